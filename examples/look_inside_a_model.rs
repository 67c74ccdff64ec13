//! Which source tokens does a translator attend to?
//!
//! `cargo run --release --example look_inside_a_model [FILE.safetensors]`
//!
//! Our own small translator writes 好久不见 in English, and everything that its heads saw is kept: queries, keys and `lse`, no weights.
//! The weights are made again when they are asked for. Look at the sharpest of the heads between the two languages: it is at 不 when it
//! writes "no", and at 见 when it writes "see". The trace goes to a file that `examples/read_a_trace.py` and `regard look FILE` read.
//!
//! Try next: another sentence. `regard look zh-en 好久不见 --out page.html`, which shows all heads: they do not agree, and their mean
//! (`regard translate zh-en 好久不见 --alignment`) is at 见 for both words.

#![expect(clippy::print_stdout, reason = "a program")]

use regard::Machine;
use regard_models::Model;
use regard_scope::render::{Depth, term};
use regard_scope::{Map, Metrics, Style, Theme, Trace, alignment, stats};
use std::error::Error;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

const SENTENCE: &str = "好久不见";

// ANCHOR: heart
/// The weights of the sharpest head between the languages: the one with the least entropy.
fn sharpest(trace: &Trace) -> Result<Map, Box<dyn Error>> {
    let heads = stats(trace, Machine::detect(), &mut |_, _| {})?;
    let between = heads.iter().filter(|head| head.site.kind == "cross");
    let least = between.min_by(|a, b| a.entropy.total_cmp(&b.entropy)).ok_or("no such head")?;
    let [rows, cols] = trace.layer(&least.site)?.data.size();
    let mut map = trace.map(Machine::detect(), &least.site, 0..rows, [rows, cols])?;

    // A row reads one token and chooses the next: it is named after what it chose.
    map.rows.labels.rotate_left(1);
    map.rows.labels[rows - 1] = "(end)".into();
    map.title = format!("{}, entropy {:.2}", map.title, least.entropy);
    Ok(map)
}

/// The source that gets the most weight while `written` is written.
fn looked_at<'m>(map: &'m Map, written: &str) -> Option<(&'m str, f32)> {
    let row = map.rows.labels.iter().position(|label| label.trim() == written)?;
    let (key, weight) =
        map.row(row).iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some((&map.cols.labels[key], weight))
}
// ANCHOR_END: heart

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args_os().nth(1).map(PathBuf::from);
    let file = file.unwrap_or_else(|| std::env::temp_dir().join("regard-trace.safetensors"));
    let model =
        Model::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/regard-cli/zh-en"))?;

    let trace = model.look(SENTENCE)?;
    let written: String = trace.labels("target").labels[1..].concat();
    println!("{SENTENCE}: {}", written.trim());
    println!("{} heads: {}\n", trace.sites().len(), trace.kinds().join(", "));
    let plain: String = written.chars().filter(|c| c.is_alphabetic() || *c == ' ').collect();
    assert_eq!(plain.trim().to_lowercase(), "long time no see");

    let map = sharpest(&trace)?;
    let depth = if std::io::stdout().is_terminal() { Depth::Indexed } else { Depth::Ascii };
    let style = Style::new(Metrics::terminal(72, depth != Depth::Ascii));
    println!("{}", term(&alignment(&map, &Style { theme: Theme::Dark, ..style }), depth));
    for (word, source) in [("no", "不"), ("see", "见")] {
        let (found, weight) = looked_at(&map, word).ok_or(format!("{word} was not written"))?;
        println!("{word:>4} <- {found} {weight:.2}");
        assert_eq!(found.trim(), source, "{word}");
    }
    for row in 0..map.rows.len() {
        let sum: f32 = map.row(row).iter().sum();
        assert!((sum - 1.0).abs() < 1e-5, "the weights of a row sum to {sum}, not to 1");
    }

    trace.save(&file)?;
    assert_eq!(Trace::load(&file, Machine::detect())?, trace, "what was written is what is read");
    println!(
        "\nThe trace is in {} ({} kB).",
        file.display(),
        std::fs::metadata(&file)?.len() / 1000
    );
    Ok(())
}
