//! What a request becomes has the same bits whatever is generated beside it: tokens and log-probabilities.

use regard::Machine;
use regard_models::files::{KnownModel, cache_dir};
use regard_models::generate::{
    AttentionProbe, Decoder, DecodingStrategy, Event, GRID, GeneratedToken, Request, Sampling,
    Scheduler, Ticket,
};
use regard_models::infer::{KvDtype, Session};
use regard_models::{CausalLm, Model, TextOptions};
use regard_scope::{Layer, LayerData};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Which of the requests come at a step.
type Arrivals<'a> = &'a dyn Fn(usize) -> Vec<usize>;

/// Token ids, and bits of log-probabilities of the token and of the likeliest.
fn bits(choice: GeneratedToken) -> Vec<u64> {
    let all = choice.log_probability.into_iter().chain(choice.top.iter().map(|one| one.1));
    std::iter::once(choice.token.into())
        .chain(choice.top.iter().map(|one| one.0.into()))
        .chain(all.map(f64::to_bits))
        .collect()
}

/// The bits of all requests, and how many tokens of prompts were found in the prefix cache.
fn run(model: &CausalLm, requests: &[Request], arrivals: Arrivals<'_>) -> (Vec<Vec<u64>>, usize) {
    let mut scheduler: Scheduler<Session<'_>> = model.scheduler(256 << 20).expect("a scheduler");
    let mut rows: HashMap<Ticket, usize> = HashMap::new();
    let (mut found, mut cached) = (vec![Vec::new(); requests.len()], 0);
    let mut step = 0;
    while rows.len() < requests.len() || !scheduler.is_idle() {
        for row in arrivals(step) {
            rows.insert(scheduler.admit(requests[row].clone()).expect("it fits"), row);
        }
        step += 1;
        let mut tell = |ticket: Ticket, event: Event| {
            match event {
                Event::Started { cached: tokens } => cached += tokens,
                Event::Token(choice) => found[rows[&ticket]].extend(bits(choice)),
                Event::Finished(_) => {}
                Event::Failed(error) => panic!("{error}"),
            }
            ControlFlow::Continue(())
        };
        scheduler.step(&mut tell).expect("a step");
    }
    (found, cached)
}

/// Requests of many lengths; a third of them begin alike.
fn requests(model: &CausalLm, count: usize, longest: usize) -> Vec<Request> {
    let words =
        "Once upon a time there was a little girl and she had a dog that was red ".repeat(99);
    let long = model.prompt(&words[..longest * 3]).expect("tokens");
    (0..count)
        .map(|i| {
            let first = if i % 3 == 0 { 0 } else { i };
            let len = [1, 2, 17, 40, 255, 256, 257, longest][i % 8].min(longest);
            let prompt = long[first..].iter().cycle().take(len).copied().collect();
            let strategy = match i % 2 {
                0 => DecodingStrategy::Greedy,
                _ => DecodingStrategy::Sample(Sampling { seed: i as u64, ..Sampling::default() }),
            };
            let mut options = TextOptions::new(strategy, 3 + i % 7);
            (options.top_log_probabilities, options.prompt_lookup) = (i % 3, (i % 5) * 2);
            Request { prompt, options: model.options(&options), row: 0, prefix: None }
        })
        .collect()
}

fn bits_do_not_depend_on_load(path: &Path, dtype: KvDtype, count: usize, longest: usize) {
    let mut model = Model::open(path).expect("a model");
    model.set_kv_dtype(dtype);
    let model = model.causal_lm().expect("it continues texts");
    let mut requests = requests(model, count, longest);
    let alone: Vec<Vec<u64>> = requests
        .iter()
        .map(|one| {
            run(model, std::slice::from_ref(one), &|step| (0..usize::from(step == 0)).collect())
                .0
                .remove(0)
        })
        .collect();
    let at_once = |step: usize| (0..if step == 0 { count } else { 0 }).collect();
    let one_a_step = |step: usize| (step..count.min(step + 1)).collect();
    for prefix in [None, Some(1)] {
        requests.iter_mut().for_each(|one| one.prefix = prefix);
        for arrivals in [&at_once as Arrivals<'_>, &one_a_step] {
            let (together, cached) = run(model, &requests, arrivals);
            for (i, (found, right)) in together.iter().zip(&alone).enumerate() {
                assert!(found == right, "request {i}, prefix {prefix:?}");
            }
            assert_eq!(cached > 0, prefix.is_some() && longest > GRID);
        }
    }
}

