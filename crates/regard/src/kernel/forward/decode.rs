//! Decoding: few rows, many keys. Features stand in the vectors here, and all query heads that one key head serves are done
//! together, so that every key and value comes from memory once, is widened in registers, and is used for all of them.
//!
//! Cost: the time to read keys and values. What a mask or a score makes of a tile is the same code as for many rows; only the two
//! products differ: on vectors (`decode_vectors.rs`), which reads those in 8 bits too, or on AMX (`decode_amx.rs`).

use super::Forward;
use super::decode_vectors::{PARTIAL, ROWS};
use crate::description::mask::Run;
use crate::description::problem::Problem;
use crate::kernel::amx::{AmxDecodeScratch, Sizes};
use crate::kernel::block_loop::{
    Call, DECODE_MAX_ROWS, KeyRange, apply_mask, mask_within, prefetch_row,
};
use crate::kernel::key_blocks::{KeyBlock, KeyBlocks, SparseKey};
use crate::kernel::lanes::multiply_tile;
use crate::kernel::micro::RowBuffer;
use crate::kernel::softmax::{SoftmaxTile, State, States, exp_and_sum_row, update_max};
use crate::machine::simd::{Any, Element, GROUP, Isa, Lanes, Number, Simd, Visitor, leaf, map_any};
use crate::tensor::cache::{CodeRows, QuantizedHead};
use crate::tensor::index::{At, BLOCK_KEYS, HeadRows, Keys, RowMask, Scope, Span, lane_range};
use crate::tensor::source::{Head, Heads, KvHead};
use crate::tensor::view::{Rows, RowsOf};
use half::{bf16, f16};
use std::ops::Range;

/// Memory of one thread.
#[derive(Debug)]
pub(crate) struct DecodeScratch<N> {
    rows: DecodeRows<N>,
    /// Query heads of a task.
    heads: usize,
    /// The visible keys, a lane for each row of each head.
    runs: Vec<Run>,
    sparse: Vec<SparseKey>,
    /// Rows that are weighed together: those of one head, or all, if no option tells heads apart.
    head_groups: Vec<HeadGroup<N>>,
    /// Dot products of a block: those of a key side by side, [`DecodeRows::width`] from one key to the next. Those of lanes without a
    /// row are 0: such a lane is computed beside the others, and large numbers in it would take all of them to the slow path.
    dots: Vec<N>,
    /// Their weights in the same order, gathered from several head groups.
    weights: Vec<Lanes<N>>,
    factors: Vec<Lanes<N>>,
    /// Rows of a block that lie in two pages.
    copies: [Copies<N>; 2],
    /// For products on tiles.
    pub(crate) amx: Option<AmxDecodeScratch>,
}

/// The rows of a task, head by head.
#[derive(Debug)]
pub(crate) struct DecodeRows<N> {
    pub(crate) q: RowBuffer<N>,
    /// The same for products on vectors: a row for four of them, 16 features of each side by side.
    pub(crate) q_parts: RowBuffer<N>,
    pub(crate) sums: RowBuffer<N>,
    pub(crate) count: usize,
    /// Lanes of a key: 1, or a power of two from [`ROWS`] to [`DECODE_MAX_ROWS`].
    pub(crate) width: usize,
}

/// The rows of a task, of the first of its heads, and the keys that they pass over.
struct Pass<'t, N: Number> {
    call: &'t Call<'t, N>,
    rows: HeadRows,
    key_range: &'t KeyRange<'t>,
}

/// The two products, on vectors or on AMX.
pub(crate) trait Products<N: Number> {
    /// The task has these rows; their scores are the dot products times `factor`.
    fn start(&mut self, rows: &mut DecodeRows<N>, factor: N);

    /// `to[key][row] = factor * keys[key] . q[row]`, while the rows of `soon` are asked for.
    fn dots(
        &mut self,
        isa: Isa,
        rows: &DecodeRows<N>,
        keys: BlockRows<'_, N>,
        next_rows: BlockRows<'_, N>,
        to: &mut [N],
    );

