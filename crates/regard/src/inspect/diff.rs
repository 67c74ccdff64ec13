//! How far apart the weights of two runs are.

use super::AttentionView;
use crate::description::mask::Run;
use crate::error::Error;
use crate::kernel::block_loop::{KeyRange, TILE_ROWS};
use crate::kernel::weights_pass::{RowStats, Scratch, WeightsQuery};
use crate::machine::run::collect;
use crate::machine::simd::Number;
use crate::tensor::index::RowTile;
use std::f64::consts::LN_2;
use std::ops::Range;

/// How far apart the weights of a query are in two runs, in nats. A sink counts as one of the keys.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Divergence {
    /// Kullback-Leibler: `sum of p ln(p / q)`; infinite where the second run does not see what the first one does.
    pub kl: f64,
    /// Jensen-Shannon: the mean of `KL(p | m)` and `KL(q | m)`, `m` halfway between them; from 0 to `ln 2`.
    pub js: f64,
}

/// Keys that are compared at a time.
const KEYS: usize = 1024;

impl<N: Number> AttentionView<'_, N> {
    /// The divergence of each query's weights from those of another run over as many queries and keys, `[heads, rows]`: of
    /// another checkpoint, another precision, another mask. A query that sees nothing in either run is 0 apart.
    ///
    /// Costs both looks, and for each pair that either sees two powers and a logarithm.
    #[inline(never)]
    pub fn diff(&self, other: &AttentionView<'_, N>) -> Result<Vec<Divergence>, Error> {
        let same = |axis, a, b| Error::unless_same(axis, ("this run", a), ("the other", b));
        let rows = |batch| self.rows_of(batch).len().div_ceil(self.step);
        same("heads", self.heads.len(), other.heads.len())?;
        let heads: Vec<_> = self.each_head().zip(other.each_head()).collect();
        for ((a, _), (b, _)) in &heads {
            same("queries", rows(*a), other.rows_of(*b).len().div_ceil(other.step))?;
            same("keys", self.problem.k_len(*a), other.problem.k_len(*b))?;
        }
        let tiles = |batch| rows(batch).div_ceil(TILE_ROWS);
        let tasks: Vec<_> = heads
            .iter()
            .flat_map(|pair| (0..tiles(pair.0.0)).map(move |tile| (*pair, tile)))
            .collect();
        let query = WeightsQuery { logs: true, ..WeightsQuery::default() };
        let memory = || [Scratch::new(&self.problem, &query), Scratch::new(&other.problem, &query)];
        let apart = collect(self.machine.threads, tasks.len(), memory, |scratch, i| {
            let ((a, b), tile) = tasks[i];
            let rows = tile * TILE_ROWS..((tile + 1) * TILE_ROWS).min(rows(a.0));
            self.compare(a, (other, b), rows, scratch)
        });
        Ok(apart.concat())
    }

    /// The same of some rows of a head, counted among those that are looked at.
    fn compare(
        &self,
        head: (usize, usize),
        (other, others): (&AttentionView<'_, N>, (usize, usize)),
        rows: Range<usize>,
        [mine, theirs]: &mut [Scratch<N>; 2],
    ) -> Vec<Divergence> {
        let mut apart = vec![Divergence::default(); rows.len()];
        let k_len = self.problem.k_len(head.0);
        let mut visible = self.runs_of(head, &rows);
        visible.extend(other.runs_of(others, &rows));
        for first in (0..k_len).step_by(KEYS) {
            let keys = first..(first + KEYS).min(k_len);
            if !visible.iter().any(|run| run.keys.start < keys.end && keys.start < run.keys.end) {
                continue;
            }
            let p = self.log_weights(head, &rows, keys.clone(), mine);
            let q = other.log_weights(others, &rows, keys.clone(), theirs);
            for (i, (p, q)) in p.into_iter().zip(q).enumerate() {
                apart[i / keys.len()].add(p, q);
            }
        }
        for (i, apart) in apart.iter_mut().enumerate() {
            apart.add(self.log_sink(head, rows.start + i), other.log_sink(others, rows.start + i));
            // Rounding may fall below 0; NaN stays.
            let least = |x: f64| if x < 0.0 { 0.0 } else { x };
            *apart = Divergence { kl: least(apart.kl), js: least(apart.js) };
        }
        apart
    }

    /// Rows, counted among those that are looked at.
    fn tile_of(&self, batch: usize, rows: &Range<usize>) -> RowTile {
        let first = self.rows_of(batch).start + rows.start * self.step;
        RowTile { first, step: self.step, count: rows.len() }
    }

    /// What these rows see.
    fn runs_of(&self, (batch, head): (usize, usize), rows: &Range<usize>) -> Vec<Run> {
        let mut runs = Vec::new();
        let scope = self.problem.scope(batch, head);
        self.problem.mask.runs(&scope, self.tile_of(batch, rows), &mut runs);
        runs
    }

    /// `log2` of the weights of some rows, counted among those that are looked at, for some keys, `[rows, keys]`.
    fn log_weights(
        &self,
        (batch, head): (usize, usize),
        rows: &Range<usize>,
        keys: Range<usize>,
        scratch: &mut Scratch<N>,
    ) -> Vec<f64> {
        let query = WeightsQuery { logs: true, ..WeightsQuery::default() };
        let tile = self.tile_of(batch, rows);
        let mut stats = RowStats::new(&query, &(tile.first..tile.first + 1));
        stats.logs = vec![f64::NEG_INFINITY; rows.len() * keys.len()];
        let key_range = KeyRange { mask: &self.problem.mask, without: None, keys };
        self.tile_stats((batch, head), tile, (&key_range, &query), None, (scratch, &mut stats));
        stats.logs
    }

    /// `log2` of the weight of a row's sink.
    fn log_sink(&self, (batch, head): (usize, usize), row: usize) -> f64 {
        let row = self.rows_of(batch).start + row * self.step;
        let row = self.problem.row_index(self.problem.scope(batch, head), row);
        let (m, share) = self.softmaxes.of_row(row);
        let sink = self.problem.score.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head].to_f64());
        sink / LN_2 - m.to_f64() + share.to_f64().log2()
    }
}

impl Divergence {
    /// Takes one more pair in, by the `log2` of its weights.
    fn add(&mut self, p: f64, q: f64) {
        if p == f64::NEG_INFINITY && q == f64::NEG_INFINITY {
            return;
        }
        let (a, b) = (p.exp2(), q.exp2());
        let middle = (0.5 * (a + b)).log2();
        let term =
            |a: f64, log: f64, other: f64| if a == 0.0 { 0.0 } else { a * (log - other) * LN_2 };
        self.kl += term(a, p, q);
        self.js += 0.5 * (term(a, p, middle) + term(b, q, middle));
    }
}
