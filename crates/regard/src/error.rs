//! Errors of the engine. A message names the axis or option, the numbers involved and the remedy.

use std::fmt;

/// The reason why a call was rejected. Returned before any computation starts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// The data of a tensor is shorter than its shape and strides require.
    DataLength {
        /// Number of elements that the shape and strides require.
        needed: usize,
        /// Number of elements given.
        found: usize,
    },
    /// A shape has more elements than memory can address.
    ShapeOverflow {
        /// Batch, heads, length, features.
        shape: [usize; 4],
    },
    /// Two elements of an output would share memory.
    OutputOverlap {
        /// Strides of batch, heads and length, in elements.
        strides: [usize; 3],
    },
    /// Two tensors have different sizes along an axis.
    Axis {
        /// `batch`, `features`, `keys`, ...
        axis: &'static str,
        /// The first tensor and its size.
        left: (&'static str, usize),
        /// The second tensor and its size.
        right: (&'static str, usize),
    },
    /// The number of query heads is not a multiple of the number of key heads, as grouped-query attention (Ainslie et al. 2023)
    /// requires.
    HeadGroups {
        /// Number of query heads.
        q: usize,
        /// Number of key and value heads.
        kv: usize,
    },
    /// A tensor has 0 features, so scores are not defined.
    NoFeatures {
        /// The tensor.
        tensor: &'static str,
    },
    /// An option has the wrong number of entries.
    Count {
        /// The option.
        option: &'static str,
        /// Expected number of entries, and their meaning.
        expected: (usize, &'static str),
        /// Number of entries given.
        found: usize,
    },
    /// An index or size is out of range.
    OutOfRange {
        /// The option.
        option: &'static str,
        /// The value given.
        found: usize,
        /// Upper bound, exclusive.
        limit: usize,
    },
    /// A size that must be at least 1 is 0.
    Zero {
        /// The option.
        option: &'static str,
    },
    /// A size that must be even is odd.
    OddDim {
        /// The option.
        option: &'static str,
        /// The size given.
        found: usize,
    },
    /// A tensor has fewer features than RoPE rotates.
    TooFewFeatures {
        /// Number of features that RoPE rotates.
        needed: usize,
        /// Number of features of the tensor.
        found: usize,
    },
    /// The value of an option is not valid.
    Value {
        /// The option.
        option: &'static str,
        /// The value given.
        found: f64,
        /// Description of the valid values.
        accepted: &'static str,
    },
    /// A bias or bit mask cannot be broadcast to the scores.
    Broadcast {
        /// The option.
        option: &'static str,
        /// Shape of the option: batch, heads, queries, keys.
        found: [usize; 4],
        /// Shape of the scores: batch, heads, queries, keys.
        scores: [usize; 4],
    },
    /// The parent of a draft token does not come before it.
    Parent {
        /// Index of the token in its tree.
        token: usize,
        /// The parent given.
        parent: usize,
    },
    /// The offsets (`cu_seqlens`) of packed sequences do not ascend from 0 to the number of rows.
    Offsets {
        /// Index of the wrong offset.
        index: usize,
        /// The offset given.
        found: usize,
        /// A valid offset.
        expected: usize,
        /// What is wrong with it.
        wrong: &'static str,
    },
    /// An option with an axis of queries or keys, which packed sequences of different lengths do not share.
    Packed {
        /// The option.
        option: &'static str,
    },
    /// Outputs cannot be merged, because their rows selected keys within each part separately.
    NotMergeable,
    /// The list of outputs to merge is empty.
    NothingToMerge,
    /// Tensors were passed to a plan for a KV cache.
    OnlyCached,
    /// An option is not available for a KV cache.
    NotInCache {
        /// The option.
        option: &'static str,
    },
    /// A KV cache in 8 bits does not offer this.
    Quantized {
        /// The call.
        option: &'static str,
        /// How the cache stores numbers.
        storage: &'static str,
    },
    /// Numbers of this type cannot be stored in 8 bits.
    NotQuantized {
        /// The type.
        dtype: &'static str,
        /// How they should be stored.
        storage: &'static str,
    },
    /// A plan was made for a KV cache that stores numbers in another way.
    Storage {
        /// What the plan was made for.
        planned: &'static str,
        /// How this cache stores numbers.
        found: &'static str,
    },
    /// A part of a plan begins or ends inside a tile, so its results would not have the bits of the whole.
    PartBorder {
        /// `rows` or `keys`.
        axis: &'static str,
        /// Where the part begins or ends.
        at: usize,
        /// Parts begin and end at multiples of this.
        multiple: usize,
    },
    /// An option is not available for a part of a plan.
    NotInPart {
        /// The option.
        option: &'static str,
    },
    /// A gradient of the entropy was passed for an output without entropies.
    NoEntropy,
    /// An option is not defined for the normalizer.
    OnlySoftmax {
        /// The option.
        option: &'static str,
        /// The normalizer.
        normalizer: &'static str,
    },
    /// A gradient estimator is not defined for the normalizer.
    NoEstimate {
        /// The estimator.
        estimate: &'static str,
        /// The normalizer.
        normalizer: &'static str,
    },
    /// An output lacks the selection of its normalizer.
    NoSelection {
        /// The normalizer.
        normalizer: &'static str,
    },
    /// A KV cache would need more pages than its budget allows.
    Budget {
        /// Bytes of all pages that would be in use.
        needed: usize,
        /// Upper bound on the bytes of all pages.
        budget: usize,
    },
    /// A memory allocation failed.
    OutOfMemory {
        /// Size of the allocation in bytes.
        bytes: usize,
    },
    /// A sequence handle was freed, or belongs to another cache.
    StaleSequence {
        /// Index of the sequence in its cache.
        index: usize,
        /// Number of earlier sequences with this index.
        generation: u64,
    },
    /// A position was evicted from the KV cache.
    Evicted {
        /// The option.
        option: &'static str,
        /// The position given.
        found: usize,
        /// The first position that is still held.
        first: usize,
    },
}

impl Error {
    /// Checks that two tensors, each with its name, have the same size along an axis.
    pub fn unless_same(
        axis: &'static str,
        left: (&'static str, usize),
        right: (&'static str, usize),
    ) -> Result<(), Self> {
        if left.1 == right.1 { Ok(()) } else { Err(Self::Axis { axis, left, right }) }
    }

    /// Checks that an index or a count is below a limit.
    pub fn unless_below(option: &'static str, found: usize, limit: usize) -> Result<(), Self> {
        if found < limit { Ok(()) } else { Err(Self::OutOfRange { option, found, limit }) }
    }

    /// Checks that an option has one entry for each query of each head and batch item.
    pub(crate) fn unless_one_each_row(
        option: &'static str,
        rows: usize,
        found: usize,
    ) -> Result<(), Self> {
        let expected = (rows, "batch x query heads x queries");
        if found == rows { Ok(()) } else { Err(Self::Count { option, expected, found }) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DataLength { needed, found } => write!(
                f,
                "data: the shape needs {needed} elements, the slice has {found}; pass a longer slice or a smaller shape"
            ),
            Self::ShapeOverflow { shape } => {
                write!(
                    f,
                    "shape {shape:?}: more elements than memory can address; check the order of the axes"
                )
            }
            Self::OutputOverlap { strides } => write!(
                f,
                "output strides {strides:?}: two elements share memory; give each axis a stride that spans the ones inside it"
            ),
            Self::Axis { axis, left, right } => write!(
                f,
                "{axis}: {} has {}, {} has {}; they must be equal",
                left.0, left.1, right.0, right.1
            ),
            Self::HeadGroups { q, kv } => write!(
                f,
                "heads: q has {q}, k and v have {kv}; the first must be a multiple of the second"
            ),
            Self::NoFeatures { tensor } => {
                write!(f, "features: {tensor} has 0; a score needs at least 1")
            }
            Self::Count { option, expected, found } => {
                write!(f, "{option}: {found} entries; give {} ({})", expected.0, expected.1)
            }
            Self::OutOfRange { option, found, limit } => {
                write!(f, "{option}: {found} is out of range; give a value below {limit}")
            }
            Self::Zero { option } => write!(f, "{option}: 0; it must be at least 1"),
            Self::OddDim { option, found } => {
                write!(
                    f,
                    "{option}: {found} is odd; RoPE rotates pairs of features, use an even number"
                )
            }
            Self::TooFewFeatures { needed, found } => write!(
                f,
                "features: rope rotates {needed}, the tensor has {found}; give rope a smaller dim or pass a wider tensor"
            ),
            Self::Value { option, found, accepted } => {
                write!(f, "{option}: {found} is invalid; use {accepted}")
            }
            Self::Broadcast { option, found, scores } => write!(
                f,
                "{option}: shape {found:?} cannot be broadcast to the scores {scores:?} [batch, heads, queries, keys]; each axis must be equal or 1"
            ),
            Self::Parent { token, parent } => write!(
                f,
                "tree: token {token} has parent {parent}; put a parent before its children, and give the first token none"
            ),
            Self::Offsets { index, found, expected, wrong } => {
                write!(f, "offsets[{index}]: {found} is {wrong}; give {expected}")
            }
            _ => self.fmt_call(f),
        }
    }
}

impl Error {
    /// Messages for errors of a call as a whole.
    fn fmt_call(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed { option } => write!(
                f,
                "{option}: not available for sequences of different lengths, which share no axis of queries or keys; give one entry for all positions, or call once per sequence"
            ),
            Self::NoEntropy => write!(
                f,
                "the gradient of entropy: the forward pass did not compute entropies; use Problem::entropy (Rust) or entropy=True (Python)"
            ),
            Self::OnlySoftmax { option, normalizer } => {
                write!(
                    f,
                    "{option}: not defined for the {normalizer} normalizer; leave it out, or use the softmax"
                )
            }
            Self::NoEstimate { estimate, normalizer } => write!(
                f,
                "{estimate}: not a gradient estimator of the {normalizer} normalizer; leave it out"
            ),
            Self::NoSelection { normalizer } => write!(
                f,
                "output: the selected keys of the {normalizer} normalizer are missing; pass the whole output of the forward pass"
            ),
            Self::NotMergeable => write!(
                f,
                "merge: each part selected keys on its own; only results of the softmax can be merged"
            ),
            Self::NothingToMerge => {
                write!(f, "merge: the list of outputs is empty; give at least one")
            }
            Self::PartBorder { axis, at, multiple } => write!(
                f,
                "{axis}: a part begins or ends at {at}, which is not a multiple of {multiple}, so its bits would not be those of the whole; cut at {} or {}",
                at / multiple * multiple,
                (at / multiple + 1) * multiple
            ),
            Self::NotInPart { option } => write!(
                f,
                "{option}: given by the numbers of rows and keys, which are others in a part of a plan; leave it out, or compute all rows in one plan"
            ),
            _ => self.fmt_cache(f),
        }
    }

    /// Messages for errors of memory and of a KV cache.
    fn fmt_cache(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnlyCached => write!(
                f,
                "k and v: this plan reads a KV cache; call forward_cached, or make a plan with Problem::new"
            ),
            Self::NotInCache { option } => write!(
                f,
                "{option}: keys in a KV cache are not projected; append projected keys, and leave it out"
            ),
            Self::Quantized { option, storage } => write!(
                f,
                "{option}: this KV cache stores {storage}, not elements; use KvCache::numbers"
            ),
            Self::NotQuantized { dtype, storage } => write!(
                f,
                "{storage}: attention over a KV cache in 8 bits is computed in f32, not in {dtype}; use a cache of f32, f16 or bf16"
            ),
            Self::Storage { planned, found } => write!(
                f,
                "KV cache: the plan was made for {planned}, this cache stores {found}; make a plan of Problem::cached for this cache"
            ),
            Self::Budget { needed, budget } => write!(
                f,
                "KV cache: {needed} bytes needed, the budget is {budget}; free, truncate or evict sequences, or raise the budget"
            ),
            Self::OutOfMemory { bytes } => write!(
                f,
                "out of memory: {bytes} bytes could not be allocated; free memory, or reduce the size of the call"
            ),
            Self::StaleSequence { index, generation } => write!(
                f,
                "sequence {index} (generation {generation}): freed, or of another KV cache; start or fork a new one"
            ),
            Self::Evicted { option, found, first } => {
                write!(f, "{option}: {found} was evicted; give {first} or more")
            }
            // Formatted by `fmt` and `fmt_call`.
            Self::DataLength { .. }
            | Self::ShapeOverflow { .. }
            | Self::OutputOverlap { .. }
            | Self::Axis { .. }
            | Self::HeadGroups { .. }
            | Self::NoFeatures { .. }
            | Self::Count { .. }
            | Self::OutOfRange { .. }
            | Self::Zero { .. }
            | Self::OddDim { .. }
            | Self::TooFewFeatures { .. }
            | Self::Value { .. }
            | Self::Broadcast { .. }
            | Self::Parent { .. }
            | Self::Offsets { .. }
            | Self::Packed { .. }
            | Self::NoEntropy
            | Self::OnlySoftmax { .. }
            | Self::NoEstimate { .. }
            | Self::NoSelection { .. }
            | Self::NotMergeable
            | Self::NothingToMerge
            | Self::PartBorder { .. }
            | Self::NotInPart { .. } => Ok(()),
        }
    }
}

impl std::error::Error for Error {}
