//! The masks of the table, one line each. Their sizes depend on the shape.

use crate::noise::Noise;
use regard::Mask;
use regard::mask::{Bits, KeyLists, MaskRule};
use regard::problem::{Dims, Scope};
use std::ops::Range;

/// A mask of the table.
#[derive(Clone, Copy, Debug)]
pub struct MaskCase {
    /// Name used in case names.
    pub name: &'static str,
    /// Builds the mask for a shape.
    pub build: fn(&Dims, &mut Noise) -> Mask,
}

const fn mask(name: &'static str, build: fn(&Dims, &mut Noise) -> Mask) -> MaskCase {
    MaskCase { name, build }
}

/// Every rule, and nested rules.
pub const MASKS: &[MaskCase] = &[
    mask("full", |_, _| Mask::full()),
    mask("nothing", |_, _| Mask::full().window(0)),
    mask("causal", |_, _| Mask::causal()),
    mask("window", |d, _| Mask::full().window(part(d.k_len, 3))),
    mask("window_1", |_, _| Mask::full().window(1)),
    mask("causal_window", |d, _| Mask::causal().window(part(d.k_len, 3))),
    mask("band", |d, _| Mask::band(Some(part(d.k_len, 4)), Some(part(d.k_len, 7)))),
    mask("band_back_all", |_, _| Mask::band(None, Some(3))),
    mask("band_ahead_all", |_, _| Mask::band(Some(2), None)),
    mask("lengths", |d, n| Mask::lengths(&ends(d, d.batch, n))),
    mask("lengths_one", |d, n| Mask::lengths(&ends(d, 1, n))),
    mask("lengths_causal", |d, n| Mask::lengths(&ends(d, d.batch, n)).and(Mask::causal())),
    mask("spans", |d, n| Mask::spans(&spans(d, n))),
    mask("spans_causal", |d, n| Mask::causal().and(Mask::spans(&spans(d, n)))),
    mask("prefix", |d, _| Mask::prefix(d.k_len / 3)),
    mask("prefix_lm", |d, _| Mask::causal().or(Mask::prefix(d.k_len / 3))),
    mask("segments", |d, n| Mask::segments(&sorted(d.k_len, n))),
    mask("segments_causal", |d, n| Mask::segments(&sorted(d.k_len, n)).and(Mask::causal())),
    mask("segments_unsorted", |d, n| Mask::segments(&unsorted(d.k_len, n))),
    mask("segments_per_item", |d, n| Mask::segments(&unsorted(d.batch * d.k_len, n))),
    mask("segments_between", |d, n| {
        Mask::segments_between(&unsorted(d.q_len, n), &sorted(d.k_len, n))
    }),
    mask("segments_between_per_item", |d, n| {
        Mask::segments_between(&unsorted(d.batch * d.q_len, n), &unsorted(d.batch * d.k_len, n))
    }),
    mask("global", |d, n| Mask::global(&positions(d, n))),
    mask("global_causal", |d, n| Mask::global(&positions(d, n)).and(Mask::causal())),
    mask("blocks", |d, _| Mask::blocks(part(d.k_len, 4))),
    mask("dilated_3", |_, _| Mask::dilated(3)),
    mask("dilated_11_causal", |_, _| Mask::dilated(11).and(Mask::causal())),
    mask("columns", |d, _| Mask::columns(part(d.k_len, 5), 2)),
    mask("strided", |_, _| Mask::strided(7)),
    mask("strided_causal", |_, _| Mask::strided(5).and(Mask::causal())),
    mask("fixed", |_, _| Mask::fixed(9, 2)),
    mask("fixed_causal", |_, _| Mask::causal().and(Mask::fixed(16, 1))),
    mask("longformer", |d, n| Mask::longformer(part(d.k_len, 8), &positions(d, n))),
    mask("longformer_padded", |d, n| {
        let seen = Mask::longformer(part(d.k_len, 8), &positions(d, n));
        seen.and(Mask::lengths(&ends(d, d.batch, n)))
    }),
    mask("bits", |d, n| bits(d, [1, 1], 0.5, n)),
    mask("bits_per_item", |d, n| bits(d, [d.batch, 1], 0.9, n)),
    mask("bits_per_head", |d, n| bits(d, [1, d.heads.q], 0.5, n)),
    mask("bits_per_both", |d, n| bits(d, [d.batch, d.heads.q], 0.2, n)),
    mask("bits_sparse", |d, n| bits(d, [1, 1], 0.03, n)),
    mask("bits_causal", |d, n| bits(d, [1, 1], 0.5, n).and(Mask::causal())),
    mask("bits_hidden_rows", hidden_rows),
    mask("tree", |d, n| Mask::tree(&parents(d.q_len.min(d.k_len), n))),
    mask("tree_of_some_rows", |d, n| Mask::tree(&parents(d.q_len.min(d.k_len) / 2, n))),
    mask("tree_window", |d, n| {
        Mask::tree(&parents(d.q_len.min(d.k_len), n)).window(part(d.k_len, 3))
    }),
    mask("tree_per_item_lengths", |d, n| {
        let sizes = (0..d.batch).map(|i| d.q_len.min(d.k_len) / (i + 1));
        let trees: Vec<_> = sizes.map(|size| parents(size, n)).collect();
        Mask::trees(&trees).and(Mask::lengths(&ends(d, d.batch, n)))
    }),
    mask("keys", |d, n| lists(d, [1, 1], [1, 1], n)),
    mask("keys_per_block", |d, n| lists(d, [1, 1], [3, 1], n)),
    mask("keys_per_key_head", |d, n| {
        lists(d, [1, d.heads.kv], [5, (d.heads.q / d.heads.kv.max(1)).max(1)], n)
    }),
    mask("keys_per_both_causal", |d, n| {
        lists(d, [d.batch, d.heads.q], [1, 1], n).and(Mask::causal())
    }),
    mask("keys_or_window", |d, n| lists(d, [1, 1], [40, 1], n).or(Mask::full().window(3))),
    mask("custom", |_, _| Mask::custom(Ladder)),
    mask("custom_or_causal", |_, _| Mask::custom(Ladder).or(Mask::causal())),
    mask("nested_documents", |d, n| {
        let documents = Mask::segments(&sorted(d.k_len, n)).and(Mask::causal().window(9));
        documents.or(Mask::global(&positions(d, n)))
    }),
    mask("nested_sparse", |d, n| {
        let near = Mask::full().window(4).or(Mask::columns(6, 1));
        near.and(Mask::lengths(&ends(d, d.batch, n))).or(Mask::dilated(5).and(Mask::causal()))
    }),
    mask("nested_everything", |d, n| {
        let some = Mask::blocks(8).or(bits(d, [1, d.heads.q], 0.1, n)).or(Mask::custom(Ladder));
        let others = Mask::strided(6).or(Mask::spans(&spans(d, n)));
        some.and(others).or(Mask::band(Some(1), Some(0)))
    }),
];

