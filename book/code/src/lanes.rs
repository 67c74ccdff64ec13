//! Queries in the lanes of vectors.
//!
//! Row `i` of a group stands in lane `i` of every vector, so a key's number meets sixteen queries in one multiplication, and
//! maxima, sums and shrinking are between vectors, lane by lane: nothing is ever summed across a vector.
//!
//! Cost: as for tiles, and one turn of the queries into lanes and of the outputs back.

use crate::{AttentionOutput, Head};
use std::array::from_fn;
use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

// ANCHOR: lanes
/// Queries side by side: one vector of AVX-512, two of AVX2, four of SSE2.
pub const LANES: usize = 16;
/// A number for each query of a group.
type Lanes = [f32; LANES];

/// Groups that meet a tile before the next one comes.
pub const GROUPS: usize = 4;
/// Rows that a call of [`attend_rows`] is best given.
pub const ROWS: usize = GROUPS * LANES;
/// Keys of a tile.
pub const KEYS: usize = 64;
/// Keys, or features of values, that are worked on at once: as many sums as the registers hold.
const BLOCK: usize = if cfg!(target_feature = "avx2") { 4 } else { 2 };
// ANCHOR_END: lanes

// ANCHOR: exp2
/// `2^x` in every lane, for `x <= 0`; 0 below `2^-127`. Within 2 ulp. There is no branch and no call in it, so it becomes vectors.
fn exp2(x: Lanes) -> Lanes {
    /// Minimax of `2^f` for `f` in [-1/2, 1/2]: relative error 2e-9, exactly 1 at 0.
    const C: [f32; 6] =
        [LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_4, 0.000_153_533_62];
    /// 1.5 x 2^23: a number this large has no room for a fraction, so adding it rounds.
    const ROUND: f32 = 12_582_912.0;
    from_fn(|lane| {
        let x = if x[lane] < -127.0 { -127.0 } else { x[lane] };
        let whole = x + ROUND;
        let f = x - (whole - ROUND);
        let p = C.iter().rev().fold(0.0, |p, c| fma(p, f, *c));
        // The whole part stands in the last bits of the sum; 127 higher, and 23 bits to the left, it is the exponent of 2^whole.
        let exponent = whole.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
        fma(p, f, 1.0) * f32::from_bits(exponent << 23)
    })
}

/// `a b + c`. Rounded once where the compiler may count on an instruction for it; elsewhere that would be a call.
fn fma(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(target_feature = "fma") { a.mul_add(b, c) } else { a * b + c }
}
// ANCHOR_END: exp2

// ANCHOR: attend
/// Attention, sixteen rows at a time.
#[must_use]
pub fn attend(head: &Head<'_>) -> AttentionOutput {
    let q_len = head.q_len();
    let mut attended =
        AttentionOutput { out: vec![0.0; q_len * head.v_dim], lse: vec![0.0; q_len] };
    let outs = attended.out.chunks_mut(ROWS * head.v_dim);
    for (i, (out, lse)) in outs.zip(attended.lse.chunks_mut(ROWS)).enumerate() {
        attend_rows(head, i * ROWS, out, lse);
    }
    attended
}

/// The rows from `first` on, as many as there are `lse`.
pub fn attend_rows(head: &Head<'_>, first: usize, out: &mut [f32], lse: &mut [f32]) {
    let end = first + lse.len();
    let starts = (first..end).step_by(LANES);
    let mut groups: Vec<Group> = starts.map(|row| Group::new(head, row..end)).collect();
    for tile in (0..head.visible(end - 1)).step_by(KEYS) {
        for group in &mut groups {
            group.meet(head, tile..(tile + KEYS).min(group.reach));
        }
    }
    let outs = out.chunks_mut(LANES * head.v_dim).zip(lse.chunks_mut(LANES));
    groups.iter().zip(outs).for_each(|(group, (out, lse))| group.finish(out, lse));
}
// ANCHOR_END: attend

// ANCHOR: group
/// Sixteen rows on their way over the keys.
struct Group {
    /// Queries, `[dim][lanes]`, times the scale and `log2 e`.
    q: Vec<Lanes>,
    /// How many keys each row sees, and the last of them.
    visible: [usize; LANES],
    reach: usize,
    max: Lanes,
    sum: Lanes,
    /// `[v_dim][lanes]`
    out: Vec<Lanes>,
}

impl Group {
    /// Up to sixteen of some rows; lanes without a row see nothing.
    fn new(head: &Head<'_>, rows: Range<usize>) -> Self {
        let factor = head.scale() * LOG2_E;
        let row = |lane: usize| Some(rows.start + lane).filter(|row| *row < rows.end);
        let turn = |d| from_fn(|lane| row(lane).map_or(0.0, |row| head.query(row)[d] * factor));
        Self {
            q: (0..head.dim).map(turn).collect(),
            visible: from_fn(|lane| row(lane).map_or(0, |row| head.visible(row))),
            reach: head.visible(rows.end.min(rows.start + LANES) - 1),
            max: [f32::MIN; LANES],
            sum: [0.0; LANES],
            out: vec![[0.0; LANES]; head.v_dim],
        }
    }
}
// ANCHOR_END: group

