//! Running sums over keys or rows, the state of linear attention (Katharopoulos et al. 2020), and products with them.

use crate::kernel::micro::{Dots, RowBuffer, add_rows, add_values, dot_tile};
use crate::machine::simd::{GROUP, Isa, Lanes, Number};
use crate::tensor::index::{RowMask, Span};

/// Reference of an empty sum: 2 to this power is 0 relative to any other reference, and differences from it are finite.
fn nothing<N: Number>() -> N {
    N::min_value() / N::from_f64(4.0)
}

/// Sum of the outer products `features x payload` over keys or rows, divided by `2^reference`: `[features][payload]`.
///
/// The payload of a key is `[v, 1]`, so the last column is the sum of the features alone. The payload of a row is
/// `[d_out, -d_out . out] / l`, where `l` is the sum of its weights.
#[derive(Debug)]
pub(crate) struct Sums<N> {
    sums: RowBuffer<N>,
    pub(crate) reference: N,
    /// Number of features and length of the payload.
    size: [usize; 2],
}

/// Features and payload of the keys or rows of a chunk, in lanes and as rows.
#[derive(Debug)]
pub(crate) struct Pairs<N> {
    pub(crate) features: Vec<Lanes<N>>,
    pub(crate) payload: Vec<Lanes<N>>,
    pub(crate) feature_rows: RowBuffer<N>,
    pub(crate) payload_rows: RowBuffer<N>,
}

impl<N: Number> Pairs<N> {
    pub(crate) fn new([features, payload]: [usize; 2]) -> Self {
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        Self {
            features: zeros(features),
            payload: zeros(payload),
            feature_rows: RowBuffer::new(GROUP, features),
            payload_rows: RowBuffer::new(GROUP, payload),
        }
    }
}

/// `2^x` for an integer `x <= 0`.
fn power<N: Number>(x: N) -> N {
    if x < N::from_f64(-N::POWERS) { N::zero() } else { x.whole_power_of_two() }
}

/// Not derived: the aligned start of a `RowBuffer` differs between allocations.
impl<N: Number> Clone for Sums<N> {
    fn clone(&self) -> Self {
        let mut same = Self::new(self.size);
        same.add(self);
        same
    }
}

impl<N: Number> Sums<N> {
    /// The empty sum.
    pub(crate) fn new(size: [usize; 2]) -> Self {
        let sums = RowBuffer::new(size[0], size[1]);
        Self { sums, reference: nothing(), size }
    }

    /// Raises the reference to at least `to`, and rescales the sums.
    pub(crate) fn raise(&mut self, to: N) {
        if to > self.reference {
            let factor = power(self.reference - to);
            self.reference = to;
            if factor != N::one() {
                for i in 0..self.size[0] {
                    self.sums.row_mut(i).iter_mut().for_each(|x| *x = *x * factor);
                }
            }
        }
    }

    /// Factor that converts a number with this reference to the reference of the sums.
    pub(crate) fn factor(&self, reference: N) -> N {
        power(reference - self.reference)
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.raise(other.reference);
        let factor = self.factor(other.reference);
        for i in 0..self.size[0] {
            let (to, from) = (self.sums.row_mut(i), other.sums.row(i));
            to.iter_mut().zip(from).for_each(|(to, x)| *to = *to + *x * factor);
        }
    }

    /// Adds the pairs of a chunk, whose exponentials are relative to this reference. `all` holds the indices of all
    /// features.
    pub(crate) fn take(&mut self, isa: Isa, pairs: &Pairs<N>, span: Span, all: &[usize]) {
        let (tile, payload) = ((&pairs.features[..], &[][..]), &pairs.payload_rows);
        add_rows(isa, tile, (payload, span), None, (all, &mut self.sums));
    }

    /// Product of features with the sums, `[payload][lanes]`.
    pub(crate) fn payload(
        &self,
        isa: Isa,
        (features, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let zero = Lanes([N::zero(); GROUP]);
        to.fill(zero);
        let sums = self.sums.view(0..self.size[0], to.len());
        add_values(isa, (sums, &[]), (features, &[]), span, (&zero, to));
    }

    /// Product of payload with the transposed sums, `[features][lanes]`.
    pub(crate) fn features(
        &self,
        isa: Isa,
        (payload, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let sums = self.sums.view(0..to.len(), payload.len());
        dot_tile(isa, (sums, payload), span, to, &mut Dots);
    }
}

/// Pairs within a chunk, computed directly: each key (or row) in `pairs` is visible to the lanes in `visible`.
#[derive(Debug)]
pub(crate) struct IntraChunk<'t, N> {
    pub(crate) pairs: &'t Pairs<N>,
    pub(crate) visible: &'t [RowMask],
    pub(crate) tile: &'t mut [Lanes<N>],
}

impl<N: Number> IntraChunk<'_, N> {
    /// Adds the payload, weighted by the dot products of `features` with the features of the pairs.
    pub(crate) fn payload(
        &mut self,
        isa: Isa,
        (features, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let Pairs { feature_rows: by, payload_rows: what, .. } = self.pairs;
        self.add_visible(isa, [by, what], (features, span), to);
    }

    /// Adds the features, weighted by the dot products of `payload` with the payload of the pairs.
    pub(crate) fn features(
        &mut self,
        isa: Isa,
        (payload, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let Pairs { feature_rows: what, payload_rows: by, .. } = self.pairs;
        self.add_visible(isa, [by, what], (payload, span), to);
    }

    /// `to[..][lane] += sum over the visible pairs of (x[lane] . by) what`. Half of the pairs at a time: with a causal mask, one
    /// half is visible to half of the lanes only.
    fn add_visible(
        &mut self,
        isa: Isa,
        [by, what]: [&RowBuffer<N>; 2],
        (x, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        const HALF: usize = GROUP / 2;
        let one = Lanes([N::one(); GROUP]);
        for first in (0..self.visible.len()).step_by(HALF) {
            let half = first..(first + HALF).min(self.visible.len());
            let visible = &self.visible[half.clone()];
            let any = visible.iter().fold(0, |any, visible| any | visible);
            let start = if any.trailing_zeros() as usize >= HALF { HALF } else { 0 };
            let end = if any.leading_zeros() as usize >= HALF { HALF } else { GROUP };
            let span = Span { start, end: span.end.min(end) };
            if span.end <= span.start {
                continue;
            }
            let tile = &mut self.tile[half.clone()];
            dot_tile(isa, (by.view(half.clone(), x.len()), x), span, tile, &mut Dots);
            let what = what.view(half, to.len());
            add_values(isa, (what, &[]), (tile, visible), span, (&one, to));
        }
    }
}