    /// Adds the values, times their weights, to the sums of the rows.
    fn add(&mut self, isa: Isa, rows: &mut DecodeRows<N>, work: Weighted<'_, N>);

    /// All is added; the sums belong into `rows`. False if the pass must be taken once more.
    fn finish(&mut self, rows: &mut DecodeRows<N>) -> bool;
}

/// Values of a block, and what they are multiplied by.
pub(crate) struct Weighted<'t, N: Number> {
    pub(crate) values: BlockRows<'t, N>,
    /// Rows that are needed next.
    pub(crate) next_rows: BlockRows<'t, N>,
    /// `[key][row]`, see [`weights_from`].
    pub(crate) weights: &'t [Lanes<N>],
    /// Which rows see each key, unless all see all of them: a key that a row does not see is left out of its sum.
    pub(crate) visible: Option<&'t [RowMask]>,
    /// What the sums so far are multiplied by.
    pub(crate) rescale: &'t [N; DECODE_MAX_ROWS],
}

/// Rows that are weighed together.
///
/// Where no option asks for more, several keys stand side by side, so that the lanes are full: all lanes of a row have the
/// same `max`. The weights of a row are added up in four classes, keys 0, 4, ..., 1, 5, ..., and each class by halves, key i and
/// i + 32, i + 16, i + 8, i + 4: that order is the same however many rows there are.
#[derive(Debug)]
struct HeadGroup<N> {
    /// Its query heads, counted from the first of the task.
    heads: Range<usize>,
    states: States<N>,
    /// Scores, then weights, of a block, `[keys][lanes]`.
    tile: Vec<Lanes<N>>,
    visible: [RowMask; BLOCK_KEYS],
    /// Whether some rows do not see some keys of the block.
    hidden: bool,
    /// Whether any row sees any.
    any: bool,
    /// What the sums so far are multiplied by.
    rescale: Lanes<N>,
    /// Lanes from one key to the next: [`GROUP`] for one key at a time.
    width: usize,
}

impl<N: Number> DecodeScratch<N> {
    /// For tasks of so many query heads.
    pub(crate) fn new(problem: &Problem<'_, N>, served: usize, tiles: Option<Sizes>) -> Self {
        let dims = problem.dims();
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        let head_group = |heads| HeadGroup {
            heads,
            states: States::empty(),
            tile: zeros(BLOCK_KEYS),
            visible: [0; BLOCK_KEYS],
            hidden: false,
            any: false,
            rescale: Lanes([N::one(); GROUP]),
            width: GROUP,
        };
        let each = if problem.treats_rows_alike() { served } else { 1 };
        let head_groups = (0..served).step_by(each.max(1)).map(|h| head_group(h..h + each));
        let q = RowBuffer::new(DECODE_MAX_ROWS, dims.qk_dim);
        let parts = dims.qk_dim.div_ceil(PARTIAL) * PARTIAL;
        let q_parts = RowBuffer::new(DECODE_MAX_ROWS / ROWS, ROWS * parts);
        let sums = RowBuffer::new(DECODE_MAX_ROWS, dims.v_dim);
        Self {
            rows: DecodeRows { q, q_parts, sums, count: 0, width: 1 },
            heads: served,
            runs: Vec::new(),
            sparse: Vec::new(),
            head_groups: head_groups.collect(),
            dots: vec![N::zero(); BLOCK_KEYS * DECODE_MAX_ROWS],
            weights: zeros(BLOCK_KEYS / GROUP * DECODE_MAX_ROWS),
            factors: zeros(if problem.has_factors() { BLOCK_KEYS } else { 0 }),
            copies: [Copies::default(), Copies::default()],
            amx: tiles.map(AmxDecodeScratch::new),
        }
    }
}

