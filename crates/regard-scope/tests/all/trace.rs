//! Traces: what is written is read again, and no file can do more than be refused.

use crate::aren::Aren;
use crate::dense::{Outcome, json};
use crate::record::trace_of;
use crate::stories::Stories;
use proptest::prelude::*;
use regard::Machine;
use regard_scope::{Inputs, Labels, Layer, LayerData, Site, Trace, Weights};
use std::collections::BTreeMap;

/// A small trace with everything in it.
fn small() -> Trace {
    let numbers = |n: usize| (0..n).map(|i| (i as f32 * 0.7).sin()).collect::<Vec<f32>>();
    let heads = Inputs::new((numbers(2 * 3 * 4), [2, 3, 4]), (numbers(5 * 4), [1, 5, 4]), "causal");
    let seen = LayerData::Inputs(heads.expect("a small problem"));
    let layer = |layer, seen| Layer {
        layer,
        kind: "cross".into(),
        rows: "words".into(),
        cols: "positions".into(),
        data: seen,
        value_norms: Vec::new(),
    };
    let weights = Weights { values: vec![0.2; 2 * 3 * 5], shape: [2, 3, 5] };
    let words = ["好", "久", "<b>"].map(String::from).to_vec();
    let spans = vec![("a part".to_string(), 1..3), ("the rest".to_string(), 2..usize::MAX)];
    let axes = BTreeMap::from([
        ("words".to_string(), Labels { spans, ..Labels::new("words", words) }),
        ("positions".to_string(), Labels::counted("positions", 5)),
    ]);
    let layers = vec![layer(0, seen), layer(1, LayerData::Weights(weights))];
    Trace { title: "small".into(), axes, layers, interventions: vec!["heads 1: drop".into()] }
}

#[test]
fn what_is_written_is_read_again() -> Outcome<()> {
    let path = std::env::temp_dir().join(format!("regard-{}.safetensors", std::process::id()));
    let trace = small();
    trace.save(&path)?;
    let read = Trace::load(&path, Machine::detect())?;
    std::fs::remove_file(&path)?;
    assert_eq!(read, trace);
    let last = Site { layer: 1, kind: "cross".into(), head: 1 };
    assert_eq!(read.map(Machine::detect(), &last, 0..3, [3, 5])?.values, vec![0.2; 15]);
    Ok(())
}

#[test]
fn lies_are_named() -> Outcome<()> {
    let bytes = small().to_bytes()?;
    // The header is text; lies of the same length keep the file whole.
    let lies = [
        ("\\\"len\\\":5", "len\\\":6", "has 5, axis"),
        ("causal", "casual", "no rule is called `casual`"),
        ("version\\\":1", "version\\\":9", "reads up to 1"),
        ("cross.0.k\\\"", "cross.9.k\\\"", "not in the file"),
        ("cross.0.k\\\"", "cross.0.q\\\"", "named twice"),
        ("start\\\":1", "start\\\":9", "start must not exceed end"),
    ];
    for (place, lie, why) in lies {
        let found = bytes.windows(place.len()).position(|text| text == place.as_bytes());
        let at = found.ok_or(place)? + place.len() - lie.len();
        let mut lying = bytes.clone();
        lying[at..at + lie.len()].copy_from_slice(lie.as_bytes());
        let error = Trace::from_bytes(&lying).err().ok_or(lie)?.to_string();
        assert!(error.contains(why), "{lie}: {error}");
    }
    Ok(())
}

#[test]
fn too_many_spans_are_refused() {
    let mut trace = small();
    let words = trace.axes.get_mut("words").expect("an axis");
    words.spans = vec![("x".to_string(), 0..1); 65];
    let error = trace.to_bytes().expect_err("refused").to_string();
    assert!(error.contains("axis words: spans: 65; 64 are the most"), "{error}");
}

