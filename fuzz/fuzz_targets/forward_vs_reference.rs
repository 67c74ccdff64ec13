//! The kernel against the definition on small problems: every mask, score and similarity, any instruction set and
//! thread count; NaN in keys that nobody sees; the same bits from another machine.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::Plan;
use regard_fuzz::{Case, ROOM, machines};
use regard_testkit::Judge;
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
    let judged = ours.choice.as_ref().map_or(problem.clone(), |choice| problem.with_choice(choice));
    let ratio = Judge::new(&judged, (q, k, v)).ratio(&ours).unwrap();
    assert!(ratio.worse() <= ROOM, "{plan:#}\nof the bound: {ratio:?}");
    assert!(same_bits(&ours, &again), "{plan:#}");
    Ok(())
}
