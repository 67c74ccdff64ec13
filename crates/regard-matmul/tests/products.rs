//! What the crate promises: numbers of ggml, products of them, and the same bits whatever else is computed.

#![expect(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "tests")]

use regard_matmul::{Error, Format, Isa, Matrix, Rows, dequantize, multiply};

/// Seeded numbers: xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn byte(&mut self) -> u8 {
        (self.next() >> 56) as u8
    }

    /// In -1..1.
    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn numbers(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.number()).collect()
    }

    /// Blocks of random codes, with finite scales.
    fn weights(&mut self, format: Format, count: usize) -> Vec<u8> {
        let halves: &[usize] = match format {
            Format::F32 | Format::F16 | Format::Bf16 => {
                return (0..count).flat_map(|_| float_bytes(format, self.number())).collect();
            }
            Format::Q4_0 | Format::Q5_0 | Format::Q8_0 => &[0],
            Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q2K => &[80, 82],
            Format::Q3K => &[108],
            Format::Q6K => &[208],
        };
        let mut bytes = vec![];
        for _ in 0..count / format.block_len() {
            let mut block: Vec<u8> = (0..format.block_bytes()).map(|_| self.byte()).collect();
            for &at in halves {
                block[at..at + 2]
                    .copy_from_slice(&half::f16::from_f32(self.number()).to_le_bytes());
            }
            bytes.extend(block);
        }
        bytes
    }

    fn matrix(&mut self, format: Format, shape: [usize; 2]) -> (Matrix, Vec<f32>) {
        let bytes = self.weights(format, shape[0] * shape[1]);
        let mut numbers = vec![0.0; shape[0] * shape[1]];
        dequantize(format, &bytes, &mut numbers).unwrap();
        (Matrix::new(format, shape, &bytes).unwrap(), numbers)
    }
}

fn float_bytes(format: Format, x: f32) -> Vec<u8> {
    match format {
        Format::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
        Format::Bf16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    }
}

