//! The microscope where keys come in blocks: of sequences whose keys do not fit into memory, or lie on several machines.
//!
//! Two passes over the keys: the first finds the `lse` of each row, the second reads weights. The blocks of both come in the same order; results
//! are the same bits for the same blocks in the same order, and differ from those of all keys at once by the rounding of sums.

use crate::error::Error;
use crate::measure::{MapPart, Measure, MeasureOutput, SomeKeys};
use crate::stats::HeadSums;
use regard::plan::Partial;
use regard::problem::Dims;
use regard::{AttentionView, Mask, Output, Plan, Shape, Tensor, View};
use std::ops::Range;

/// The plan of some rows over some keys, and the keys.
type PlanAndKeys<'a, 'k> = (Plan<'a, f32>, View<'k, f32>);

/// Some rows of a call without values, and their softmax over the keys so far.
///
/// ```
/// use regard::{Layout, Machine, Mask, Plan, Problem, Shape, Tensor};
/// use regard_scope::{BlockedRows, RowStats};
/// let shape = Shape { batch: 1, heads: 1, len: 256, dim: 8 };
/// let x: Vec<f32> = (0..256 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
/// let problem = Problem::of_shapes(shape, shape, Shape { dim: 0, ..shape }).mask(Mask::causal());
/// let plan = Plan::new(problem, Machine::detect())?;
/// let q = Tensor::new(x.clone(), shape, Layout::Bhsd)?;
///
/// let mut rows = BlockedRows::new(&plan, 0..256, q)?;
/// let blocks = [(0..100, &x[..800]), (100..256, &x[800..])];
/// for (keys, k) in blocks.clone() {
///     rows.add(keys, k)?;
/// }
/// rows.finish()?;
/// let mut stats = RowStats::default();
/// for (keys, k) in blocks {
///     stats.add(&rows, keys, k)?;
/// }
/// assert!(stats.sums(&rows)[0].to_array()[0] == 256.0); // rows of head 0
/// # Ok::<(), regard_scope::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockedRows<'a> {
    whole: Plan<'a, f32>,
    /// These rows over all keys.
    plan: Plan<'a, f32>,
    rows: Range<usize>,
    q: Tensor<f32>,
    partial: Partial<f32>,
    /// Once all keys have come.
    output: Option<Output<f32>>,
}

impl<'a> BlockedRows<'a> {
    /// The rows `rows` of the call that `plan` is of, whose values have no features; `q` has these rows alone. What [`Plan::part`] refuses is
    /// refused.
    pub fn new(plan: &Plan<'a, f32>, rows: Range<usize>, q: Tensor<f32>) -> Result<Self, Error> {
        let (whole, Dims { k_len, .. }) = (plan.clone(), plan.problem().dims());
        let plan = whole.part(rows.clone(), 0..k_len)?;
        let partial = plan.partial(Vec::new())?;
        Ok(Self { whole, plan, rows, q, partial, output: None })
    }

    /// The rows.
    #[must_use]
    pub fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// First pass: adds some keys, `[kv_heads, keys, dim]`.
    pub fn add(&mut self, keys: Range<usize>, k: &[f32]) -> Result<(), Error> {
        let Some((part, k)) = self.part(keys, k)? else { return Ok(()) };
        let v = Shape { dim: 0, ..k.shape() };
        let found = part.forward_partial(self.q.view(), k, View::bhsd(&[], v.to_array())?)?;
        Ok(self.partial.merge(&found)?)
    }

    /// Ends the first pass.
    pub fn finish(&mut self) -> Result<(), Error> {
        self.output = Some(self.plan.finish(self.q.view(), &self.partial)?);
        Ok(())
    }

    /// Second pass: measures the weights of some keys. `None` if no row sees one of them.
    fn measure(
        &self,
        measure: &Measure,
        (keys, rows): (Range<usize>, Range<usize>),
        k: &[f32],
    ) -> Result<Option<MeasureOutput<f32>>, Error> {
        let Some((part, k)) = self.part(keys, k)? else { return Ok(None) };
        let first = || Error::NotThere {
            what: "the lse of the rows".into(),
            there: "the first pass, which has not ended: call finish".into(),
        };
        let output = self.output.as_ref().ok_or_else(first)?;
        let view = AttentionView::new(&part, self.q.view(), k, output)?;
        Ok(Some(measure.of(&view.rows(rows))?))
    }

    /// The plan of these rows over some keys, and the keys; `None` if no row sees one of them. The sinks are with the first keys.
    fn part<'k>(
        &self,
        keys: Range<usize>,
        k: &'k [f32],
    ) -> Result<Option<PlanAndKeys<'a, 'k>>, Error> {
        let Dims { heads, qk_dim, .. } = self.whole.problem().dims();
        let k = View::bhsd(k, [1, heads.kv, keys.len(), qk_dim])?;
        let first = keys.start == 0;
        let part = self.whole.part(self.rows.clone(), keys)?;
        Ok((first || part.work().pairs > 0).then_some((part, k)))
    }

    fn heads(&self) -> usize {
        self.whole.problem().dims().heads.q
    }
}

