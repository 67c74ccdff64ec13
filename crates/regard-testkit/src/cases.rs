//! The case table: shapes x masks x scores x similarities x layouts x alignments x dtypes.
//!
//! The full product has millions of rows. The table has every mask with a few scores, every score with a few masks, every
//! size with a few of both, and a seeded sample of the product for unforeseen combinations. A row has about 10,000 pairs,
//! so that the table takes about a minute.

use crate::cached;
use crate::data::Arrangement;
use crate::delta;
use crate::linear;
use crate::lsh;
use crate::masks::{MASKS, MaskCase, named};
use crate::noise::Noise;
use crate::scores::{Entries, SCORES, ScoreOption, bias};
use regard::cache::Quantization;
use regard::machine::Precision;
use regard::problem::{Align, Dims, Heads, Normalizer};
use regard_approx::FeatureMap;
use std::fmt;

/// One test call.
#[derive(Clone, Debug)]
pub struct Case {
    /// Dtype of the tensors.
    pub dtype: Dtype,
    /// Dimensions.
    pub dims: Dims,
    /// Attention mask.
    pub mask: MaskCase,
    /// Score options.
    pub scores: Vec<ScoreOption>,
    /// Similarity function.
    pub similarity: SimilarityCase,
    /// Memory layout of the tensors.
    pub arrangement: Arrangement,
    /// Position of row 0.
    pub align: Align,
    /// Dropout rate.
    pub dropout: Option<f64>,
    /// Whether the entropy is computed and part of the loss.
    pub entropy: bool,
    /// Normalizer of the scores.
    pub normalizer: Normalizer,
    /// Reach of local attention around the window center of each row, if local.
    pub reach: Option<usize>,
    /// Precision of the products, if not the default. Such rows run only where the precision makes a difference.
    pub precision: Option<Precision>,
    /// A NaN among the inputs: its tensor and its bit pattern.
    pub nan: Option<NanCase>,
    /// Kind of attention.
    pub attention: AttentionKind,
    /// Seed of the inputs.
    pub seed: u64,
}

/// A NaN among the inputs of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NanCase {
    /// The tensor that contains it.
    pub tensor: NanIn,
    /// Index into [`NAN_BITS`].
    pub bits: usize,
}

/// The tensor that contains a NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "their names")]
pub enum NanIn {
    Q,
    K,
    V,
    Bias,
    DOut,
}

impl NanIn {
    /// All tensors.
    pub const ALL: [Self; 5] = [Self::Q, Self::K, Self::V, Self::Bias, Self::DOut];

    /// Name used in case names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::Bias => "bias",
            Self::DOut => "d_out",
        }
    }
}

/// NaN bit patterns of processors and libraries, as `f16`. Other dtypes have the same sign and the same first and last
/// mantissa bits: the NaN of x86 and Arm, the NaN of CUDA (all mantissa bits set), its negative, and a signaling NaN with
/// only the last mantissa bit set.
pub const NAN_BITS: [u16; 4] = [0x7e00, 0x7fff, 0xffff, 0x7c01];

/// Kind of attention that a case computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKind {
    /// Exact attention, by [`Plan`](regard::Plan).
    #[default]
    Exact,
    /// [`LinearAttention`](regard_approx::LinearAttention) with this feature map: full or causal, no options.
    Linear(FeatureMap),
    /// [`LshAttention`](regard_approx::LshAttention): full or causal, no options.
    Lsh {
        /// Number of hash rounds.
        rounds: usize,
        /// Keys per block.
        bucket_size: usize,
    },
    /// Exact attention over a [`KvCache`](regard::KvCache): a forward pass.
    Cached {
        /// How the cache stores numbers, if not as elements.
        quantization: Option<Quantization>,
        /// Positions in a page.
        page: usize,
        /// Whether values are the first features of their keys.
        latent: bool,
    },
    /// [`DeltaRule`](regard_approx::DeltaRule), or, without `delta`, linear attention with this decay.
    Delta {
        /// The decay.
        decay: DecayCase,
        /// Whether there is a beta.
        delta: bool,
    },
}

/// Decay of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayCase {
    /// None.
    None,
    /// One number per head and position.
    Head,
    /// One number per feature of the key.
    Feature,
}

