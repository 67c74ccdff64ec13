//! The table: shapes x masks x scores x similarities x layouts x alignments x dtypes.
//!
//! Not the full product, which has millions of rows: every mask with a few scores, every score with a few masks, every
//! size with a few of both, and a seeded sample of the product for what nobody thought of. A row is small, about 10,000
//! pairs, so that the table takes about a minute.

use crate::data::Arrangement;
use crate::linear;
use crate::lsh;
use crate::masks::{MASKS, MaskCase, named};
use crate::noise::Noise;
use crate::scores::{Entries, SCORES, ScoreOption, bias};
use regard::{Align, Dims, FeatureMap, Heads, Normalizer, Precision};
use std::fmt;

/// One call to be made and judged.
#[derive(Clone, Debug)]
pub struct Case {
    /// What the tensors hold.
    pub dtype: Dtype,
    /// The sizes.
    pub dims: Dims,
    /// Who may see whom.
    pub mask: MaskCase,
    /// What happens to the similarity.
    pub scores: Vec<ScoreOption>,
    /// How a query and a key make a number.
    pub similarity: SimilarityCase,
    /// How the tensors lie in memory.
    pub arrangement: Arrangement,
    /// Where row 0 stands.
    pub align: Align,
    /// The rate at which weights are dropped.
    pub dropout: Option<f64>,
    /// Whether the entropy is asked for, and part of the loss.
    pub entropy: bool,
    /// How scores become weights.
    pub normalizer: Normalizer,
    /// How far rows see around a centre of their own, if they have one.
    pub reach: Option<usize>,
    /// How exact the products are, if not as usual: such rows run only where that makes a difference.
    pub precision: Option<Precision>,
    /// Where a NaN stands among the inputs, and which one.
    pub nan: Option<NanCase>,
    /// Which function is computed.
    pub way: Way,
    /// Of the inputs.
    pub seed: u64,
}

/// One NaN among the inputs of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NanCase {
    /// The tensor that it stands in.
    pub tensor: NanIn,
    /// Which of [`NAN_BITS`] it is.
    pub bits: usize,
}

/// The tensor that a NaN stands in.
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
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Q, Self::K, Self::V, Self::Bias, Self::DOut];

    /// Its name in the names of cases.
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

/// NaN as processors and libraries make them, as `f16`; other types have the sign and the first and the last digits the same:
/// what x86 and Arm make, what CUDA makes (all digits set), its negative, and a signalling one with its last digit alone.
pub const NAN_BITS: [u16; 4] = [0x7e00, 0x7fff, 0xffff, 0x7c01];

/// Which function a case computes of its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// Attention, by [`Plan`](regard::Plan).
    #[default]
    Exact,
    /// [`LinearAttention`](regard::LinearAttention) with this map: full or causal, no options.
    Linear(FeatureMap),
    /// [`LshAttention`](regard::LshAttention): full or causal, no options.
    Lsh {
        /// How often everything is hashed.
        rounds: usize,
        /// Keys of a block.
        bucket_size: usize,
    },
}

impl Way {
    /// Its name in the names of cases and in the report; none for the usual one.
    #[must_use]
    pub fn name(self) -> Option<String> {
        match self {
            Self::Exact => None,
            Self::Linear(map) => Some(format!("linear {}", map.name())),
            Self::Lsh { .. } => Some("lsh".into()),
        }
    }
}

/// The type of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// 32 bits.
    F32,
    /// 64 bits.
    F64,
    /// 16 bits, 11 of them for the digits.
    F16,
    /// The upper half of `f32`: 8 bits for the digits.
    Bf16,
}

impl Dtype {
    /// Its name in the names of cases.
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

/// A [`Similarity`](regard::Similarity), without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimilarityCase {
    /// Dot products.
    Dot,
    /// One `W` for all heads.
    General,
    /// A `W` for each query head.
    GeneralPerHead,
    /// Negative squared distances.
    Distance,
    /// A hidden layer, one for all heads.
    Additive,
    /// A hidden layer for each head.
    AdditivePerHead,
    /// The same over keys that are projected already.
    AdditiveProjected,
}