/// The weights `[key][row]` from this one on: those of a key lie side by side.
#[inline(always)]
pub(crate) fn weights_from<N>(weights: &[Lanes<N>], first: usize) -> &[N] {
    &weights[first / GROUP].0[first % GROUP..]
}

/// Sums that the weights of a row are kept in: keys that stand side by side for [`DECODE_MAX_ROWS`] rows.
const CLASSES: usize = GROUP / DECODE_MAX_ROWS;

impl<N: Number> Forward<'_, '_, N> {
    /// The rows of some heads that one key head serves, over the keys of the way.
    pub(crate) fn decode(&mut self, isa: Isa, products: &mut impl Products<N>) {
        let Self { call, scope, rows, .. } = *self;
        let Some(mut scratch) = self.scratch.decode.take() else { return };
        if let Some(key_range) = &self.stage.keys {
            let pass = Pass { call: &call, rows: HeadRows { scope, rows }, key_range };
            for _ in 0..2 {
                scratch.start(&pass);
                products.start(&mut scratch.rows, N::from_f64(call.problem.query_factor()));
                let block = &mut self.scratch.block_loop.block;
                scratch.block_loop(isa, &pass, block, products);
                if products.finish(&mut scratch.rows) {
                    break;
                }
            }
        }
        let v_dim = call.problem.dims().v_dim;
        for head_group in &scratch.head_groups {
            for (at, h) in head_group.heads.clone().enumerate() {
                self.part = h;
                self.scope.head = scope.head + h;
                for i in 0..rows.count {
                    let state = head_group.state(at * rows.count + i);
                    let sums = &scratch.rows.sums.row(h * rows.count + i)[..v_dim];
                    self.put_row(isa, i, state, sums);
                }
            }
        }
        self.scratch.decode = Some(scratch);
    }
}

impl<N: Number> DecodeScratch<N> {
    fn start(&mut self, pass: &Pass<'_, N>) {
        let Pass { call, rows: HeadRows { scope, rows }, key_range } = *pass;
        let before = (self.rows.count, self.rows.width);
        self.rows.count = self.heads * rows.count;
        self.rows.width = match self.rows.count {
            0 | 1 => 1,
            count => count.next_power_of_two().max(ROWS),
        };
        (0..self.rows.count.next_multiple_of(ROWS).min(DECODE_MAX_ROWS))
            .for_each(|row| self.rows.sums.row_mut(row).fill(N::zero()));
        if before != (self.rows.count, self.rows.width) {
            self.dots.fill(N::zero());
        }
        for head_group in &mut self.head_groups {
            head_group.states.clear();
            head_group.width =
                if call.problem.treats_rows_alike() { self.rows.width } else { GROUP };
        }
        for h in 0..self.heads {
            let q = call.queries(scope.batch, scope.head + h);
            for i in 0..rows.count {
                let to = self.rows.q.row_mut(h * rows.count + i);
                N::visit(q, WidenRow { row: rows.row(i), to });
            }
        }
        // Heads that the mask tells apart are in tasks of their own.
        key_range.mask.runs_beyond(key_range.without, &scope, rows, &mut self.runs);
        // A bit for each head, so that the product has the lanes of all.
        let copies = (0..self.heads).fold(0, |set, h| set | 1 << (h * rows.count));
        self.runs.iter_mut().for_each(|run| run.lanes *= copies);
    }