impl AttentionKind {
    /// Name used in case names and in the report; `None` for exact attention.
    #[must_use]
    pub fn name(self) -> Option<String> {
        match self {
            Self::Exact => None,
            Self::Linear(map) => Some(format!("linear {}", map.name())),
            Self::Lsh { .. } => Some("lsh".into()),
            Self::Cached { quantization, latent, .. } => {
                let latent = if latent { "latent " } else { "" };
                let stored = quantization.map_or("elements", Quantization::name);
                Some(format!("cache {latent}{stored}"))
            }
            Self::Delta { decay, delta } => {
                let rule = if delta { "delta" } else { "recurrent" };
                let decay = match decay {
                    DecayCase::None => "",
                    DecayCase::Head => " gated",
                    DecayCase::Feature => " gated features",
                };
                Some(format!("{rule}{decay}"))
            }
        }
    }
}

/// Dtype of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 64 bits.
    F64,
    /// 16 bits, with a precision of 11 bits.
    F16,
    /// The upper half of `f32`, with a precision of 8 bits.
    Bf16,
}

impl Dtype {
    /// Name used in case names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// A [`Similarity`](regard::problem::Similarity) without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimilarityCase {
    /// Dot products.
    Dot,
    /// One `W` for all heads (Luong et al. 2015).
    General,
    /// One `W` per query head.
    GeneralPerHead,
    /// Negative squared distances.
    Distance,
    /// One hidden layer for all heads (Bahdanau et al. 2015).
    Additive,
    /// One hidden layer per head.
    AdditivePerHead,
    /// One hidden layer for all heads, over keys that are already projected.
    AdditiveProjected,
}

impl SimilarityCase {
    /// All similarities.
    pub const ALL: [Self; 7] = [
        Self::Dot,
        Self::General,
        Self::GeneralPerHead,
        Self::Distance,
        Self::Additive,
        Self::AdditivePerHead,
        Self::AdditiveProjected,
    ];

    /// Name used in case names.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dot => "dot",
            Self::General => "general",
            Self::GeneralPerHead => "general_per_head",
            Self::Distance => "distance",
            Self::Additive => "additive",
            Self::AdditivePerHead => "additive_per_head",
            Self::AdditiveProjected => "additive_projected",
        }
    }

    fn projects(self) -> bool {
        !matches!(self, Self::Dot | Self::Distance)
    }
}

/// `{dtype}-{similarity}-b{batch}-h{q}x{kv}-n{q_len}x{k_len}-d{qk}[from{q}]x{v}-{mask}-{options or plain}-{layout}-{align}
/// [-{normalizer}][-around{reach}][-dropout{rate}][-entropy][-{precision}][-nan{bits}in{tensor}][-{way}]`,
/// e.g. `f32-dot-b2-h4x2-n33x65-d16x8-causal-alibi+sinks-bshd-end`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Dims { batch, heads, q_len, k_len, q_dim, qk_dim, v_dim } = self.dims;
        write!(f, "{}-{}-b{batch}", self.dtype.name(), self.similarity.name())?;
        write!(f, "-h{}x{}", heads.q, heads.kv)?;
        write!(f, "-n{q_len}x{k_len}-d{qk_dim}")?;
        if q_dim != qk_dim {
            write!(f, "from{q_dim}")?;
        }
        write!(f, "x{v_dim}-{}-", self.mask.name)?;
        let options: Vec<String> = self.scores.iter().map(ToString::to_string).collect();
        f.write_str(if options.is_empty() { "plain" } else { "" })?;
        write!(f, "{}-{}-", options.join("+"), self.arrangement)?;
        match self.align {
            Align::End => write!(f, "end"),
            Align::Start => write!(f, "start"),
            Align::Offset(n) => write!(f, "from{n}"),
        }?;
        match self.normalizer {
            Normalizer::Softmax => Ok(()),
            Normalizer::TopK(k) => write!(f, "-top{k}"),
            other => write!(f, "-{}", other.name()),
        }?;
        self.reach.map_or(Ok(()), |reach| write!(f, "-around{reach}"))?;
        self.dropout.map_or(Ok(()), |rate| write!(f, "-dropout{rate}"))?;
        f.write_str(if self.entropy { "-entropy" } else { "" })?;
        self.precision.map_or(Ok(()), |precision| write!(f, "-{}", precision.name()))?;
        if let Some(NanCase { tensor, bits }) = self.nan {
            write!(f, "-nan{:x}in{}", NAN_BITS[bits], tensor.name())?;
        }
        self.attention.name().map_or(Ok(()), |way| write!(f, "-{}", way.replace(' ', "-")))?;
        match self.attention {
            AttentionKind::Exact | AttentionKind::Linear(_) | AttentionKind::Delta { .. } => Ok(()),
            AttentionKind::Lsh { rounds, bucket_size } => write!(f, "-{rounds}x{bucket_size}"),
            AttentionKind::Cached { page, .. } => write!(f, "-page{page}"),
        }
    }
}

