//! Every invalid call: the error value, and a message that names the argument, the numbers and the remedy.

use regard::mask::{Bits, KeyLists};
use regard::plan::{OutputGrads, OutputMut};
use regard::problem::{Align, Dropout, Similarity};
use regard::score::RelativeBias;
use regard::tensor::Strides;
use regard::{Error, Machine, Mask, Output, Plan, Problem, Score, Shape, Tensor, View, ViewMut};

/// Compares the error, and looks for each word in its message.
fn refused<T>(result: Result<T, Error>, expected: Error, words: &[&str]) {
    let Err(error) = result else { panic!("accepted, instead of: {expected}") };
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` does not say `{word}`");
    }
    assert_eq!(error, expected, "{message}");
}

fn shape([batch, heads, len, dim]: [usize; 4]) -> Shape {
    Shape { batch, heads, len, dim }
}

/// 2 items, 4 query heads, 2 key heads, 5 queries, 7 keys, 3 features.
fn problem<'a>() -> Problem<'a, f32> {
    Problem::of_shapes(shape([2, 4, 5, 3]), shape([2, 2, 7, 3]), shape([2, 2, 7, 6]))
}

fn axis(axis: &'static str, left: (&'static str, usize), right: (&'static str, usize)) -> Error {
    Error::Axis { axis, left, right }
}

/// Where tensors are empty, a batch of any size is as good as another: nothing may walk over its items.
#[test]
fn a_huge_batch_of_empty_tensors_takes_no_time() {
    let lists = KeyLists::new::<[usize; 0]>(&[], [1, 1, 0]).unwrap();
    for mask in [Mask::causal(), Mask::tree(&[]), Mask::keys(lists)] {
        let empty = shape([1 << 40, 1, 0, 1]);
        let problem = Problem::<f32>::of_shapes(empty, empty, empty).mask(mask);
        let plan = Plan::new(problem.clone(), Machine::detect()).unwrap();
        assert_eq!(plan.work().pairs, 0);
    }
}

#[test]
fn tensors_that_disagree_are_errors() {
    let check = |q, k, v, expected: Error, words: &[&str]| {
        let problem = Problem::<f32>::of_shapes(shape(q), shape(k), shape(v));
        refused(problem.check(), expected.clone(), words);
        refused(Plan::new(problem, Machine::detect()), expected, words);
    };
    let v = [2, 2, 7, 6];
    let equal = "must be equal";
    let e = axis("batch", ("q", 1), ("k", 2));
    check([1, 4, 5, 3], [2, 2, 7, 3], v, e, &["batch: q has 1, k has 2", equal]);
    let e = axis("batch", ("k", 2), ("v", 3));
    check([2, 4, 5, 3], [2, 2, 7, 3], [3, 2, 7, 6], e, &["batch: k has 2, v has 3", equal]);
    let e = axis("heads", ("k", 2), ("v", 4));
    check([2, 4, 5, 3], [2, 2, 7, 3], [2, 4, 7, 6], e, &["heads: k has 2, v has 4", equal]);
    let e = axis("keys", ("k", 7), ("v", 8));
    check([2, 4, 5, 3], [2, 2, 7, 3], [2, 2, 8, 6], e, &["keys: k has 7, v has 8", equal]);
    // ANCHOR: features
    let e = axis("features", ("q", 64), ("k", 32));
    check([2, 4, 5, 64], [2, 2, 7, 32], v, e, &["features: q has 64, k has 32", equal]);
    let e = Error::HeadGroups { q: 4, kv: 3 };
    let words = ["heads", "q has 4", "have 3", "multiple"];
    check([2, 4, 5, 3], [2, 3, 7, 3], [2, 3, 7, 6], e, &words);
    // ANCHOR_END: features
    let e = Error::HeadGroups { q: 4, kv: 0 };
    check([2, 4, 5, 3], [2, 0, 7, 3], [2, 0, 7, 6], e, &["q has 4", "have 0", "multiple"]);
    let e = Error::NoFeatures { tensor: "q" };
    check([2, 4, 5, 0], [2, 2, 7, 0], v, e, &["features: q has 0", "at least 1"]);
    let e = Error::NoFeatures { tensor: "k" };
    check([2, 4, 5, 3], [2, 2, 7, 0], v, e, &["features: k has 0", "at least 1"]);
}

#[test]
fn memory_that_does_not_fit_is_an_error() {
    let mut data = [0f32; 10];
    let short = Error::DataLength { needed: 12, found: 10 };
    let words = ["needs 12", "has 10", "longer slice"];
    refused(View::bhsd(&data, [1, 1, 4, 3]), short.clone(), &words);
    refused(View::bshd(&data, [1, 4, 1, 3]), short.clone(), &words);
    refused(View::matrix(&data, [4, 3]), short.clone(), &words);
    refused(ViewMut::bhsd(&mut data, [1, 1, 4, 3]), short.clone(), &words);
    refused(ViewMut::bshd(&mut data, [1, 4, 1, 3]), short.clone(), &words);
    refused(Tensor::new(vec![0f32; 10], shape([1, 1, 4, 3]), regard::Layout::Bhsd), short, &words);
    let strides = Strides { batch: 0, heads: 0, len: 9 };
    let e = Error::DataLength { needed: 12, found: 10 };
    refused(View::strided(&data, shape([1, 1, 2, 3]), strides), e, &words);
    let huge = [usize::MAX, 2, 4, 3];
    let e = Error::ShapeOverflow { shape: huge };
    let words = ["[18446744073709551615, 2, 4, 3]", "order of the axes"];
    refused(View::bhsd(&data, huge), e.clone(), &words);
    refused(ViewMut::bhsd(&mut data, huge), e.clone(), &words);
    refused(Tensor::new(vec![0f32; 1], shape(huge), regard::Layout::Bshd), e.clone(), &words);
    refused(Bits::from_bools(&[true], huge), e.clone(), &words);
    refused(Bits::windowed(&[0], &[1], huge), e, &words);
    let far = Strides { batch: usize::MAX / 2, heads: 1, len: 3 };
    let e = Error::ShapeOverflow { shape: [4, 1, 1, 3] };
    refused(View::strided(&data, shape([4, 1, 1, 3]), far), e, &["[4, 1, 1, 3]"]);
    let overlap = Strides { batch: 0, heads: 4, len: 2 };
    let e = Error::OutputOverlap { strides: [0, 4, 2] };
    let words = ["[0, 4, 2]", "share memory", "stride"];
    refused(ViewMut::strided(&mut data, shape([1, 2, 2, 3]), overlap), e, &words);
    let e = Error::DataLength { needed: 8, found: 3 };
    refused(Bits::from_bools(&[true; 3], [1, 1, 2, 4]), e, &["needs 8", "has 3"]);
    let windowed = |firsts: &[usize], words: &[u64]| Bits::windowed(firsts, words, [1, 1, 2, 130]);
    let e = Error::DataLength { needed: 4, found: 3 };
    refused(windowed(&[0, 0], &[0; 3]), e, &["needs 4", "has 3"]);
    let expected = (2, "the first word of each row");
    let e = Error::Count { option: "bits", expected, found: 1 };
    refused(windowed(&[0], &[0; 2]), e, &["bits: 1 entries", "give 2", "first word"]);
    let option = "the first word of a row of bits";
    let e = Error::OutOfRange { option, found: usize::MAX, limit: 3 };
    refused(windowed(&[0, usize::MAX], &[0; 2]), e, &["first word", "below 3"]);
    let e = Error::OutOfRange { option: "the last key of a row of bits", found: 130, limit: 130 };
    refused(windowed(&[0, 1], &[1, 0, 0, 0b100]), e, &["last key", "130", "below 130"]);
    assert!(windowed(&[0, 1], &[1, 0, 0, 0b10]).is_ok());
}

#[test]
fn masks_that_do_not_fit_are_errors() {
    let check = |mask: Mask, expected: Error, words: &[&str]| {
        refused(problem().mask(mask.clone()).check(), expected.clone(), words);
        // The same mask nested in others.
        let nested = Mask::blocks(2).or(Mask::causal().and(mask));
        refused(problem().mask(nested).check(), expected, words);
    };
    let count = |option, n, what, found| Error::Count { option, expected: (n, what), found };
    let e = count("lengths", 2, "one for each item of the batch", 3);
    check(Mask::lengths(&[1, 2, 3]), e, &["lengths", "3 entries", "give 2", "each item"]);
    let e = Error::OutOfRange { option: "lengths", found: 8, limit: 8 };
    let words = ["lengths: 8", "below 8"];
    check(Mask::lengths(&[3, 8]), e.clone(), &words);
    check(Mask::spans(&[0..3, 2..8]), e.clone(), &words);
    check(Mask::prefix(8), e, &words);
    let what = "one for each key, or for each key of each item";
    let e = count("segments", 7, what, 6);
    check(Mask::segments(&[0; 6]), e.clone(), &["segments: 6 entries", "give 7", "each key"]);
    check(Mask::segments_between(&[0; 5], &[0; 6]), e, &["segments: 6 entries", "give 7"]);
    let e = count("segments", 5, "one for each query, or for each query of each item", 9);
    let words = ["segments: 9 entries", "give 5", "each query"];
    check(Mask::segments_between(&[0; 9], &[0; 7]), e, &words);
    check(Mask::blocks(0), Error::Zero { option: "blocks" }, &["blocks: 0", "at least 1"]);
    check(Mask::dilated(0), Error::Zero { option: "dilated" }, &["dilated: 0", "at least 1"]);
    check(Mask::strided(0), Error::Zero { option: "dilated" }, &["dilated: 0", "at least 1"]);
    check(Mask::columns(0, 1), Error::Zero { option: "columns" }, &["columns: 0", "at least 1"]);
    check(Mask::fixed(0, 1), Error::Zero { option: "blocks" }, &["blocks: 0", "at least 1"]);
    let bits = |shape: [usize; 4]| {
        let all = vec![true; shape.iter().product()];
        Mask::bits(Bits::from_bools(&all, shape).unwrap())
    };
    for found in [[3, 1, 5, 7], [1, 3, 5, 7], [1, 1, 4, 7], [2, 4, 5, 1]] {
        let e = Error::Broadcast { option: "bits", found, scores: [2, 4, 5, 7] };
        check(bits(found), e, &["bits", &format!("{found:?}"), "[2, 4, 5, 7]", "equal or 1"]);
    }
}

#[test]
fn trees_that_do_not_fit_are_errors() {
    let check =
        |mask: Mask, e: Error, words: &[&str]| refused(problem().mask(mask).check(), e, words);
    let e = Error::Parent { token: 1, parent: 1 };
    check(Mask::tree(&[None, Some(1)]), e, &["token 1", "parent 1", "before its children"]);
    let e = Error::Parent { token: 0, parent: usize::MAX };
    check(Mask::causal().and(Mask::tree(&[Some(usize::MAX)])), e, &["token 0", "none"]);
    let e = Error::OutOfRange { option: "tree, tokens among the queries", found: 6, limit: 6 };
    check(Mask::tree(&[None; 6]), e, &["queries: 6", "below 6"]);
    let e =
        Error::Count { option: "tree", expected: (2, "one for each item of the batch"), found: 3 };
    check(Mask::trees(&[[None::<usize>]; 3]), e, &["tree: 3 entries", "give 2"]);
    // More queries than keys.
    let (q, k) = (shape([1, 1, 5, 3]), shape([1, 1, 4, 3]));
    let problem = Problem::<f32>::of_shapes(q, k, k).mask(Mask::tree(&[None; 5]));
    let e = Error::OutOfRange { option: "tree, tokens among the keys", found: 5, limit: 5 };
    refused(problem.check(), e, &["keys: 5", "below 5"]);
}

#[test]
fn key_lists_that_do_not_fit_are_errors() {
    let lists = |n: usize, shape| KeyLists::new(&vec![[6usize]; n], shape).unwrap();
    let check = |lists: KeyLists, e: Error, words: &[&str]| {
        refused(problem().mask(Mask::keys(lists)).check(), e, words);
    };
    let own = |n| ("the key lists", n);
    let e = axis("batch", own(3), ("the scores", 2));
    check(lists(15, [3, 1, 5]), e, &["batch", "key lists has 3", "scores has 2"]);
    let e = axis("heads", own(6), ("the scores", 4));
    check(lists(15, [1, 3, 5]).head_block(2), e, &["heads", "6", "4"]);
    let e = axis("rows", own(4), ("the queries, in blocks", 5));
    check(lists(4, [1, 1, 4]), e, &["rows", "4", "5"]);
    let e = axis("rows", own(4), ("the queries, in blocks", 3));
    check(lists(4, [1, 1, 4]).row_block(2), e, &["rows", "4", "3"]);
    check(lists(5, [1, 1, 5]).row_block(0), Error::Zero { option: "row_block" }, &["at least 1"]);
    check(lists(5, [1, 1, 5]).head_block(0), Error::Zero { option: "head_block" }, &["at least 1"]);
    let beyond = KeyLists::new(&[vec![0], vec![], vec![], vec![2, 7], vec![]], [1, 1, 5]).unwrap();
    check(
        beyond,
        Error::OutOfRange { option: "keys", found: 7, limit: 7 },
        &["keys: 7", "below 7"],
    );
    let expected = (6, "one list for each row of each head of each item");
    let e = Error::Count { option: "keys", expected, found: 2 };
    refused(KeyLists::new(&[vec![0], vec![1]], [1, 2, 3]), e, &["keys: 2 entries", "give 6"]);
    let limit = u32::MAX as usize;
    let e = Error::OutOfRange { option: "keys", found: usize::MAX, limit };
    refused(KeyLists::new(&[[usize::MAX]], [1, 1, 1]), e, &["keys", "below 4294967295"]);
}

#[test]
fn a_global_position_outside_the_sequence_is_named_as_given() {
    let e = Error::OutOfRange { option: "global", found: 7, limit: 7 };
    let problem = problem().mask(Mask::global(&[2, 7]));
    refused(problem.check(), e, &["global: 7 is out of range", "below 7"]);
}

#[test]
fn the_largest_position_is_an_error_and_no_panic() {
    let e = Error::OutOfRange { option: "global", found: usize::MAX, limit: 7 };
    refused(problem().mask(Mask::global(&[usize::MAX])).check(), e, &["global", "below 7"]);
}

#[test]
fn scores_that_do_not_fit_are_errors() {
    let check = |score: Score<'_, f32>, expected: Error, words: &[&str]| {
        refused(problem().score(score).check(), expected, words);
    };
    let value = |option, found, accepted| Error::Value { option, found, accepted };
    let finite = "a finite number";
    let e = value("scale", f64::INFINITY, finite);
    check(Score::new().scale(f64::INFINITY), e, &["scale: inf", finite]);
    let above = "a finite number above 0";
    for t in [0.0, -1.0, f64::INFINITY] {
        let e = value("temperature", t, above);
        check(Score::new().temperature(t), e, &[&format!("temperature: {t}"), above]);
        let e = value("softcap", t, "a finite number above 0, or leave it out");
        check(Score::new().softcap(t), e, &[&format!("softcap: {t}"), above, "leave it out"]);
    }
    for (score, option) in
        [(Score::new().scale(f64::NAN), "scale"), (Score::new().softcap(f64::NAN), "softcap")]
    {
        let error = problem().score(score).check().unwrap_err().to_string();
        assert!(error.starts_with(option) && error.contains("NaN is invalid"), "{error}");
    }
    let heads = "one for each query head";
    let count = |option, n, what, found| Error::Count { option, expected: (n, what), found };
    let e = count("alibi", 4, heads, 2);
    check(Score::new().alibi(&[0.5; 2]), e, &["alibi: 2 entries", "give 4", heads]);
    let e = count("sinks", 4, heads, 5);
    check(Score::new().sinks(&[0.5; 5]), e, &["sinks: 5 entries", "give 4", heads]);
    let table = [0.0; 10];
    for (relative, n) in [
        (RelativeBias::clipped(&table, 1), 12),
        (RelativeBias::t5(&table, 8, 20, true), 32),
        (RelativeBias::t5(&table, 8, 20, false), 32),
    ] {
        let e = count("relative bias", n, "buckets x query heads", 10);
        let words = ["relative bias: 10 entries", &format!("give {n}"), "buckets"];
        check(Score::new().relative(relative), e, &words);
    }
    for found in [[3, 1, 1, 1], [1, 2, 1, 1], [1, 1, 4, 1], [2, 4, 5, 6], [1, 1, 1, 0]] {
        let data = vec![0.0; found.iter().product()];
        let bias = View::bhsd(&data, found).unwrap();
        let e = Error::Broadcast { option: "bias", found, scores: [2, 4, 5, 7] };
        let words = ["bias", &format!("{found:?}"), "[2, 4, 5, 7]", "equal or 1"];
        check(Score::new().bias(bias), e, &words);
    }
}

#[test]
fn a_table_has_as_many_buckets_as_were_asked_for() {
    // Small distances use only the first half of the buckets, but the table has all of them.
    let table = [0.0; 32 * 4];
    let relative = RelativeBias::t5(&table, 32, 8, false);
    problem().score(Score::new().relative(relative)).check().unwrap();
}

#[test]
fn similarities_and_alignments_that_do_not_fit_are_errors() {
    let data = vec![0.0; 200];
    let check = |w: [usize; 4], expected: Error, words: &[&str]| {
        let w = View::bhsd(&data, w).unwrap();
        refused(problem().similarity(Similarity::General(w)).check(), expected, words);
    };
    let equal = "must be equal";
    let e = axis("features", ("q", 3), ("rows of W", 4));
    check([1, 1, 4, 3], e, &["features: q has 3, rows of W has 4", equal]);
    let e = axis("features", ("k", 3), ("columns of W", 5));
    check([1, 1, 3, 5], e, &["features: k has 3, columns of W has 5", equal]);
    let e = axis("batch", ("W", 2), ("a shared W", 1));
    check([2, 1, 3, 3], e, &["batch: W has 2, a shared W has 1", equal]);
    let e = axis("heads", ("q", 4), ("W", 2));
    check([1, 2, 3, 3], e, &["heads: q has 4, W has 2", equal]);
    let at = i64::MAX;
    let accepted = "a position that fits in 62 bits";
    let e = Error::Value { option: "align", found: at as f64, accepted };
    refused(problem().align(Align::Offset(at)).check(), e, &["align: 92233720368547", accepted]);
}

#[test]
fn tensors_that_do_not_fit_the_plan_are_errors() {
    let data = vec![0f32; 1000];
    let view = |shape| View::bhsd(&data, shape).unwrap();
    let (q, k, v) = (view([2, 4, 5, 3]), view([2, 2, 7, 3]), view([2, 2, 7, 6]));
    let plan = Plan::new(problem(), Machine::detect()).unwrap();
    let planned = |axis_name, n, name, found| axis(axis_name, ("the plan", n), (name, found));
    let mut out = vec![0f32; 2 * 4 * 5 * 6];
    for (inputs, e, says) in [
        ((view([1, 4, 5, 3]), k, v), planned("batch", 2, "q", 1), "batch: the plan has 2, q has 1"),
        ((q, view([2, 1, 7, 3]), v), planned("heads", 2, "k", 1), "heads: the plan has 2, k has 1"),
        (
            (q, k, view([2, 2, 6, 6])),
            planned("length", 7, "v", 6),
            "length: the plan has 7, v has 6",
        ),
        ((q, k, view([2, 2, 7, 5])), planned("features", 6, "v", 5), "features: the plan has 6"),
    ] {
        let words = [says, "must be equal"];
        refused(plan.forward(inputs.0, inputs.1, inputs.2), e.clone(), &words);
        let out = ViewMut::bhsd(&mut out, [2, 4, 5, 6]).unwrap();
        let to = OutputMut { out, lse: &mut [0.0; 40], entropy: None };
        refused(plan.forward_into(inputs.0, (inputs.1, inputs.2), to), e, &words);
    }
    let small = ViewMut::bhsd(&mut out, [2, 4, 5, 4]).unwrap();
    let small = OutputMut { out: small, lse: &mut [0.0; 40], entropy: None };
    let e = planned("features", 6, "the output", 4);
    let words = ["features: the plan has 6, the output has 4", "must be equal"];
    refused(plan.forward_into(q, (k, v), small), e, &words);
    let whole = ViewMut::bhsd(&mut out, [2, 4, 5, 6]).unwrap();
    let whole = OutputMut { out: whole, lse: &mut [0.0; 39], entropy: None };
    let expected = (40, "batch x query heads x queries");
    let e = Error::Count { option: "lse", expected, found: 39 };
    let words = ["lse: 39 entries", "give 40", "queries"];
    refused(plan.forward_into(q, (k, v), whole), e, &words);
}

#[test]
fn gradients_that_do_not_fit_the_plan_are_errors() {
    let data = vec![0f32; 1000];
    let view = |shape| View::bhsd(&data, shape).unwrap();
    let (q, k, v) = (view([2, 4, 5, 3]), view([2, 2, 7, 3]), view([2, 2, 7, 6]));
    let plan = Plan::new(problem().entropy(), Machine::detect()).unwrap();
    let (output, d_out) = (plan.forward(q, k, v).unwrap(), view([2, 4, 5, 6]));
    let back = |output: &Output<f32>, output_grads: OutputGrads<'_, f32>| {
        plan.backward(q, k, v, output, output_grads).map(drop)
    };
    back(&output, OutputGrads::new(d_out).lse(&data[..40]).entropy(&data[..40])).unwrap();

    let with = |change: &dyn Fn(&mut Output<f32>)| {
        let mut changed = output.clone();
        change(&mut changed);
        changed
    };
    let planned = |axis_name, n, name, found| axis(axis_name, ("the plan", n), (name, found));
    let e = planned("length", 7, "k", 6);
    refused(plan.backward(q, view([2, 2, 6, 3]), v, &output, d_out), e, &["k has 6", "equal"]);
    let e = planned("features", 6, "the gradient of the output", 5);
    let words = ["features: the plan has 6, the gradient of the output has 5", "must be equal"];
    refused(back(&output, view([2, 4, 5, 5]).into()), e, &words);
    let small = Tensor::new(vec![0f32; 100], shape([1, 4, 5, 5]), regard::Layout::Bhsd).unwrap();
    let e = planned("batch", 2, "the output", 1);
    let words = ["batch: the plan has 2, the output has 1", "must be equal"];
    refused(back(&with(&|o: &mut Output<f32>| o.out = small.clone()), d_out.into()), e, &words);

    let count = |option| Error::Count {
        option,
        expected: (40, "batch x query heads x queries"),
        found: 39,
    };
    let (few, short, given) = (&data[..39], vec![0.0; 39], OutputGrads::new(d_out));
    for (output, output_grads, option) in [
        (with(&|o: &mut Output<f32>| o.lse = short.clone()), given, "lse"),
        (with(&|o: &mut Output<f32>| o.states = vec![[0.0; 2]; short.len()]), given, "states"),
        (output.clone(), given.lse(few), "the gradient of lse"),
        (
            with(&|o: &mut Output<f32>| o.entropy = Some(short.clone())),
            given.entropy(&data[..40]),
            "entropy",
        ),
        (output.clone(), given.entropy(few), "the gradient of entropy"),
    ] {
        let words = [&*format!("{option}: 39 entries"), "give 40", "queries"];
        refused(back(&output, output_grads), count(option), &words);
    }
    let without = with(&|o: &mut Output<f32>| o.entropy = None);
    refused(back(&without, given.entropy(&data[..40])), Error::NoEntropy, &["entropy"]);
}

#[test]
fn a_dropout_rate_that_is_no_share_below_one_is_an_error() {
    let accepted = "a number from 0 to below 1";
    for found in [1.0, -0.1, 1.5, f64::INFINITY, f64::NEG_INFINITY] {
        let e = Error::Value { option: "dropout", found, accepted };
        let words = [&*format!("dropout: {found}"), accepted];
        refused(problem().dropout(Dropout::new(found, 0, 0)).check(), e, &words);
    }
    let error = problem().dropout(Dropout::new(f64::NAN, 0, 0)).check().unwrap_err().to_string();
    assert!(error.starts_with("dropout: NaN is invalid"), "{error}");
    for rate in [0.0, 1.0 - f64::EPSILON] {
        problem().dropout(Dropout::new(rate, 0, 0)).check().unwrap();
    }
}

#[test]
fn parts_that_do_not_fit_together_are_errors() {
    let none: &[Output<f32>] = &[];
    refused(
        Output::merge(Machine::detect(), none),
        Error::NothingToMerge,
        &["merge: the list of outputs is empty", "at least one"],
    );
    let part = |s: [usize; 4]| {
        let zeros = vec![0f32; s.iter().product()];
        let out = Tensor::new(zeros, shape(s), regard::Layout::Bhsd).unwrap();
        Output::new(out, vec![0.0; s[0] * s[1] * s[2]])
    };
    let first = [2, 3, 4, 5];
    for (i, name) in ["batch", "heads", "queries", "features"].into_iter().enumerate() {
        let mut other = first;
        other[i] += 1;
        let (a, b) = (first[i], other[i]);
        let e = axis(name, ("the first part", a), ("another part", b));
        let words = [&*format!("{name}: the first part has {a}, another part has {b}"), "equal"];
        refused(
            Output::merge(Machine::detect(), &[part(first), part(first), part(other)]),
            e,
            &words,
        );
    }
}

#[test]
fn parts_whose_lse_does_not_fit_are_an_error_and_no_panic() {
    let out = Tensor::new(vec![0f32; 4], shape([1, 1, 4, 1]), regard::Layout::Bhsd).unwrap();
    let (whole, short) = (vec![0.0; 4], vec![0.0; 3]);
    let parts = [Output::new(out.clone(), whole), Output::new(out, short)];
    assert!(Output::merge(Machine::detect(), &parts).is_err());
}
