//! Every kernel drops exactly the pairs that [`Dropout::keeps`] rejects.

use regard::problem::{Dropout, Pair};
use regard::{Isa, Mask, Problem, View};
use regard_testkit::cases::dims;
use regard_testkit::masks::named;
use regard_testkit::run::{both_ways, forward, same_bits, same_grad_bits};
use regard_testkit::{Case, Data};

#[test]
fn the_same_draw_gives_the_same_bits_and_another_offset_others() {
    let case = Case::new(dims([2, 4, 2, 33, 70, 8, 5])).mask(named("causal"));
    let data = Data::<f32>::new(&case);
    let drawn = |offset: u64, isa: Isa| {
        let problem = data.problem(&case).dropout(Dropout::new(0.2, 11, offset));
        both_ways(&problem, data.inputs(), data.output_grads(&case), isa, 2)
    };
    for isa in Isa::available() {
        let [first, again, other] = [5, 5, 6].map(|offset| drawn(offset, isa));
        assert!(same_bits(&first.0, &again.0) && same_grad_bits(&first.1, &again.1));
        assert!(!same_bits(&first.0, &other.0) && !same_grad_bits(&first.1, &other.1));
        assert_eq!(first.0.lse, other.0.lse, "weights are dropped after the softmax");
    }
}

/// Keys per value feature. The output must distinguish all sums of this many powers of 2.
const SHARING: usize = 10;

/// Recovers from an output which weights were dropped. Equal scores give equal weights, and the value of each key is a
/// power of 2 in one feature that no other key with that power uses.
fn what_is_dropped_is_what_keeps_says([batch, heads, q_len, k_len]: [usize; 4], mask: &Mask) {
    let rate = 0.3;
    let dropout = Dropout::new(rate, 3, 9);
    let features = k_len.div_ceil(SHARING);
    let value = |i: usize| {
        let (key, feature) = (i / features % k_len, i % features);
        if key % features == feature { f32::from(1u16 << (key / features)) } else { 0.0 }
    };
    let (zeros, ones) = (vec![0f32; batch * heads * q_len], vec![1f32; batch * k_len]);
    let values: Vec<f32> = (0..batch * k_len * features).map(value).collect();
    let view = |data, shape| View::bhsd(data, shape).expect("as many numbers as the shape has");
    let q = view(&zeros, [batch, heads, q_len, 1]);
    let k = view(&ones, [batch, 1, k_len, 1]);
    let v = view(&values, [batch, 1, k_len, features]);
    let problem = Problem::new(&q, &k, &v).mask(mask.clone()).dropout(dropout);
    for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let output = forward(&problem, (q, k, v), isa, threads);
        for (i, lse) in output.lse.iter().enumerate() {
            let (batch, head, row) = (i / q_len / heads, i / q_len % heads, i % q_len);
            let (out, scope) =
                (output.out.view().row(batch, head, row), problem.scope(batch, head));
            // A score of 0 gives a weight of 1 / e^lse, divided by 1 - rate if it is kept.
            let unit = f64::from(lse.exp()) * (1.0 - rate);
            for key in 0..k_len {
                let kept = f64::from(out[key % features]) * unit;
                assert!((kept - kept.round()).abs() < 0.1, "{mask}: {kept} of row {row}");
                let kept = kept.round() / f64::from(1u16 << (key / features)) % 2.0 >= 1.0;
                let expected = mask.is_visible(&scope, row, key)
                    && dropout.keeps(Pair { batch, head, row, key });
                assert_eq!(kept, expected, "{mask} on {}: row {row}, key {key}", isa.name());
            }
        }
    }
}

#[test]
fn a_forward_drops_the_pairs_that_it_says_it_drops() {
    for mask in [Mask::causal(), Mask::strided(7), Mask::strided(5).and(Mask::causal())] {
        what_is_dropped_is_what_keeps_says([2, 3, 70, 130], &mask);
    }
    what_is_dropped_is_what_keeps_says([1, 1, 1, 9000], &Mask::full());
    what_is_dropped_is_what_keeps_says([1, 2, 1, 9000], &Mask::full().window(8500));
}
