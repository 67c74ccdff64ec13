//! The sums that stand for all keys (or rows) seen so far, and what they answer.

use crate::index::{RowMask, Span};
use crate::micro::{Dots, RowBuffer, add_rows, add_values, dot_tile};
use crate::simd::{GROUP, Lanes, Number, Simd, Task};

/// The reference of sums of nothing: 2 to it is 0 beside any other, and differences from it are finite.
fn nothing<N: Number>() -> N {
    N::min_value() / N::from_f64(4.0)
}

/// The sum of `features x payload` over keys or rows, divided by `2^reference`: `[features][payload]`.
///
/// Of a key, the payload is its value and a 1, so the last column is the sum of the features alone. Of a row it is the gradient of
/// its output, and what the sum of its weights has to do with it.
#[derive(Debug)]
pub(crate) struct Sums<N> {
    sums: RowBuffer<N>,
    pub(crate) reference: N,
    /// Features and payload.
    size: [usize; 2],
}

/// Keys or rows of a chunk: features and payload, in lanes and as rows.
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

/// `2^x` for a whole number not above 0.
fn power<N: Number>(x: N) -> N {
    if x < N::from_f64(-N::POWERS) { N::zero() } else { x.whole_power_of_two() }
}

/// Field by field would not do: what is aligned in one place is not in another.
impl<N: Number> Clone for Sums<N> {
    fn clone(&self) -> Self {
        let mut same = Self::new(self.size);
        same.add(self);
        same
    }
}

impl<N: Number> Sums<N> {
    /// Of nothing.
    pub(crate) fn new(size: [usize; 2]) -> Self {
        let sums = RowBuffer::new(size[0], size[1]);
        Self { sums, reference: nothing(), size }
    }

    /// Makes the reference at least this.
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

    /// What a number with this reference is to be multiplied by, to be added here.
    pub(crate) fn factor(&self, reference: N) -> N {
        power(reference - self.reference)
    }

    /// Adds others.
    pub(crate) fn add(&mut self, other: &Self) {
        self.raise(other.reference);
        let factor = self.factor(other.reference);
        for i in 0..self.size[0] {
            let (to, from) = (self.sums.row_mut(i), other.sums.row(i));
            to.iter_mut().zip(from).for_each(|(to, x)| *to = *to + *x * factor);
        }
    }

    /// Adds those of a chunk, whose powers are relative to the reference here; `all` counts the features.
    #[inline(always)]
    pub(crate) fn take<S: Simd<N>>(&mut self, s: S, pairs: &Pairs<N>, span: Span, all: &[usize]) {
        let (tile, payload) = ((&pairs.features[..], &[][..]), &pairs.payload_rows);
        add_rows::<_, S, false, false>(s, tile, (payload, span), payload, (all, &mut self.sums));
    }

    /// The payload that features fetch, `[payload][lanes]`.
    #[inline(always)]
    pub(crate) fn payload<S: Simd<N>>(
        &self,
        s: S,
        (features, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let zero = Lanes([N::zero(); GROUP]);
        to.fill(zero);
        let sums = self.sums.view(0..self.size[0], to.len());
        add_values::<_, S, false, false>(s, (sums, &[]), (features, &[]), span, (&zero, to));
    }

    /// The features that payload fetches, `[features][lanes]`.
    #[inline(always)]
    pub(crate) fn features<S: Simd<N>>(
        &self,
        s: S,
        (payload, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let sums = self.sums.view(0..to.len(), payload.len());
        dot_tile(s, (sums, payload), span, to, &mut Dots);
    }
}

/// Those of a chunk that are intra_chunk by others of the same chunk, pair by pair: each is `seen` by some lanes.
#[derive(Debug)]
pub(crate) struct IntraChunk<'t, N> {
    pub(crate) pairs: &'t Pairs<N>,
    pub(crate) visible: &'t [RowMask],
    pub(crate) tile: &'t mut [Lanes<N>],
}

impl<N: Number> IntraChunk<'_, N> {
    /// Adds the payload that features fetch.
    #[inline(always)]
    pub(crate) fn payload<S: Simd<N>>(
        &mut self,
        s: S,
        (features, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let Pairs { feature_rows: by, payload_rows: what, .. } = self.pairs;
        s.call(AddVisible {
            by,
            what,
            visible: self.visible,
            tile: self.tile,
            x: features,
            span,
            to,
        });
    }

    /// Adds the features that payload fetches.
    #[inline(always)]
    pub(crate) fn features<S: Simd<N>>(
        &mut self,
        s: S,
        (payload, span): (&[Lanes<N>], Span),
        to: &mut [Lanes<N>],
    ) {
        let Pairs { feature_rows: what, payload_rows: by, .. } = self.pairs;
        s.call(AddVisible {
            by,
            what,
            visible: self.visible,
            tile: self.tile,
            x: payload,
            span,
            to,
        });
    }
}

/// `to[..][lane] += sum over those it sees of (x[lane] . by) what`.
struct AddVisible<'t, N> {
    by: &'t RowBuffer<N>,
    what: &'t RowBuffer<N>,
    visible: &'t [RowMask],
    tile: &'t mut [Lanes<N>],
    x: &'t [Lanes<N>],
    span: Span,
    to: &'t mut [Lanes<N>],
}

impl<N: Number> Task<N> for AddVisible<'_, N> {
    type Out = ();
    /// For half of them at a time: the lanes that see none of one half are half of all.
    #[inline(always)]
    fn run<S: Simd<N>>(self, s: S) {
        const HALF: usize = GROUP / 2;
        let Self { by, what, visible: all, tile, x, span, to } = self;
        let one = Lanes([N::one(); GROUP]);
        for first in (0..all.len()).step_by(HALF) {
            let intra_chunk = first..(first + HALF).min(all.len());
            let visible = &all[intra_chunk.clone()];
            let any = visible.iter().fold(0, |any, visible| any | visible);
            let start = if any.trailing_zeros() as usize >= HALF { HALF } else { 0 };
            let end = if any.leading_zeros() as usize >= HALF { HALF } else { GROUP };
            let span = Span { start, end: span.end.min(end) };
            if span.end <= span.start {
                continue;
            }
            let tile = &mut tile[intra_chunk.clone()];
            dot_tile(s, (by.view(intra_chunk.clone(), x.len()), x), span, tile, &mut Dots);
            let what = what.view(intra_chunk, to.len());
            add_values::<_, S, true, false>(s, (what, &[]), (tile, visible), span, (&one, to));
        }
    }
}
