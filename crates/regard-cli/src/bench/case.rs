//! Names of cases: one grammar that says all of what is measured, and the list of those we always measure.
//!
//! `{prefill|short|decode|backward|look|linear|lsh}-{f32|f64|f16|bf16}-n{keys}-d{dim}` and then any of `-h{heads} -kv{heads} -b{batch}
//! -v{v_dim} -q{queries}` and of [`OPTIONS`].

use super::memory;
use crate::args::Dtype;
use crate::job::fits_in_memory;
use anyhow::{Result, anyhow, bail};
use regard::cache::Quantization;
use regard::machine::Precision;
use regard::problem::{Dims, Heads, Normalizer};
use regard::{Layout, Shape};
use regard_approx::FeatureMap;
use serde::Serialize;

/// What the machine can run out of first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bound {
    /// Multiply-adds.
    Fma,
    /// Reading keys and values.
    Read,
}

/// The passes of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pass {
    Forward,
    /// Forward and backward pass, as in a training step.
    Both,
    /// Backward pass only, with the output of an earlier forward pass.
    Backward,
    /// A look at the weights, with the output of a forward before.
    Look,
}

/// A part of the mask, with all its numbers: enough for us and for a baseline to build the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "rule", rename_all = "lowercase")]
pub(crate) enum Rule {
    Causal,
    Window {
        keys: usize,
    },
    Lengths {
        lengths: Vec<usize>,
    },
    /// Each pair visible or not by the toss of a coin.
    Bits,
    Blocks {
        size: usize,
    },
    Longformer {
        window: usize,
        global: Vec<usize>,
    },
    Strided {
        stride: usize,
    },
    Fixed {
        block: usize,
        summary: usize,
    },
    /// Draft tokens: the parent of each, -1 for none.
    Tree {
        parents: Vec<isize>,
    },
    /// So many keys for each row, scattered.
    Keys {
        keys: usize,
    },
}

/// What is added to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Bias {
    /// `[1, 1, queries, keys]`
    Shared,
    /// `[1, heads, queries, keys]`
    Heads,
    Alibi,
}

/// One thing to measure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) dims: Dims,
    pub(crate) bound: Bound,
    pub(crate) pass: Pass,
    pub(crate) layout: Layout,
    pub(crate) rules: Vec<Rule>,
    pub(crate) bias: Option<Bias>,
    pub(crate) softcap: Option<f64>,
    /// Whether each head has a learned sink.
    pub(crate) sinks: bool,
    pub(crate) dropout: Option<f64>,
    /// Factor of the queries; a large one gives large logits, and most weights become denormal.
    pub(crate) q_scale: f64,
    /// If not the usual one of the dtype.
    pub(crate) precision: Option<Precision>,
    /// Whether keys and values come from a cache.
    pub(crate) cached: Option<Cached>,
    /// How the cache stores numbers, if in 8 bits.
    pub(crate) quantization: Option<Quantization>,
    /// Whether values are the first features of their keys.
    pub(crate) latent: bool,
    /// Whether similarities are additive, with as many hidden units as features.
    pub(crate) additive: bool,
    pub(crate) normalizer: Normalizer,
    /// How far rows see around a center of their own.
    pub(crate) local: Option<usize>,
    /// The map of linear attention, if that is what is measured.
    pub(crate) linear: Option<FeatureMap>,
    /// Whether attention by hashing is measured, on queries and keys that have neighbours.
    pub(crate) lsh: bool,
}

/// How sequences hold their keys and values in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Cached {
    /// Each its own.
    Paged,
    /// All the same, which is read once.
    Shared,
}

pub(crate) const OPTIONS: &str = "causal window{keys} padding bool blocks{size} longformer{window} strided fixed tree keys{keys} \
bias headbias alibi softcap sinks dropout large-logit bshd backward-only strict full high paged shared int8 fp8 latent additive top-{keys} hard sampled \
sparsemax local{reach}; of linear, causal relu random{features} both bshd; of lsh, causal both bshd";