fn product(x: &[f32], matrix: &Matrix, isa: Isa) -> Vec<f32> {
    let mut rows = Rows::new();
    rows.set(x, matrix.inputs()).unwrap();
    let mut out = vec![f32::NAN; rows.rows() * matrix.outputs()];
    multiply(&rows, &mut [(matrix, &mut out)], isa).unwrap();
    out
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Inputs that the format can have: float formats with a tail.
fn inputs(format: Format) -> usize {
    match format.block_len() {
        1 => 77,
        32 => 96,
        _ => 512,
    }
}

#[test]
fn numbers_are_those_of_gguf() {
    let path = |name: &str| format!("{}/tests/fixtures/{name}.bin", env!("CARGO_MANIFEST_DIR"));
    for format in Format::ALL.into_iter().skip(1) {
        let bytes = std::fs::read(path(&format!("{format:?}").replace("Bf16", "BF16"))).unwrap();
        let count =
            bytes.len() * format.block_len() / (format.block_bytes() + 4 * format.block_len());
        let (blocks, expected) = bytes.split_at(bytes.len() - 4 * count);
        let expected: Vec<u32> =
            expected.as_chunks().0.iter().map(|&x| u32::from_le_bytes(x)).collect();
        let mut numbers = vec![0.0; count];
        dequantize(format, blocks, &mut numbers).unwrap();
        assert_eq!(bits(&numbers), expected, "{format:?}");
    }
}

#[test]
fn a_row_is_what_was_packed() {
    let mut random = Random(1);
    for format in Format::ALL {
        let shape = [37, inputs(format)];
        let (matrix, numbers) = random.matrix(format, shape);
        assert_eq!((matrix.outputs(), matrix.inputs(), matrix.format()), (37, shape[1], format));
        let mut row = vec![0.0; shape[1]];
        for (output, expected) in numbers.chunks(shape[1]).enumerate() {
            matrix.row(output, &mut row).unwrap();
            assert_eq!(bits(&row), bits(expected), "{format:?} {output}");
        }
    }
}

#[test]
fn memory_is_that_of_the_file() {
    let mut random = Random(2);
    for format in Format::ALL {
        let (matrix, _) = random.matrix(format, [64, 1024]);
        let bytes = 64 * format.row_bytes(1024).unwrap();
        assert!(matrix.bytes() * 100 <= bytes * 104, "{format:?}: {} of {bytes}", matrix.bytes());
    }
}

/// What the activations are rounded to: the definition.
fn rounded(x: &[f32], inputs: usize) -> Vec<f64> {
    let block = |x: &[f32]| {
        let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        let (scale, inverse) = (max / 127.0, 127.0 / max);
        x.iter()
            .map(|x| f64::from((x * inverse).round_ties_even()) * f64::from(scale))
            .collect::<Vec<_>>()
    };
    x.chunks(inputs).flat_map(|row| row.chunks(32).flat_map(block)).collect()
}

#[test]
fn products_are_those_of_f64() {
    let mut random = Random(3);
    for format in Format::ALL {
        let shape = [37, inputs(format)];
        let (matrix, w) = random.matrix(format, shape);
        let x = random.numbers(5 * shape[1]);
        let exact: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
        let given = if format.block_len() == 1 { exact.clone() } else { rounded(&x, shape[1]) };
        let out = product(&x, &matrix, Isa::detect());
        for (i, &out) in out.iter().enumerate() {
            let (row, output) = (i / 37 * shape[1], i % 37 * shape[1]);
            let w = &w[output..output + shape[1]];
            let sum =
                |x: &[f64]| w.iter().zip(&x[row..]).map(|(&w, x)| f64::from(w) * x).sum::<f64>();
            let size: f64 =
                w.iter().zip(&given[row..]).map(|(&w, x)| (f64::from(w) * x).abs()).sum();
            let error = (f64::from(out) - sum(&given)).abs();
            // Mins are subtracted from what the codes add up to, which may be larger than what remains.
            assert!(error <= 1e-5 * size.max(1.0), "{format:?} {i}: {error:e} of {size}");
            // Rounding an activation changes it by at most half of 1/127 of the block's largest; over many inputs the errors
            // cancel, and 1 % of the sum of magnitudes is never reached.
            let rounding = (f64::from(out) - sum(&exact)).abs();
            assert!(rounding <= 1e-2 * size.max(1.0), "{format:?} {i}: {rounding:e} of {size}");
        }
    }
}

#[test]
fn bits_depend_on_nothing_else() {
    let mut random = Random(4);
    for format in Format::ALL {
        let shape = [50, inputs(format)];
        let (matrix, _) = random.matrix(format, shape);
        let x = random.numbers(40 * shape[1]);
        let portable = bits(&product(&x, &matrix, Isa::Portable));
        for isa in Isa::available() {
            let all = bits(&product(&x, &matrix, isa));
            // bf16 terms are added in another order.
            if isa != Isa::Amx || format.block_len() > 1 {
                assert_eq!(all, portable, "{format:?} {isa:?}");
            }
            for rows in 1..=40 {
                for first in [0, 40 - rows, (40 - rows) / 2] {
                    let x = &x[first * shape[1]..][..rows * shape[1]];
                    let out = bits(&product(x, &matrix, isa));
                    let at = first * shape[0];
                    assert_eq!(out, all[at..at + out.len()], "{format:?} {isa:?} {rows} {first}");
                }
            }
            for threads in [1, 2, 7] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let out = pool.install(|| bits(&product(&x, &matrix, isa)));
                assert_eq!(out, all, "{format:?} {isa:?} {threads} threads");
            }
        }
    }
}

