//! Descriptions made of bytes, for both targets.

use arbitrary::{Arbitrary, Result, Unstructured};
use regard::{Align, Bits, Mask, MaskRule, Scope};
use std::ops::Range;

/// A size: mostly small, sometimes at the edge of the type.
pub fn size(u: &mut Unstructured<'_>, wild: bool) -> Result<usize> {
    match u.int_in_range(0..=9u8)? {
        0 if wild => Ok(usize::MAX - usize::from(u8::arbitrary(u)?)),
        1 if wild => usize::arbitrary(u),
        _ => Ok(usize::from(u8::arbitrary(u)?)),
    }
}

/// The sizes that a mask is asked about.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub batch: usize,
    pub heads: usize,
    pub q_len: usize,
    pub k_len: usize,
}

/// A mask rule that gives each row its own ranges, which may overlap or be empty.
#[derive(Debug)]
struct Ranges(Vec<(u8, u8)>);

impl MaskRule for Ranges {
    fn visible(&self, _: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let mut mine: Vec<_> = self
            .0
            .iter()
            .map(|(start, len)| {
                let start = usize::from(*start) + row % 5;
                start..start + usize::from(*len) / 4
            })
            .collect();
        mine.sort_by_key(|r| r.start);
        ranges.extend(mine);
    }
}

/// Any mask. Unless `wild`, one that fits the sizes.
pub fn mask(u: &mut Unstructured<'_>, at: Sizes, wild: bool, depth: usize) -> Result<Mask> {
    let Sizes { batch, heads, q_len, k_len } = at;
    // Lists hold one entry for each of these; a wild call has lists of any length.
    let count = |u: &mut Unstructured<'_>, n: usize| {
        if wild && u.ratio(1, 4)? { Ok(usize::from(u8::arbitrary(u)?)) } else { Ok(n.min(512)) }
    };
    let positive = |u: &mut Unstructured<'_>| {
        let n = size(u, wild)?;
        Ok::<_, arbitrary::Error>(if wild { n } else { n % 40 + 1 })
    };
    let last = if depth == 0 { 12 } else { 15 };
    Ok(match u.int_in_range(0..=last)? {
        0 => Mask::full(),
        1 => Mask::causal(),
        2 => {
            let mut bound = || -> Result<_> {
                Ok(if bool::arbitrary(u)? { Some(size(u, wild)?) } else { None })
            };
            Mask::band(bound()?, bound()?)
        }
        3 => Mask::full().window(size(u, wild)?),
        4 => {
            let n = count(u, batch)?;
            let lengths = (0..n).map(|_| bounded(u, k_len, wild)).collect::<Result<Vec<_>>>()?;
            Mask::lengths(&lengths)
        }
        5 => {
            let n = count(u, batch)?;
            let span =
                |u: &mut Unstructured<'_>| Ok(bounded(u, k_len, wild)?..bounded(u, k_len, wild)?);
            let spans = (0..n).map(|_| span(u)).collect::<Result<Vec<_>>>()?;
            Mask::spans(&spans)
        }
        6 => {
            let items = if bool::arbitrary(u)? { 1 } else { batch };
            let n = count(u, k_len.saturating_mul(items))?;
            let documents = documents(u, n)?;
            if bool::arbitrary(u)? {
                let n = count(u, q_len)?;
                Mask::segments_between(&self::documents(u, n)?, &documents)
            } else {
                Mask::segments(&documents)
            }
        }
        7 => {
            let n = usize::from(u8::arbitrary(u)?) % 8;
            let places = (0..n)
                .map(|_| bounded(u, k_len.saturating_sub(1), wild))
                .collect::<Result<Vec<_>>>()?;
            if k_len == 0 && !wild { Mask::full() } else { Mask::global(&places) }
        }
        8 => Mask::blocks(positive(u)?),
        9 => Mask::every(positive(u)?),
        10 => Mask::columns(positive(u)?, size(u, wild)?),
        11 => {
            let (b, h) = (
                if bool::arbitrary(u)? { 1 } else { batch.min(4) },
                if bool::arbitrary(u)? { 1 } else { heads.min(8) },
            );
            let shape = [b, h, q_len.min(256), k_len.min(256)];
            let mut state = u32::arbitrary(u)? | 1;
            let rare = u8::arbitrary(u)?;
            let bools: Vec<bool> = (0..shape.iter().product())
                .map(|_| {
                    state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
                    (state >> 24) as u8 >= rare
                })
                .collect();
            Bits::from_bools(&bools, shape).map_or(Mask::full(), Mask::bits)
        }
        12 => Mask::custom(Ranges(Vec::arbitrary(u)?)),
        13 => Mask::strided(positive(u)?),
        14 => mask(u, at, wild, depth - 1)?.and(mask(u, at, wild, depth - 1)?),
        _ => mask(u, at, wild, depth - 1)?.or(mask(u, at, wild, depth - 1)?),
    })
}

fn bounded(u: &mut Unstructured<'_>, most: usize, wild: bool) -> Result<usize> {
    if wild { size(u, wild) } else { u.int_in_range(0..=most) }
}

/// Runs of equal documents, as packed sequences have them, and now and then the same one again.
fn documents(u: &mut Unstructured<'_>, n: usize) -> Result<Vec<u32>> {
    let mut documents = Vec::with_capacity(n);
    while documents.len() < n {
        let (id, run) = (u8::arbitrary(u)? % 6, usize::from(u8::arbitrary(u)? % 32) + 1);
        documents.extend(std::iter::repeat_n(u32::from(id), run.min(n - documents.len())));
    }
    Ok(documents)
}

/// Where row 0 stands.
pub fn align(u: &mut Unstructured<'_>, wild: bool) -> Result<Align> {
    Ok(match u.int_in_range(0..=3u8)? {
        0 | 1 => Align::End,
        2 => Align::Start,
        _ if wild => Align::Offset(i64::arbitrary(u)?),
        _ => Align::Offset(i64::from(i16::arbitrary(u)? % 300)),
    })
}

/// Numbers in `-amplitude..amplitude`, repeatable.
pub fn numbers(seed: u32, n: usize, amplitude: f32) -> Vec<f32> {
    let mut state = u64::from(seed).wrapping_mul(2_654_435_769) + 1;
    let next = move |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0) * amplitude
    };
    (0..n).map(next).collect()
}