/// Looks up a mask by name.
///
/// # Panics
/// If the table has no such mask.
#[must_use]
pub fn named(name: &str) -> MaskCase {
    *MASKS.iter().find(|m| m.name == name).unwrap_or_else(|| panic!("no mask is named {name}"))
}

/// A fraction of the keys, at least one.
fn part(keys: usize, share: usize) -> usize {
    (keys / share).max(1)
}

/// Number of keys before the padding of each item; item 1 has no padding.
fn ends(d: &Dims, items: usize, noise: &mut Noise) -> Vec<usize> {
    (0..items)
        .map(|i| if i == 1 { d.k_len } else { noise.below(d.k_len + 1).max(d.k_len / 4) })
        .collect()
}

/// Padding on both sides. A range is empty if its start and end coincide.
fn spans(d: &Dims, noise: &mut Noise) -> Vec<Range<usize>> {
    let start = |n: &mut Noise| n.below(d.k_len / 2 + 1);
    (0..d.batch).map(|_| start(noise)..d.k_len - start(noise)).collect()
}

/// Consecutive documents of a few keys each.
fn sorted(len: usize, noise: &mut Noise) -> Vec<u32> {
    documents(len, |before| before + u32::from(noise.chance(0.12)))
}

/// Documents that are interrupted by others.
fn unsorted(len: usize, noise: &mut Noise) -> Vec<u32> {
    let four = [3, 0, 2, 1];
    documents(len, |before| if noise.chance(0.2) { *noise.pick(&four) } else { before })
}