/// The numbers of [`HeadStats`](crate::HeadStats) of each row, over the keys so far.
#[derive(Clone, Debug, Default)]
pub struct RowStats {
    /// Entropy, distance, weight of the first key, largest weight, `[heads, rows]` each.
    found: [Vec<f32>; 4],
}

impl RowStats {
    /// Adds some keys of the second pass.
    pub fn add(
        &mut self,
        rows: &BlockedRows<'_>,
        keys: Range<usize>,
        k: &[f32],
    ) -> Result<(), Error> {
        let all = rows.heads() * rows.rows.len();
        self.found.iter_mut().for_each(|found| found.resize(all, 0.0));
        let measure = Measure::new().entropy().mean_distance().top_k(1);
        let measure = match keys.start {
            0 => measure.of_some_keys(SomeKeys::First).mass(Mask::prefix(1)),
            _ => measure.of_some_keys(SomeKeys::Later),
        };
        let every = 0..rows.rows.len();
        let Some(found) = rows.measure(&measure, (keys, every), k)? else { return Ok(()) };
        let MeasureOutput { entropy, mean_distance, masses, top, .. } = found;
        let [entropies, distances, firsts, largest] = &mut self.found;
        let add = |to: &mut Vec<f32>, x: &[f32]| to.iter_mut().zip(x).for_each(|(to, x)| *to += x);
        add(entropies, &entropy);
        add(distances, &mean_distance);
        masses.iter().for_each(|mass| add(firsts, mass));
        for (i, largest) in largest.iter_mut().enumerate() {
            larger(std::slice::from_mut(largest), top.weights(i));
        }
        Ok(())
    }

    /// The sums of each head, rows that see nothing left out.
    #[must_use]
    pub fn sums(&self, rows: &BlockedRows<'_>) -> Vec<HeadSums> {
        let (len, lse) = (rows.rows.len(), rows.output.as_ref().map_or(&[][..], |out| &out.lse));
        let row = |i: usize| {
            let [entropy, distance, first, largest] = self.found.each_ref().map(|found| found[i]);
            // A row with a NaN has no largest weight.
            let largest = if lse[i].is_nan() { lse[i] } else { largest };
            let numbers = [entropy, distance, first, largest, lse[i] + largest.ln()];
            (lse[i] != f32::NEG_INFINITY).then(|| numbers.map(f64::from))
        };
        let of_head = |head: usize| (head * len..(head + 1) * len).filter_map(row).collect();
        (0..lse.len() / len.max(1)).map(of_head).collect()
    }
}

/// Maps of all heads, the largest weight in each cell, of some rows and all keys.
#[derive(Clone, Debug)]
pub struct CellMaps {
    rows: Range<usize>,
    keys: usize,
    /// Down and across.
    cells: [usize; 2],
    /// `[heads, down, across]`
    values: Vec<f32>,
}

impl CellMaps {
    /// Of the call that `plan` is of, in at most `cells` cells down and across.
    #[must_use]
    pub fn new(plan: &Plan<'_, f32>, rows: Range<usize>, cells: [usize; 2]) -> Self {
        let Dims { heads, k_len, .. } = plan.problem().dims();
        let cells = [cells[0].min(rows.len()), cells[1].min(k_len)];
        Self { rows, keys: k_len, cells, values: vec![0.0; heads.q * cells[0] * cells[1]] }
    }

    /// Adds some keys of the second pass.
    pub fn add(
        &mut self,
        rows: &BlockedRows<'_>,
        keys: Range<usize>,
        k: &[f32],
    ) -> Result<(), Error> {
        let (own, first) = (rows.rows(), [rows.rows.start, keys.start]);
        let start = self.rows.start.clamp(own.start, own.end);
        let seen = start - own.start..self.rows.end.clamp(start, own.end) - own.start;
        if seen.is_empty() {
            return Ok(());
        }
        let (map, cells) = (self.rows.clone(), self.cells);
        let measure =
            Measure::new().part_of_map(MapPart { rows: map, keys: 0..self.keys, first, cells });
        let Some(found) = rows.measure(&measure, (keys, seen), k)? else { return Ok(()) };
        let [down, across] = self.cells;
        for (head, ([top, left], part)) in found.parts.iter().enumerate() {
            for (i, row) in part.values.chunks(part.cols).enumerate() {
                let to = &mut self.values[(head * down + top + i) * across + left..][..part.cols];
                larger(to, row);
            }
        }
        Ok(())
    }

    /// Adds what others have found in the same cells.
    pub fn merge(&mut self, values: &[f32]) -> Result<(), Error> {
        let (needed, found) = (self.values.len(), values.len());
        if needed != found {
            return Err(regard::Error::DataLength { needed, found }.into());
        }
        larger(&mut self.values, values);
        Ok(())
    }

    /// Cells down and across.
    #[must_use]
    pub fn cells(&self) -> [usize; 2] {
        self.cells
    }

    /// `[heads, down, across]`
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// The larger ones; a NaN stays.
fn larger(to: &mut [f32], values: &[f32]) {
    to.iter_mut()
        .zip(values)
        .filter(|(to, x)| x.is_nan() || **x > **to)
        .for_each(|(to, x)| *to = *x);
}