fn parse_dtype(name: &str) -> Result<Dtype> {
    Ok(match name {
        "f32" => Dtype::F32,
        "f64" => Dtype::F64,
        "f16" => Dtype::F16,
        "bf16" => Dtype::Bf16,
        _ => {
            bail!("`{name}`: the dtype comes second and is f32, f64, f16 or bf16, as in {EXAMPLE}")
        }
    })
}

impl Case {
    /// Reads a name.
    pub(crate) fn parse(name: &str) -> Result<Self> {
        // Options of two words, joined so that a hyphen separates parts only.
        let text = name.replace("-top-", "-top_").replace("-large-logit", "-large_logit");
        let text = text.replace("-backward-only", "-backward_only");
        let mut parts = text.split('-');
        let (kind, dtype) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let (batch, heads, kv, q_len, bound) = match kind {
            "prefill" | "backward" | "look" | "linear" | "lsh" => (1, 8, None, None, Bound::Fma),
            "short" => (64, 8, None, None, Bound::Fma),
            "decode" => (1, 32, Some(8), Some(1), Bound::Read),
            _ => bail!(
                "`{kind}`: a case begins with prefill, short, decode, backward, look, linear or lsh, as in {EXAMPLE}"
            ),
        };
        let dtype = parse_dtype(dtype)?;
        let mut seen: Vec<(&str, Option<usize>)> = Vec::new();
        for part in parts {
            let word = split_number(part)?;
            if seen.iter().any(|(name, _)| *name == word.0) {
                bail!("`{}` is given twice; give it once", word.0);
            }
            seen.push(word);
        }
        let mut size = |name| {
            let at = seen.iter().position(|(found, n)| *found == name && n.is_some())?;
            seen.swap_remove(at).1.map(|n| n.max(1))
        };
        let missing =
            |axis| anyhow!("{axis} is missing; the keys and features are needed, as in {EXAMPLE}");
        let k_len = size("n").ok_or_else(|| missing("n{keys}"))?;
        let qk_dim = size("d").ok_or_else(|| missing("d{features}"))?;
        let given = size("h");
        let kv = size("kv").or(if given.is_none() { kv } else { None });
        let heads = given.unwrap_or(heads);
        let dims = Dims {
            batch: size("b").unwrap_or(batch),
            heads: Heads { q: heads, kv: kv.unwrap_or(heads) },
            q_len: size("q").or(q_len).unwrap_or(k_len),
            k_len,
            q_dim: qk_dim,
            qk_dim,
            v_dim: size("v").unwrap_or(qk_dim),
        };
        let mut case = Self {
            name: name.into(),
            dtype,
            dims,
            bound,
            pass: match kind {
                "backward" => Pass::Both,
                "look" => Pass::Look,
                _ => Pass::Forward,
            },
            layout: Layout::Bhsd,
            rules: Vec::new(),
            bias: None,
            softcap: None,
            sinks: false,
            dropout: None,
            q_scale: 1.0,
            precision: None,
            cached: None,
            quantization: None,
            latent: false,
            additive: false,
            normalizer: Normalizer::Softmax,
            local: None,
            linear: (kind == "linear").then_some(FeatureMap::EluPlusOne),
            lsh: kind == "lsh",
        };
        case.check_dims()?;
        case.fits()?; // options make lists of these sizes
        seen.sort_unstable(); // the order of options in a name means nothing
        seen.into_iter().try_for_each(|(option, n)| case.add(option, n))?;
        if case.latent {
            case.bound = Bound::Fma; // each key is multiplied by many rows
        }
        case.check()?;
        Ok(case)
    }

