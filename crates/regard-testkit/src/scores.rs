//! The score options of the table, and the combinations that are tested.

use crate::data::Data;
use regard::problem::Pair;
use regard::score::{Intervention, RelativeBias, ScoreRule};
use regard::{Element, Score};
use std::fmt;

/// One option of a [`Score`], without its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ScoreOption {
    /// An explicit scale.
    Scale(f64),
    /// A temperature.
    Temperature(f64),
    /// A softcap.
    Softcap(f64),
    /// A dense bias with these axes in full and the others of size 1.
    Bias {
        /// Whether the bias has the axis: batch, heads, queries, keys.
        axes: [bool; 4],
        /// Kind of entries.
        entries: Entries,
    },
    /// ALiBi with the published slopes.
    Alibi,
    /// A relative bias with one bucket per distance up to this one.
    Clipped(usize),
    /// A relative bias with the buckets of T5.
    T5 {
        /// Whether keys after the query have buckets of their own.
        bidirectional: bool,
    },
    /// Sinks.
    Sinks,
    /// The rule [`Wave`].
    Custom,
    /// Edges that are scaled and biased, and with `true` others that are dropped: [`interventions`].
    Interventions(bool),
}

/// Entries of a dense bias besides normal numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entries {
    /// No others.
    Finite,
    /// Some entries are `-inf`, which mask the pair.
    Hiding,
    /// Some entries are the lowest finite number, which several libraries use for padding. One entry of each row of the
    /// bias is an ordinary number.
    Lowest,
    /// Every entry is the lowest finite number, as in a padding row.
    OnlyLowest,
}

/// Number of buckets and largest distance of the T5 bias.
pub(crate) const T5_BUCKETS: (usize, usize) = (8, 20);

impl ScoreOption {
    /// Adds the option and its data to a score.
    pub(crate) fn join<'d, E: Element>(
        self,
        score: Score<'d, E>,
        data: &'d Data<E>,
    ) -> Score<'d, E> {
        match self {
            Self::Scale(x) => score.scale(x),
            Self::Temperature(x) => score.temperature(x),
            Self::Softcap(x) => score.softcap(x),
            Self::Bias { .. } => score.bias(data.bias.view()),
            Self::Alibi => score.alibi(&data.slopes),
            Self::Clipped(reach) => score.relative(RelativeBias::clipped(&data.table, reach)),
            Self::T5 { bidirectional } => {
                let (buckets, farthest) = T5_BUCKETS;
                score.relative(RelativeBias::t5(&data.table, buckets, farthest, bidirectional))
            }
            Self::Sinks => score.sinks(&data.sinks),
            Self::Custom => score.custom(&Wave),
            Self::Interventions(drops) => score.interventions(interventions(drops)),
        }
    }
}

impl fmt::Display for ScoreOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scale(x) => write!(f, "scale{x}"),
            Self::Temperature(x) => write!(f, "temperature{x}"),
            Self::Softcap(x) => write!(f, "softcap{x}"),
            Self::Bias { axes, entries } => {
                write!(f, "bias_")?;
                for (axis, whole) in "bhqk".chars().zip(axes) {
                    write!(f, "{}", if *whole { axis } else { '1' })?;
                }
                f.write_str(match entries {
                    Entries::Finite => "",
                    Entries::Hiding => "_hiding",
                    Entries::Lowest => "_lowest",
                    Entries::OnlyLowest => "_only_lowest",
                })
            }
            Self::Alibi => write!(f, "alibi"),
            Self::Clipped(reach) => write!(f, "clipped{reach}"),
            Self::T5 { bidirectional: true } => write!(f, "t5_both_ways"),
            Self::T5 { bidirectional: false } => write!(f, "t5_back"),
            Self::Sinks => write!(f, "sinks"),
            Self::Custom => write!(f, "custom"),
            Self::Interventions(false) => write!(f, "interventions"),
            Self::Interventions(true) => write!(f, "interventions_drop"),
        }
    }
}

/// A dense bias; `axes` are letters, for example `"b1qk"`.
#[must_use]
pub const fn bias(axes: &str, entries: Entries) -> ScoreOption {
    let axes = axes.as_bytes();
    let axes = [axes[0] != b'1', axes[1] != b'1', axes[2] != b'1', axes[3] != b'1'];
    ScoreOption::Bias { axes, entries }
}

use Entries::{Finite, Hiding, Lowest};
use ScoreOption::{Alibi, Clipped, Custom, Interventions, Scale, Sinks, Softcap, T5, Temperature};

