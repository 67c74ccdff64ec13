//! Attention over a KV cache in the case table: rows, and comparison with the reference over the numbers that the cache holds.

use crate::cases::{AttentionKind, Case, Dtype, dims};
use crate::close::{OutputCheck, Ratio};
use crate::data::Data;
use crate::masks::named;
use crate::noise::Noise;
use crate::run::{CheckedCase, Runs, same_bits};
use crate::scores::ScoreOption;
use regard::cache::{CacheShape, PAGE, Quantization};
use regard::problem::Dims;
use regard::{Element, Error, Isa, KvCache, Machine, Output, Plan, Problem, Sequence, View};

/// One row per head and many; blocks of keys that begin in one page and end in another; parts of keys; nothing to see, nothing to sum.
const SHAPES: &[[usize; 7]] = &[
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 7, 3, 4],
    [1, 2, 1, 64, 64, 16, 16],
    [1, 1, 1, 65, 129, 17, 24],
    [1, 3, 1, 190, 190, 24, 40],
    [3, 8, 2, 1, 200, 64, 72],
    [1, 4, 1, 1, 130, 128, 128],
    [2, 4, 2, 2, 300, 40, 130],
    [1, 16, 1, 1, 90, 33, 65],
    [2, 16, 1, 1, 200, 72, 64],
    [1, 6, 3, 3, 130, 40, 33],
    [1, 4, 1, 1, 8300, 32, 32],
    [1, 2, 1, 5, 0, 3, 4],
    [1, 2, 2, 5, 9, 3, 0],
];

/// Blocks of keys, some or all of which are gathered.
const MASKS: &[&str] = &[
    "full",
    "causal",
    "window",
    "lengths",
    "strided",
    "bits",
    "tree",
    "keys",
    "keys_per_key_head",
];

/// All shapes with elements and both kinds of 8 bits, with values or latent.
pub(crate) fn cases() -> Vec<Case> {
    let stored = [None, Some(Quantization::Int8), Some(Quantization::Fp8E4m3)];
    let mixed = [ScoreOption::Softcap(3.0), ScoreOption::Alibi, ScoreOption::Sinks];
    let mut table = Vec::new();
    for (i, shape) in SHAPES.iter().enumerate() {
        for (j, mask) in MASKS.iter().enumerate() {
            for quantization in stored {
                // Pages that do not divide a block as well.
                let page = [PAGE, 7, 100, 1][(i + j) % 4];
                let [.., qk_dim, v_dim] = *shape;
                let latent = v_dim <= qk_dim && (i + j / 2) % 2 == 0;
                let attention = AttentionKind::Cached { quantization, page, latent };
                let scores = if (i + j) % 2 == 0 { &[][..] } else { &mixed };
                let case = Case::new(dims(*shape)).mask(named(mask)).scores(scores);
                table.push(Case { attention, ..case });
            }
        }
    }
    // A number of int8 needs more bits than those of f16 and bf16, with which the reference could not be given it.
    let short = |case: &Case| match case.attention {
        AttentionKind::Cached { quantization, .. } => quantization != Some(Quantization::Int8),
        _ => false,
    };
    let others = [(Dtype::F16, 0), (Dtype::Bf16, 1)].into_iter().flat_map(|(dtype, first)| {
        let of = table.iter().filter(|case| short(case)).skip(first).step_by(2);
        of.map(move |case| Case { dtype, ..case.clone() })
    });
    let others: Vec<Case> = others.collect();
    table.extend(others);
    for case in &mut table {
        let mut noise = Noise::of_name(&case.to_string());
        case.seed = noise.bits() >> 32;
        case.entropy = noise.chance(0.3);
    }
    table
}

/// Attention over a cache, compared with the reference.
pub(crate) struct CachedCase<'d, E: Element> {
    case: &'d Case,
    /// Inputs; keys and values are those that the cache holds.
    data: Data<E>,
    cache: KvCache<E>,
    sequences: Vec<Sequence>,
    judge: OutputCheck,
}