    /// All blocks that any head sees, keys ascending.
    fn block_loop(
        &mut self,
        isa: Isa,
        pass: &Pass<'_, N>,
        block: &mut KeyBlock,
        products: &mut impl Products<N>,
    ) {
        let Pass { call, rows: HeadRows { scope, rows }, key_range } = *pass;
        let (k, v) = call.keys_and_values(scope);
        let range = key_range.keys.start..key_range.keys.end.min(scope.k_len);
        let [mut key_copies, mut value_copies] = std::mem::take(&mut self.copies);
        let (runs, mut sparse) = (std::mem::take(&mut self.runs), std::mem::take(&mut self.sparse));
        let all = lane_range(0, self.rows.count);
        let mut blocks = KeyBlocks::new(&runs, range.clone(), all, &mut sparse);
        while blocks.next(block) {
            let n = block.len;
            // What is needed next: memory must not rest while the vectors are busy.
            let next = match block.keys() {
                Keys::From(first) => {
                    let after = first + n;
                    next_of(k, after..after + n.min(range.end - after))
                }
                Keys::Gathered(keys) => {
                    for key in keys {
                        prefetch_row(k, *key);
                        prefetch_row(v, *key);
                    }
                    BlockRows::none()
                }
            };
            let keys = rows_of(k, block, &mut key_copies);
            let values = rows_of(v, block, &mut value_copies);
            products.dots(isa, &self.rows, keys, values, &mut self.dots);
            for b in 0..self.head_groups.len() {
                self.head_groups[b].look(block, rows.count);
                self.exp_and_sum(isa, call.problem, HeadRows { scope, rows }, b, block);
            }
            let mut rescale = [N::one(); DECODE_MAX_ROWS];
            let mut visible = [RowMask::MAX; BLOCK_KEYS];
            let hidden = self.gather(rows.count, n, &mut rescale, &mut visible);
            let weights = match &self.head_groups[..] {
                [one] if one.spreads() => &one.tile,
                _ => &self.weights,
            };
            let (rescale, visible) = (&rescale, hidden.then_some(&visible[..n]));
            let work = Weighted { values, next_rows: next, weights, visible, rescale };
            products.add(isa, &mut self.rows, work);
        }
        (self.runs, self.sparse) = (runs, sparse);
        self.copies = [key_copies, value_copies];
    }

    /// The weights of all head groups side by side, what their sums are multiplied by and, if that is not all, what they see.
    fn gather(
        &mut self,
        each: usize,
        n: usize,
        rescale: &mut [N; DECODE_MAX_ROWS],
        visible: &mut [RowMask; BLOCK_KEYS],
    ) -> bool {
        let (width, mut hidden) = (self.rows.width, false);
        for head_group in &self.head_groups {
            let (first, count) = (head_group.heads.start * each, head_group.heads.len() * each);
            rescale[first..first + count].copy_from_slice(&head_group.rescale.0[..count]);
            if !head_group.spreads() {
                let keys = self.weights.iter_mut().flat_map(|keys| keys.0.chunks_exact_mut(width));
                for (to, weights) in keys.zip(&head_group.tile[..n]) {
                    let to = &mut to[first..first + count];
                    match head_group.any {
                        true => to.copy_from_slice(&weights.0[..count]),
                        false => to.fill(N::zero()),
                    }
                }
            }
            if !head_group.any || head_group.hidden {
                hidden = true;
                let lanes = Span::first(count).set();
                for (visible, own) in visible.iter_mut().zip(&head_group.visible[..n]) {
                    let row_mask = if head_group.any { *own } else { 0 };
                    *visible &= !((!row_mask & lanes) << first);
                }
            }
        }
        hidden
    }