fn stories() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/stories260K"))
}

#[test]
fn of_f32_weights() {
    bits_do_not_depend_on_load(&stories(), KvDtype::F32, 64, 400);
}

#[test]
fn of_a_bf16_cache() {
    bits_do_not_depend_on_load(&stories(), KvDtype::Bf16, 64, 400);
}

#[test]
fn of_caches_in_8_bits() {
    bits_do_not_depend_on_load(&stories(), KvDtype::Int8, 32, 400);
    bits_do_not_depend_on_load(&stories(), KvDtype::Fp8E4m3, 32, 400);
}

#[test]
fn a_bf16_cache_holds_twice_as_much_and_is_nearly_as_exact() {
    let mut model = Model::open(&stories()).expect("a model");
    let found = KvDtype::ALL.map(|dtype| {
        model.set_kv_dtype(dtype);
        let model = model.causal_lm().expect("it continues texts");
        let tokens = model.prompt("Once upon a time there was a little girl").expect("tokens");
        let mut session = model.transformer().session(&[], 1 << 20).expect("a session");
        let mut states = [session.start(0).expect("a state")];
        let scores = session.feed(&mut states, &[&tokens], &[tokens.len()]).expect("scores");
        (session.memory().expect("pages").count, scores)
    });
    let [(few, exact), (many, near), (int8_pages, int8), (fp8_pages, fp8)] = found;
    assert_eq!(few, many / 2);
    // Scales of 8 features each: half as much again.
    assert!(int8_pages > many && fp8_pages >= 4 * few, "{few} {int8_pages} {fp8_pages}");
    let largest = |list: &mut dyn Iterator<Item = f32>| list.fold(0.0, f32::max);
    let size = largest(&mut exact.iter().map(|x| x.abs()));
    for (near, bound) in [(near, 64.0), (int8, 32.0), (fp8, 4.0)] {
        let error = largest(&mut exact.iter().zip(&near).map(|(a, b)| (a - b).abs()));
        assert!(error > 0.0 && error < size / bound, "{error} of {size}");
    }
}

#[test]
fn of_quantised_weights() {
    let base = cache_dir(|name| std::env::var_os(name)).expect("HOME or REGARD_CACHE");
    let path = KnownModel::named("smollm2").expect("a known name").fetch(&base, "python3");
    let path = path.expect("run `regard models get smollm2`");
    bits_do_not_depend_on_load(&path, KvDtype::F32, 16, 600);
}

