//! Alignment heads of real models, against definitions over the weights that `regard look` prints, and against gold links by hand.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn fixture(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path);
    path.to_str().expect("a path").into()
}

fn regard(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_regard")).args(args).output().expect("it starts")
}

fn told(args: &[&str]) -> String {
    let output = regard(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

fn json(args: &[&str]) -> Vec<Value> {
    let text = told(&[args, &["--format", "json"]].concat());
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

type Links = Vec<(usize, usize)>;

/// A pair of the gold: words, sure links and possible links, the sure ones among them.
struct Pair {
    source: Vec<String>,
    target: Vec<String>,
    sure: Links,
    possible: Links,
}

fn gold(file: &str) -> Vec<Pair> {
    let text = std::fs::read_to_string(fixture(file)).expect("a file");
    let pair = |line: &str| {
        let columns: Vec<&str> = line.split('\t').collect();
        let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
        let [mut sure, mut possible] = [Links::new(), Links::new()];
        for link in columns[2].split(' ') {
            let (i, j) = link.split_once(['-', '?']).expect("a link");
            let link_of = (i.parse().expect("a number"), j.parse().expect("a number"));
            possible.push(link_of);
            if link.contains('-') {
                sure.push(link_of);
            }
        }
        Pair { source: words(columns[0]), target: words(columns[1]), sure, possible }
    };
    text.lines().map(pair).collect()
}

/// Alignment error rate, precision and recall over all pairs, by the definitions.
fn errors(pairs: &[Pair], links: &[Links]) -> [f64; 3] {
    let within = |links: &Links, of: &Links| links.iter().filter(|link| of.contains(link)).count();
    let [mut a, mut s, mut a_and_s, mut a_and_p] = [0; 4];
    for (pair, links) in pairs.iter().zip(links) {
        (a, s) = (a + links.len(), s + pair.sure.len());
        a_and_s += within(links, &pair.sure);
        a_and_p += within(links, &pair.possible);
    }
    let [a, s, a_and_s, a_and_p] = [a, s, a_and_s, a_and_p].map(|n: usize| n as f64);
    [1.0 - (a_and_s + a_and_p) / (a + s), a_and_p / a, a_and_s / s]
}

/// The word of each token, by the letters of the tokens in their order; special tokens have none.
fn words_of(labels: &[String], words: &[String]) -> Vec<Vec<usize>> {
    let letters: Vec<usize> =
        words.iter().enumerate().flat_map(|(i, word)| word.chars().map(move |_| i)).collect();
    let mut at = 0;
    let of = |label: &String| {
        let count = label.chars().filter(|c| *c != ' ').count();
        let count = if label.starts_with('<') { 0 } else { count };
        at += count;
        let mut own = letters[at - count..at].to_vec();
        own.dedup();
        own
    };
    let all = labels.iter().map(of).collect();
    assert_eq!(at, letters.len(), "{labels:?}");
    all
}

/// The links of every head of a pair by the definition, as `look` prints its weights: by its name.
fn links_of_heads(model: &str, pair: &Pair, joins: [&str; 2]) -> BTreeMap<String, Links> {
    let (source, target) = (pair.source.join(joins[0]), pair.target.join(joins[1]));
    let texts = |list: &Value| serde_json::from_value::<Vec<String>>(list.clone()).expect("labels");
    let mut all = BTreeMap::new();
    let mut sums: BTreeMap<u64, (f64, Vec<Vec<f64>>)> = BTreeMap::new();
    let looked = json(&["look", model, &source, "--target", &target]);
    let cross = looked.iter().filter(|line| line["kind"] == "cross");
    let mut labels = [Vec::new(), Vec::new()];
    let mut heads: Vec<(String, Vec<Vec<f64>>)> = Vec::new();
    for line in cross {
        labels = [texts(&line["cols"]), texts(&line["rows"])];
        let weights: Vec<Vec<f64>> = serde_json::from_value(line["weights"].clone()).expect("rows");
        let layer = line["layer"].as_u64().expect("a number");
        let (count, sum) = sums.entry(layer).or_insert_with(|| (0.0, weights.clone()));
        if *count > 0.0 {
            let each = sum.iter_mut().flatten().zip(weights.iter().flatten());
            each.for_each(|(sum, weight)| *sum += weight);
        }
        *count += 1.0;
        heads.push((format!("{layer}.{}", line["head"]), weights));
    }
    heads.extend(sums.into_iter().map(|(layer, (_, sum))| (format!("{layer}.mean"), sum)));
    let source = words_of(&labels[0], &pair.source);
    let target = words_of(&labels[1], &pair.target);
    for (name, weights) in heads {
        for (suffix, back) in [("", 1), (":reads", 0)] {
            let link = |word: usize| {
                let weight = |own: usize| -> f64 {
                    let tokens = (0..target.len()).filter(|t| target[*t].contains(&word));
                    let rows: Vec<f64> = tokens
                        .map(|t| {
                            let keys = (0..source.len()).filter(|key| source[*key].contains(&own));
                            keys.map(|key| weights[t - back][key]).sum()
                        })
                        .collect();
                    rows.iter().sum::<f64>() / rows.len() as f64
                };
                let all: Vec<f64> = (0..pair.source.len()).map(weight).collect();
                let best = (0..all.len()).rev().max_by(|a, b| all[*a].total_cmp(&all[*b]));
                (best.expect("a word"), word)
            };
            all.insert(format!("{name}{suffix}"), (0..pair.target.len()).map(link).collect());
        }
    }
    all
}

fn numbers(line: &Value) -> [f64; 3] {
    ["aer", "precision", "recall"].map(|name| line[name].as_f64().expect("a number"))
}

/// The ranking of a model, which must be that of the definitions; returns its lines and the pairs.
fn ranked(model: &str, file: &str, unspaced: &str, joins: [&str; 2]) -> (Vec<Value>, Vec<Pair>) {
    let path = fixture(file);
    let lines = json(&["align", model, "--gold", &path, "--unspaced", unspaced]);
    let pairs = gold(file);
    let mut links: BTreeMap<String, Vec<Links>> = BTreeMap::new();
    for pair in &pairs {
        for (name, own) in links_of_heads(model, pair, joins) {
            links.entry(name).or_default().push(own);
        }
    }
    assert_eq!(lines.len(), links.len());
    for line in &lines {
        let name = line["heads"].as_str().expect("a name");
        let expected = errors(&pairs, &links[name]);
        for (found, expected) in numbers(line).into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-12, "{name}: {found} for {expected}");
        }
    }
    let rates: Vec<f64> = lines.iter().map(|line| numbers(line)[0]).collect();
    assert!(rates.is_sorted(), "{rates:?}");
    (lines, pairs)
}

/// The rate of links along the diagonal, for which no model is needed.
fn of_diagonal(pairs: &[Pair]) -> f64 {
    let link = |pair: &Pair, target: usize| target * pair.source.len() / pair.target.len();
    let links = |pair: &Pair| (0..pair.target.len()).map(|j| (link(pair, j), j)).collect();
    errors(pairs, &pairs.iter().map(links).collect::<Vec<_>>())[0]
}

#[test]
fn the_alignment_heads_of_a_chinese_translator_are_found() {
    let (lines, pairs) = ranked("zh-en", "alignment/zh-en.tsv", "source", ["", " "]);
    assert_eq!((lines.len(), pairs.len()), (20, 30));
    let [best, worst] = [&lines[0], &lines[19]].map(|line| numbers(line)[0]);
    let diagonal = of_diagonal(&pairs);
    assert!(best < 0.15 && worst > 0.8, "{best}, {worst}");
    // The number of the how-to page.
    assert!((diagonal - 0.49).abs() < 0.005, "{diagonal}");
}

#[test]
fn the_alignment_heads_of_a_transliteration_are_found() {
    let model = fixture("aren-transliteration");
    let (lines, pairs) = ranked(&model, "alignment/aren.tsv", "source,target", ["", ""]);
    assert_eq!((lines.len(), pairs.len()), (108, 24));
    let [best, worst] = [&lines[0], &lines[107]].map(|line| numbers(line)[0]);
    let diagonal = of_diagonal(&pairs);
    // The head whose weights CTranslate2 returns for this model.
    let of_last = lines.iter().find(|line| line["heads"] == "5.0").map(|line| numbers(line)[0]);
    // The numbers of the how-to page.
    assert!((of_last.expect("head 5.0") - 0.55).abs() < 0.005, "{of_last:?}");
    assert!((diagonal - 0.12).abs() < 0.005, "{diagonal}");
    assert!(best < 0.05 && worst > 0.8, "{best}, {worst}");
}

/// A file of a test, removed with it.
struct Pairs(PathBuf);

impl Pairs {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("regard-{name}-{}.tsv", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("a path")
    }
}

impl Drop for Pairs {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn links_and_paths_of_chosen_heads_are_exported() {
    let text = "我 昨天 没有 见到 他\tI didn't see him yesterday\n\n我们 昨天 去 了 学校\tWe went to school yesterday\t0-0\n";
    let file = Pairs::new("exported", text);
    let export = |more: &[&str]| {
        let args = ["align", "zh-en", "--pairs", file.path(), "--unspaced", "source"];
        told(&[&args[..], more].concat())
    };
    let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<_>>();
    let pairs = text.lines().filter(|line| !line.is_empty()).map(|line| {
        let columns: Vec<&str> = line.split('\t').collect();
        let (source, target) = (words(columns[0]), words(columns[1]));
        Pair { source, target, sure: Links::new(), possible: Links::new() }
    });
    let pairs: Vec<Pair> = pairs.collect();
    for head in ["1.mean", "0.3", "1.1:reads"] {
        let link = |(i, j): &(usize, usize)| format!("{i}-{j}");
        let lines = pairs.iter().map(|pair| {
            let links = &links_of_heads("zh-en", pair, ["", " "])[head];
            links.iter().map(link).collect::<Vec<_>>().join(" ")
        });
        let lines: Vec<String> = lines.collect();
        // The empty line stays.
        assert_eq!(export(&["--heads", head]), format!("{}\n\n{}\n", lines[0], lines[1]), "{head}");
    }
    let path = export(&["--heads", "0.mean,1.mean", "--export", "dtw"]);
    for (line, pair) in path.lines().filter(|line| !line.is_empty()).zip(&pairs) {
        let cells = line.split(' ').map(|cell| {
            let (i, j) = cell.split_once('-').expect("a link");
            [i, j].map(|number| number.parse::<usize>().expect("a number"))
        });
        let cells: Vec<[usize; 2]> = cells.collect();
        assert_eq!(cells.last(), Some(&[pair.source.len() - 1, pair.target.len() - 1]));
        assert_eq!(cells[0], [0, 0]);
        let is_step = |from: &[usize; 2], to: &[usize; 2]| {
            [[1, 1], [1, 0], [0, 1]].contains(&[to[0] - from[0], to[1] - from[1]])
        };
        assert!(cells.is_sorted_by(is_step), "{line}");
    }
    let lines = export(&["--heads", "1.mean", "--format", "json"]);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((lines.len(), &lines[1]["line"]), (2, &Value::from(3)));
    assert_eq!(lines[0]["links"].as_array().expect("links").len(), pairs[0].target.len());
}

#[test]
fn a_monotone_path_through_letters_is_that_of_the_gold() {
    let (model, pairs) = (fixture("aren-transliteration"), gold("alignment/aren.tsv"));
    let best = &json(&[
        "align",
        &model,
        "--gold",
        &fixture("alignment/aren.tsv"),
        "--unspaced",
        "source,target",
    ])[0];
    let head = best["heads"].as_str().expect("a name");
    let lines = json(&[
        "align",
        &model,
        "--pairs",
        &fixture("alignment/aren.tsv"),
        "--unspaced",
        "source,target",
        "--heads",
        head,
        "--export",
        "dtw",
    ]);
    let links =
        lines.iter().map(|line| serde_json::from_value(line["links"].clone()).expect("links"));
    let [rate, ..] = errors(&pairs, &links.collect::<Vec<Links>>());
    assert!(rate < 0.01, "{rate}");
}

#[test]
fn a_translation_is_aligned_by_the_heads_that_are_named() {
    let text = "我喜欢在早上喝咖啡。";
    let aligned = |more: &[&str]| {
        let line = json(&[&["translate", "zh-en", text, "--alignment"], more].concat()).remove(0);
        let links = line["alignment"].as_array().expect("links").clone();
        (line["translation"].as_str().expect("a text").trim().to_owned(), links)
    };
    let (target, of_all) = aligned(&[]);
    let args = ["look", "zh-en", text, "--target", &target, "--kind", "cross", "--format", "json"];
    let looked = told(&args);
    for (heads, head, row) in [("1.2", 2, 0), ("1.2:reads", 2, 1), ("1.3,1.3", 3, 0)] {
        let (again, links) = aligned(&["--alignment-heads", heads]);
        assert_eq!(again, target);
        let mut lines =
            looked.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let line = lines.find(|line| line["layer"] == 1 && line["head"] == head).expect("a head");
        let weights: Vec<Vec<f64>> = serde_json::from_value(line["weights"].clone()).expect("rows");
        assert_eq!(links.len(), weights.len() - 1);
        for (i, link) in links.iter().enumerate() {
            let best = weights[i + row].iter().copied().fold(0.0, f64::max);
            let key = weights[i + row].iter().position(|weight| *weight == best).expect("a key");
            assert!(
                (link["weight"].as_f64().expect("a number") - best).abs() < 1e-6,
                "{heads}: {link}"
            );
            assert_eq!(link["source"], line["cols"][key], "{heads}");
            assert_eq!(link["target"], line["rows"][i + 1], "{heads}");
        }
    }
    let (_, of_means) = aligned(&["--alignment-heads", "0.mean,1.mean"]);
    for (one, other) in of_all.iter().zip(&of_means) {
        assert_eq!((&one["target"], &one["source"]), (&other["target"], &other["source"]));
    }
}

#[test]
fn what_cannot_be_aligned_is_told_with_its_remedy() {
    let good = Pairs::new("good", "我 来\tI come\t0-0 1-1\n");
    let bare = Pairs::new("bare", "我 来\tI come\n");
    let link = Pairs::new("link", "我 来\tI come\t0-0\n我 来\tI come\t0-0 2-1\n");
    let empty = Pairs::new("empty", "\n");
    let gap = Pairs::new("gap", "我 来\t \t\n");
    let unsure = Pairs::new("unsure", "我 来\tI come\t0?0\n");
    let stories = fixture("stories260K");
    for (args, status, parts) in [
        (&["--gold", bare.path()][..], 3, &["line 1: 2 columns", "separated by tabs"][..]),
        (&["--gold", link.path()], 3, &["line 2", "`2-1`", "2 source and 2 target words"]),
        (&["--gold", empty.path()], 3, &["no pairs"]),
        (&["--gold", gap.path()], 3, &["line 1", "without words"]),
        (&["--gold", unsure.path()], 3, &["no sure links", "i-j"]),
        (&["--gold", good.path(), "--heads", "2.0"], 3, &["2.0", "0.0 to 1.3"]),
        (&["--gold", good.path(), "--heads", "1"], 2, &["LAYER.HEAD"]),
        (&["--gold", good.path(), "--to", "fra_Latn"], 3, &["language", "M2M-100"]),
        (&["--pairs", good.path()], 2, &["--heads"]),
        (&["--heads", "1.0"], 2, &["--gold"]),
        (&["--gold", good.path(), "--export", "dtw"], 2, &["--export"]),
    ] {
        let output = regard(&[&["align", "zh-en"], args].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
        for part in parts {
            assert!(error.contains(part), "{args:?}: no {part:?} in {error}");
        }
    }
    let output = regard(&["align", &stories, "--gold", good.path()]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("translate"), "{error}");
    let output = regard(&["translate", "zh-en", "我", "--alignment-heads", "1.0"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("--alignment"));
}
