//! Jobs to threads.

use crate::error::Error;
use crate::format::LANES;
use crate::kernel::Piece;
use crate::matrix::Matrix;
use crate::memory::Columns;
use crate::rows::Rows;
use crate::simd::Isa;
use std::sync::{Mutex, PoisonError};

/// Multiplies rows with matrices, all at once on the threads of rayon's current pool and on the calling thread: for each job
/// `(w, y)`, `y[row, output] = sum over inputs of x[row, input] * w[output, input]`, row-major.
///
/// # Errors
///
/// If a matrix has other inputs than `x`, an output buffer another length than `rows * outputs`, or the processor has no such
/// instructions. Nothing is written then.
pub fn multiply(x: &Rows, jobs: &mut [(&Matrix, &mut [f32])], isa: Isa) -> Result<(), Error> {
    isa.check()?;
    for (matrix, out) in jobs.iter() {
        if matrix.inputs() != x.inputs() {
            return Err(Error::Inputs { rows: x.inputs(), matrix: matrix.inputs() });
        }
        let expected = x.rows().saturating_mul(matrix.outputs());
        if out.len() != expected {
            return Err(Error::Length { buffer: "out", found: out.len(), expected });
        }
    }
    if x.rows() == 0 {
        return Ok(());
    }
    for (matrix, _) in jobs.iter() {
        x.prepare(matrix.format(), isa);
    }
    let threads = rayon::current_num_threads();
    let pieces = split(x, jobs, threads);
    let threads = threads.min(pieces.len());
    let queue = Mutex::new(pieces.into_iter());
    let work = || {
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(piece) = next() {
            piece.run(isa);
        }
    };
    // The calling thread starts at once, whatever the others take to wake up.
    rayon::in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| work());
        }
        work();
    });
    Ok(())
}

/// Weights of a piece, in bytes times rows, below which a thread takes longer to wake up than to compute.
const GRAIN: usize = 1 << 15;

/// Pieces for each thread, so that one which is held up does not hold up all.
const PIECES: usize = 4;

/// Contiguous groups of outputs, all of about the same number of bytes.
fn split<'a>(x: &'a Rows, jobs: &'a mut [(&Matrix, &mut [f32])], threads: usize) -> Vec<Piece<'a>> {
    let bytes: usize = jobs.iter().map(|(matrix, _)| matrix.bytes()).sum();
    let limit = if threads == 1 { 1 } else { threads * PIECES };
    let count = (bytes.saturating_mul(x.rows()) / GRAIN).clamp(1, limit);
    let mut pieces = Vec::with_capacity(count + jobs.len());
    for (matrix, out) in jobs {
        let matrix: &Matrix = matrix;
        // At least as many outputs as make a piece of this size.
        let groups = (matrix.groups() * bytes).div_ceil((matrix.bytes() * count).max(1));
        // Two groups share what is read of the rows.
        let groups = groups.max(1).next_multiple_of(2);
        let mut rest = Columns::new(out, matrix.outputs());
        while !rest.range().is_empty() {
            let out = rest.split(rest.range().start + groups * LANES);
            pieces.push(Piece { x, matrix, out });
        }
    }
    pieces
}
