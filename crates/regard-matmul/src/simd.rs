//! The operations that kernels are written in; portable lanes; instruction sets.

use crate::error::Error;
use crate::memory::{Block, Line, TILE};
use half::f16;

/// Instructions to use. Results are the same bits with each, except that `Amx` adds up products of float formats in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust: slow where the target has no fused multiply-add.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, VL and VNNI.
    Avx512,
    /// AVX-512, AMX-INT8 and AMX-BF16.
    Amx,
}

impl Isa {
    const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Amx];

    /// The best that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }

    /// All that this processor has, the best last.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_here())
    }

    fn is_here(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => crate::x86::Avx2::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => crate::x86::Avx512::<false>::new().is_some(),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => crate::x86::Avx512::<true>::new().is_some(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// An error if this processor has it not.
    pub(crate) fn check(self) -> Result<(), Error> {
        if self.is_here() { Ok(()) } else { Err(Error::Isa(self)) }
    }

    /// Without what only whole tiles of rows profit from, and takes time to set up.
    pub(crate) fn without_tiles(self) -> Self {
        if self == Self::Amx { Self::Avx512 } else { self }
    }

    /// If float formats are multiplied in bf16 terms.
    pub(crate) fn has_terms(self) -> bool {
        self == Self::Amx
    }

    /// Runs a task with these instructions, or portably if they are missing.
    pub(crate) fn run<T: Task>(self, task: T) {
        #[cfg(target_arch = "x86_64")]
        match self {
            Self::Avx2 => {
                if let Some(simd) = crate::x86::Avx2::new() {
                    return simd.run(task);
                }
            }
            Self::Avx512 => {
                if let Some(simd) = crate::x86::Avx512::<false>::new() {
                    return simd.run(task);
                }
            }
            Self::Amx => {
                if let Some(simd) = crate::x86::Avx512::<true>::new() {
                    return simd.run(task);
                }
            }
            Self::Portable => {}
        }
        task.run(Portable);
    }
}

/// What runs on any instruction set. `run` must be `#[inline(always)]`, as all it calls with a [`Simd`]: otherwise it is compiled
/// without the instructions.
pub(crate) trait Task {
    fn run<S: Simd>(self, simd: S);

    /// Of a task that calls [`Simd::term_products`]: for how many rows.
    fn term_rows(&self) -> Option<usize> {
        None
    }
}

/// Operations on 16 lanes. A value proves that the processor has the instructions.
pub(crate) trait Simd: Copy {
    /// 16 lanes of `i32`, or 64 bytes.
    type Ints: Copy;
    /// 16 lanes of `f32`.
    type Floats: Copy;
    /// The most rows of a tile: as many as registers hold.
    const ROWS: usize;
    /// If there are matrix instructions.
    const TILES: bool = false;

    fn line(self, line: &Line) -> Self::Ints;
    fn ints(self, x: i32) -> Self::Ints;
    fn floats(self, x: f32) -> Self::Floats;
    /// `(x >> right) & mask` in each lane; to the left if `right` is negative. `mask` selects bits that come from the same byte.
    fn field(self, x: Self::Ints, right: i32, mask: u8) -> Self::Ints;
    fn or(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// `(x >> right) & 15` in each lane.
    fn nibble(self, x: Self::Ints, right: i32) -> Self::Ints;
    /// Adds to each lane the product of its 4 unsigned bytes of `w` with the 4 signed bytes of `x`, exactly. `wide` if bytes of `w`
    /// may exceed 6 bits. No byte of `x` is -128.
    fn dot(self, sum: Self::Ints, w: Self::Ints, x: i32, wide: bool) -> Self::Ints;
    fn convert(self, x: Self::Ints) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// `c - a * b`, rounded once.
    fn mul_sub(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Signed bytes.
    fn bytes(self, x: &[u8; 16]) -> Self::Ints;
    fn f16(self, x: &[u8; 32]) -> Self::Floats;
    /// 16 pairs of bf16: the first of each, and the second.
    fn bf16(self, x: &Line) -> [Self::Floats; 2];
    fn f32(self, x: &Line) -> Self::Floats;
    fn array(self, x: Self::Floats) -> [f32; 16];
    fn store(self, x: Self::Ints, to: &mut Line);
    /// Each byte less `by`.
    fn lower(self, x: Self::Ints, by: i32) -> Self::Ints;
    fn store_f32(self, x: Self::Floats, to: &mut Line);
    /// Products of 16 rows with signed codes of 16 outputs, 4 inputs in a line, 16 or 32 inputs in all: sub-block `i`. Makes a
    /// line for each row. Only if `TILES`.
    fn products(self, _: &[Block; 16], _codes: &[Line], _i: usize, _: &mut [Line; 16]) {}
    /// Has a line brought from memory.
    fn prefetch(self, _: &Line) {}
    /// Numbers of even places, and of odd places. Only if `TILES`.
    fn apart(self, _: &[f32; 32]) -> [Self::Floats; 2] {
        [self.floats(0.0); 2]
    }
    /// Splits pairs of numbers into pairs of `N` bf16 terms, the largest first, which add up to them if they have at most `8 * N`
    /// significant bits. What is not finite has a term that is not. Only if `TILES`.
    fn terms<const N: usize>(self, _: [Self::Floats; 2]) -> [Self::Ints; N] {
        [self.ints(0); N]
    }
    /// See [`amx::term_products`](crate::amx::term_products). Only if `TILES`, in a task of as many [`Task::term_rows`].
    fn term_products<const R: usize, const C: usize, const T: usize>(
        self,
        _rows: usize,
        _x: [&[Line]; R],
        _w: [&[Line]; C],
        _sums: &mut [[Line; TILE]],
        _first: bool,
    ) {
    }
}

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

fn pair(x: &[u8; 32], i: usize) -> [u8; 2] {
    [x[2 * i], x[2 * i + 1]]
}

impl Simd for Portable {
    type Ints = [i32; 16];
    type Floats = [f32; 16];
    const ROWS: usize = 1;

    fn line(self, line: &Line) -> [i32; 16] {
        let (quads, _) = line.0.as_chunks::<4>();
        std::array::from_fn(|i| i32::from_le_bytes(quads[i]))
    }

    fn ints(self, x: i32) -> [i32; 16] {
        [x; 16]
    }

    fn floats(self, x: f32) -> [f32; 16] {
        [x; 16]
    }

    fn field(self, x: [i32; 16], right: i32, mask: u8) -> [i32; 16] {
        let mask = u32::from_le_bytes([mask; 4]);
        x.map(|x| {
            let x = x.cast_unsigned();
            let moved = if right < 0 { x << -right } else { x >> right };
            (moved & mask).cast_signed()
        })
    }

    fn or(self, a: [i32; 16], b: [i32; 16]) -> [i32; 16] {
        std::array::from_fn(|i| a[i] | b[i])
    }

    fn nibble(self, x: [i32; 16], right: i32) -> [i32; 16] {
        x.map(|x| x >> right & 15)
    }

    fn dot(self, sum: [i32; 16], w: [i32; 16], x: i32, _: bool) -> [i32; 16] {
        let x = x.to_le_bytes().map(|x| i32::from(x.cast_signed()));
        std::array::from_fn(|i| {
            let w = w[i].to_le_bytes().map(i32::from);
            sum[i] + w[0] * x[0] + w[1] * x[1] + w[2] * x[2] + w[3] * x[3]
        })
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "rounded to nearest, as the vector instructions do"
    )]
    fn convert(self, x: [i32; 16]) -> [f32; 16] {
        x.map(|x| x as f32)
    }

    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    fn mul_add(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    fn mul_sub(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| (-a[i]).mul_add(b[i], c[i]))
    }

    fn bytes(self, x: &[u8; 16]) -> [i32; 16] {
        x.map(|x| i32::from(x.cast_signed()))
    }

    fn f16(self, x: &[u8; 32]) -> [f32; 16] {
        std::array::from_fn(|i| f16::from_le_bytes(pair(x, i)).to_f32())
    }

    fn bf16(self, x: &Line) -> [[f32; 16]; 2] {
        let pairs = self.line(x).map(i32::cast_unsigned);
        [pairs.map(|x| f32::from_bits(x << 16)), pairs.map(|x| f32::from_bits(x & 0xffff_0000))]
    }

    fn f32(self, x: &Line) -> [f32; 16] {
        let (quads, _) = x.0.as_chunks::<4>();
        std::array::from_fn(|i| f32::from_le_bytes(quads[i]))
    }

    fn array(self, x: [f32; 16]) -> [f32; 16] {
        x
    }

    fn store(self, x: [i32; 16], to: &mut Line) {
        let (quads, _) = to.0.as_chunks_mut::<4>();
        quads.iter_mut().zip(x).for_each(|(to, x)| *to = x.to_le_bytes());
    }

    fn store_f32(self, x: [f32; 16], to: &mut Line) {
        self.store(x.map(|x| x.to_bits().cast_signed()), to);
    }

    fn lower(self, x: [i32; 16], by: i32) -> [i32; 16] {
        x.map(|x| i32::from_le_bytes(x.to_le_bytes().map(|x| x.wrapping_sub(by.to_le_bytes()[0]))))
    }
}