    /// From dot products to the weights of head group `b` for a block of keys.
    fn exp_and_sum(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        HeadRows { scope, rows }: HeadRows,
        b: usize,
        block: &KeyBlock,
    ) {
        let n = block.len;
        let Self { head_groups, dots, factors, .. } = self;
        let head_group = &mut head_groups[b];
        head_group.rescale = Lanes([N::one(); GROUP]);
        if !head_group.any {
            return;
        }
        let (from, count) =
            (head_group.heads.start * rows.count, head_group.heads.len() * rows.count);
        let width = self.rows.width;
        let spread = head_group.spreads();
        let span = Span::first(if spread { GROUP } else { count });
        // Rows of the tile; lanes without a key count as hidden.
        let used = if spread { (n * width).div_ceil(GROUP) } else { n };
        let hides = match spread {
            true => head_group.hidden || n * width < used * GROUP,
            false => head_group.hidden || problem.may_hide(),
        };
        let mut visible = [0; BLOCK_KEYS];
        if hides {
            head_group.spread_mask(n, &mut visible);
        }
        let scope = Scope { head: scope.head + head_group.heads.start, ..scope };
        let at = At { scope, rows, span, keys: block.keys() };
        if spread {
            let visible = if hides { &mut visible[..used] } else { &mut [] };
            return head_group.weigh_spread(isa, dots, visible, used);
        }
        let HeadGroup { states, tile, .. } = &mut *head_group;
        let softmax_tile = SoftmaxTile { lanes: &mut tile[..n], keys: n, span };
        let rescale = states.weigh(isa, softmax_tile, problem.entropy, |tile| {
            for (to, dots) in tile.iter_mut().zip(dots.chunks_exact(width)) {
                to.0[..count].copy_from_slice(&dots[from..from + count]);
            }
            problem.apply(isa, at, tile, None);
            if hides {
                apply_mask(isa, tile, &mut visible[..n], span);
            }
        });
        if let Some(rescale) = rescale {
            head_group.rescale = rescale;
        }
        if hides {
            // A bias may have hidden more.
            (head_group.hidden, head_group.visible) = (true, visible);
        }
        if problem.has_factors() {
            problem.factors(isa, at, &mut factors[..n]);
            multiply_tile(isa, &mut head_group.tile[..n], factors, span);
        }
    }
}

leaf! {
    /// From dot products to weights, while `max` is current, and their sums to the states. False if it is not; then nothing is added,
    /// and `sums` holds the sums, or is infinite in lanes whose `max` is not set yet. Without `sums` they are added whatever they are.
    fn spread_step<'t, N>(
        s: S,
        group: &'t mut HeadGroup<N>,
        dots: &'t [N],
        visible: &'t mut [RowMask],
        used: usize,
        sums: Option<&'t mut Lanes<N>>,
    ) -> bool {
        let HeadGroup { states, tile, width, .. } = group;
        let (tile, span) = (&mut tile[..used], Span::first(GROUP));
        let mut sums = sums;
        if let Some(sums) = &mut sums
            && !states.max_is_set(span)
        {
            **sums = states.infinite_where_empty();
            return false;
        }
        for (to, dots) in tile.iter_mut().zip(dots.chunks_exact(GROUP)) {
            to.0.copy_from_slice(dots);
        }
        if !visible.is_empty() {
            mask_within(s, tile, visible, span);
        }
        for lane in span.vectors::<N, S>() {
            let (max, mut sum) = (s.load(&states.max.0[lane..]), s.splat(N::zero()));
            for row in tile.iter_mut() {
                exp_and_sum_row(s, &mut row.0[lane..], max, &mut sum);
            }
        }
        let found = sum_of_classes(s, tile, *width);
        match sums {
            Some(sums) => {
                *sums = found;
                states.add_sums(s, sums, span, false)
            }
            None => states.add_sums(s, &found, span, true),
        }
    }
}

/// The sums of the four classes of each row, in its first lanes; the others are 0.
#[inline(always)]
fn sum_of_classes<N: Number, S: Simd<N>>(s: S, tile: &[Lanes<N>], width: usize) -> Lanes<N> {
    let mut sums = Lanes([N::zero(); GROUP]);
    for lane in (0..GROUP).step_by(S::LANES) {
        let mut rows = [s.splat(N::zero()); DECODE_MAX_ROWS];
        for (to, row) in rows.iter_mut().zip(tile) {
            *to = s.load(&row.0[lane..]);
        }
        let mut half = width / 2;
        while half > 0 {
            for i in 0..half {
                rows[i] = s.add(rows[i], rows[i + half]);
            }
            half /= 2;
        }
        s.store(rows[0], &mut sums.0[lane..]);
    }
    let mut half = GROUP / 2;
    while half >= CLASSES * width {
        let (first, second) = sums.0.split_at_mut(half);
        for (to, x) in first.iter_mut().zip(&mut *second) {
            (*to, *x) = (*to + *x, N::zero());
        }
        half /= 2;
    }
    sums
}