impl Case {
    /// Scaled dot-product attention of dense `f32` tensors, no mask.
    #[must_use]
    pub fn new(dims: Dims) -> Self {
        Self {
            dtype: Dtype::F32,
            dims,
            mask: named("full"),
            scores: Vec::new(),
            similarity: SimilarityCase::Dot,
            arrangement: Arrangement::Bhsd,
            align: Align::End,
            dropout: None,
            entropy: false,
            normalizer: Normalizer::Softmax,
            reach: None,
            precision: None,
            nan: None,
            attention: AttentionKind::Exact,
            seed: 7,
        }
    }

    /// Replaces the mask.
    #[must_use]
    pub fn mask(self, mask: MaskCase) -> Self {
        Self { mask, ..self }
    }

    /// Replaces the score options.
    #[must_use]
    pub fn scores(self, scores: &[ScoreOption]) -> Self {
        Self { scores: scores.to_vec(), ..self }
    }

    /// Replaces the similarity. With a projection, queries have another number of features than keys.
    #[must_use]
    pub fn similarity(mut self, similarity: SimilarityCase) -> Self {
        self.dims.q_dim = self.dims.qk_dim;
        if similarity.projects() {
            self.dims.q_dim = self.dims.qk_dim * 3 / 4 + 2;
        }
        Self { similarity, ..self }
    }

    /// Replaces the layout.
    #[must_use]
    pub fn arrangement(self, arrangement: Arrangement) -> Self {
        Self { arrangement, ..self }
    }

    /// Replaces the alignment of queries and keys.
    #[must_use]
    pub fn align(self, align: Align) -> Self {
        Self { align, ..self }
    }

    /// Groups of the report: the mask, each option, the similarity, the layout and the dtype, or only the kind of attention
    /// if it is not exact.
    #[must_use]
    pub fn groups(&self) -> Vec<String> {
        if let Some(way) = self.attention.name() {
            return vec![format!("way {way}")];
        }
        let mut groups = vec![
            format!("dtype {}", self.dtype.name()),
            format!("mask {}", self.mask.name),
            format!("similarity {}", self.similarity.name()),
            format!("layout {}", self.arrangement),
        ];
        groups.extend(self.scores.iter().map(|option| format!("score {option}")));
        if self.scores.is_empty() {
            groups.push("score plain".into());
        }
        if self.normalizer != Normalizer::Softmax {
            groups.push(format!("normalizer {}", self.normalizer.name()));
        }
        groups.extend(self.reach.map(|_| "local".into()));
        groups.extend(self.dropout.map(|rate| format!("dropout {rate}")));
        if self.entropy {
            groups.push("entropy".into());
        }
        groups.extend(self.precision.map(|precision| format!("precision {}", precision.name())));
        groups.extend(self.nan.map(|nan| format!("nan in {}", nan.tensor.name())));
        groups
    }
}

/// Dimensions from batch, query heads, KV heads, queries, keys, key features, value features.
#[must_use]
pub fn dims([batch, q, kv, q_len, k_len, qk_dim, v_dim]: [usize; 7]) -> Dims {
    Dims { batch, heads: Heads { q, kv }, q_len, k_len, q_dim: qk_dim, qk_dim, v_dim }
}

/// Shapes tested with every mask: at the edges of key blocks and tiles, with more queries than keys, with fewer, with one.
const SHAPES: &[[usize; 7]] = &[
    [1, 1, 1, 1, 1, 1, 1],
    [2, 2, 1, 5, 7, 3, 4],
    [2, 2, 2, 33, 31, 8, 8],
    [1, 2, 1, 64, 64, 16, 16],
    [1, 1, 1, 65, 129, 17, 24],
    [1, 1, 1, 129, 63, 8, 40],
    [1, 3, 1, 1, 200, 8, 16],
    [3, 1, 1, 13, 65, 24, 3],
];