impl SimilarityCase {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Dot,
        Self::General,
        Self::GeneralPerHead,
        Self::Distance,
        Self::Additive,
        Self::AdditivePerHead,
        Self::AdditiveProjected,
    ];

    /// Its name in the names of cases.
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
        self.way.name().map_or(Ok(()), |way| write!(f, "-{}", way.replace(' ', "-")))?;
        match self.way {
            Way::Exact | Way::Linear(_) => Ok(()),
            Way::Lsh { rounds, bucket_size } => write!(f, "-{rounds}x{bucket_size}"),
        }
    }
}

impl Case {
    /// Scaled dot products of dense `f32` tensors, no mask.
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
            way: Way::Exact,
            seed: 7,
        }
    }

    /// The same with another mask.
    #[must_use]
    pub fn mask(self, mask: MaskCase) -> Self {
        Self { mask, ..self }
    }

    /// The same with other options.
    #[must_use]
    pub fn scores(self, scores: &[ScoreOption]) -> Self {
        Self { scores: scores.to_vec(), ..self }
    }

    /// The same with another similarity; `W` changes the number of features of the queries.
    #[must_use]
    pub fn similarity(mut self, similarity: SimilarityCase) -> Self {
        self.dims.q_dim = self.dims.qk_dim;
        if similarity.projects() {
            self.dims.q_dim = self.dims.qk_dim * 3 / 4 + 2;
        }
        Self { similarity, ..self }
    }

    /// The same in another layout.
    #[must_use]
    pub fn arrangement(self, arrangement: Arrangement) -> Self {
        Self { arrangement, ..self }
    }

    /// The same elsewhere among the keys.
    #[must_use]
    pub fn align(self, align: Align) -> Self {
        Self { align, ..self }
    }

    /// What the report is grouped by: the mask, each option, the similarity, the layout, the dtype; or the way alone.
    #[must_use]
    pub fn groups(&self) -> Vec<String> {
        if let Some(way) = self.way.name() {
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

/// Sizes: batch, query heads, key heads, queries, keys, features of a key, of a value.
#[must_use]
pub fn dims([batch, q, kv, q_len, k_len, qk_dim, v_dim]: [usize; 7]) -> Dims {
    Dims { batch, heads: Heads { q, kv }, q_len, k_len, q_dim: qk_dim, qk_dim, v_dim }
}

/// Shapes that meet every mask: around the edges of cells and tiles, more queries than keys, fewer, one.
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

/// Lengths around the widths of vectors, register tiles, cells and row tiles.
const LENGTHS: &[usize] = &[1, 2, 3, 5, 7, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129];

/// Features, within and beyond 256.
const FEATURES: &[usize] = &[1, 3, 8, 16, 17, 24, 40, 64, 72, 128, 256, 320];

/// Shapes without keys, queries, items, heads or features of values.
pub(crate) const EMPTY: &[[usize; 7]] = &[
    [2, 2, 1, 5, 0, 3, 4],
    [2, 2, 1, 0, 5, 3, 4],
    [0, 2, 1, 5, 5, 3, 4],
    [1, 0, 0, 5, 5, 3, 4],
    [1, 1, 1, 5, 5, 3, 0],
    [1, 2, 2, 0, 0, 3, 4],
];

/// Where row 0 may stand: at the ends, among the keys, before and behind them, and far outside.
const ALIGNS: &[Align] = &[
    Align::Start,
    Align::Offset(3),
    Align::Offset(-5),
    Align::Offset(40),
    Align::Offset(-200),
    Align::Offset(1 << 40),
];

/// Rows of `f32` at least.
const ROWS: usize = 5_200;

/// The table.
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
    // Inputs differ from row to row, and some rows lie otherwise in memory, whatever they are about. All that follows from what
    // a row is called, so that rows which are added change no others.
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
    let others = others.chain(exactly(Precision::F32, 0, 4)).chain(exactly(Precision::High, 3, 8));
    // The tiles have a way of their own for few rows of bf16.
    let few = few_rows().into_iter().map(|case| Case { dtype: Dtype::Bf16, ..case });
    let others: Vec<Case> = others.chain(few).collect();
    table.extend(others);
    table.extend(nans());
    table.extend(linear::cases());
    table.extend(lsh::cases());
    table
}

/// A NaN of every kind in every tensor, for every type and precision: it must reach what depends on it, and nothing else.
fn nans() -> Vec<Case> {
    // Many rows, a few rows of many keys, more than one tile of rows.
    let shapes = [[1, 2, 1, 33, 70, 32, 32], [1, 4, 1, 2, 200, 32, 64], [1, 1, 1, 130, 66, 24, 17]];
    let types = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16].map(|dtype| (dtype, None));
    let exactly = [Precision::F32, Precision::High].map(|p| (Dtype::F32, Some(p)));
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

/// Other ways from scores to weights: each with some masks, scores, similarities and shapes.
fn normalised() -> Vec<Case> {
    let normalizers = [
        Normalizer::TopK(1),
        Normalizer::TopK(3),
        Normalizer::TopK(70),
        Normalizer::Hard,
        Normalizer::Sampled { seed: 5 },
        Normalizer::Sparsemax,
    ];
    let masks = ["full", "causal", "lengths", "bits", "strided", "global"];
    let mut table = Vec::new();
    for (n, normalizer) in normalizers.into_iter().enumerate() {
        for (i, shape) in SHAPES.iter().enumerate() {
            let case = Case { normalizer, ..Case::new(dims(*shape)) };
            for (j, mask) in masks.into_iter().enumerate() {
                let similarity = SimilarityCase::ALL[(n + i + j) % SimilarityCase::ALL.len()];
                table.push(case.clone().mask(named(mask)).similarity(similarity));
            }
            let scores = (0..4).map(|j| SCORES[(13 * n + 5 * i + 11 * j) % SCORES.len()]);
            // Only some have a place for a sink.
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

/// Rows that look around a centre of their own.
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
    // Rows of padding whose every bias is the lowest number: as good as no bias at all.
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

/// Every mask that speaks of positions, at every alignment.
fn aligned() -> Vec<Case> {
    let scores = [&[][..], &[ScoreOption::Clipped(4)], &[ScoreOption::T5 { bidirectional: true }]];
    let mut table = Vec::new();
    for (i, (mask, align)) in pairs(MASKS, ALIGNS).enumerate() {
        let shape = [[2, 1, 1, 33, 65, 8, 8], [1, 1, 1, 70, 21, 8, 8]][i % 2];
        table.push(Case::new(dims(shape)).mask(mask).align(align).scores(scores[i % 3]));
    }
    // ALiBi far outside would be a difference of numbers that f32 cannot tell apart.
    for (mask, align) in pairs(&["full", "causal", "window", "strided"], &ALIGNS[..5]) {
        let case = Case::new(dims([1, 2, 1, 33, 65, 8, 8])).mask(named(mask)).align(align);
        table.push(case.scores(&[ScoreOption::Alibi]));
    }
    table
}

/// Few rows, many keys: the plan splits these.
fn long_keys() -> Vec<Case> {
    let shapes = [[1, 1, 1, 1, 8192, 8, 8], [1, 2, 1, 5, 8197, 4, 4], [1, 1, 1, 3, 12_300, 3, 5]];
    let masks = ["full", "causal", "lengths", "window", "bits_sparse", "segments", "global"];
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

/// Few rows of one, two, ... heads that share their keys, whose features are whole tiles.
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

/// Anything with anything.
fn sampled(noise: &mut Noise) -> Case {
    let kv = 1 + noise.below(3);
    let mut length = || *noise.pick(LENGTHS);
    let (q_len, k_len) = (length(), length());
    let features = &FEATURES[..8];
    let (qk_dim, v_dim) = (*noise.pick(features), *noise.pick(features));
    // About as many pairs for long rows as for short ones.
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
