//! The cases that are always measured, and how a pattern chooses among them.

use super::case::Case;
use anyhow::{Result, anyhow, bail};

/// A case of the list, and whether it is left out unless asked for by name.
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) slow: bool,
}

/// What we always measure.
pub(crate) fn listed() -> Vec<Listed> {
    let mut names = Vec::new();
    for n in [512, 1024, 2048, 8192] {
        for d in [64, 128] {
            names.extend(["", "-causal"].map(|option| format!("prefill-f32-n{n}-d{d}{option}")));
        }
    }
    names.extend((16..=256).step_by(8).map(|d| format!("prefill-f32-n2048-d{d}-h1")));
    let options = ["window256", "causal-window256", "padding", "bool", "bias", "headbias"];
    names.extend(options.map(|option| format!("prefill-f32-n2048-d64-{option}")));
    let options = ["alibi", "softcap", "large-logit", "bshd", "kv2"];
    names.extend(options.map(|option| format!("prefill-f32-n2048-d64-{option}")));
    names.push("prefill-f64-n2048-d64-h1".into());
    let options = ["window512", "causal-window512", "longformer512", "strided", "fixed"];
    names.extend(options.map(|option| format!("prefill-f32-n16384-d64-h1-{option}")));
    for n in [32, 64, 128] {
        let options = ["", "-padding", "-causal"];
        names.extend(options.map(|option| format!("short-f32-n{n}-d64{option}")));
    }
    names.extend(halves());
    for n in [2048, 8192] {
        for d in [64, 128] {
            names.extend(["", "-causal"].map(|option| format!("backward-f32-n{n}-d{d}{option}")));
        }
    }
    names.extend([64, 128].map(|d| format!("backward-f32-n2048-d{d}-backward-only")));
    names.extend([32, 64, 128].map(|n| format!("backward-f32-n{n}-d64-b64")));
    let options = ["dropout", "bias", "headbias", "v32", "h1", "kv2", "causal-window256", "alibi"];
    names.extend(options.map(|option| format!("backward-f32-n2048-d64-{option}")));
    names.extend(others());
    for n in [128, 256, 512, 1024, 2048, 4096, 8192, 16384] {
        names.push(format!("linear-f32-n{n}-d64-h1-causal"));
    }
    let options = ["relu", "random128", "both", "h8"];
    names.extend(options.map(|option| format!("linear-f32-n8192-d64-causal-{option}")));
    names.extend(["linear-f32-n8192-d64-h1".into(), "linear-bf16-n8192-d64-h1-causal".into()]);
    names.extend([8192, 16384].map(|n| format!("lsh-f32-n{n}-d64-h1")));
    names.extend(["", "-causal"].map(|option| format!("look-f32-n8192-d64-h1{option}")));
    let slow = [
        "look-f32-n100000-d64-h1-causal",
        "look-f32-n1000000-d64-h1-causal-window4096",
        "lsh-f32-n32768-d64-h1",
        "lsh-f32-n65536-d64-h1",
        "lsh-f32-n65536-d64-h1-causal",
        "lsh-f32-n131072-d64-h1",
        "prefill-f32-n16384-d64-h1",
        "prefill-f32-n131072-d64-h1",
        "backward-f32-n65536-d64-h1",
        "backward-f32-n65536-d64-h1-causal-window256",
        "linear-f32-n32768-d64-h1-causal",
        "linear-f32-n65536-d64-h1-causal",
        "linear-f32-n131072-d64-h1-causal",
    ];
    let slow = slow.map(|name| Listed { name: name.into(), slow: true });
    names.into_iter().map(|name| Listed { name, slow: false }).chain(slow).collect()
}

/// Other similarities, other ways from scores to weights.
fn others() -> Vec<String> {
    let mut names: Vec<String> = vec!["backward-f32-n2048-d256-h1-additive".into()];
    let options = ["top-32", "hard", "sampled", "sparsemax"];
    names.extend(options.map(|option| format!("backward-f32-n2048-d64-h1-{option}")));
    names.push("backward-f32-n16384-d64-h1-local64".into());
    // Draft tokens against a chain of them, retrieved keys, latent attention.
    for q in [4, 8, 16] {
        names.extend(["causal", "tree"].map(|mask| format!("decode-f32-n32768-d128-q{q}-{mask}")));
    }
    names.extend(["", "-q16"].map(|q| format!("decode-f32-n100000-d128{q}-keys1000")));
    names.push("backward-f32-n16384-d64-h1-keys512".into());
    for dtype in ["f32", "bf16"] {
        names.push(format!("decode-{dtype}-n8192-d576-v512-h128-kv1-latent"));
    }
    names
}