/// Lengths around the widths of vectors, register tiles, key blocks and row tiles.
const LENGTHS: &[usize] = &[1, 2, 3, 5, 7, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129];

/// Numbers of features, up to 256 and beyond.
const FEATURES: &[usize] = &[1, 3, 8, 16, 17, 24, 40, 64, 72, 128, 256, 320];

/// Shapes without keys, queries, items, heads or value features.
pub(crate) const EMPTY: &[[usize; 7]] = &[
    [2, 2, 1, 5, 0, 3, 4],
    [2, 2, 1, 0, 5, 3, 4],
    [0, 2, 1, 5, 5, 3, 4],
    [1, 0, 0, 5, 5, 3, 4],
    [1, 1, 1, 5, 5, 3, 0],
    [1, 2, 2, 0, 0, 3, 4],
];

/// Positions of row 0: at the ends, among the keys, before and after them, and far outside.
const ALIGNS: &[Align] = &[
    Align::Start,
    Align::Offset(3),
    Align::Offset(-5),
    Align::Offset(40),
    Align::Offset(-200),
    Align::Offset(1 << 40),
];

/// Minimum number of `f32` rows.
const ROWS: usize = 5_200;

/// All rows of the table.
#[must_use]
pub fn cases() -> Vec<Case> {
    let mut table = masks_and_scores();
    table.extend(sizes());
    table.extend(aligned());
    table.extend(long_keys());
    table.extend(few_rows());
    table.extend(normalised());
    table.extend(local());
    table.extend(empty());
    let mut noise = Noise::new(2019);
    while table.len() < ROWS {
        table.push(sampled(&mut noise));
    }
    // Vary seed, layout, dropout and entropy from row to row. They derive from the name of the row, so that adding rows
    // does not change others.
    for case in &mut table {
        let mut noise = Noise::of_name(&case.to_string());
        case.seed = noise.bits() >> 32;
        if case.arrangement == Arrangement::Bhsd {
            let all = [Arrangement::Bhsd, Arrangement::Bshd, Arrangement::Slice];
            case.arrangement = *noise.pick(&all);
        }
        case.dropout = *noise.pick(&[None, None, Some(0.1), None, Some(0.6)]);
        case.entropy = noise.chance(0.5) && case.normalizer != Normalizer::Sparsemax;
    }
    let of = |dtype, first: usize, step: usize| {
        table.iter().skip(first).step_by(step).map(move |case| Case { dtype, ..case.clone() })
    };
    let others = of(Dtype::F64, 0, 8).chain(of(Dtype::F16, 1, 5)).chain(of(Dtype::Bf16, 2, 3));
    let exactly = |precision, first: usize, step: usize| {
        of(Dtype::F32, first, step).map(move |case| Case { precision: Some(precision), ..case })
    };
    let others = others.chain(exactly(Precision::Full, 0, 4)).chain(exactly(Precision::High, 3, 8));
    // AMX has a separate decode kernel for a few rows of `bf16`.
    let few = few_rows().into_iter().map(|case| Case { dtype: Dtype::Bf16, ..case });
    let others: Vec<Case> = others.chain(few).collect();
    table.extend(others);
    table.extend(nans());
    table.extend(linear::cases());
    table.extend(lsh::cases());
    table.extend(cached::cases());
    table.extend(delta::cases());
    table
}

/// Every NaN bit pattern in every tensor, for every dtype and precision: it must propagate to everything that depends on
/// it, and to nothing else.
fn nans() -> Vec<Case> {
    // Many rows, a few rows with many keys, more rows than one tile.
    let shapes = [[1, 2, 1, 33, 70, 32, 32], [1, 4, 1, 2, 200, 32, 64], [1, 1, 1, 130, 66, 24, 17]];
    let types = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16].map(|dtype| (dtype, None));
    let exactly = [Precision::Full, Precision::High].map(|p| (Dtype::F32, Some(p)));
    let mut table = Vec::new();
    for (dtype, precision) in types.into_iter().chain(exactly) {
        for (i, tensor) in NanIn::ALL.into_iter().enumerate() {
            for (bits, shape) in (0..NAN_BITS.len()).zip(shapes.into_iter().cycle().skip(i)) {
                let case = Case { dtype, precision, ..Case::new(dims(shape)) };
                let nan = Some(NanCase { tensor, bits });
                let mask = named(["causal", "full"][bits % 2]);
                let case = Case { nan, entropy: bits == 2, ..case.mask(mask) };
                let whole = bias("bhqk", Entries::Finite);
                let scores: &[ScoreOption] = if tensor == NanIn::Bias { &[whole] } else { &[] };
                let seed = Noise::of_name(&case.to_string()).bits() >> 32;
                table.push(Case { seed, ..case.scores(scores) });
            }
        }
    }
    table
}