fn documents(len: usize, mut next: impl FnMut(u32) -> u32) -> Vec<u32> {
    std::iter::successors(Some(3), |before| Some(next(*before))).take(len).collect()
}

fn positions(d: &Dims, noise: &mut Noise) -> Vec<usize> {
    let len = d.k_len.max(d.q_len);
    (0..len.min(3)).map(|_| noise.below(len)).collect()
}

fn bits(d: &Dims, [batch, heads]: [usize; 2], visible: f64, noise: &mut Noise) -> Mask {
    let n = batch * heads * d.q_len * d.k_len;
    let bools: Vec<bool> = (0..n).map(|_| noise.chance(visible)).collect();
    of_bools(&bools, [batch, heads, d.q_len, d.k_len])
}

/// Every second row is fully masked, and so are all rows from 63 on, which is more than a tile if there are enough rows.
fn hidden_rows(d: &Dims, noise: &mut Noise) -> Mask {
    let pairs = (0..d.q_len).flat_map(|row| (0..d.k_len).map(move |_| row));
    let bools: Vec<bool> = pairs.map(|row| row % 2 == 0 && row < 63 && noise.chance(0.7)).collect();
    of_bools(&bools, [1, 1, d.q_len, d.k_len])
}

fn of_bools(bools: &[bool], shape: [usize; 4]) -> Mask {
    Mask::bits(Bits::from_bools(bools, shape).expect("as many booleans as the shape says"))
}

/// A tree with several roots.
fn parents(tokens: usize, noise: &mut Noise) -> Vec<Option<usize>> {
    (0..tokens)
        .map(|i| if i == 0 || noise.chance(0.1) { None } else { Some(noise.below(i)) })
        .collect()
}

/// Lists of a few keys, unsorted, for each row block of each head block; some are empty.
fn lists(
    d: &Dims,
    [batch, heads]: [usize; 2],
    [row_block, head_block]: [usize; 2],
    noise: &mut Noise,
) -> Mask {
    let shape = [batch, heads, d.q_len.div_ceil(row_block)];
    let mut list = |_| -> Vec<usize> {
        let len = if d.k_len == 0 { 0 } else { noise.below(d.k_len.min(40) + 1) };
        (0..len).map(|_| noise.below(d.k_len)).collect()
    };
    let lists: Vec<_> = (0..shape.iter().product::<usize>()).map(&mut list).collect();
    let lists = KeyLists::new(&lists, shape).expect("a list for each block of rows");
    Mask::keys(lists.row_block(row_block).head_block(head_block))
}

/// A user-defined rule with overlapping ranges, empty ranges, and ranges that extend beyond the keys.
#[derive(Debug)]
pub struct Ladder;

impl MaskRule for Ladder {
    fn visible(&self, scope: &Scope, row: usize, ranges: &mut Vec<Range<usize>>) {
        let first = (row * 2 + scope.head) % (scope.k_len + 1);
        ranges.push(first..first + 5);
        ranges.push(first + 3..first + 8);
        ranges.push(first + 9..first + 9);
        if row % 3 == scope.batch % 3 {
            ranges.push(scope.k_len.saturating_sub(4).max(first + 9)..scope.k_len + 3);
        }
    }
}
