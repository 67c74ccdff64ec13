//! A problem in parts, for several processes: some of the rows, or some of the keys, computed as the whole would compute them.
//!
//! Cost of a part: that of its rows and keys. A [`Partial`] has `v_dim + 4` numbers for each row.

use super::forward::Outputs;
use super::{Core, ItemClass, PART_KEYS, Plan, Schedule};
use crate::description::normalizer::Selection;
use crate::description::problem::{Dims, Problem};
use crate::error::Error;
use crate::kernel::block_loop::{Call, Tiling};
use crate::kernel::forward::{STATE, Stage};
use crate::kernel::softmax::State;
use crate::machine::memory::filled;
use crate::machine::simd::{Element, Number};
use crate::plan::output::Output;
use crate::tensor::view::{Shape, View, ViewMut};
use std::ops::Range;

/// The softmax of rows over some of their keys, not divided yet: for each row the weighted sum of values, and the state that
/// says relative to what it is weighted. Those of disjoint keys become one, and [`Plan::finish`] makes an [`Output`] of them.
///
/// Where a plan splits keys into parts, there is one state for each, in the order of the keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial<N: Number> {
    /// Of the output.
    shape: Shape,
    /// `[parts, batch, heads.q, q_len, v_dim + STATE]`
    data: Vec<N>,
}

impl<N: Number> Partial<N> {
    /// The numbers, to be sent to another process: see [`Plan::partial`]. Those of later keys may be appended.
    #[must_use]
    pub fn data(&self) -> &[N] {
        &self.data
    }

    /// Numbers of one part.
    fn each(&self) -> usize {
        let Shape { batch, heads, len, dim } = self.shape;
        batch * heads * len * (dim + STATE)
    }

    /// Adds other keys of the same rows; what is left is one part. The same bits for the same order of merges; another order differs
    /// by rounding.
    #[inline(never)]
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        self.shape.unless_same("the first part", "another part", other.shape)?;
        let (each, width) = (self.each(), self.shape.dim + STATE);
        if each == 0 || other.data.is_empty() {
            return Ok(());
        }
        if self.data.is_empty() {
            self.data.extend(&other.data[..each]);
        } else {
            let rest = self.data.split_off(each);
            rest.chunks_exact(each).for_each(|part| merge_rows(&mut self.data, part, width));
            merge_rows(&mut self.data, &other.data[..each], width);
        }
        for part in other.data[each..].chunks_exact(each) {
            merge_rows(&mut self.data, part, width);
        }
        Ok(())
    }
}

/// Adds the rows of a part, each `width` wide, its state last.
fn merge_rows<N: Number>(to: &mut [N], part: &[N], width: usize) {
    let state = |row: &[N]| {
        let [max, sum, sum_x_log, true_max] = [0, 1, 2, 3].map(|i| row[width - STATE + i]);
        State { max, sum, sum_x_log, true_max }
    };
    for (to, part) in to.chunks_exact_mut(width).zip(part.chunks_exact(width)) {
        let (merged, mine, theirs) = state(to).merge(state(part));
        let (sums, columns) = to.split_at_mut(width - STATE);
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum = *sum * mine + *x * theirs);
        let State { max, sum, sum_x_log, true_max } = merged;
        columns.copy_from_slice(&[max, sum, sum_x_log, true_max]);
    }
}

impl<'a, E: Element> Plan<'a, E> {
    /// Rows can be cut at multiples of this: the rows of a tile, whose results may depend on each other in their last bits.
    #[must_use]
    pub fn row_step(&self) -> usize {
        self.core().steps()[0]
    }

    /// Keys can be cut at multiples of this: the keys of a part, if keys are split into parts (at most 128 rows and at least 8192
    /// keys), or else 1.
    #[must_use]
    pub fn key_step(&self) -> usize {
        self.core().steps()[1]
    }