/// Normalizers other than softmax: each with some masks, scores, similarities and shapes.
fn normalised() -> Vec<Case> {
    let normalizers = [
        Normalizer::TopK(1),
        Normalizer::TopK(3),
        Normalizer::TopK(70),
        Normalizer::Hard,
        Normalizer::Sampled { seed: 5 },
        Normalizer::Sparsemax,
    ];
    let masks = ["full", "causal", "lengths", "bits", "strided", "global", "keys", "tree"];
    let mut table = Vec::new();
    for (n, normalizer) in normalizers.into_iter().enumerate() {
        for (i, shape) in SHAPES.iter().enumerate() {
            let case = Case { normalizer, ..Case::new(dims(*shape)) };
            for (j, mask) in masks.into_iter().enumerate() {
                let similarity = SimilarityCase::ALL[(n + i + j) % SimilarityCase::ALL.len()];
                table.push(case.clone().mask(named(mask)).similarity(similarity));
            }
            let scores = (0..4).map(|j| SCORES[(13 * n + 5 * i + 11 * j) % SCORES.len()]);
            // Only top-k supports sinks.
            let fits = |scores: &&[ScoreOption]| {
                matches!(normalizer, Normalizer::TopK(_)) || !scores.contains(&ScoreOption::Sinks)
            };
            table.extend(scores.filter(fits).map(|scores| case.clone().scores(scores)));
        }
        table.push(Case { normalizer, ..Case::new(dims([1, 2, 1, 3, 8200, 8, 8])) });
        table.push(Case { normalizer, ..Case::new(dims([1, 1, 1, 2050, 9, 3, 3])) });
    }
    table
}

/// Local attention around a window center per row (Luong et al. 2015).
fn local() -> Vec<Case> {
    let mut table = Vec::new();
    for (i, shape) in SHAPES.iter().enumerate() {
        for (j, reach) in [1, 2, 7, 40].into_iter().enumerate() {
            let case = Case { reach: Some(reach), ..Case::new(dims(*shape)) };
            let mask = ["full", "causal", "lengths"][(i + j) % 3];
            let similarity = SimilarityCase::ALL[(i + 3 * j) % SimilarityCase::ALL.len()];
            let scores = SCORES[(7 * i + j) % SCORES.len()];
            table.push(case.clone().mask(named(mask)).similarity(similarity));
            table.push(case.scores(scores));
        }
    }
    table.push(Case { reach: Some(30), ..Case::new(dims([1, 4, 1, 1, 8300, 32, 32])) });
    table
}

/// All masks with a few scores, all scores with a few masks.
fn masks_and_scores() -> Vec<Case> {
    let mut table = Vec::new();
    let mixed = [ScoreOption::Softcap(3.0), ScoreOption::Alibi, ScoreOption::Sinks];
    let hiding = [bias("11qk", Entries::Hiding)];
    for shape in SHAPES {
        for mask in MASKS {
            for scores in [&[][..], &mixed, &hiding] {
                table.push(Case::new(dims(*shape)).mask(*mask).scores(scores));
            }
        }
        for scores in SCORES {
            for mask in ["full", "causal", "lengths", "longformer"] {
                table.push(Case::new(dims(*shape)).mask(named(mask)).scores(scores));
            }
        }
    }
    // Padding rows in which every bias is the lowest number: equivalent to no bias.
    for entries in ["b11k", "11q1", "bhqk"] {
        let scores = [bias(entries, Entries::OnlyLowest)];
        table.push(Case::new(dims([2, 2, 2, 9, 21, 8, 8])).scores(&scores));
    }
    table
}

