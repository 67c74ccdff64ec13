//! Speed of products in each format: bytes of weights per second for one row, operations per second for many.
//!
//! `cargo run --release -p regard-matmul --example products -- [formats and instruction set]`

#![expect(clippy::print_stdout, clippy::cast_possible_truncation, reason = "it prints a table")]

use rayon::prelude::*;
use regard_matmul::{Error, Format, Isa, Matrix, Rows, multiply};
use std::time::Instant;

/// Bytes of weights that all matrices of a measurement take: more than caches hold.
const TOTAL: usize = 200 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut only: Vec<String> = std::env::args().skip(1).collect();
    let named = |isa: &Isa| only.contains(&format!("{isa:?}"));
    let isa = Isa::available().find(named).unwrap_or(Isa::detect());
    only.retain(|name| *name != format!("{isa:?}"));
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        println!("{threads} threads, {isa:?}");
        println!("  read {:.1} GB/s", pool.install(read_speed));
        println!(
            "  {:6} {:>12} {:>16} {:>18} {:>18}",
            "", "shape", "m=1 GB/s", "m=128 GFLOP/s", "m=512 GFLOP/s"
        );
        for format in Format::ALL {
            if only.is_empty() || only.contains(&format!("{format:?}")) {
                pool.install(|| {
                    [[1536, 576], [576, 1536], [49152, 576]].map(|shape| line(isa, format, shape))
                })
                .into_iter()
                .collect::<Result<(), _>>()?;
            }
        }
    }
    Ok(())
}

/// Prints the speeds of a format. Super-blocks of 256 do not divide 576 inputs: they are measured with 512.
fn line(isa: Isa, format: Format, [outputs, inputs]: [usize; 2]) -> Result<(), Error> {
    let inputs = inputs / format.block_len() * format.block_len();
    let bytes = outputs * format.row_bytes(inputs)?;
    // As a byte of a scale or of a float, none of these makes a subnormal number.
    let pattern: Vec<u8> = (0..bytes).map(|i| 44 + (i * i / 7 % 8) as u8).collect();
    let one = Matrix::new(format, [outputs, inputs], &pattern)?;
    let matrices = vec![one; TOTAL.div_ceil(bytes)];
    let held: usize = matrices.iter().map(Matrix::bytes).sum();
    let mut found = vec![];
    for rows in [1, 128, 512] {
        let x: Vec<f32> = (0..rows * inputs).map(|i| (i * i % 97) as f32 / 97.0 - 0.5).collect();
        let mut y = vec![0.0; rows * outputs];
        let mut quantised = Rows::new();
        let mut run = |matrix| -> Result<f64, Error> {
            let start = Instant::now();
            quantised.set(&x, inputs)?;
            multiply(&quantised, &mut [(matrix, &mut y)], isa)?;
            Ok(start.elapsed().as_secs_f64())
        };
        // Many rows take long, and what they wait for is not memory.
        let rounds =
            if rows == 1 { 3 * matrices.len().max(20) } else { (1 << 31) / (rows * bytes) + 10 };
        let times = (0..rounds).map(|i| run(&matrices[i % matrices.len()]));
        let time = undisturbed(times.collect::<Result<_, _>>()?);
        let amount = if rows == 1 { held / matrices.len() } else { 2 * rows * outputs * inputs };
        found.push(amount as f64 / time / 1e9);
    }
    println!(
        "  {:6} {:>12} {:>16.1} {:>18.0} {:>18.0}",
        format!("{format:?}"),
        format!("{outputs}x{inputs}"),
        found[0],
        found[1],
        found[2]
    );
    Ok(())
}

/// Of repeated times, one that is seldom undercut: without what else the machine did meanwhile.
fn undisturbed(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 10]
}

/// Speed of a plain sum over memory, 4 MiB at a time.
fn read_speed() -> f64 {
    let memory = vec![1_u64; TOTAL / 8];
    let read = |memory: &[u64]| {
        let start = Instant::now();
        let sum: u64 = memory.par_chunks(1 << 14).map(|part| part.iter().sum::<u64>()).sum();
        assert_eq!(sum, memory.len() as u64);
        start.elapsed().as_secs_f64()
    };
    let times = (0..5).flat_map(|_| memory.chunks_exact(1 << 19)).map(read);
    (4 << 20) as f64 / undisturbed(times.collect()) / 1e9
}
