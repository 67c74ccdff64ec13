//! The kernel against the definition on small problems: every mask, score and similarity, any instruction set and
//! thread count; NaN in keys that nobody sees; the same bits from another machine. Then a look at its weights.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::{AttentionView, Mask, Plan};
use regard_scope::{Measure, Pool};
use regard_fuzz::{Case, ROOM, machines};
use regard_testkit::OutputCheck;
use regard_testkit::run::same_bits;

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let case = Case::arbitrary(u)?;
    let (problem, (q, k, v)) = (case.problem(), case.inputs());
    let plans = machines(u)?.map(|machine| Plan::new(problem.clone(), machine).unwrap());
    let [plan, _] = &plans;
    let [ours, again] = plans.each_ref().map(|plan| plan.forward(q, k, v).unwrap());
    // Which keys are chosen is the kernel's to say; where scores are nearly equal the definition may choose others.
    let judged = ours.selection.as_ref().map_or(problem.clone(), |choice| problem.with_selection(choice));
    let ratio = OutputCheck::new(&judged, (q, k, v)).ratio(&ours).unwrap();
    assert!(ratio.worse() <= ROOM, "{plan:#}\nof the bound: {ratio:?}");
    assert!(same_bits(&ours, &again), "{plan:#}");
    // Each row has all of its weight somewhere, and statistics have the same bits on every machine.
    let (cells, step) = ([u.int_in_range(1..=9)?, u.int_in_range(1..=9)?], u.int_in_range(1..=5)?);
    let statistics = plans.each_ref().map(|plan| {
        let view = AttentionView::new(plan, q, k, &ours).unwrap().every(step).unwrap();
        let all = Measure::new().entropy().mean_distance().col_sum().top_k(3).sink_mass().mass(Mask::full());
        all.pooled(cells[0], cells[1], Pool::Max).of(&view).unwrap()
    });
    for (mass, sink) in statistics[0].masses[0].iter().zip(&statistics[0].sink_mass) {
        let whole = mass + sink;
        assert!(whole == 0.0 || (whole - 1.0).abs() < 0.05, "{plan:#}\nin all {whole}");
    }
    assert_eq!(format!("{:?}", statistics[0]), format!("{:?}", statistics[1]), "{plan:#}");
    Ok(())
}