    fn add(&mut self, option: &str, number: Option<usize>) -> Result<()> {
        if let Some(rule) = self.rule(option, number) {
            // Both patterns of Child et al. look back only.
            if matches!(rule, Rule::Strided { .. } | Rule::Fixed { .. })
                && !self.rules.contains(&Rule::Causal)
            {
                self.rules.push(Rule::Causal);
            }
            self.rules.push(rule);
            return Ok(());
        }
        match (option, number) {
            ("bias", None) => return self.set_bias(Bias::Shared),
            ("headbias", None) => return self.set_bias(Bias::Heads),
            ("alibi", None) => return self.set_bias(Bias::Alibi),
            ("softcap", None) => self.softcap = Some(50.0),
            ("sinks", None) => self.sinks = true,
            ("dropout", None) => self.dropout = Some(0.1),
            ("relu", None) if self.linear.is_some() => return self.set_map(FeatureMap::Relu),
            ("random", Some(features)) if self.linear.is_some() => {
                return self.set_map(FeatureMap::PositiveRandom { features, seed: 1 });
            }
            ("both", None) if self.is_another() => self.pass = Pass::Both,
            ("backward_only", None) if self.pass == Pass::Both && !self.is_another() => {
                self.pass = Pass::Backward;
            }
            ("paged", None) if self.bound == Bound::Read => return self.set_cached(Cached::Paged),
            ("shared", None) if self.bound == Bound::Read => {
                return self.set_cached(Cached::Shared);
            }
            ("int", Some(8)) if self.bound == Bound::Read => self.set_bits(Quantization::Int8)?,
            ("fp", Some(8)) if self.bound == Bound::Read => self.set_bits(Quantization::Fp8E4m3)?,
            ("strict", None) => return self.set_precision(Precision::Strict),
            ("full", None) => return self.set_precision(Precision::Full),
            ("high", None) => return self.set_precision(Precision::High),
            ("latent", None) => self.latent = true,
            ("additive", None) => self.additive = true,
            ("local", Some(reach)) => self.local = Some(reach),
            ("top_", Some(k)) => return self.set_normalizer(Normalizer::TopK(k)),
            ("hard", None) => return self.set_normalizer(Normalizer::Hard),
            ("sampled", None) => return self.set_normalizer(Normalizer::Sampled { seed: 7 }),
            ("sparsemax", None) => return self.set_normalizer(Normalizer::Sparsemax),
            ("large_logit", None) => self.q_scale = 20.0,
            ("bshd", None) => self.layout = Layout::Bshd,
            _ => {
                let number = number.map_or(String::new(), |n| n.to_string());
                bail!("`{}{number}`: no such option; known are {OPTIONS}", option.replace('_', "-"))
            }
        }
        Ok(())
    }