impl<N: Number> HeadGroup<N> {
    /// Whether several keys stand side by side in the lanes. It is the only one then.
    fn spreads(&self) -> bool {
        self.width < GROUP
    }

    /// What its rows see of a block.
    fn look(&mut self, block: &KeyBlock, each: usize) {
        let first = self.heads.start * each;
        let everyone = Span::first(self.heads.len() * each).set();
        let visible = &mut self.visible[..block.len];
        if block.full {
            visible.fill(everyone);
            (self.any, self.hidden) = (true, false);
            return;
        }
        #[expect(clippy::cast_possible_truncation, reason = "few rows")]
        for (visible, lanes) in visible.iter_mut().zip(&block.lanes) {
            *visible = (lanes >> first) as RowMask & everyone;
        }
        self.any = visible.iter().any(|visible| *visible != 0);
        self.hidden = visible.iter().any(|visible| *visible != everyone);
    }

    /// Which lanes see their keys, where several keys stand side by side.
    fn spread_mask(&self, n: usize, to: &mut [RowMask; BLOCK_KEYS]) {
        for (key, visible) in self.visible[..n].iter().enumerate() {
            let lane = key * self.width;
            to[lane / GROUP] |= visible << (lane % GROUP);
        }
    }

    /// The softmax of a block where several keys stand side by side; see `States::weigh`. `visible` is empty if all is visible.
    fn weigh_spread(&mut self, isa: Isa, dots: &[N], visible: &mut [RowMask], used: usize) {
        let mut sums = Lanes([N::zero(); GROUP]);
        if self.states.max_is_stale {
            sums = self.states.infinite_where_empty();
        } else if spread_step(isa, self, dots, visible, used, Some(&mut sums)) {
            return;
        }
        let Self { states, tile, rescale, width, .. } = self;
        for (to, dots) in tile[..used].iter_mut().zip(dots.chunks_exact(GROUP)) {
            to.0.copy_from_slice(dots);
        }
        if !visible.is_empty() {
            apply_mask(isa, &mut tile[..used], visible, Span::first(GROUP));
        }
        // The same `max` in all lanes of a row.
        let mut top = tile[0];
        for row in &tile[1..used] {
            top.0.iter_mut().zip(&row.0).for_each(|(top, x)| *top = top.max(*x));
        }
        for lanes in [&mut top, &mut sums] {
            let mut half = GROUP / 2;
            while half >= *width {
                let (first, second) = lanes.0.split_at_mut(half);
                first.iter_mut().zip(second).for_each(|(to, x)| *to = to.max(*x));
                half /= 2;
            }
            (*width..GROUP).for_each(|lane| lanes.0[lane] = lanes.0[lane - *width]);
        }
        update_max(isa, states, &[top], &sums, Span::first(GROUP), rescale);
        spread_step(isa, self, dots, visible, used, None);
    }

    /// The state of a row: of all its lanes.
    fn state(&self, row: usize) -> State<N> {
        let mut state = self.states.get(row);
        for lane in (row + self.width..GROUP).step_by(self.width) {
            let State { sum, sum_x_log, true_max, .. } = self.states.get(lane);
            (state.sum, state.sum_x_log, state.true_max) =
                (state.sum + sum, state.sum_x_log + sum_x_log, state.true_max.max(true_max));
        }
        state
    }
}

/// Rows of elements of any type.
pub(crate) type AnyRows<'r, N> = Any<RowsOf<'r>, N>;

/// A row of a head, widened.
struct WidenRow<'t, N> {
    row: usize,
    to: &'t mut [N],
}

