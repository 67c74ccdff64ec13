//! Numbers of each head: how concentrated it is, how far it looks, how much goes to the first token.

use crate::error::Error;
use crate::map::Map;
use crate::measure::{Measure, MeasureOutput};
use crate::trace::{LayerData, Site, Trace};
use regard::{Machine, Mask};
use serde::Serialize;

/// Means over the queries of a head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeadStats {
    /// Which head.
    #[serde(flatten)]
    pub site: Site,
    /// Queries, those that see nothing left out. All that follows is NaN if there are none.
    pub queries: usize,
    /// The entropy of a query's weights, in nats: 0 where one key has all the weight, `ln n` where n keys share it.
    pub entropy: f64,
    /// `e^entropy`: over about how many keys a query spreads its weight, of the mean entropy.
    pub keys: f64,
    /// The mean of `|key - position|`. Of weights alone, which know no positions, queries are taken to end where keys do.
    pub distance: f64,
    /// The weight of the first key.
    pub first: f64,
    /// The largest weight of a query.
    pub largest: f64,
    /// The highest score of any query, which is what grows where training comes apart; NaN of weights alone.
    pub max_score: f64,
}

/// The numbers of every head of a trace; `progress` hears of layers done and layers in all.
pub fn stats(
    trace: &Trace,
    machine: Machine,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<HeadStats>, Error> {
    let mut all = Vec::new();
    for (i, layer) in trace.layers.iter().enumerate() {
        let site = |head| Site { layer: layer.layer, kind: layer.kind.clone(), head };
        let sums = match &layer.data {
            LayerData::Inputs(inputs) => {
                let [q_len, k_len] = layer.data.size();
                let first = if k_len > 0 { Mask::prefix(1) } else { Mask::full() };
                let all = Measure::new().entropy().mean_distance().top_k(1);
                let MeasureOutput { entropy, mean_distance, top, masses, .. } =
                    all.mass(first).of(&inputs.view(machine)?)?;
                let first = masses.into_iter().next().unwrap_or_default();
                // Rows that see nothing have no lse; what met a NaN keeps it.
                let row = |i: usize| {
                    let largest = top.weights(i).first().copied().unwrap_or(inputs.lse[i]);
                    let seen = inputs.lse[i] != f32::NEG_INFINITY;
                    let score = inputs.lse[i] + largest.ln();
                    seen.then(|| {
                        [entropy[i], mean_distance[i], first[i], largest, score].map(f64::from)
                    })
                };
                let of_head = |head| (0..q_len).filter_map(|i| row(head * q_len + i)).collect();
                (0..layer.data.heads()).map(of_head).collect::<Vec<HeadSums>>()
            }
            LayerData::Weights(weights) => {
                let [heads, q_len, _] = weights.shape;
                let of_head = |head| {
                    let rows = (0..q_len).filter_map(|i| weights.row_stats(head, i));
                    rows.map(|[a, b, c, d]| [a, b, c, d, f64::NAN]).collect()
                };
                (0..heads).map(of_head).collect()
            }
        };
        all.extend(sums.iter().enumerate().map(|(head, sums)| sums.stats(site(head))));
        progress(i + 1, trace.layers.len());
    }
    Ok(all)
}

/// What the statistics of a head are made of: sums over rows, which can be computed apart from each other and added.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadSums {
    rows: f64,
    /// Entropy, distance, weight of the first key, largest weight.
    sums: [f64; 4],
    max_score: f64,
}

impl Default for HeadSums {
    fn default() -> Self {
        Self { rows: 0.0, sums: [0.0; 4], max_score: f64::NAN }
    }
}

impl FromIterator<[f64; 5]> for HeadSums {
    /// Of rows: the numbers of [`HeadStats`] and the highest score.
    fn from_iter<I: IntoIterator<Item = [f64; 5]>>(rows: I) -> Self {
        let mut all = Self::default();
        for [entropy, distance, first, largest, max_score] in rows {
            all.add(&Self { rows: 1.0, sums: [entropy, distance, first, largest], max_score });
        }
        all
    }
}

impl HeadSums {
    /// How many numbers it is.
    pub const LEN: usize = 6;

    /// Adds the sums of other rows.
    pub fn add(&mut self, other: &Self) {
        self.rows += other.rows;
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, x)| *sum += x);
        self.max_score = self.max_score.max(other.max_score);
    }

    /// As numbers, to be sent to another process.
    #[must_use]
    pub fn to_array(self) -> [f64; Self::LEN] {
        let Self { rows, sums: [a, b, c, d], max_score } = self;
        [rows, a, b, c, d, max_score]
    }

    /// The inverse.
    #[must_use]
    pub fn from_array([rows, a, b, c, d, max_score]: [f64; Self::LEN]) -> Self {
        Self { rows, sums: [a, b, c, d], max_score }
    }

    /// The means.
    #[must_use]
    pub fn stats(&self, site: Site) -> HeadStats {
        let [entropy, distance, first, largest] = self.sums.map(|sum| sum / self.rows);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a count of rows"
        )]
        let queries = self.rows as usize;
        let (keys, max_score) = (entropy.exp(), self.max_score);
        HeadStats { site, queries, entropy, keys, distance, first, largest, max_score }
    }
}

impl HeadStats {
    /// The names of the numbers, as they are printed.
    pub const NAMES: [&'static str; 5] = ["entropy", "keys", "distance", "first", "largest"];

    /// One head in several traces: means over all queries, and the highest score of any. `None` of nothing.
    #[must_use]
    pub fn mean(all: &[Self]) -> Option<Self> {
        let site = all.first()?.site.clone();
        let queries = all.iter().map(|one| one.queries).sum();
        let mean = |of: fn(&Self) -> f64| {
            let seen = all.iter().filter(|one| one.queries > 0);
            seen.map(|one| one.queries as f64 * of(one)).sum::<f64>() / queries as f64
        };
        let entropy = mean(|one| one.entropy);
        Some(Self {
            site,
            queries,
            entropy,
            keys: entropy.exp(),
            distance: mean(|one| one.distance),
            first: mean(|one| one.first),
            largest: mean(|one| one.largest),
            max_score: all.iter().map(|one| one.max_score).fold(f64::NAN, f64::max),
        })
    }

    /// A number by its name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<f64> {
        match name {
            "entropy" => Some(self.entropy),
            "keys" => Some(self.keys),
            "distance" => Some(self.distance),
            "first" => Some(self.first),
            "largest" => Some(self.largest),
            _ => None,
        }
    }

    /// One number of all heads of a kind, layers down, heads across.
    #[must_use]
    pub fn map(all: &[Self], kind: &str, name: &str) -> Map {
        let number = |stats: &'_ Self| (stats.site.clone(), stats.get(name).unwrap_or(f64::NAN));
        Map::of_heads(format!("{name} of {kind}"), kind, all.iter().map(number))
    }
}
