//! The kernel against the definition on small problems: every mask, score and similarity, any instruction set and
//! thread count; NaN in keys that nobody sees; the same bits from another machine.
#![no_main]

use arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use regard::{Plan, reference};
use regard_fuzz::{Case, bits, machines};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured<'_>) -> Result<()> {
    let case = Case::arbitrary(u)?;
    let (problem, (q, k, v)) = (case.problem(), case.inputs());
    let machines = machines(u)?;
    let plans = machines.map(|machine| Plan::new(problem.clone(), machine).unwrap());
    let [plan, _] = &plans;
    let [ours, again] = plans.each_ref().map(|plan| plan.forward(q, k, v).unwrap());
    let exact = reference::forward::<f64, f32>(&problem, (q, k, v));

    let check = |what: &str, ours: &[f32], exact: &[f64], tolerance: f64| {
        assert_eq!(ours.len(), exact.len(), "{plan:#}\n{what}");
        for (i, (ours, exact)) in ours.iter().zip(exact).enumerate() {
            let same = f64::from(*ours) == *exact; // -inf
            let error = (f64::from(*ours) - exact).abs();
            assert!(same || error <= tolerance, "{plan:#}\n{what}[{i}] is {ours}, not {exact}");
        }
    };
    let tolerance = case.tolerance();
    check("out", ours.out.data(), &exact.out, tolerance * problem.growth());
    check("lse", &ours.lse, &exact.lse, tolerance);
    if let Some(entropy) = &ours.entropy {
        check("entropy", entropy, &exact.entropy, tolerance);
    }

    assert_eq!(bits(ours.out.data()), bits(again.out.data()), "{plan:#}");
    assert_eq!(bits(&ours.lse), bits(&again.lse), "{plan:#}");
    let [ours, again] = [ours, again].map(|output| output.entropy.as_deref().map(bits));
    assert_eq!(ours, again, "{plan:#}");
    Ok(())
}