/// What a head looks at in the last row of a trace, by the definition.
fn last_row(layers: &[Layer], layer: usize, head: usize) -> Vec<f64> {
    let LayerData::Inputs(inputs) = &layers[layer].data else { panic!("weights of a kind") };
    let ([heads, n, dim], [kv_heads, ..]) = (inputs.q_shape, inputs.k_shape);
    let query = &inputs.q[(head * n + n - 1) * dim..][..dim];
    let keys = inputs.k[head / (heads / kv_heads) * n * dim..][..n * dim].chunks_exact(dim);
    let product = |key: &[f32]| -> f64 {
        query.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let powers: Vec<f64> = keys.map(|key| (product(key) / (dim as f64).sqrt()).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

#[test]
fn a_probe_sees_what_the_microscope_sees() {
    let model = Model::open(&stories()).expect("a model");
    let model = model.causal_lm().expect("it continues texts");
    let text = "Once upon a time there was a little girl and she had a dog. ".repeat(9);
    let mut options = TextOptions::new(DecodingStrategy::Greedy, 4);
    options.attention = Some(AttentionProbe {
        layers: vec![0, 4],
        heads: vec![1, 7],
        top: 5,
        spans: vec![0..3, 2..usize::MAX],
    });
    let prompt = model.prompt(&text).expect("tokens");
    let request =
        |prompt| Request { prompt, options: model.options(&options), row: 0, prefix: None };
    let mut scheduler = model.scheduler(64 << 20).expect("a scheduler");
    // Another one beside it, of another length.
    let other = scheduler.admit(request(prompt[..100].to_vec())).expect("it fits");
    scheduler.admit(request(prompt.clone())).expect("it fits");
    let mut choices = Vec::new();
    while !scheduler.is_idle() {
        let mut tell = |ticket, event| {
            if let (true, Event::Token(choice)) = (ticket != other, event) {
                choices.push(choice);
            }
            ControlFlow::Continue(())
        };
        scheduler.step(&mut tell).expect("a step");
    }
    assert_eq!(choices.len(), 4);
    let mut tokens = prompt;
    for choice in choices {
        let layers = model.transformer().look(None, &tokens).expect("a trace");
        let sites: Vec<_> = choice.attention.iter().map(|row| (row.layer, row.head)).collect();
        assert_eq!(sites, [(0, 1), (0, 7), (4, 1), (4, 7)]);
        for row in &choice.attention {
            let right = last_row(&layers, row.layer, row.head);
            let entropy: f64 = right.iter().map(|p| -p * p.ln()).sum();
            let back = right.iter().rev().zip(0_u32..);
            let distance: f64 = back.map(|(p, n)| p * f64::from(n)).sum();
            assert!((row.entropy - entropy).abs() < 1e-4, "{row:?} {entropy}");
            assert!((row.distance - distance).abs() < 1e-2, "{row:?} {distance}");
            let mut best = right.clone();
            best.sort_by(|a, b| b.total_cmp(a));
            for ((position, weight), best) in row.top.iter().zip(best) {
                assert!((f64::from(*weight) - best).abs() < 1e-5, "{row:?}");
                assert!((f64::from(*weight) - right[*position]).abs() < 1e-5, "{row:?}");
            }
            assert_eq!(row.top.len(), 5);
            let [first, rest]: [f64; 2] = [right[..3].iter().sum(), right[2..].iter().sum()];
            let near = |a: f64, b: f64| (a - b).abs() < 1e-4;
            assert!(near(row.spans[0], first) && near(row.spans[1], rest), "{row:?}");
        }
        tokens.push(choice.token);
    }
    let mut options = model.options(&options);
    options.attention =
        Some(AttentionProbe { layers: vec![5], heads: vec![0], top: 1, spans: Vec::new() });
    let bad = Request { prompt: vec![1], options, row: 0, prefix: None };
    let error = scheduler.admit(bad).expect_err("there are 5 layers").to_string();
    assert!(error.starts_with("attention.layers: 5; it must be below 5"), "{error}");
}

#[test]
fn a_prompt_cache_in_a_file_changes_nothing_but_the_time() {
    let mut model = Model::open(&stories()).expect("a model");
    let path = std::env::temp_dir().join(format!("regard-prompt-{}", std::process::id()));
    let text = "Once upon a time there was a little girl and she had a dog. ".repeat(27);
    let other = &text[5..];
    let run = |model: &Model, text: &str, file: Option<&Path>| {
        let mut options = TextOptions::new(DecodingStrategy::Greedy, 9);
        options.prompt_cache = file.map(Path::to_owned);
        let model = model.causal_lm().expect("it continues texts");
        let silent = &mut |_: usize, _: &str| ControlFlow::Continue(());
        let (all, usage) = model.generate_with(&[text], &options, silent)?;
        Ok::<_, regard_models::Error>((all[0].tokens.clone(), all[0].score.to_bits(), usage))
    };
    for dtype in KvDtype::ALL {
        let _gone = std::fs::remove_file(&path);
        model.set_kv_dtype(dtype);
        for (text, cached) in [
            (text.as_str(), 0),
            (&text, 256),
            (&text[..1500], 256),
            (&text[..9], 0),
            (&text, 256),
            (other, 0),
            (other, 256),
            (&text, 0),
        ] {
            let (tokens, score, usage) = run(&model, text, Some(&path)).expect("a text");
            let right = run(&model, text, None).expect("a text");
            assert_eq!((tokens, score), (right.0, right.1));
            assert_eq!(usage.cached_tokens, cached, "{dtype:?}, {} tokens", usage.prompt_tokens);
        }
    }
    let refusal = |model: &Model| {
        let error = run(model, &text, Some(&path)).expect_err("it is refused").to_string();
        assert!(error.contains("remove the file"), "{error}");
        error
    };
    // The numbers of the last dtype are those of f32, but what follows them is not.
    model.set_kv_dtype(KvDtype::F32);
    let error = refusal(&model);
    assert!(error.contains("of another model"), "{error}");
    let _gone = std::fs::remove_file(&path);
    model.set_kv_dtype(KvDtype::Bf16);
    run(&model, &text, Some(&path)).expect("a text");
    model.set_kv_dtype(KvDtype::F32);
    let error = refusal(&model);
    assert!(error.contains("layers.0.keys: BF16"), "{error}");
    // Some numbers of the last layer, as another model would have them.
    model.set_kv_dtype(KvDtype::Bf16);
    let mut bytes = std::fs::read(&path).expect("a file");
    let end = bytes.len();
    bytes[end - 999..].iter_mut().for_each(|byte| *byte ^= 0x41);
    std::fs::write(&path, &bytes).expect("a file");
    let error = refusal(&model);
    assert!(error.contains("of another model"), "{error}");
    for len in [0, 7, 100, end / 2] {
        std::fs::write(&path, &bytes[..len]).expect("a file");
        refusal(&model);
    }
    std::fs::remove_file(&path).expect("it is there");
}

/// The trace of a model has what attention reads: queries, keys and log-sum-exps that belong together, as the KV cache rounds them.
#[test]
fn what_is_looked_at_comes_from_the_cache() {
    let mut model = Model::open(&stories()).expect("a model");
    let text = "Once upon a time there was a little girl";
    let mut first_keys = Vec::new();
    for dtype in KvDtype::ALL {
        model.set_kv_dtype(dtype);
        let trace = model.look(text).expect("a trace");
        for site in trace.sites() {
            let layer = trace.layer(&site).expect("a layer");
            let size = layer.data.size();
            let map = trace.map(Machine::detect(), &site, 0..size[0], size).expect("a map");
            for row in 0..size[0] {
                // Pairs that the mask hides are NaN.
                let sum: f32 = map.row(row).iter().filter(|weight| !weight.is_nan()).sum();
                assert!((sum - 1.0).abs() < 1e-5, "{dtype:?}, {site:?}, row {row}: {sum}");
            }
        }
        let LayerData::Inputs(first) = &trace.layers[0].data else { panic!("a bias or a window") };
        first_keys.push(first.k.clone());
        let model = model.causal_lm().expect("it continues texts");
        let tokens = model.prompt(text).expect("tokens");
        let mut session = model.transformer().session(&[], 1 << 20).expect("a session");
        let mut states = [session.start(0).expect("a state")];
        let fed = session.feed(&mut states, &[&tokens], &[tokens.len()]).expect("scores");
        let scores = model.transformer().logits(None, &tokens).expect("scores");
        assert!(fed == scores, "{dtype:?}: scores of a session are others");
    }
    for (i, dtype) in KvDtype::ALL.iter().enumerate().skip(1) {
        assert_ne!(first_keys[0], first_keys[i], "{dtype:?}");
    }
}