/// Half types, precisions and decoding.
fn halves() -> Vec<String> {
    let mut names = Vec::new();
    for (n, d) in [(512, 64), (512, 128), (2048, 64), (2048, 128), (8192, 64), (8192, 128)] {
        names.extend(["", "-causal"].map(|option| format!("prefill-bf16-n{n}-d{d}{option}")));
    }
    names.extend([64, 128].map(|d| format!("prefill-f16-n2048-d{d}")));
    for (n, d) in [(2048, 64), (2048, 128), (8192, 64)] {
        names
            .extend(["full", "high"].map(|precision| format!("prefill-f32-n{n}-d{d}-{precision}")));
    }
    names.extend([32, 64, 128].map(|n| format!("short-bf16-n{n}-d64")));
    for dtype in ["f32", "bf16"] {
        names.extend([1024, 8192, 32768].map(|n| format!("decode-{dtype}-n{n}-d128")));
        names.push(format!("decode-{dtype}-n8192-d128-paged"));
    }
    names.push("decode-bf16-n8192-d128-b16-shared".into());
    names.extend(["paged", "int8", "fp8"].map(|cache| format!("decode-bf16-n32768-d128-{cache}")));
    for d in [64, 128] {
        names.extend(["", "-causal"].map(|option| format!("backward-bf16-n2048-d{d}{option}")));
    }
    names.push("backward-bf16-n8192-d64".into());
    names.extend([16, 32, 64, 128].map(|n| format!("backward-bf16-n{n}-d64-b64")));
    names.push("backward-f32-n2048-d64-full".into());
    names
}

/// The cases that a pattern of `*` and `?` names; a full name need not be listed.
pub(crate) fn choose(pattern: Option<&str>) -> Result<Vec<Case>> {
    let Some(pattern) = pattern else {
        return listed().iter().filter(|c| !c.slow).map(|c| Case::parse(&c.name)).collect();
    };
    if !pattern.contains(['*', '?']) {
        let case = Case::parse(pattern).map_err(|why| anyhow!("--case {pattern}: {why}"))?;
        return Ok(vec![case]);
    }
    let found: Vec<_> = listed().into_iter().filter(|c| matches(pattern, &c.name)).collect();
    if found.is_empty() {
        bail!("--case {pattern}: no listed case matches; see them with `regard bench list`");
    }
    found.iter().map(|c| Case::parse(&c.name)).collect()
}

/// Whether `text` fits `pattern`: `*` stands for any characters, `?` for one.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut p, mut t) = (0, 0);
    let mut star = None; // the last `*`, and where the text stood after what it has swallowed
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == text[t] => (p, t) = (p + 1, t + 1),
            _ => {
                let Some((at, swallowed)) = star else { return false };
                star = Some((at, swallowed + 1));
                (p, t) = (at + 1, swallowed + 1);
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_a_case_and_stands_once() {
        let mut names: Vec<_> = listed().into_iter().map(|c| c.name).collect();
        names.iter().for_each(|name| assert_eq!(Case::parse(name).unwrap().name, *name));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn patterns_choose() {
        for (pattern, text, fits) in [
            ("*", "", true),
            ("", "a", false),
            ("a*c", "abc", true),
            ("a*c", "abcd", false),
            ("*-d64", "n1-d64-d64", true),
            ("a?c", "abc", true),
            ("a?", "a", false),
            ("*b*b*", "abab", true),
            ("*b*b*", "aba", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
        assert_eq!(choose(Some("prefill-f32*n2048-d64-causal")).unwrap().len(), 1);
        assert_eq!(choose(Some("prefill-f32-n3-d5-h1")).unwrap()[0].dims.k_len, 3);
        assert!(choose(Some("z*")).unwrap_err().to_string().contains("bench list"));
        assert!(choose(Some("prefill")).unwrap_err().to_string().contains("--case prefill"));
        let slow = listed().iter().filter(|c| c.slow).count();
        assert_eq!(choose(None).unwrap().len() + slow, choose(Some("*")).unwrap().len());
    }
}