    /// The plan of some rows and keys of this problem, which keep their positions: for a process that has the rows `rows` of q, and
    /// the rows `keys` of k and v. They are computed in the same way as by this plan, so
    ///
    /// * over all keys, `forward` gives the bits of these rows of the whole;
    /// * where keys are split into parts, [`forward_partial`](Self::forward_partial) of all of them, appended in the order of the keys,
    ///   and [`finish`](Self::finish) give the bits of the whole; elsewhere parts of the keys give the same up to rounding.
    ///
    /// Refuses ranges that begin or end elsewhere than at a multiple of [`row_step`](Self::row_step) and
    /// [`key_step`](Self::key_step), or at the end; normalizers other than the softmax; dropout, local windows, custom scores and biases of single
    /// positions; and packed or cached sequences.
    ///
    /// ```
    /// use regard::{Machine, Mask, Plan, Problem, View};
    /// let data: Vec<f32> = (0..256 * 8).map(|i| (i as f32 * 0.37).sin()).collect();
    /// let x = View::matrix(&data, [256, 8])?;
    /// let plan = Plan::new(Problem::new(&x, &x, &x).mask(Mask::causal()), Machine::detect())?;
    /// let whole = plan.forward(x, x, x)?;
    /// let cut = plan.row_step();
    /// let q = View::matrix(&data[cut * 8..], [256 - cut, 8])?;
    /// let rows = plan.part(cut..256, 0..256)?.forward(q, x, x)?;
    /// assert_eq!(rows.out.data(), &whole.out.data()[cut * 8..]);
    /// # Ok::<(), regard::Error>(())
    /// ```
    pub fn part(&self, rows: Range<usize>, keys: Range<usize>) -> Result<Self, Error> {
        let problem = self.problem().part(&rows, &keys)?;
        let Dims { q_len, k_len, .. } = self.problem().dims();
        let [row_step, key_step] = self.core().steps();
        for (axis, range, len, multiple) in
            [("rows", rows, q_len, row_step), ("keys", keys, k_len, key_step)]
        {
            Error::unless_below(axis, range.end, len.saturating_add(1))?;
            Error::unless_below(axis, range.start, range.end.saturating_add(1))?;
            let inside = |at: &usize| *at != len && !at.is_multiple_of(multiple);
            if let Some(at) = [range.start, range.end].into_iter().find(inside) {
                return Err(Error::PartBorder { axis, at, multiple });
            }
        }
        Ok(Self { core: self.core().for_part(problem.erase()), problem })
    }

    /// Numbers of a [`Partial`] that [`forward_partial`](Self::forward_partial) returns.
    #[must_use]
    pub fn partial_len(&self) -> usize {
        self.core().partial_sizes().iter().product()
    }

    /// Attention over the keys of this plan that is not finished, because others have more of them: see [`part`](Self::part).
    #[inline(never)]
    pub fn forward_partial(
        &self,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Partial<E::Num>, Error> {
        self.problem().check_parts()?;
        let (q, k, v) = (q.erase(), k.erase(), v.erase());
        let core = self.core();
        core.check_inputs(&q, &k, &v)?;
        let data = match core.with_projected_keys(&k)? {
            Some((core, keys)) => core.partial(core.call(q, keys.view(), v)),
            None => core.partial(core.call(q, k, v)),
        }?;
        Ok(Partial { shape: self.problem().dims().out_shape(), data })
    }

    /// The numbers of one or more partial results of the rows of this plan, as [`Partial::data`] gave them, in the order of their keys.
    /// None at all are rows that see nothing.
    pub fn partial(&self, data: Vec<E::Num>) -> Result<Partial<E::Num>, Error> {
        let partial = Partial { shape: self.problem().dims().out_shape(), data };
        let (each, found) = (partial.each().max(1), partial.data.len());
        if found.is_multiple_of(each) {
            return Ok(partial);
        }
        let expected = (found.next_multiple_of(each), "rows x (features of a value + 4) x parts");
        Err(Error::Count { option: "partial", expected, found })
    }

    /// Merges the parts in order and divides: the output of all their keys. Of `q` only the layout is used.
    #[inline(never)]
    pub fn finish(&self, q: View<'_, E>, partial: &Partial<E::Num>) -> Result<Output<E>, Error> {
        self.problem().check_parts()?;
        let (core, q) = (self.core(), q.erase());
        core.check_tensors(&[&q])?;
        core.problem().dims().out_shape().unless_same("the plan", "the partial", partial.shape)?;
        // No key is read any more.
        Self::output_of(core, core.call(q, q, q), Some(partial))
    }
}

impl<'a, N: Number> Core<'a, N> {
    /// Where rows and keys can be cut without changing how they are computed. All items alike.
    fn steps(&self) -> [usize; 2] {
        let Some(class) = self.classes.first() else { return [1; 2] };
        let Schedule { rows, parted, diagonal, .. } = class.schedule;
        let stride = self.diagonal.as_ref().filter(|_| diagonal).map_or(1, |(stride, _)| *stride);
        [rows.saturating_mul(stride), if parted { PART_KEYS } else { 1 }]
    }