    /// The rule of a mask that an option names, if it is one.
    fn rule(&self, option: &str, number: Option<usize>) -> Option<Rule> {
        let Dims { batch, q_len, k_len, .. } = self.dims;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a root and a fraction of a length are lengths"
        )]
        let (root, length) = (
            ((k_len as f64).sqrt().round() as usize).max(1),
            // Lengths from half to all of the keys, spread evenly, neighbours far apart.
            |b: usize| k_len - (k_len as f64 / 2.0 * (0.5 + 0.618_034 * b as f64).fract()) as usize,
        );
        Some(match (option, number) {
            ("causal", None) => Rule::Causal,
            ("window", Some(keys)) => Rule::Window { keys },
            ("padding", None) => Rule::Lengths { lengths: (0..batch).map(length).collect() },
            ("bool", None) => Rule::Bits,
            ("blocks", Some(size)) => Rule::Blocks { size },
            ("longformer", Some(window)) => {
                Rule::Longformer { window, global: scattered(16, k_len) }
            }
            ("strided", None) => Rule::Strided { stride: root },
            ("fixed", None) => Rule::Fixed { block: root, summary: root.min(8) },
            // Two continuations of each token.
            ("tree", None) => Rule::Tree {
                parents: (0..q_len.min(k_len).cast_signed())
                    .map(|i| (i - 1).div_euclid(2))
                    .collect(),
            },
            ("keys", Some(keys)) => Rule::Keys { keys: keys.min(k_len) },
            _ => return None,
        })
    }

    fn set_map(&mut self, map: FeatureMap) -> Result<()> {
        match self.linear.replace(map) {
            Some(FeatureMap::EluPlusOne) | None => Ok(()),
            Some(_) => bail!("relu and random; give one"),
        }
    }

    /// Whether another function than attention is measured.
    fn is_another(&self) -> bool {
        self.linear.is_some() || self.lsh
    }

    /// The one of the options that only attention has.
    fn beyond_another(&self) -> Option<&'static str> {
        let causal = self.rules.iter().all(|rule| *rule == Rule::Causal);
        let found = [
            (!causal, "a mask"),
            (self.bias.is_some(), "a bias"),
            (self.softcap.is_some(), "softcap"),
            (self.sinks, "sinks"),
            (self.dropout.is_some(), "dropout"),
            (self.precision.is_some(), "a precision"),
        ];
        found.into_iter().find(|(found, _)| *found).map(|(_, name)| name)
    }

    fn set_cached(&mut self, cached: Cached) -> Result<()> {
        if self.cached.replace(cached).is_some_and(|_| self.quantization.is_none()) {
            bail!("paged and shared; give one");
        }
        Ok(())
    }

    fn set_bits(&mut self, quantization: Quantization) -> Result<()> {
        if self.quantization.replace(quantization).is_some() {
            bail!("int8 and fp8; give one");
        }
        if self.dtype == Dtype::F64 {
            bail!("int8 and fp8 are computed in f32; the dtype is f32, f16 or bf16");
        }
        self.cached.get_or_insert(Cached::Paged);
        Ok(())
    }

    fn set_precision(&mut self, precision: Precision) -> Result<()> {
        if self.precision.replace(precision).is_some() {
            bail!("two of strict, f32 and high; give one");
        }
        Ok(())
    }

    fn set_normalizer(&mut self, normalizer: Normalizer) -> Result<()> {
        if self.normalizer != Normalizer::Softmax {
            bail!("two of top, hard, sampled and sparsemax; give one");
        }
        self.normalizer = normalizer;
        Ok(())
    }

    fn set_bias(&mut self, bias: Bias) -> Result<()> {
        if self.bias.replace(bias).is_some() {
            bail!("two of bias, headbias and alibi; give one");
        }
        Ok(())
    }

    /// Refuses what could not run.
    fn check(&self) -> Result<()> {
        let Heads { q, kv } = self.dims.heads;
        if q % kv != 0 {
            bail!("h{q} and kv{kv}: the first must be a multiple of the second");
        }
        let Dims { qk_dim, v_dim, .. } = self.dims;
        if self.latent && (v_dim > qk_dim || self.pass != Pass::Forward || self.is_another()) {
            bail!("latent: a forward pass with v{v_dim} not above d{qk_dim}; give smaller values");
        }
        if let Some(option) = self.beyond_another().filter(|_| self.is_another()) {
            let what = if self.lsh { "attention by hashing" } else { "linear attention" };
            bail!("{what} has not {option}; leave it out");
        }
        Ok(())
    }

    /// Refuses tensors that cannot be addressed.
    fn check_dims(&self) -> Result<()> {
        let [q, k, v] = self.shapes();
        let out = Shape { dim: v.dim, ..q };
        let all = [("q", q), ("k", k), ("v", v), ("the output", out)];
        all.into_iter().try_for_each(|(name, shape)| fits_in_memory(name, shape))
    }

    /// Refuses what takes more memory than there is.
    pub(crate) fn fits(&self) -> Result<()> {
        let (needed, most) = (self.needed_bytes(), memory::most());
        if needed > most {
            bail!(
                "--case {}: it needs at least {:.1} GB, this process can have {:.1} GB of memory; give fewer keys \
                 (n), queries (q), heads (h), features (d, v) or items (b)",
                self.name,
                needed * 1e-9,
                most * 1e-9
            );
        }
        Ok(())
    }

    /// Bytes of what is held at once, at least. Not whole: as numbers that cannot overflow.
    fn needed_bytes(&self) -> f64 {
        let product = |axes: &[usize]| axes.iter().map(|n| *n as f64).product::<f64>();
        let [q, k, v] = self.shapes();
        let of = |shape: Shape| product(&shape.to_array());
        let bias = match self.bias {
            Some(Bias::Shared) => product(&[q.len, k.len]),
            Some(Bias::Heads) => product(&[q.heads, q.len, k.len]),
            Some(Bias::Alibi) | None => 0.0,
        };
        let out = of(Shape { dim: v.dim, ..q });
        let v = if self.latent { Shape { dim: 0, ..v } } else { v };
        let inputs = of(q) + of(k) + of(v) + bias;
        let grads = if self.pass == Pass::Forward { 0.0 } else { inputs };
        let cached = if self.cached.is_some() { of(k) + of(v) } else { 0.0 };
        let hidden = if self.additive { 2.0 * product(&[q.dim, q.dim]) } else { 0.0 };
        let features = match self.linear {
            Some(map) => product(&[map.features(q.dim), q.dim]),
            None => 0.0,
        };
        let numbers = inputs + 2.0 * out + grads + cached + hidden + features;
        // A bool and later a bit for each.
        let bits = if self.rules.contains(&Rule::Bits) { product(&[q.len, k.len]) } else { 0.0 };
        numbers * self.dtype.bytes() as f64 + bits
    }

    /// Flops for `pairs` that see each other: two products forward, five backward, one for a look. A hyperbolic tangent counts as one
    /// multiplication and addition, as if it were a dot product. Of linear attention, those of the sums over keys and of what
    /// rows ask of them, and twice as many backward for both.
    pub(crate) fn flops(&self, pairs: f64) -> f64 {
        if let Some(map) = self.linear {
            let Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. } = self.dims;
            let rows = (batch * (heads.q * q_len + heads.kv * k_len)) as f64;
            let forward = 2.0 * rows * map.features(qk_dim) as f64 * v_dim as f64;
            return forward * if self.pass == Pass::Forward { 1.0 } else { 4.0 };
        }
        let [qk, v] = [self.dims.qk_dim, self.dims.v_dim].map(|n| n as f64);
        let (forward, backward) = (qk + v, 3.0 * qk + 2.0 * v);
        2.0 * pairs
            * match self.pass {
                Pass::Forward => forward,
                Pass::Both => forward + backward,
                Pass::Backward => backward,
                Pass::Look => qk,
            }
    }

    /// Bytes of what a call returns: the outputs, and the gradients of all that could be learned. What a look returns is what it is
    /// to be measured by, so none of it counts.
    pub(crate) fn returned_bytes(&self) -> usize {
        let [q, k, v] = self.shapes();
        let elements = |shape: Shape| shape.to_array().iter().product::<usize>();
        let bias = match self.bias {
            Some(Bias::Shared) => q.len * k.len,
            Some(Bias::Heads) => q.heads * q.len * k.len,
            Some(Bias::Alibi) | None => 0,
        };
        let outputs = elements(Shape { dim: v.dim + 2, ..q });
        let grads = elements(q) + elements(k) + elements(v) + bias;
        let returned = match self.pass {
            Pass::Forward => outputs,
            Pass::Both => outputs + grads,
            Pass::Backward => grads,
            Pass::Look => 0,
        };
        returned * self.dtype.bytes()
    }

    /// The shapes of q, k and v.
    pub(crate) fn shapes(&self) -> [Shape; 3] {
        let Dims { batch, heads, q_len, k_len, qk_dim, v_dim, .. } = self.dims;
        let k = Shape { batch, heads: heads.kv, len: k_len, dim: qk_dim };
        [Shape { heads: heads.q, len: q_len, ..k }, k, Shape { dim: v_dim, ..k }]
    }
}

