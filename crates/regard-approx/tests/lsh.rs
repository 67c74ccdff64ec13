//! LSH attention: its rows of the case table, and properties that the table does not cover.

use regard::{Error, Machine, Mask, View, attend};
use regard_approx::LshAttention;
use regard_testkit::lsh::clustered;
use regard_testkit::{AttentionKind, Case, Noise, cases, check};

fn here() -> Machine {
    Machine::detect()
}

#[test]
fn the_rows_of_the_table_agree_with_the_definition() {
    let own = |case: &Case| matches!(case.attention, AttentionKind::Lsh { .. });
    let rows: Vec<Case> = cases().into_iter().filter(own).collect();
    assert!(rows.len() > 100, "only {} rows", rows.len());
    let report = check(&rows, &mut |_, _| {});
    assert!(report.is_green(), "{report}");
}

#[test]
fn one_block_for_all_keys_is_full_attention() {
    let x: Vec<f32> = Noise::new(5).normals(2 * 100 * 16);
    let x = View::bhsd(&x, [1, 2, 100, 16]).unwrap();
    let found = LshAttention::new().rounds(3).bucket_size(100).forward(here(), x, x, x).unwrap();
    let full = attend(x, x, x, Mask::full()).unwrap();
    let errors = found.output.out.data().iter().zip(full.out.data()).map(|(a, b)| (a - b).abs());
    assert!(errors.fold(0.0, f32::max) < 1e-5);
    let recall = found.recall(here(), x, x, 10, 50).unwrap();
    assert_eq!(recall.rows, 100);
    assert!(recall.mass.worst > 1.0 - 1e-5 && recall.top.worst == 1.0, "{recall:?}");
}

#[test]
fn what_a_row_meets_depends_on_no_other_row() {
    let (q, k): (Vec<f32>, Vec<f32>) =
        (Noise::new(6).normals(90 * 8), Noise::new(7).normals(400 * 8));
    let k = View::matrix(&k, [400, 8]).unwrap();
    let lsh = LshAttention::new().rounds(4).bucket_size(8).causal();
    let all = lsh.forward(here(), View::matrix(&q, [90, 8]).unwrap(), k, k).unwrap();
    let last = lsh.forward(here(), View::matrix(&q[80 * 8..], [10, 8]).unwrap(), k, k).unwrap();
    for (row, key) in (0..10).flat_map(|row| (0..400).map(move |key| (row, key))) {
        assert_eq!(
            all.buckets.is_visible(0, 0, 80 + row, key),
            last.buckets.is_visible(0, 0, row, key)
        );
    }
}

#[test]
fn a_row_that_is_a_key_meets_itself() {
    let x: Vec<f32> = Noise::new(8).normals(500 * 8);
    let x = View::matrix(&x, [500, 8]).unwrap();
    let found =
        LshAttention::new().rounds(1).bucket_size(4).causal().forward(here(), x, x, x).unwrap();
    assert!((0..500).all(|i| found.buckets.is_visible(0, 0, i, i)));
    assert!(found.output.lse.iter().all(|lse| lse.is_finite()));
}

// ANCHOR: clusters
#[test]
fn rows_of_a_cluster_find_each_other() {
    let (n, d) = (4096, 32);
    let x: Vec<f32> = clustered(n, d, 128, 0.2, 1);
    let x = View::matrix(&x, [n, d]).unwrap();
    let found = LshAttention::new().forward(here(), x, x, x).unwrap();
    let recall = found.recall(here(), x, x, 16, 64).unwrap();
    assert!(recall.top.mean > 0.9, "{recall:?}");
    let noise: Vec<f32> = Noise::new(9).normals(n * d);
    let x = View::matrix(&noise, [n, d]).unwrap();
    let found = LshAttention::new().forward(here(), x, x, x).unwrap();
    let lost = found.recall(here(), x, x, 16, 64).unwrap();
    assert!(lost.mass.mean < recall.mass.mean, "{lost:?}");
}
// ANCHOR_END: clusters

#[test]
fn not_a_number_in_the_inputs_is_no_panic() {
    let mut x: Vec<f32> = Noise::new(8).normals(300 * 8);
    x[70] = f32::NAN;
    x[80] = f32::INFINITY;
    let x = View::matrix(&x, [300, 8]).unwrap();
    let found = LshAttention::new().bucket_size(8).forward(here(), x, x, x).unwrap();
    // The row itself, and rows with it among their candidates, are NaN; recall leaves them out.
    assert!(found.output.lse[8].is_nan() && found.output.out.data()[8 * 8].is_nan());
    let recall = found.recall(here(), x, x, 3, 300).unwrap();
    assert!(recall.mass.mean.is_finite() && recall.top.mean.is_finite());
}

#[test]
fn tensors_of_nothing_may_be_as_large_as_they_like() {
    let of = |shape| View::<f32>::bhsd(&[], shape).unwrap();
    let lsh = LshAttention::new();
    let wide = of([0, 1, 1000, 1 << 60]);
    assert!(matches!(lsh.forward(here(), wide, wide, wide), Err(Error::OutOfRange { .. })));
    let many = of([1, 1 << 40, 0, 8]);
    assert!(matches!(lsh.forward(here(), many, many, many), Err(Error::OutOfRange { .. })));
}

#[test]
fn gradients_of_packed_sequences_are_refused() {
    let data = vec![0.5f32; 2 * 5 * 4];
    let x = View::bhsd(&data, [2, 1, 5, 4]).unwrap();
    let lsh = LshAttention::new();
    let found = lsh.forward(here(), x, x, x).unwrap();
    let packed = View::packed(&data[..9 * 4], &[0, 5, 9], [1, 4]).unwrap();
    let error = lsh.backward(here(), x, x, x, &found, packed).unwrap_err();
    assert_eq!(error, Error::Packed { option: "lsh" });
    assert_eq!(found.recall(here(), packed, x, 1, 1).unwrap_err(), Error::Packed { option: "lsh" });
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let data = vec![0f32; 6 * 4];
    let x = View::matrix(&data, [6, 4]).unwrap();
    let refused = |lsh: LshAttention| lsh.forward(here(), x, x, x).unwrap_err();
    let lsh = LshAttention::new();
    assert_eq!(refused(lsh.rounds(0)), Error::Zero { option: "lsh rounds" });
    assert_eq!(refused(lsh.bucket_size(0)), Error::Zero { option: "lsh bucket_size" });
    let limit = Error::OutOfRange { option: "lsh rounds", found: usize::MAX, limit: 257 };
    assert_eq!(refused(lsh.rounds(usize::MAX)), limit);
    assert!(matches!(refused(lsh.scale(f64::NAN)), Error::Value { .. }));
    assert!(lsh.bucket_size(usize::MAX).forward(here(), x, x, x).is_ok());
    let packed = View::packed(&data, &[0, 2, 6], [1, 4]).unwrap();
    let error = lsh.forward(here(), packed, packed, packed).unwrap_err();
    assert_eq!(error, Error::Packed { option: "lsh" });
    let found = lsh.forward(here(), x, x, x).unwrap();
    let short = View::matrix(&data, [5, 4]).unwrap();
    let axis = |error| matches!(error, Error::Axis { .. });
    assert!(axis(lsh.backward(here(), x, short, short, &found, x).unwrap_err()));
    assert!(axis(lsh.backward(here(), x, x, x, &found, short).unwrap_err()));
    assert!(axis(found.recall(here(), short, x, 1, 1).unwrap_err()));
    assert_eq!(found.recall(here(), x, x, 0, 1).unwrap_err(), Error::Zero { option: "top" });
}