/// A file whose tensors hold nothing may not say that there are many of them.
#[test]
fn sizes_without_numbers_are_refused() {
    for shape in ["[1099511627776, 0, 4]", "[0, 3, 4]", "[2, 1099511627776, 0]"] {
        let about = r#"{\"version\":1,\"axes\":{\"a\":{\"len\":0}},\"layers\":[{\"layer\":0,\"kind\":\"s\",\"rows\":\"a\",\"cols\":\"a\",\"weights\":\"w\"}]}"#;
        let tensor = format!(r#""w":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}"#);
        let header = format!(r#"{{"__metadata__":{{"regard":"{about}"}},{tensor}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let error = Trace::from_bytes(&bytes).map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("leave out what is empty") || error.contains("safetensors"),
            "{error}"
        );
    }
}

/// Ten thousand damaged files: flipped bits, cut ends, pieces moved about. Each is read or refused, and no more.
#[test]
fn damaged_files_are_refused_and_no_more() -> Outcome<()> {
    let whole = small().to_bytes()?;
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut below = |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from((seed >> 33) % n as u64).unwrap_or(0)
    };
    let (mut read, before) = (0, memory());
    for _ in 0..10_000 {
        let mut bytes = whole.clone();
        for _ in 0..=below(4) {
            let (i, j, n) = (below(bytes.len()), below(bytes.len()), below(16));
            match below(5) {
                0 => bytes[i] ^= 1 << below(8),
                1 => bytes[i] = b"0123456789,:{}[]\"\\-e"[below(20)],
                2 => bytes.truncate(i.max(1)),
                3 => bytes.extend_from_within(..n.min(bytes.len())),
                _ => {
                    let piece: Vec<u8> = bytes[i..(i + n).min(bytes.len())].to_vec();
                    let end = (j + piece.len()).min(bytes.len());
                    bytes[j..end].copy_from_slice(&piece[..end - j]);
                }
            }
        }
        let Ok(trace) = Trace::from_bytes(&bytes) else { continue };
        read += 1;
        for site in trace.sites() {
            let rows = trace.layer(&site)?.data.size()[0];
            trace.map(Machine::detect().threads(1), &site, 0..rows, [7, 7])?;
        }
    }
    assert!((1..5000).contains(&read), "{read} of 10,000 were read");
    // A file of a kilobyte is no reason for megabytes; threads and their stacks are.
    let more = memory().saturating_sub(before);
    assert!(more < 64 << 10, "{more} kB");
    Ok(())
}

/// The most memory that this process has had, in kB; 0 where nobody says.
fn memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

proptest! {
    #[test]
    fn any_bytes_are_refused_and_no_more(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Trace::from_bytes(&bytes);
    }
}

/// Head 0 of the last layer, for the steps that wrote a letter.
#[test]
fn the_view_of_a_real_model_equals_what_another_program_reports() -> Outcome<()> {
    let (model, goldens) = (Aren::load()?, json(crate::aren::FOLDER, "golden_ctranslate2.json")?);
    for golden in goldens.as_array().ok_or("a list of names")? {
        let run = model.transliterate(golden["src"].as_str().ok_or("a name")?)?;
        let trace = trace_of(&run.text, &run, 4)?;
        let trace = Trace::from_bytes(&trace.to_bytes()?)?;
        let site = Site { layer: 5, kind: "cross".into(), head: 0 };
        let LayerData::Inputs(heads) = &trace.layer(&site)?.data else {
            return Err("weights".into());
        };
        let view = heads.view(Machine::detect())?.head(0, 0)?;
        let expected: Vec<Vec<f64>> = serde_json::from_value(golden["greedy_attention"].clone())?;
        for (i, expected) in expected.iter().enumerate() {
            for (ours, expected) in view.row(i)?.iter().zip(expected) {
                assert!((f64::from(*ours) - expected).abs() < 1e-4, "{ours} for {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_story_of_grouped_heads_is_seen_causally() -> Outcome<()> {
    let run = Stories::load()?.tell(40)?;
    let trace = trace_of("a story", &run, 8)?;
    assert_eq!(trace.sites().len(), 5 * Stories::HEADS);
    for site in trace.sites() {
        let map = trace.map(Machine::detect(), &site, 0..run.target.len(), [usize::MAX; 2])?;
        for row in 0..map.rows.len() {
            let (seen, hidden) = map.row(row).split_at(row + 1);
            assert!((seen.iter().sum::<f32>() - 1.0).abs() < 1e-4, "{site} {row}");
            assert!(hidden.iter().all(|a| a.is_nan()));
        }
    }
    Ok(())
}