/// All lengths, all numbers of features, all head groups.
fn sizes() -> Vec<Case> {
    let mut table = Vec::new();
    for (q_len, k_len) in pairs(LENGTHS, LENGTHS) {
        for mask in ["full", "causal"] {
            table.push(Case::new(dims([1, 1, 1, q_len, k_len, 8, 8])).mask(named(mask)));
        }
    }
    for (qk_dim, v_dim) in pairs(FEATURES, FEATURES) {
        table.push(Case::new(dims([1, 1, 1, 19, 37, qk_dim, v_dim])));
    }
    for (dim, similarity) in pairs(FEATURES, &SimilarityCase::ALL) {
        for (mask, scores) in pairs(&["full", "bits"], &SCORES[..2]) {
            let case = Case::new(dims([1, 2, 1, 17, 70, dim, 16])).mask(named(mask));
            table.push(case.scores(scores).similarity(similarity));
        }
    }
    // Enough rows for tiles of 128; many heads; a diagonal over several tiles.
    let groups = [[8, 8], [8, 4], [8, 2], [8, 1], [6, 3], [12, 4], [128, 16], [16, 4]];
    for ([q, kv], mask) in pairs(&groups, &["full", "causal", "window"]) {
        table.push(Case::new(dims([1, q, kv, 18, 20, 8, 8])).mask(named(mask)));
    }
    for mask in MASKS {
        table.push(Case::new(dims([1, 16, 4, 133, 9, 4, 4])).mask(*mask));
        table.push(Case::new(dims([1, 1, 1, 2050, 7, 3, 3])).mask(*mask));
    }
    table
}

/// Every mask at every alignment.
fn aligned() -> Vec<Case> {
    let scores = [&[][..], &[ScoreOption::Clipped(4)], &[ScoreOption::T5 { bidirectional: true }]];
    let mut table = Vec::new();
    for (i, (mask, align)) in pairs(MASKS, ALIGNS).enumerate() {
        let shape = [[2, 1, 1, 33, 65, 8, 8], [1, 1, 1, 70, 21, 8, 8]][i % 2];
        table.push(Case::new(dims(shape)).mask(mask).align(align).scores(scores[i % 3]));
    }
    // Far outside, ALiBi would be a difference of numbers that `f32` cannot distinguish.
    for (mask, align) in pairs(&["full", "causal", "window", "strided"], &ALIGNS[..5]) {
        let case = Case::new(dims([1, 2, 1, 33, 65, 8, 8])).mask(named(mask)).align(align);
        table.push(case.scores(&[ScoreOption::Alibi]));
    }
    table
}

/// A few rows with many keys, which the plan splits.
fn long_keys() -> Vec<Case> {
    let shapes = [[1, 1, 1, 1, 8192, 8, 8], [1, 2, 1, 5, 8197, 4, 4], [1, 1, 1, 3, 12_300, 3, 5]];
    let masks = [
        "full",
        "causal",
        "lengths",
        "window",
        "bits_sparse",
        "segments",
        "global",
        "tree",
        "keys",
        "keys_per_block",
    ];
    let scores = [0, 1, 6, 19, 24, 31, 33, 36, 37, 48];
    let mut table = Vec::new();
    for shape in shapes {
        for mask in masks {
            table.push(Case::new(dims(shape)).mask(named(mask)));
        }
        for scores in scores {
            table.push(Case::new(dims(shape)).scores(SCORES[scores]));
        }
    }
    table
}

