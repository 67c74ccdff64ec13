//! LSH attention in the case table: clustered inputs, rows, and comparison with the reference.

use crate::cases::{AttentionKind, Case, Dtype, EMPTY, dims};
use crate::close::{Ratio, narrow};
use crate::data::{Arrangement, Data};
use crate::masks::named;
use crate::noise::Noise;
use crate::run::{CheckedCase, Exact, Runs, same_bits, same_grad_bits};
use regard::mask::Bits;
use regard::problem::Dims;
use regard::{Element, Error, Grads, Isa, Machine, Mask};
use regard_approx::{Buckets, LshAttention, LshOutput};

/// `n` rows of `d` features around `clusters` centers, in random order: `[n, d]`.
///
/// Centers are normal vectors of norm about 10 `sqrt(d / 64)`. A row is a center plus `spread` times another such vector,
/// so that the cosine of two rows of a cluster is about `1 / (1 + spread^2)`. For `d = 64`, scores within a cluster are
/// about 12 and other scores about 0 +- 2: softmax self-attention stays within the cluster as long as a cluster has many
/// more than `n / 20000` rows.
#[must_use]
pub fn clustered<E: Element>(
    n: usize,
    d: usize,
    clusters: usize,
    spread: f64,
    seed: u64,
) -> Vec<E> {
    let mut noise = Noise::new(seed);
    let centers: Vec<f64> = noise.normals(clusters * d);
    let mut row = || {
        let center = noise.below(clusters) * d;
        let features =
            centers[center..center + d].iter().map(|x| 1.25 * (x + spread * noise.normal()));
        features.map(narrow).collect::<Vec<E>>()
    };
    (0..n).flat_map(|_| row()).collect()
}

/// Batch, query heads, KV heads, queries, keys, key features, value features.
const SHAPES: &[[usize; 7]] = &[
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 7, 3, 4],
    [1, 2, 2, 64, 64, 16, 16],
    [2, 4, 2, 33, 65, 8, 3],
    [1, 1, 1, 70, 300, 8, 8],
    [1, 1, 1, 200, 75, 17, 24],
    [1, 3, 1, 190, 190, 24, 40],
    [1, 1, 1, 3, 700, 8, 8],
];

/// Rounds and keys per block: more blocks than keys, blocks that straddle words, one digit and two, one block for all keys.
const HASHES: &[[usize; 2]] = &[[1, 1], [3, 5], [4, 16], [2, 64], [8, 2], [2, 1000]];

/// All shapes with all hashes, in any dtype and layout.
pub(crate) fn cases() -> Vec<Case> {
    let mut table = Vec::new();
    for shape in SHAPES.iter().chain(EMPTY) {
        for [rounds, bucket_size] in HASHES {
            for mask in ["full", "causal"] {
                let case = Case::new(dims(*shape)).mask(named(mask));
                let attention = AttentionKind::Lsh { rounds: *rounds, bucket_size: *bucket_size };
                table.push(Case { attention, ..case });
            }
        }
    }
    let of = |dtype, first: usize, step: usize| {
        table.iter().skip(first).step_by(step).map(move |case| Case { dtype, ..case.clone() })
    };
    let others = of(Dtype::F64, 0, 3).chain(of(Dtype::F16, 1, 3)).chain(of(Dtype::Bf16, 0, 2));
    let others: Vec<Case> = others.collect();
    table.extend(others);
    for (i, case) in table.iter_mut().enumerate() {
        case.seed = 9000 + i as u64;
        case.arrangement = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice][i % 3];
    }
    table
}

/// LSH attention, compared with the reference over the candidate keys of each row.
pub(crate) struct LshCase<'d, E: Element> {
    case: &'d Case,
    data: &'d Data<E>,
    lsh: LshAttention,
}

impl<'d, E: Element> LshCase<'d, E> {
    pub(crate) fn new(case: &'d Case, data: &'d Data<E>) -> Self {
        let lsh = LshAttention::new().seed(case.seed);
        let lsh = if case.mask.name == "causal" { lsh.causal() } else { lsh };
        let lsh = match case.attention {
            AttentionKind::Lsh { rounds, bucket_size } => {
                lsh.rounds(rounds).bucket_size(bucket_size)
            }
            _ => lsh,
        };
        Self { case, data, lsh }
    }
}

impl<E: Element> CheckedCase for LshCase<'_, E> {
    type Output = (LshOutput<E>, Grads<E>);

    fn name(&self) -> String {
        self.case.to_string()
    }

    fn runs(&self, isa: Isa) -> Runs {
        Runs::of(self.case, &self.data.problem(self.case), isa)
    }

    fn call(&self, machine: Machine) -> Result<Self::Output, Error> {
        let Self { case, data, lsh } = self;
        let (q, k, v) = data.inputs();
        let found = lsh.forward(machine, q, k, v)?;
        let grads = lsh.backward(machine, q, k, v, &found, data.output_grads(case))?;
        Ok((found, grads))
    }

    fn judge(&self, (found, grads): &Self::Output) -> Result<(Ratio, &'static str), String> {
        let Self { case, data, .. } = self;
        let problem = data.problem(case).mask(mask(&found.buckets));
        Exact::over(case, data, problem).judge(&(found.output.clone(), grads.clone()))
    }

    fn same((a, a_grads): &Self::Output, (b, b_grads): &Self::Output) -> bool {
        same_bits(&a.output, &b.output) && same_grad_bits(a_grads, b_grads)
    }
}

/// Candidate pairs as a mask of one bit per pair.
///
/// # Panics
/// Never: there is one bit per pair.
#[must_use]
pub fn mask(buckets: &Buckets) -> Mask {
    let Dims { batch, heads, q_len, k_len, .. } = buckets.dims();
    let rows =
        (0..batch).flat_map(|b| (0..heads.q).flat_map(move |h| (0..q_len).map(move |i| (b, h, i))));
    let pairs = rows.flat_map(|row| (0..k_len).map(move |key| (row, key)));
    let seen: Vec<bool> = pairs.map(|((b, h, i), key)| buckets.is_visible(b, h, i, key)).collect();
    let bits = Bits::from_bools(&seen, [batch, heads.q, q_len, k_len]);
    Mask::bits(bits.expect("a bit for each pair"))
}