impl<'c, N: Number> Visitor<Heads<'c>, N> for WidenRow<'_, N> {
    type Out = ();
    fn visit<E: Element<Num = N>>(self, head: Head<'c, E>) {
        let row = head.row(self.row).iter().map(|x| x.widen());
        row.zip(self.to).for_each(|(x, to)| *to = x);
    }
}

/// Memory for rows of a block that do not lie side by side.
#[derive(Debug, Default)]
struct Copies<N> {
    own: Vec<N>,
    f16: Vec<f16>,
    bf16: Vec<bf16>,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

/// Rows of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BlockRows<'r, N: Number> {
    Elements(AnyRows<'r, N>),
    Codes(CodeRows<'r>),
}

impl<'r, N: Number> BlockRows<'r, N> {
    fn none() -> Self {
        Self::Elements(Any::Own(Rows::none()))
    }

    /// The rows, where nothing is in 8 bits.
    pub(crate) fn elements(self) -> AnyRows<'r, N> {
        match self {
            Self::Elements(rows) => rows,
            Self::Codes(_) => unreachable!("a plan for a cache in 8 bits uses vectors"),
        }
    }
}

/// Rows of a block: where they lie, or copied if they are gathered or lie in two pages.
#[inline(always)]
fn rows_of<'r, 'c: 'r, N: Number>(
    head: KvHead<'c, N>,
    block: &'r KeyBlock,
    copies: &'r mut Copies<N>,
) -> BlockRows<'r, N> {
    let head = match head {
        KvHead::Elements(head) => head,
        KvHead::Quantized(head) => {
            return BlockRows::Codes(copied_codes(head, block, copies));
        }
    };
    BlockRows::Elements(match head {
        Any::Own(head) => Any::Own(copied(head, block, &mut copies.own)),
        Any::F16(head) => Any::F16(copied(head, block, &mut copies.f16)),
        Any::Bf16(head) => Any::Bf16(copied(head, block, &mut copies.bf16)),
    })
}

/// The rows that come next, as far as they lie in one piece.
#[inline(always)]
fn next_of<'r, 'c: 'r, N: Number>(head: KvHead<'c, N>, rows: Range<usize>) -> BlockRows<'r, N> {
    let (first, len) = (rows.start, rows.len());
    match head {
        KvHead::Elements(head) => {
            let next = map_any!(head, head => head.run(first, len).unwrap_or(Rows::none()));
            BlockRows::Elements(next)
        }
        KvHead::Quantized(_) if rows.is_empty() => BlockRows::none(),
        KvHead::Quantized(head) => BlockRows::Codes(head.run(first, len)),
    }
}

#[inline(always)]
fn copied<'r, T: Copy>(head: Head<'r, T>, block: &KeyBlock, copy: &'r mut Vec<T>) -> Rows<'r, T> {
    let (keys, n) = (block.keys(), block.len);
    if let Keys::From(first) = keys
        && let Some(rows) = head.run(first, n)
    {
        return rows;
    }
    copy.clear();
    (0..n).for_each(|i| copy.extend_from_slice(head.row(keys.get(i))));
    Rows { data: copy, stride: head.dim(), len: n, dim: head.dim() }
}

#[inline(always)]
fn copied_codes<'r, 'c: 'r, N>(
    head: QuantizedHead<'c>,
    block: &KeyBlock,
    copies: &'r mut Copies<N>,
) -> CodeRows<'r> {
    let (keys, n) = (block.keys(), block.len);
    if let Keys::From(first) = keys {
        let rows = head.run(first, n);
        if rows.codes.len == n {
            return rows;
        }
    }
    let Copies { codes, scales, .. } = copies;
    codes.clear();
    scales.clear();
    for i in 0..n {
        let row = head.run(keys.get(i), 1);
        codes.extend_from_slice(row.codes.data);
        scales.extend_from_slice(row.scales);
    }
    let codes = Rows { data: codes, stride: head.dim, len: n, dim: head.dim };
    CodeRows { codes, scales, quantization: head.quantization }
}
