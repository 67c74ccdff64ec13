//! Every call of every type, compiled here, once, and not again in every crate that makes it: of a generic function that is
//! never inlined, what one crate has compiled serves in all others.
//!
//! Nothing depends on this file but the time that compiling takes: without it each test, example and program would compile all
//! kernels itself, which takes minutes.

use crate::description::problem::Problem;
use crate::error::Error;
use crate::inspect::AttentionView;
use crate::machine::simd::Element;
use crate::plan::output::Output;
use crate::plan::{OutputMut, Plan};
use crate::rope::Rope;
use crate::tensor::cache::{KvCache, Sequence};
use crate::tensor::view::View;
use half::{bf16, f16};

/// What the calls are made of.
struct Made<'m, E: Element> {
    problem: Problem<'m, E>,
    plan: Plan<'m, E>,
    x: View<'m, E>,
    cache: &'m KvCache<E>,
    sequences: &'m [Sequence],
    rope: Rope,
}

/// Makes every call once. Never called itself.
fn every_call<E: Element>(made: Made<'_, E>) -> Result<String, Error> {
    let Made { problem, plan, x, cache, sequences, rope } = made;
    let machine = plan.machine();
    let mut output = Plan::new(problem.clone(), machine)?.forward(x, x, x)?;
    let to = OutputMut { out: output.out.view_mut(), lse: &mut output.lse, entropy: None };
    plan.forward_into(x, (x, x), to)?;
    plan.backward(x, x, x, &output, x)?;
    let mut partial = plan.part(0..1, 0..1)?.forward_partial(x, x, x)?;
    partial.merge(&plan.partial(Vec::new())?)?;
    plan.finish(x, &partial)?;
    let cached = plan.forward_cached(x, cache, sequences)?;
    let shared = plan.forward_shared(x, cache, sequences)?;
    let view = AttentionView::new(&plan, x, x, &shared)?;
    view.for_each_tile(&mut view.scratch(true), &mut |_| ());
    AttentionView::from_lse(&plan, x, x, &shared.lse)?.row(0)?;
    AttentionView::cached(&plan, x, (cache, sequences), &shared)?;
    AttentionView::cached_from_lse(&plan, x, (cache, sequences), &shared.lse)?;
    rope.apply(machine, &mut Output::merge(machine, &[cached, shared])?.out.view_mut(), 0..)?;
    Ok(format!("{plan:#}"))
}

/// Kept, so that it is compiled.
type Compiled<E> = fn(Made<'_, E>) -> Result<String, Error>;

#[used]
static F32: Compiled<f32> = every_call;
#[used]
static F64: Compiled<f64> = every_call;
#[used]
static F16: Compiled<f16> = every_call;
#[used]
static BF16: Compiled<bf16> = every_call;