// ANCHOR: meet
impl Group {
    /// The group, and a tile of keys.
    fn meet(&mut self, head: &Head<'_>, keys: Range<usize>) {
        if keys.is_empty() {
            return;
        }
        let mut tile = [[0.0; LANES]; KEYS];
        let tile = &mut tile[..keys.len()];
        self.scores(head, keys.start, tile);
        if self.visible.iter().any(|visible| *visible < keys.end) {
            for (row, j) in tile.iter_mut().zip(keys.clone()) {
                *row = from_fn(|l| if j < self.visible[l] { row[l] } else { f32::NEG_INFINITY });
            }
        }
        let before = self.max;
        for row in &*tile {
            self.max = from_fn(|l| if row[l] > self.max[l] { row[l] } else { self.max[l] });
        }
        let shrink = exp2(from_fn(|l| before[l] - self.max[l]));
        let mut sum = [0.0; LANES];
        for row in &mut *tile {
            *row = exp2(from_fn(|l| row[l] - self.max[l]));
            sum = from_fn(|l| sum[l] + row[l]);
        }
        self.sum = from_fn(|l| fma(self.sum[l], shrink[l], sum[l]));
        self.add_values(head, keys.start, tile, shrink);
    }
}
// ANCHOR_END: meet

// ANCHOR: products
impl Group {
    /// `tile[key][lane] = q . k`
    fn scores(&self, head: &Head<'_>, first: usize, tile: &mut [Lanes]) {
        let mut blocks = tile.chunks_exact_mut(BLOCK);
        let mut j = first;
        for block in &mut blocks {
            let keys: [&[f32]; BLOCK] = from_fn(|r| head.key(j + r));
            let mut sums = [[0.0; LANES]; BLOCK];
            for (d, q) in self.q.iter().enumerate() {
                for r in 0..BLOCK {
                    let k = keys[r][d];
                    sums[r] = from_fn(|l| fma(k, q[l], sums[r][l]));
                }
            }
            block.copy_from_slice(&sums);
            j += BLOCK;
        }
        for row in blocks.into_remainder() {
            let key = head.key(j).iter().zip(&self.q);
            *row = key.fold([0.0; LANES], |sum, (k, q)| from_fn(|l| fma(*k, q[l], sum[l])));
            j += 1;
        }
    }

    /// `out[d][lane] = out[d][lane] shrink[lane] + sum over keys of v[key][d] weight[key][lane]`
    fn add_values(&mut self, head: &Head<'_>, first: usize, tile: &[Lanes], shrink: Lanes) {
        let mut blocks = self.out.chunks_exact_mut(BLOCK);
        let mut d = 0;
        for block in &mut blocks {
            let mut sums = [[0.0; LANES]; BLOCK];
            for (j, weights) in tile.iter().enumerate() {
                let values = &head.value(first + j)[d..d + BLOCK];
                for r in 0..BLOCK {
                    sums[r] = from_fn(|l| fma(values[r], weights[l], sums[r][l]));
                }
            }
            for (out, sum) in block.iter_mut().zip(sums) {
                *out = from_fn(|l| fma(out[l], shrink[l], sum[l]));
            }
            d += BLOCK;
        }
        for out in blocks.into_remainder() {
            let mut sum = [0.0; LANES];
            for (j, weights) in tile.iter().enumerate() {
                let value = head.value(first + j)[d];
                sum = from_fn(|l| fma(value, weights[l], sum[l]));
            }
            *out = from_fn(|l| fma(out[l], shrink[l], sum[l]));
            d += 1;
        }
    }
}
// ANCHOR_END: products

impl Group {
    /// Divides, and writes lanes as rows.
    fn finish(&self, out: &mut [f32], lse: &mut [f32]) {
        for (lane, (out, lse)) in out.chunks_mut(self.out.len()).zip(lse).enumerate() {
            let sum = self.sum[lane];
            if sum != 0.0 {
                out.iter_mut().zip(&self.out).for_each(|(to, x)| *to = x[lane] / sum);
            }
            *lse = (self.max[lane] + sum.log2()) * LN_2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every 101st float from 0 down to where `2^x` is no normal number any more.
    #[test]
    fn exp2_is_within_two_ulp() {
        let mut worst = 0f64;
        for bits in ((-0f32).to_bits()..(-126f32).to_bits()).step_by(101) {
            let x = f32::from_bits(bits);
            let (exact, found) = (f64::from(x).exp2(), exp2([x; LANES])[0]);
            let ulp = 2f64.powf(exact.log2().floor() - 23.0);
            worst = worst.max((f64::from(found) - exact).abs() / ulp);
        }
        println!("{worst:.3} ulp");
        assert!(worst < 2.0, "{worst}");
    }

    #[test]
    fn exp2_keeps_its_special_values() {
        let mut x = [0.0; LANES];
        (x[1], x[2], x[3], x[4]) = (f32::NEG_INFINITY, f32::MIN, f32::NAN, -1.0);
        let y = exp2(x);
        assert_eq!((y[0], y[1], y[2], y[4]), (1.0, 0.0, 0.0, 0.5));
        assert!(y[3].is_nan());
    }
}