const EXAMPLE: &str = "prefill-f32-n2048-d64-causal";

/// `window512` is `window` and 512.
fn split_number(part: &str) -> Result<(&str, Option<usize>)> {
    let name = part.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &part[name.len()..];
    if digits.is_empty() {
        return Ok((name, None));
    }
    let number = crate::args::count(digits).map_err(|why| anyhow!("`{part}`: {why}"))?;
    Ok((name, Some(number)))
}

/// Positions with uneven distances, the same each time.
fn scattered(count: usize, n: usize) -> Vec<usize> {
    let mut at: Vec<usize> = (0..count.min(n)).map(|i| i * 2_654_435_761 % n).collect();
    at.sort_unstable();
    at.dedup();
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_all_of_a_case() {
        let case = Case::parse("prefill-f32-n2048-d64-causal").unwrap();
        let heads = Heads { q: 8, kv: 8 };
        let dims =
            Dims { batch: 1, heads, q_len: 2048, k_len: 2048, q_dim: 64, qk_dim: 64, v_dim: 64 };
        assert_eq!((case.dims, case.bound, case.rules), (dims, Bound::Fma, vec![Rule::Causal]));
        let case = Case::parse("decode-f64-n1000-d128-b3").unwrap();
        assert_eq!(case.dims.heads, Heads { q: 32, kv: 8 });
        assert_eq!((case.dims.q_len, case.dims.k_len, case.dims.batch), (1, 1000, 3));
        assert_eq!((case.dtype, case.bound), (Dtype::F64, Bound::Read));
        let case = Case::parse("backward-f32-n8-d4-v2-dropout").unwrap();
        assert_eq!((case.pass, case.dropout, case.flops(1.0)), (Pass::Both, Some(0.1), 44.0));
        let case = Case::parse("backward-f32-n8-d4-backward-only").unwrap();
        assert_eq!((case.pass, case.flops(1.0)), (Pass::Backward, 40.0));
        let case =
            Case::parse("short-f32-window7-v16-q5-kv2-n9-d8-h4-bshd-softcap-large-logit").unwrap();
        assert_eq!(case.dims.heads, Heads { q: 4, kv: 2 });
        assert_eq!((case.dims.q_len, case.dims.v_dim, case.dims.batch), (5, 16, 64));
        assert_eq!((case.layout, case.rules), (Layout::Bshd, vec![Rule::Window { keys: 7 }]));
        assert_eq!((case.softcap, case.q_scale), (Some(50.0), 20.0));
    }

    #[test]
    fn patterns_get_their_numbers_from_the_length() {
        let rules = |name: &str| Case::parse(name).unwrap().rules;
        let strided = vec![Rule::Causal, Rule::Strided { stride: 128 }];
        assert_eq!(rules("prefill-f32-n16384-d64-strided"), strided);
        assert_eq!(rules("prefill-f32-n16384-d64-strided-causal"), strided);
        let fixed = Rule::Fixed { block: 32, summary: 8 };
        assert_eq!(rules("prefill-f32-n1000-d64-fixed"), [Rule::Causal, fixed]);
        let Rule::Lengths { lengths } = &rules("short-f32-n128-d64-padding")[0] else { panic!() };
        assert_eq!(lengths.len(), 64);
        assert!(lengths.iter().all(|n| (64..=128).contains(n)));
        let Rule::Longformer { global, .. } = &rules("prefill-f32-n5-d1-longformer3")[0] else {
            panic!()
        };
        assert!(!global.is_empty() && global.iter().all(|at| *at < 5));
    }

    #[test]
    fn errors_name_the_part_and_the_remedy() {
        for (name, part) in [
            ("", "begins with prefill"),
            ("train-f32-n1-d1", "`train`"),
            ("prefill-f8-n1-d1", "`f8`"),
            ("prefill-f32-n128", "d{features} is missing"),
            ("prefill-f32-d64", "n{keys} is missing"),
            ("prefill-f32-n0-d64", "`n0`"),
            ("prefill-f32-n99999999999999999999-d64", "whole number"),
            ("prefill-f32-n8-d8-n9", "given twice"),
            ("prefill-f32-n8-d8-frob", "no such option; known are causal"),
            ("prefill-f32-n8-d8-window", "`window`"),
            ("prefill-f32-n8-d8-causal3", "`causal3`"),
            ("prefill-f32-n8-d8-h8-kv3", "multiple"),
            ("prefill-f32-n8-d8-bias-alibi", "give one"),
            ("prefill-f32-n8-d8-backward-only", "`backward-only`"),
            ("prefill-f32-n8-d8-", "``"),
            ("prefill-f32-n1099511627776-d1099511627776", "memory"),
        ] {
            let error = Case::parse(name).unwrap_err().to_string();
            assert!(error.contains(part), "{name}: {error}");
        }
    }
}