/// Decoding: a few rows of heads that share their keys, with numbers of features that fill whole tiles.
fn few_rows() -> Vec<Case> {
    let rows = [
        [1, 1, 1],
        [2, 1, 1],
        [6, 2, 1],
        [4, 1, 1],
        [5, 1, 1],
        [16, 2, 1],
        [12, 1, 1],
        [16, 1, 1],
        [3, 1, 2],
        [4, 1, 4],
    ];
    let features = [[32, 32], [64, 96], [128, 64], [96, 256]];
    let masks = ["full", "causal", "lengths", "window", "bits", "segments_between"];
    let mut table = Vec::new();
    for (i, [q, kv, q_len]) in rows.into_iter().enumerate() {
        for (j, k_len) in [1, 16, 47, 64, 130, 200].into_iter().enumerate() {
            let [qk_dim, v_dim] = features[(i + j) % 4];
            let case = Case::new(dims([1 + j % 2, q, kv, q_len, k_len, qk_dim, v_dim]));
            table.push(case.clone().mask(named(masks[(i + j) % 6])));
            table.push(case.scores(SCORES[(7 * i + j) % SCORES.len()]));
        }
    }
    table.push(Case::new(dims([1, 4, 1, 1, 8300, 32, 32])));
    table.push(Case::new(dims([1, 16, 1, 1, 8200, 64, 32])).mask(named("lengths")));
    // Draft tokens; rows with key lists of their own; more heads to a key head than a task has.
    let drafts = [[4, 2, 2], [6, 1, 5], [2, 2, 8], [2, 1, 16], [32, 1, 1], [24, 1, 3], [7, 1, 4]];
    let masks = ["tree", "keys", "tree_window", "keys_per_block", "keys_per_key_head", "causal"];
    for (i, [q, kv, q_len]) in drafts.into_iter().enumerate() {
        for (j, mask) in masks.into_iter().enumerate() {
            let [qk_dim, v_dim] = features[(i + j) % 4];
            // More than 4 queries are decoded over long keys only.
            let k_len = if q_len > 4 { 1024 + 13 * j } else { 150 + 40 * j };
            let case = Case::new(dims([1, q, kv, q_len, k_len, qk_dim, v_dim]));
            table.push(case.clone().mask(named(mask)));
            table.push(case.mask(named(mask)).scores(SCORES[(7 * i + j) % SCORES.len()]));
        }
    }
    // Latent attention: one key head, values as far apart as keys.
    let latent =
        [[16, 1, 130, 72, 64], [128, 1, 70, 576, 512], [16, 3, 200, 72, 64], [16, 20, 90, 72, 64]];
    for (shape, mask) in pairs(&latent, &["causal", "tree", "keys"]) {
        let [heads, q_len, k_len, qk_dim, v_dim] = shape;
        let case = Case::new(dims([1, heads, 1, q_len, k_len, qk_dim, v_dim]));
        table.push(case.mask(named(mask)).arrangement(Arrangement::Slice));
    }
    table.push(Case::new(dims([1, 8, 2, 8, 8300, 32, 32])).mask(named("tree")));
    table.push(Case::new(dims([1, 16, 1, 40, 8300, 32, 64])).mask(named("keys_per_key_head")));
    table
}

fn empty() -> Vec<Case> {
    let mut table = Vec::new();
    for shape in EMPTY {
        for mask in MASKS {
            table.push(Case::new(dims(*shape)).mask(*mask));
        }
        for scores in SCORES {
            table.push(Case::new(dims(*shape)).scores(scores));
        }
        for similarity in SimilarityCase::ALL {
            table.push(Case::new(dims(*shape)).similarity(similarity));
        }
    }
    table
}

/// A random combination of options.
fn sampled(noise: &mut Noise) -> Case {
    let kv = 1 + noise.below(3);
    let mut length = || *noise.pick(LENGTHS);
    let (q_len, k_len) = (length(), length());
    let features = &FEATURES[..8];
    let (qk_dim, v_dim) = (*noise.pick(features), *noise.pick(features));
    // Limits the number of pairs of long rows.
    let room = (1 + 10_000 / (q_len * k_len * kv)).min(3);
    let (batch, q) = (1 + noise.below(room), kv * (1 + noise.below(room)));
    let align = if noise.chance(0.5) { Align::End } else { *noise.pick(&ALIGNS[..5]) };
    Case::new(dims([batch, q, kv, q_len, k_len, qk_dim, v_dim]))
        .mask(*noise.pick(MASKS))
        .scores(SCORES[noise.below(SCORES.len())])
        .similarity(*noise.pick(&SimilarityCase::ALL))
        .align(align)
}

fn pairs<'a, A: Copy, B: Copy>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (A, B)> + 'a {
    a.iter().flat_map(move |a| b.iter().map(move |b| (*a, *b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn the_table_has_five_thousand_different_rows_of_f32() {
        let table = cases();
        let names: HashSet<String> = table.iter().map(ToString::to_string).collect();
        let f32s = table.iter().filter(|case| case.dtype == Dtype::F32).count();
        println!("{} rows, {f32s} of f32, {} names", table.len(), names.len());
        assert!(f32s >= 5_000 && names.len() >= 5_000);
    }

    #[test]
    fn names_follow_the_grammar() {
        let case = Case::new(dims([2, 4, 2, 33, 65, 16, 8]))
            .mask(named("causal"))
            .scores(&[ScoreOption::Alibi, ScoreOption::Sinks])
            .arrangement(Arrangement::Bshd);
        let name = "f32-dot-b2-h4x2-n33x65-d16x8-causal-alibi+sinks-bshd-end";
        assert_eq!(case.to_string(), name);
    }
}