impl<'d, E: Element> CachedCase<'d, E> {
    pub(crate) fn new(case: &'d Case, stored: (Option<Quantization>, bool), page: usize) -> Self {
        let made = filled(case, stored, page);
        let (data, cache, sequences) = made.expect("a cache without a limit takes what fits it");
        let judge = OutputCheck::new(&data.problem(case), data.inputs());
        Self { case, data, cache, sequences, judge }
    }

    /// The problem of the case, over the cache.
    fn problem(&self) -> Result<Problem<'_, E>, Error> {
        let of_tensors = self.data.problem(self.case);
        let mut problem = Problem::cached(&self.data.q.view(), &self.cache, &self.sequences)?;
        problem.mask = of_tensors.mask;
        problem.score = of_tensors.score;
        problem.align = of_tensors.align;
        problem.entropy = of_tensors.entropy;
        Ok(problem)
    }
}

/// A case, a cache and its sequences.
type Filled<E> = (Data<E>, KvCache<E>, Vec<Sequence>);

/// A cache that was given the keys and values of a case in two pieces, and the data of the case with what it holds.
fn filled<E: Element>(
    case: &Case,
    (quantization, latent): (Option<Quantization>, bool),
    page: usize,
) -> Result<Filled<E>, Error> {
    let mut data = Data::<E>::new(case);
    let Dims { batch, heads, k_len, qk_dim, v_dim, .. } = case.dims;
    let heads = heads.kv;
    let shape = CacheShape { heads, qk_dim, v_dim, page };
    let mut cache = match (quantization, latent) {
        (Some(bits), true) => KvCache::latent_quantized(shape, bits, usize::MAX)?,
        (Some(bits), false) => KvCache::quantized(shape, bits, usize::MAX)?,
        (None, true) => KvCache::latent(shape, usize::MAX)?,
        (None, false) => KvCache::new(shape, usize::MAX)?,
    };
    let mut sequences = Vec::new();
    for b in 0..batch {
        let sequence = cache.start()?;
        for positions in [0..k_len * 2 / 3, k_len * 2 / 3..k_len] {
            let [k, v] = [&data.k, &data.v].map(|tensor| {
                let view = tensor.view();
                let rows = (0..heads).flat_map(|h| positions.clone().map(move |i| (h, i)));
                rows.flat_map(|(h, i)| view.row(b, h, i).to_vec()).collect::<Vec<E>>()
            });
            let n = positions.len();
            let k = View::bhsd(&k, [1, heads, n, qk_dim])?;
            if latent {
                cache.append_keys(sequence, k)?;
            } else {
                cache.append(sequence, k, View::bhsd(&v, [1, heads, n, v_dim])?)?;
            }
        }
        for (h, i) in (0..heads).flat_map(|h| (0..k_len).map(move |i| (h, i))) {
            let [k, v] = cache.numbers(sequence, h, i)?;
            for (tensor, numbers) in [(&mut data.k, k), (&mut data.v, v)] {
                let row = tensor.row_mut(b, h, i);
                row.iter_mut().zip(numbers).for_each(|(to, x)| *to = E::narrow(x));
            }
        }
        sequences.push(sequence);
    }
    Ok((data, cache, sequences))
}

impl<E: Element> CheckedCase for CachedCase<'_, E> {
    type Output = Output<E>;

    fn name(&self) -> String {
        self.case.to_string()
    }

    fn runs(&self, isa: Isa) -> Runs {
        self.problem().map_or(Runs::Not, |problem| Runs::of(self.case, &problem, isa))
    }

    fn call(&self, machine: Machine) -> Result<Output<E>, Error> {
        let plan = Plan::new(self.problem()?, machine)?;
        plan.forward_cached(self.data.q.view(), &self.cache, &self.sequences)
    }

    fn judge(&self, found: &Output<E>) -> Result<(Ratio, &'static str), String> {
        Ok((self.judge.ratio(found)?, "none"))
    }

    fn same(a: &Output<E>, b: &Output<E>) -> bool {
        same_bits(a, b)
    }
}