const T5_BOTH: ScoreOption = T5 { bidirectional: true };
const T5_BACK: ScoreOption = T5 { bidirectional: false };

/// Combinations of options: each alone, every broadcast shape of a bias, and several up to all at once.
pub const SCORES: &[&[ScoreOption]] = &[
    &[],
    &[Scale(1.0)],
    &[Scale(-0.3)],
    &[Scale(0.0)],
    &[Temperature(0.5)],
    &[Temperature(4.0)],
    &[Softcap(2.0)],
    &[Softcap(50.0)],
    &[bias("1111", Finite)],
    &[bias("111k", Finite)],
    &[bias("11q1", Finite)],
    &[bias("11qk", Finite)],
    &[bias("1h11", Finite)],
    &[bias("1h1k", Finite)],
    &[bias("1hq1", Finite)],
    &[bias("1hqk", Finite)],
    &[bias("b111", Finite)],
    &[bias("b11k", Finite)],
    &[bias("b1q1", Finite)],
    &[bias("b1qk", Finite)],
    &[bias("bh11", Finite)],
    &[bias("bh1k", Finite)],
    &[bias("bhq1", Finite)],
    &[bias("bhqk", Finite)],
    &[bias("11qk", Hiding)],
    &[bias("b11k", Hiding)],
    &[bias("1hq1", Hiding)],
    &[bias("bhqk", Hiding)],
    &[bias("b11k", Lowest)],
    &[bias("11qk", Lowest)],
    &[bias("bhqk", Lowest)],
    &[Alibi],
    &[Clipped(0)],
    &[Clipped(4)],
    &[T5_BOTH],
    &[T5_BACK],
    &[Sinks],
    &[Custom],
    &[Interventions(false)],
    &[Interventions(true)],
    &[Scale(1.0), Softcap(5.0)],
    &[Scale(1.0), Temperature(3.0), Sinks],
    &[Softcap(3.0), bias("b1qk", Finite)],
    &[Softcap(3.0), Alibi, Sinks],
    &[bias("11qk", Finite), Alibi],
    &[bias("1hqk", Hiding), Sinks],
    &[bias("b11k", Lowest), Alibi, Sinks],
    &[bias("b11k", Hiding), T5_BACK, Custom],
    &[Alibi, T5_BOTH],
    &[Clipped(7), Custom, Sinks],
    &[Softcap(6.0), Interventions(true), Sinks],
    &[bias("bhqk", Hiding), Custom, Interventions(true)],
    &[Temperature(0.8), T5_BOTH, Softcap(10.0)],
    &[
        Scale(0.2),
        Temperature(0.7),
        Softcap(4.0),
        bias("bhqk", Finite),
        Alibi,
        Clipped(5),
        Custom,
        Sinks,
    ],
    &[Scale(0.4), Softcap(8.0), bias("1h1k", Hiding), Alibi, T5_BACK, Custom, Sinks],
];

/// Rectangles that begin and end inside of tiles, that overlap, that reach beyond the last query, and one of which has a hidden row.
#[must_use]
pub fn interventions(drops: bool) -> Vec<Intervention> {
    let mut all = vec![
        Intervention::scale(2.5).heads(0..1).rows(1..70).keys(2..67),
        Intervention::add(-1.25).items(0..1).rows(5..usize::MAX).keys(0..3),
        Intervention::scale(0.3).heads(1..2).keys(1..2),
    ];
    if drops {
        all.push(Intervention::drop().rows(2..9).keys(1..66));
        all.push(Intervention::scale(0.0).heads(0..1).rows(3..4));
        all.push(Intervention::add(3.0).items(1..2).rows(4..5).keys(1..5));
    }
    all
}

/// A user-defined rule with a varying derivative. `-inf` stays `-inf`: masked pairs stay masked.
#[derive(Debug)]
pub struct Wave;

impl Wave {
    fn phase(at: Pair) -> f64 {
        (at.row + 2 * at.key + 3 * at.head + 5 * at.batch) as f64
    }
}

impl ScoreRule for Wave {
    fn apply(&self, at: Pair, score: f64) -> f64 {
        if score == f64::NEG_INFINITY {
            return score;
        }
        score + 0.25 * (score + Self::phase(at)).sin()
    }

    fn derivative(&self, at: Pair, score: f64) -> f64 {
        1.0 + 0.25 * (score + Self::phase(at)).cos()
    }
}