#[test]
fn jobs_are_computed_together() {
    let mut random = Random(5);
    let x = random.numbers(20 * 512);
    let matrices: Vec<_> = Format::ALL
        .into_iter()
        .enumerate()
        .map(|(i, f)| random.matrix(f, [1 + 300 * i, 512]).0)
        .collect();
    let mut rows = Rows::new();
    rows.set(&x, 512).unwrap();
    let mut outs: Vec<_> = matrices.iter().map(|m| vec![f32::NAN; 20 * m.outputs()]).collect();
    let mut jobs: Vec<_> =
        matrices.iter().zip(&mut outs).map(|(matrix, out)| (matrix, out.as_mut_slice())).collect();
    multiply(&rows, &mut jobs, Isa::detect()).unwrap();
    for (matrix, out) in matrices.iter().zip(&outs) {
        assert_eq!(bits(out), bits(&product(&x, matrix, Isa::detect())));
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let mut random = Random(6);
    for format in Format::ALL {
        let (matrix, _) = random.matrix(format, [16, 256]);
        for x in [f32::NAN, f32::INFINITY] {
            let mut row = vec![1.0; 256];
            row[100] = x;
            assert!(
                product(&row, &matrix, Isa::detect()).iter().all(|y| !y.is_finite()),
                "{format:?}"
            );
        }
        assert!(
            product(&[0.0; 256], &matrix, Isa::detect()).iter().all(|&y| y == 0.0),
            "{format:?}"
        );
    }
}

#[test]
fn a_bias_is_added() {
    let mut random = Random(12);
    for format in Format::ALL {
        let (matrix, _) = random.matrix(format, [37, inputs(format)]);
        let (x, bias) = (random.numbers(20 * inputs(format)), random.numbers(37));
        let biased = matrix.clone().with_bias(&bias).unwrap();
        for isa in Isa::available() {
            let sums = product(&x, &matrix, isa);
            let expected: Vec<f32> =
                sums.iter().zip(bias.iter().cycle()).map(|(y, b)| y + b).collect();
            assert_eq!(bits(&product(&x, &biased, isa)), bits(&expected), "{format:?} {isa:?}");
        }
        assert!(matrix.with_bias(&bias[1..]).is_err());
    }
}

const FLOATS: [Format; 3] = [Format::F32, Format::F16, Format::Bf16];

/// Sums and sums of magnitudes in `f64`, of each row with each output.
fn exact(x: &[f32], w: &[f32], inputs: usize) -> Vec<[f64; 2]> {
    let dot = |x: &[f32], w: &[f32]| {
        x.iter().zip(w).fold([0.0, 0.0], |[sum, size], (&x, &w)| {
            let product = f64::from(x) * f64::from(w);
            [sum + product, size + product.abs()]
        })
    };
    x.chunks(inputs).flat_map(|x| w.chunks(inputs).map(move |w| dot(x, w))).collect()
}

/// The largest error, and the root of the mean square, in parts of the sums of magnitudes.
fn errors(found: &[f32], exact: &[[f64; 2]]) -> [f64; 2] {
    let (mut largest, mut square) = (0.0f64, 0.0);
    for (&found, [sum, size]) in found.iter().zip(exact) {
        let error = (f64::from(found) - sum).abs() / size;
        (largest, square) = (largest.max(error), square + error * error);
    }
    [largest, (square / found.len() as f64).sqrt()]
}

#[test]
fn float_formats_are_as_accurate_as_sums_in_f32() {
    let mut random = Random(9);
    for format in FLOATS {
        for inputs in [1, 31, 33, 77, 384, 1000, 1536] {
            let (matrix, w) = random.matrix(format, [37, inputs]);
            for rows in [1, 2, 15, 16, 17, 33, 40] {
                let x = random.numbers(rows * inputs);
                let exact = exact(&x, &w, inputs);
                let [_, plain] = errors(&product(&x, &matrix, Isa::Portable), &exact);
                for isa in Isa::available() {
                    let [largest, mean] = errors(&product(&x, &matrix, isa), &exact);
                    let case = format!("{format:?} {inputs} {rows} {isa:?}");
                    assert!(largest <= 2e-7, "{case}: {largest:e}");
                    // Of few products, each is rounded once, and terms of it a few times.
                    let limit = if inputs < 384 { 5e-8f64.max(plain) } else { plain };
                    assert!(mean <= limit, "{case}: {mean:e}, plain {plain:e}");
                }
            }
        }
    }
}

/// Tiles take numbers and results below 2^-126 as zeros, terms among them: a number below 2^-110 has fewer bits there.
#[test]
fn magnitudes_far_from_1_are_multiplied() {
    let mut random = Random(10);
    let (inputs, rows) = (300, 18);
    let tiny = f64::from(f32::MIN_POSITIVE);
    for (of_x, of_w) in
        [(1e-30, 1e30), (1e30, 1e-30), (1e-30, 1e-3), (1e37, 1.0), (1e-36, 1e3), (1e-42, 1.0)]
    {
        let x: Vec<f32> = random.numbers(rows * inputs).iter().map(|x| x * of_x).collect();
        let w: Vec<f32> = random.numbers(20 * inputs).iter().map(|w| w * of_w).collect();
        let bytes: Vec<u8> = w.iter().flat_map(|w| w.to_le_bytes()).collect();
        let matrix = Matrix::new(Format::F32, [20, inputs], &bytes).unwrap();
        // What is taken as zero: of a sum, products; of a product, three terms of each factor.
        let lost = inputs as f64 * tiny * (1.0 + 3.0 * f64::from(of_x.abs() + of_w.abs()));
        for isa in Isa::available() {
            for (y, [sum, size]) in product(&x, &matrix, isa).iter().zip(exact(&x, &w, inputs)) {
                let error = (f64::from(*y) - sum).abs();
                assert!(
                    error <= 2e-7 * size + lost,
                    "{isa:?} {of_x} {of_w}: {error:e} of {size:e}"
                );
            }
        }
    }
}

#[test]
fn float_weights_that_are_not_finite_reach_their_outputs_alone() {
    let mut random = Random(11);
    let odd = [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7f80_0000, 0xff80_0000].map(f32::from_bits);
    let x = random.numbers(18 * 70);
    for format in FLOATS {
        let (whole, numbers) = random.matrix(format, [33, 70]);
        for isa in Isa::available() {
            let good = product(&x, &whole, isa);
            for odd in odd {
                // As a weight of output 20, and as an input of row 3.
                let mut w = numbers.clone();
                w[20 * 70 + 69] = odd;
                let bytes: Vec<u8> = w.iter().flat_map(|&w| float_bytes(format, w)).collect();
                let found = product(&x, &Matrix::new(format, [33, 70], &bytes).unwrap(), isa);
                for (i, (y, good)) in found.iter().zip(&good).enumerate() {
                    let right =
                        if i % 33 == 20 { !y.is_finite() } else { y.to_bits() == good.to_bits() };
                    assert!(right, "{format:?} {isa:?} weight {odd}: {i}");
                }
                let mut x = x.clone();
                x[3 * 70 + 69] = odd;
                for (i, (y, good)) in product(&x, &whole, isa).iter().zip(&good).enumerate() {
                    let right =
                        if i / 33 == 3 { !y.is_finite() } else { y.to_bits() == good.to_bits() };
                    assert!(right, "{format:?} {isa:?} input {odd}: {i}");
                }
            }
        }
    }
    // All bits of a NaN of 16 bits.
    for (format, nan) in [(Format::F16, 0x7fff_u16), (Format::F16, 0xffff), (Format::Bf16, 0x7fff)]
    {
        let matrix = Matrix::new(format, [1, 1], &nan.to_le_bytes()).unwrap();
        for isa in Isa::available() {
            assert!(product(&[1.0], &matrix, isa)[0].is_nan(), "{format:?} {isa:?}");
        }
    }
}

#[test]
fn wrong_sizes_are_refused() {
    let matrix = Matrix::new(Format::Q8_0, [2, 32], &[0; 68]).unwrap();
    let new = |format, shape, bytes: &[u8]| Matrix::new(format, shape, bytes).unwrap_err();
    assert_eq!(new(Format::Q8_0, [2, 33], &[]), Error::Blocks { format: Format::Q8_0, inputs: 33 });
    assert_eq!(
        new(Format::Q4K, [2, 256], &[0; 7]),
        Error::Length { buffer: "bytes", found: 7, expected: 288 }
    );
    for shape in [[0, 32], [32, 0], [usize::MAX, 32], [1 << 62, 1 << 5], [32, usize::MAX / 32 * 32]]
    {
        assert!(Matrix::new(Format::F32, shape, &[0; 4]).is_err(), "{shape:?}");
        assert!(Matrix::new(Format::Q8_0, shape, &[0; 34]).is_err(), "{shape:?}");
    }
    assert!(matrix.row(2, &mut [0.0; 32]).is_err());
    assert!(matrix.row(1, &mut [0.0; 31]).is_err());
    let mut rows = Rows::new();
    assert!(rows.set(&[0.0; 33], 32).is_err());
    assert!(rows.set(&[], 0).is_err());
    rows.set(&[0.0; 64], 64).unwrap();
    let mut out = [0.0; 2];
    let error = multiply(&rows, &mut [(&matrix, &mut out)], Isa::Portable).unwrap_err();
    assert_eq!(error, Error::Inputs { rows: 64, matrix: 32 });
    assert!(error.to_string().contains("64 inputs and the weights 32"), "{error}");
    rows.set(&[0.0; 64], 32).unwrap();
    assert!(multiply(&rows, &mut [(&matrix, &mut out)], Isa::Portable).is_err());
    rows.set(&[], 32).unwrap();
    multiply(&rows, &mut [(&matrix, &mut [])], Isa::Portable).unwrap();
}

/// Whatever a file says, nothing panics.
#[test]
fn any_bytes_are_weights() {
    let mut random = Random(8);
    for round in 0..300 {
        let format = Format::ALL[round % Format::ALL.len()];
        let outputs = random.next() as usize % 40;
        let inputs = random.next() as usize % 4 * format.block_len();
        let exact = outputs * format.row_bytes(inputs).unwrap();
        let length = if random.byte() < 200 { exact } else { random.next() as usize % 1000 };
        let bytes: Vec<u8> = (0..length).map(|_| random.byte()).collect();
        let Ok(matrix) = Matrix::new(format, [outputs, inputs], &bytes) else { continue };
        let (mut row, mut all) = (vec![0.0; inputs], vec![0.0; outputs * inputs]);
        dequantize(format, &bytes, &mut all).unwrap();
        for (output, expected) in all.chunks(inputs).enumerate() {
            matrix.row(output, &mut row).unwrap();
            let same =
                |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(row.iter().zip(expected).all(same), "{format:?}");
        }
        product(&row, &matrix, Isa::detect());
    }
}