    /// The same way for some rows and keys of the problem: with the schedule of the whole.
    fn for_part(&self, problem: Problem<'a, N>) -> Self {
        let k_len = problem.dims().k_len;
        let class = |class: &ItemClass| {
            let parts = if class.schedule.parted { k_len.div_ceil(PART_KEYS) } else { 1 };
            ItemClass { schedule: class.schedule, items: None, parts }
        };
        let classes = self.classes.iter().map(class).collect();
        let diagonal = problem.mask.diagonal();
        Self { classes, diagonal, ..self.with_problem(problem) }
    }

    /// The sizes of a partial result: parts, heads of all items, rows, columns.
    fn partial_sizes(&self) -> [usize; 4] {
        let Dims { batch, heads, q_len, k_len, v_dim, .. } = self.problem.dims();
        let parts = if k_len == 0 { 0 } else { self.classes.first().map_or(0, |c| c.parts) };
        [parts, batch * heads.q, q_len, v_dim + STATE]
    }

    /// Computes all stages that pass over keys, and leaves what they found: `[parts, batch, heads.q, q_len, v_dim + STATE]`.
    fn partial(&self, call: Call<'_, N>) -> Result<Vec<N>, Error> {
        let Dims { batch, heads, .. } = self.problem.dims();
        let [parts, all_heads, q_len, width] = self.partial_sizes();
        let mut data = filled(N::zero(), &[parts, all_heads, q_len, width])?;
        if data.is_empty() {
            return Ok(data);
        }
        let view = ViewMut::bhsd(&mut data, [batch, parts * heads.q, q_len, width])?;
        for class in &self.classes {
            let over_keys = self.stages(class).filter(|(_, stage)| stage.keys.is_some());
            let mut left =
                over_keys.map(|(tiling, stage)| (tiling, Stage { into: Some(0), ..stage }));
            self.run_stages(class, call, &mut left, None, Some(&view));
        }
        transposed(data, [batch, parts], heads.q * q_len * width)
    }

    /// Merges partial results in order, and divides.
    pub(super) fn finish_partial(
        &self,
        call: Call<'_, N>,
        partial: &Partial<N>,
        to: &Outputs<'_, N>,
    ) -> Result<Option<Selection<N>>, Error> {
        let Dims { batch, heads, q_len, v_dim, .. } = self.problem.dims();
        let each = partial.each();
        let Some(class) = self.classes.first().filter(|_| batch * heads.q * q_len > 0) else {
            return Ok(None);
        };
        let parts = partial.data.len() / each;
        let mut data = transposed(partial.data.clone(), [parts, batch], each / batch)?;
        let view = ViewMut::bhsd(&mut data, [batch, parts * heads.q, q_len, v_dim + STATE])?;
        let schedule = Schedule { tiles: None, ..class.schedule };
        let class = ItemClass { schedule, items: None, parts };
        let tiling = Tiling { rows: schedule.rows, ..self.tiling(1) };
        let merge = (tiling, Stage { from: 0..parts, keys: None, into: None });
        self.run_stages(&class, call, &mut std::iter::once(merge), Some(to), Some(&view));
        Ok(None)
    }
}

/// `[a, b, each]` as `[b, a, each]`.
fn transposed<N: Number>(data: Vec<N>, [a, b]: [usize; 2], each: usize) -> Result<Vec<N>, Error> {
    if a <= 1 || b <= 1 {
        return Ok(data);
    }
    let mut to = filled(N::zero(), &[data.len()])?;
    for (i, from) in data.chunks_exact(each).enumerate() {
        to[(i % b * a + i / b) * each..][..each].copy_from_slice(from);
    }
    Ok(to)
}
