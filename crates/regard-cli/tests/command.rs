//! What a user can type, and what they see.

use serde_json::Value;
use std::io::Write;
use std::process::{Command, Output, Stdio};

fn regard(args: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_regard")).args(args.split('+')).output().expect("it starts")
}

fn told(args: &str) -> String {
    let output = regard(args);
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn json(args: &str) -> Vec<Value> {
    told(args).lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

#[test]
fn info_names_the_machine_and_a_typical_plan() {
    let text = told("info");
    for part in ["cpu", "threads", "L1", "portable", "forward", "prefill-f32-n2048-d64", "Gflop"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let line = &json("info+--format+json")[0];
    assert!(line["threads"].as_u64().unwrap() >= 1);
    assert_eq!(line["isas"][0]["name"], "portable");
    assert!(line["plan"].as_str().unwrap().starts_with("forward "));
}

#[test]
fn the_status_tells_invalid_arguments_and_failures_apart() {
    assert_eq!(regard("plan+--queries+many").status.code(), Some(2));
    assert_eq!(regard("look+/nothing/there.safetensors").status.code(), Some(3));
    assert!(told("--help").contains("Exit status: 0 success; 1 "));
}

#[test]
fn the_long_version_names_features_and_instruction_sets() {
    assert_eq!(told("-V").lines().count(), 1);
    let version = told("--version");
    for part in
        [env!("CARGO_PKG_VERSION"), "features: models, shipped, serve, train, lab", "portable"]
    {
        assert!(version.contains(part), "{part}: {version}");
    }
}

#[test]
fn completions_and_man_pages_have_every_command() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = told(&format!("completions+{shell}"));
        assert!(script.contains("audit") && script.contains("translate"), "{shell}");
    }
    let folder = std::env::temp_dir().join(format!("regard-man-{}", std::process::id()));
    told(&format!("man+{}", folder.display()));
    for page in ["regard.1", "regard-audit.1", "regard-bench-suite.1"] {
        assert!(folder.join(page).is_file(), "{page}");
    }
    std::fs::remove_dir_all(folder).expect("it was made");
}

#[test]
fn plan_describes_what_the_flags_say() {
    let text =
        told("plan+--heads+1+--queries+100+--mask+causal & window 8+--threads+3+--isa+portable");
    for part in ["forward portable f32", "t3", "causal window 8", "772 visible of 10000", "memory"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let line = &json("plan+--queries+100+--heads+2+--mask+causal & window 8+--format+json")[0];
    assert_eq!(line["pairs"], 2 * 772);
    let all = "plan+--batch+2+--heads+4+--kv-heads+2+--queries+5+--keys+7+--dim+8+--v-dim+3+--dtype+f64\
               +--layout+bshd+--mask+lengths 7,5+--softcap+30+--scale+0.5+--temperature+2+--alibi+--sinks+--bias\
               +--similarity+general+--format+json";
    let line = &json(all)[0];
    assert_eq!(line["pairs"], 4 * 5 * (7 + 5));
    assert!(line["problem"].as_str().unwrap().contains("general"));
}

#[test]
fn steps_are_shown_with_their_shapes() {
    let text = told("steps+--queries+2+--keys+3+--dim+4+--v-dim+5+--mask+causal");
    for part in [
        "[2, 4]",
        "1 similarity",
        "[2, 3]",
        "times 0.5000, causal only",
        "sum 1.0000",
        "[2, 5]",
        "  .\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let lines = json("steps+--similarity+additive+--normalizer+top-2+--seed+3+--format+json");
    let named = |name: &str| lines.iter().find(|line| line["step"] == name).unwrap();
    assert_eq!(named("similarity")["shape"], serde_json::json!([1, 1, 3, 3]));
    let weights = named("weight")["data"].as_array().unwrap();
    assert_eq!(weights.iter().filter(|x| x.as_f64() == Some(0.0)).count(), 3);
}

#[test]
fn bench_lists_its_cases() {
    let text = told("bench+list");
    assert!(text.contains("prefill-f32-n2048-d64-causal\n"), "{text}");
    assert!(json("bench+list+--format+json").iter().any(|line| line["default"] == false));
    assert!(told("bench+list+--case+lsh-*").lines().all(|line| line.starts_with("lsh-")));
    let suite = told("bench+list+--suite");
    assert!(
        suite.contains("decode-bf16-n8192-d128-b16-shared\n") && suite.contains("model-"),
        "{suite}"
    );
}

#[test]
fn a_suite_goes_on_where_it_was_stopped() {
    let path = std::env::temp_dir().join(format!("regard-suite-{}.jsonl", std::process::id()));
    let args = format!(
        "bench+suite+--case+short-f32-n32-d64+--seconds+0.01+--python+/no/python+--format+json+--out+{}",
        path.display()
    );
    let rows = json(&args);
    assert_eq!((rows.len(), &rows[0]["case"]), (1, &"short-f32-n32-d64".into()), "{rows:?}");
    // An engine that does not start is in the record with its reason.
    let baselines = rows[0]["baselines"].as_array().unwrap();
    assert_eq!(baselines.len(), 5);
    assert!(baselines.iter().all(|one| one["error"].as_str().unwrap().contains("/no/python")));
    assert!(rows[0]["date"].is_string() && rows[0]["samples"].as_u64().unwrap() >= 3, "{rows:?}");
    let again = regard(&args);
    assert!(again.status.success() && again.stdout.is_empty(), "{again:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 1);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn bench_measures_a_case() {
    for name in ["prefill-f32-n16-d8-h1-causal", "decode-f32-n64-d16", "short-f64-n8-d8-padding"] {
        let lines =
            json(&format!("bench+run+--case+{name}+--seconds+0.1+--threads+1,2+--format+json"));
        assert_eq!(lines.len(), 2);
        for (line, threads) in lines.iter().zip([1, 2]) {
            assert_eq!((&line["case"], &line["threads"]), (&Value::from(name), &threads.into()));
            for field in
                ["median_ms", "gflops", "roofline_gflops", "of_roofline", "of_roofline_low"]
            {
                assert!(line[field].as_f64().unwrap() > 0.0, "{field}: {line}");
            }
            assert_eq!(
                (&line["range"], &line["baselines"]),
                (&"p10-p90".into(), &Value::Array(vec![]))
            );
            assert!(line["peak_rss_mb"].is_number(), "{line}");
        }
    }
    let text = told("bench+run+--case+prefill-f32-n16-d8-h1+--seconds+0.01+--isa+portable");
    assert!(text.contains("of the roofline") && text.contains("Medians"), "{text}");
}

#[test]
fn mistakes_are_named_with_their_remedy() {
    for (args, parts) in [
        ("plan+--mask+causal & windw 3", vec!["--mask", "`windw`", "^", "window KEYS"]),
        ("plan+--mask+lengths 1,2", vec!["--mask", "2 entries", "give 1"]),
        ("plan+--mask+blocks 0", vec!["--mask", "at least 1"]),
        ("plan+--mask+global 99999", vec!["--mask", "out of range", "below"]),
        ("plan+--softcap+-1", vec!["--softcap: -1", "above 0"]),
        ("plan+--temperature+nan", vec!["--temperature: NaN", "use"]),
        ("plan+--kv-heads+3", vec!["--heads 8 --kv-heads 3", "divisor"]),
        ("plan+--heads+0", vec!["--heads", "'0'", "from 1"]),
        ("plan+--isa+mmx", vec!["--isa mmx", "portable"]),
        ("plan+--batch+1000000000000+--keys+1000000000000", vec!["--batch", "memory"]),
        ("plan+--dim+100000000000", vec!["--dim: 100000000000", "67108864"]),
        ("plan+--heads+100000000000", vec!["--heads: 100000000000", "67108864"]),
        ("plan+--keys+100000000000+--bias", vec!["--keys with --bias: 100000000000", "67108864"]),
        ("plan+--threads+100000", vec!["--threads", "1 to 1024"]),
        ("steps+--keys+40", vec!["--keys 40", "--format json"]),
        ("steps+--queries+9999+--format+json", vec!["--queries 9999", "give less"]),
        ("steps+--normalizer+topp", vec!["--normalizer", "top-{K}"]),
        ("bench+run+--case+nothing*", vec!["--case nothing*", "bench list"]),
        ("bench+run+--case+prefill-f32-n8", vec!["--case", "d{features} is missing"]),
        ("bench+run+--case+prefill-f32-n8-d8-frob", vec!["--case", "`frob`", "longformer{window}"]),
        (
            "bench+run+--case+prefill-f32-n1000000000000-d64",
            vec!["--case", "at least", "give fewer keys"],
        ),
        ("bench+run+--case+prefill-f32-n1-d1-b1000000000000-padding", vec!["--case", "at least"]),
        ("bench+run+--case+prefill-f32-n1000000-d1-h1-bool", vec!["--case", "at least 1000"]),
        ("bench+run+--case+prefill-f32-n1-d10000000-additive", vec!["--case", "at least"]),
        ("bench+run+--case+linear-f32-n1-d64-random1000000000000", vec!["--case", "at least"]),
        ("bench+run+--threads+1,100000", vec!["--threads", "1 to 1024"]),
        ("bench+run+--seconds+0", vec!["--seconds 0", "above 0"]),
        ("bench+run+--python+python3", vec!["--against"]),
        (
            "bench+run+--against+torch+--python+/no/python",
            vec!["--python /no/python", "bench/environment"],
        ),
        ("bench+run+--against+torch+--python+true", vec!["--python true", "bench/environment"]),
        ("bench+suite", vec!["--out"]),
        ("bench+list+--suite+--case+none*", vec!["--case none*", "list --suite"]),
        ("bench+list+--case+none*", vec!["--case none*", "bench list"]),
        ("bench", vec!["list", "run", "suite"]),
        ("lab+run", vec!["<NAME>"]),
        ("lab+run+scalng", vec!["scalng", "scaling"]),
        ("models+get+gpt5", vec!["gpt5: unknown model", "smollm2"]),
        ("models+rm+gpt5", vec!["gpt5: unknown model", "smollm2"]),
        ("models+path+zh-en", vec!["zh-en: part of the program"]),
        (
            "generate+gpt5",
            vec!["gpt5: no file or folder", "zh-en, smollm2", "regard models get NAME"],
        ),
        ("generate+zh-en+--seed+3", vec!["--temperature <X>|--top-k <N>|--top-p <P>"]),
        ("translate+zh-en+hi+--seed+3+--num-beams+2", vec!["--temperature"]),
        ("translate+zh-en+-+-", vec!["standard input can be read only once"]),
        ("look+zh-en+-+--target+-", vec!["standard input can be read only once"]),
        ("translate+zh-en+@/no/file", vec!["/no/file: No such file"]),
        ("generate+zh-en+--chat+hi", vec!["generate = a translator", "a causal language model"]),
        ("generate+zh-en+--system+hi", vec!["--chat"]),
        ("info+-q+-v", vec!["--quiet", "--verbose"]),
        ("data+get+wmt", vec!["wmt: unknown data set", "tatoeba-zh-en"]),
        ("bench+suite+--out+/no/folder/file", vec!["--out /no/folder/file"]),
        ("frob", vec!["frob", "--help"]),
    ] {
        let output = regard(args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{args}");
        for part in parts {
            assert!(error.contains(part), "{args}: no {part:?} in {error}");
        }
        assert!(output.stdout.is_empty() && !error.contains("panicked"), "{args}: {error}");
    }
}

#[test]
fn threads_are_limited_by_name() {
    for name in ["RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS"] {
        for (threads, fine) in
            [("1024", true), ("0", true), ("many", true), ("1025", false), ("100000", false)]
        {
            let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
            let output = command.args(["steps"]).env(name, threads).output().expect("it starts");
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.success(), fine, "{name}={threads}: {error}");
            let named = error.contains(&format!("{name}={threads}: at most 1024"));
            assert!(fine || named, "{name}={threads}: {error}");
        }
    }
}

/// What the command says with this environment and input.
fn told_with(args: &str, (name, value): (&str, &str), input: &str) -> [String; 2] {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(args.split('+')).env(name, value).stdin(Stdio::piped());
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    stdin.write_all(input.as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{args}: {}", String::from_utf8_lossy(&output.stderr));
    [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("text"))
}

#[test]
fn threads_are_those_that_were_asked_for() {
    let threads = |args: &str, number: &str| {
        let [out, _] = told_with(args, ("RAYON_NUM_THREADS", number), "");
        let line: Value = serde_json::from_str(&out).unwrap();
        let plan = line["plan"].as_str().unwrap();
        plan.split(' ').find_map(|word| word.strip_prefix('t')?.parse::<usize>().ok()).unwrap()
    };
    for n in [1, 3] {
        assert_eq!(threads("info+--format+json", &n.to_string()), n);
        assert_eq!(threads(&format!("plan+-t+{n}+--format+json"), "2"), n);
    }
    // An option counts more than the environment, even one that is refused alone.
    assert_eq!(threads("plan+-t+2+--format+json", "99999"), 2);
    let [_, said] = told_with("stats+zh-en+好久不见+-v+-t+3", ("NO_COLOR", "1"), "");
    assert!(said.contains(", 3 threads\n"), "{said}");
}

#[test]
fn texts_are_typed_read_from_a_file_or_from_the_standard_input() {
    let path = std::env::temp_dir().join(format!("regard-text-{}.txt", std::process::id()));
    std::fs::write(&path, "好久不见\n").unwrap();
    let translated = |text: &str, input: &str| {
        told_with(&format!("translate+zh-en+{text}+--format+json"), ("NO_COLOR", "1"), input)[0]
            .clone()
    };
    let typed = translated("好久不见", "");
    assert!(typed.contains("Long time, no see."), "{typed}");
    assert_eq!(typed, translated(&format!("@{}", path.display()), ""));
    assert_eq!(typed, translated("-", "好久不见\r\n"));
    let looked =
        |text: &str, input| told_with(&format!("stats+zh-en+{text}"), ("NO_COLOR", "1"), input);
    assert_eq!(looked("好久不见", ""), looked("-", "好久不见\n"));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn an_alignment_is_labelled_with_the_words_that_are_written() {
    let picture = told("look+zh-en+好久不见+--view+alignment+--kind+cross+--layer+0+--head+0");
    assert!(picture.contains("(end)") && picture.contains("time"), "{picture}");
    let heat = told("look+zh-en+好久不见+--view+heat+--kind+cross+--layer+0+--head+0");
    assert!(!heat.contains("(end)"), "{heat}");
}

#[test]
fn quiet_tells_results_alone_and_verbose_tells_more() {
    let [_, said] = told_with("translate+zh-en+好久不见+-v", ("NO_COLOR", "1"), "");
    assert!(said.starts_with("regard 0."), "{said}");
    let [_, said] = told_with("translate+zh-en+好久不见+-q", ("NO_COLOR", "1"), "");
    assert!(said.is_empty(), "{said}");
}

/// What a plan holds does not grow with the sequence.
#[test]
fn a_plan_of_any_length_takes_no_memory_for_it() {
    let args = "plan+--heads+1+--queries+1+--keys+1000000000000+--mask+window 8+--format+json";
    assert_eq!(json(args)[0]["pairs"], 8);
}

#[test]
fn no_code_of_the_working_directory_is_run() {
    let folder = std::env::temp_dir().join(format!("regard-cwd-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let trap = format!("open({:?}, 'a').write(__name__ + ' ')\n", folder.join("ran"));
    for module in ["pip.py", "torch.py", "json.py", "sitecustomize.py"] {
        std::fs::write(folder.join(module), &trap).expect("a file");
    }
    let script = "#!/bin/sh\nexec python3 \"$@\"\n";
    std::fs::write(folder.join("python"), script).expect("a file");
    let sh = Command::new("chmod").args(["+x", "python"]).current_dir(&folder).status();
    assert!(sh.expect("it starts").success());
    for (args, part) in [
        ("models get e2k", "-m pip download"),
        ("models get e2k --python ./python", "-m pip download"),
        // The last word is of a Python that has a torch of its own.
        ("bench run --case prefill-f32-n1-d1 --seconds 0.01 --against torch", "torch"),
        (
            "bench run --case prefill-f32-n1-d1 --seconds 0.01 --against torch --python ./python",
            "torch",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
        command.args(args.split(' ')).current_dir(&folder).env("REGARD_CACHE", "cache");
        let output =
            command.envs([("PIP_NO_INDEX", "1"), ("PYTHONPATH", ".")]).output().expect("it starts");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(
            said.contains(part) && !said.contains("cannot be run") && !said.contains("not start"),
            "{args}: {said}"
        );
        let ran = std::fs::read_to_string(folder.join("ran"));
        assert!(ran.is_err(), "{args} ran {ran:?} of the working directory");
    }
    std::fs::remove_dir_all(folder).expect("it was there");
}

#[test]
fn the_lab_lists_its_experiments_runs_one_and_tells_by_its_status_whether_it_holds() {
    let text = told("lab");
    assert!(text.contains("E1   scaling") && text.contains("E11  learning"), "{text}");
    let all = json("lab+--format+json");
    assert_eq!((all.len(), all[10]["id"].as_str()), (11, Some("E11")));
    let text = told("lab+run+scaling+--quick");
    for part in ["predicted", "variance of q . k, d = 4", "holds: ", "--inject wrong-scale"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let line = &json("lab+run+e1+--quick+--format+json")[0];
    assert_eq!(line["holds"], true);
    let broken = regard("lab+run+scaling+--quick+--inject+wrong-scale");
    assert_eq!(broken.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&broken.stdout).contains("DOES NOT HOLD"));
    let wrong = regard("lab+run+scaling+--heads+2");
    let told = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(told.contains("there are dim, samples"), "{told}");
}

#[test]
fn several_experiments_are_a_line_each() {
    let lines = json("lab+run+scaling+order+--quick+--format+json");
    assert_eq!((&lines[0]["name"], &lines[1]["name"]), (&"scaling".into(), &"order".into()));
}

#[test]
fn models_and_data_sets_are_listed_with_how_to_get_them() {
    let cache = std::env::temp_dir().join(format!("regard-cache-{}", std::process::id()));
    let regard = |args: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
        let output = command.args(args.split('+')).env("REGARD_CACHE", &cache).output().unwrap();
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap()).concat()
    };
    let list = regard("models+list");
    assert!(
        list == regard("models") && list.contains("to get it: regard models get e2k"),
        "{list}"
    );
    let none = regard("models+path+e2k");
    assert!(none.contains("e2k is not installed; to get it: regard models get e2k"), "{none}");
    let none = regard("generate+aren");
    assert!(none.contains("aren is not installed; to get it: copy it from"), "{none}");
    assert!(regard("models+rm+e2k").contains("e2k is not installed"));
    let (list, there) = (regard("data"), regard("data+get+multi30k-ende"));
    for part in ["tatoeba-tiny", "CC BY 2.0 FR", "zh-de-en-gpt", "data/get-multi30k"] {
        assert!(list.contains(part), "{part}: {list}");
    }
    // Tests run in the folder of the crate, which has no data.
    assert!(there.contains("data/multi30k-ende is not here") && there.contains("get-multi30k"));
}

#[test]
fn an_experiment_becomes_a_page() {
    let path = std::env::temp_dir().join(format!("regard-lab-{}.html", std::process::id()));
    told(&format!("lab+run+scaling+--quick+--out+{}", path.display()));
    let page = std::fs::read_to_string(&path).expect("a page");
    assert!(page.contains("<svg") && page.contains("It holds."), "{page}");
    std::fs::remove_file(path).expect("it was there");
}

#[test]
fn what_the_lab_says_to_try_next_can_be_tried() {
    for experiment in &regard_lab::EXPERIMENTS {
        for command in experiment.next {
            let words = command.strip_prefix("regard ").expect(command);
            if words.starts_with("plan") || words.starts_with("steps") {
                let mut quoted = false;
                let arguments = words.chars().filter_map(|c| match c {
                    '\'' => {
                        quoted = !quoted;
                        None
                    }
                    ' ' if !quoted => Some('+'),
                    c => Some(c),
                });
                told(&arguments.collect::<String>());
            }
        }
    }
}
