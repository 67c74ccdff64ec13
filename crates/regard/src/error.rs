//! Every way a call can be wrong. A message names the axis, both numbers and the remedy.

use std::fmt;

/// Why a call was refused. Raised before any work starts.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's memory is shorter than its shape and strides reach.
    DataLength {
        /// Elements that the shape and strides reach.
        needed: usize,
        /// Elements in memory.
        found: usize,
    },
    /// A shape whose element count does not fit in memory.
    ShapeOverflow {
        /// Batch, heads, length, features.
        shape: [usize; 4],
    },
    /// Two elements of an output would share memory.
    OutputOverlap {
        /// Strides of batch, heads and length, in elements.
        strides: [usize; 3],
    },
    /// Two tensors disagree about an axis.
    Axis {
        /// `batch`, `features`, `keys`, ...
        axis: &'static str,
        /// One tensor and its size.
        left: (&'static str, usize),
        /// The other tensor and its size.
        right: (&'static str, usize),
    },
    /// Query heads that do not divide evenly among the key heads.
    HeadGroups {
        /// Heads of the queries.
        q: usize,
        /// Heads of the keys and values.
        kv: usize,
    },
    /// Queries and keys without features have no scores.
    NoFeatures {
        /// The tensor.
        tensor: &'static str,
    },
    /// An option holds the wrong number of entries.
    Count {
        /// The option.
        option: &'static str,
        /// Entries expected, and what they stand for.
        expected: (usize, &'static str),
        /// Entries given.
        found: usize,
    },
    /// An option refers to a position outside the sequence, or farther than is kept.
    OutOfRange {
        /// The option.
        option: &'static str,
        /// The position given.
        found: usize,
        /// The first position that is too large.
        limit: usize,
    },
    /// A size that must be at least 1 is 0.
    Zero {
        /// The option.
        option: &'static str,
    },
    /// A size that must be even is odd.
    Odd {
        /// The option.
        option: &'static str,
        /// The size given.
        found: usize,
    },
    /// A tensor with fewer features than a pass works on.
    TooFewFeatures {
        /// Features that the pass works on.
        needed: usize,
        /// Features of the tensor.
        found: usize,
    },
    /// A number that is not usable.
    Value {
        /// The option.
        option: &'static str,
        /// The number given.
        found: f64,
        /// What is accepted.
        accepted: &'static str,
    },
    /// A bias or bit mask that cannot be broadcast to the scores.
    Broadcast {
        /// The option.
        option: &'static str,
        /// Batch, heads, queries, keys of the option.
        found: [usize; 4],
        /// Batch, heads, queries, keys of the scores.
        scores: [usize; 4],
    },
    /// The offsets of packed sequences do not ascend from 0 to the number of rows.
    Offsets {
        /// Which of them.
        index: usize,
        /// The offset given.
        found: usize,
        /// One that would do.
        expected: usize,
        /// What it is not.
        wrong: &'static str,
    },
    /// An option with an axis of queries or keys, which sequences of different lengths do not share.
    Packed {
        /// The option.
        option: &'static str,
    },
    /// Results to be merged whose rows have chosen among their own keys.
    Chosen,
    /// Nothing to merge.
    NothingToMerge,
    /// Tensors were given to a plan for a cache.
    OnlyCached,
    /// An option that needs more of the keys than a cache holds.
    NotInCache {
        /// The option.
        option: &'static str,
    },
    /// A gradient of the entropy was given for an output without entropies.
    NoEntropy,
    /// An option that a normalizer has no meaning for.
    OnlySoftmax {
        /// The option.
        option: &'static str,
        /// The normalizer.
        normalizer: &'static str,
    },
    /// An estimate of gradients was asked for that the normalizer does not have.
    NoEstimate {
        /// The estimate.
        estimate: &'static str,
        /// The normalizer.
        normalizer: &'static str,
    },
    /// An output without the choice that its normalizer has made.
    NoSelection {
        /// The normalizer.
        normalizer: &'static str,
    },
    /// Hashing was to be compared with attention that it does not stand for.
    NotHashed,
    /// A cache would need more pages than its budget allows.
    Budget {
        /// Bytes of all pages that would be in use.
        needed: usize,
        /// Bytes that they may have.
        budget: usize,
    },
    /// The system gave no memory.
    OutOfMemory {
        /// Bytes asked for at once.
        bytes: usize,
    },
    /// A handle of a sequence that was freed, or of another cache.
    StaleSequence {
        /// The place of the sequence in its cache.
        index: usize,
        /// Sequences that had this place before it.
        generation: u64,
    },
    /// A position that a sequence no longer holds.
    Evicted {
        /// What was asked for.
        option: &'static str,
        /// The position given.
        found: usize,
        /// The first position that is still held.
        first: usize,
    },
}

impl Error {
    /// Refuses two tensors that disagree about an axis.
    pub(crate) fn unless_same(
        axis: &'static str,
        left: (&'static str, usize),
        right: (&'static str, usize),
    ) -> Result<(), Self> {
        if left.1 == right.1 { Ok(()) } else { Err(Self::Axis { axis, left, right }) }
    }

    /// One entry for each query of each head and item.
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
            Self::Odd { option, found } => {
                write!(f, "{option}: {found} is odd; it must be even, for features go in pairs")
            }
            Self::TooFewFeatures { needed, found } => write!(
                f,
                "features: rope rotates {needed}, the tensor has {found}; give rope a smaller dim or pass a wider tensor"
            ),
            Self::Value { option, found, accepted } => {
                write!(f, "{option}: {found} is not usable; give {accepted}")
            }
            Self::Broadcast { option, found, scores } => write!(
                f,
                "{option}: shape {found:?} against scores {scores:?} [batch, heads, queries, keys]; each axis must be equal or 1"
            ),
            Self::Offsets { index, found, expected, wrong } => {
                write!(f, "offsets[{index}]: {found} is {wrong}; give {expected}")
            }
            _ => self.fmt_call(f),
        }
    }
}

impl Error {
    /// What is wrong with a call as a whole, and with a cache.
    fn fmt_call(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packed { option } => write!(
                f,
                "{option}: sequences of different lengths have no common axis of queries or keys; give one entry for all positions, or call for each sequence"
            ),
            Self::NoEntropy => write!(
                f,
                "the gradient of entropy: the output has no entropies; ask for them with Problem::entropy"
            ),
            Self::OnlySoftmax { option, normalizer } => {
                write!(
                    f,
                    "{option}: a {normalizer} normalizer has none; leave it out, or take the softmax"
                )
            }
            Self::NoEstimate { estimate, normalizer } => write!(
                f,
                "{estimate}: the gradient of a {normalizer} normalizer is not estimated so; leave it out"
            ),
            Self::NoSelection { normalizer } => write!(
                f,
                "output: it lacks the selection of its {normalizer} normalizer; pass what forward returned, as it is"
            ),
            Self::NotHashed => write!(
                f,
                "lsh: it stands for scaled dot products of tensors, all keys or causal, with no other option; audit such a problem, or leave it out"
            ),
            Self::Chosen => write!(
                f,
                "merge: rows have chosen among the keys of a part, not among all; merge results of the softmax"
            ),
            Self::NothingToMerge => write!(f, "merge: no parts; give at least one"),
            Self::OnlyCached => write!(
                f,
                "k and v: the plan is for sequences of a cache; call forward_cached, or plan with Problem::new"
            ),
            Self::NotInCache { option } => write!(
                f,
                "{option}: keys of a cache are met as they lie there; append projected keys, and leave it out"
            ),
            Self::Budget { needed, budget } => write!(
                f,
                "cache: {needed} bytes of pages would be in use, the budget is {budget}; free, truncate or evict sequences, or update_max the budget"
            ),
            Self::OutOfMemory { bytes } => write!(
                f,
                "memory: the system refused {bytes} bytes; free memory elsewhere, or ask for less"
            ),
            Self::StaleSequence { index, generation } => write!(
                f,
                "sequence {index}, generation {generation}: it was freed, or another cache gave it; start or fork a new one"
            ),
            Self::Evicted { option, found, first } => {
                write!(f, "{option}: {found} was evicted; give {first} or more")
            }
            // Told by `fmt`.
            Self::DataLength { .. }
            | Self::ShapeOverflow { .. }
            | Self::OutputOverlap { .. }
            | Self::Axis { .. }
            | Self::HeadGroups { .. }
            | Self::NoFeatures { .. }
            | Self::Count { .. }
            | Self::OutOfRange { .. }
            | Self::Zero { .. }
            | Self::Odd { .. }
            | Self::TooFewFeatures { .. }
            | Self::Value { .. }
            | Self::Broadcast { .. }
            | Self::Offsets { .. } => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// Memory of these sizes for results, all of it `x`. Sizes come from the caller, and the system may refuse what they ask for.
pub(crate) fn filled<T: Copy>(x: T, sizes: &[usize]) -> Result<Vec<T>, Error> {
    let count = sizes.iter().try_fold(1usize, |n, size| n.checked_mul(*size));
    let bytes = count.unwrap_or(usize::MAX).saturating_mul(size_of::<T>());
    let refused = || Error::OutOfMemory { bytes };
    let (count, mut room) = (count.ok_or_else(refused)?, Vec::new());
    room.try_reserve_exact(count).map_err(|_| refused())?;
    room.resize(count, x);
    Ok(room)
}
