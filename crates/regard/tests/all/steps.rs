//! The intermediate results of `steps` agree with the kernels.

use regard::problem::Normalizer;
use regard::reference::steps;
use regard::{Error, Mask, Problem, View};
use regard_testkit::run::forward;
use regard_testkit::{Case, Data, cases::dims};

#[test]
fn the_steps_lead_to_the_output() {
    let case = Case::new(dims([2, 4, 2, 9, 13, 8, 5]));
    let data = Data::<f32>::new(&case);
    for normalizer in [Normalizer::Softmax, Normalizer::TopK(3), Normalizer::Sparsemax] {
        let problem = data.problem(&case).mask(Mask::causal()).normalizer(normalizer);
        let (q, k, v) = data.inputs();
        let seen = steps(&problem, q, k, v).unwrap();
        let output = forward(&problem, data.inputs(), regard::Isa::best(), 1);
        for (a, b) in seen.out.data().iter().zip(output.out.data()) {
            assert!((a - b).abs() < 1e-5, "{normalizer}: {a} {b}");
        }
        assert_eq!(seen.weights.shape().to_array(), [2, 4, 9, 13]);
        for row in 0..2 * 4 * 9 {
            let (scores, weights) =
                (&seen.scores.data()[row * 13..][..13], &seen.weights.data()[row * 13..][..13]);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
            // Row i is at position i + 4. Masked keys have a similarity, but no score and no weight.
            for key in row % 9 + 5..13 {
                assert_eq!((scores[key], weights[key]), (f32::NEG_INFINITY, 0.0));
                assert!(seen.similarities.data()[row * 13 + key].is_finite());
            }
        }
        let scale = problem.scale();
        let (similarity, score) = (seen.similarities.data()[0], seen.scores.data()[0]);
        assert!((f64::from(similarity) * scale - f64::from(score)).abs() < 1e-6);
    }
}

#[test]
fn steps_of_what_nobody_could_read_are_refused() {
    let data = vec![0f32; 5000];
    let x = View::matrix(&data, [5000, 1]).unwrap();
    let error = steps(&Problem::new(&x, &x, &x), x, x, x).unwrap_err();
    assert!(matches!(error, Error::Value { option: "pairs", .. }), "{error}");
    let y = View::matrix(&data[..10], [10, 1]).unwrap();
    let error = steps(&Problem::new(&y, &y, &y), x, y, y).unwrap_err();
    assert!(matches!(error, Error::Axis { axis: "length", .. }), "{error}");
}
