//! An operation with its own way back, as Burn wants it: the only file that knows Burn's graph.

use crate::error::Error;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    Autodiff, AutodiffBackend, DispatchAutodiffContext, DispatchKindConversion, DispatchTensor,
    Flex,
};
use burn::tensor::{GradientCheckpointingStrategy, Tensor};
use std::fmt;
use std::sync::Arc;

/// One call of an operation. What the way forward finds out, it may keep in itself for the way back.
pub(crate) trait Operation: fmt::Debug + Send + Sync + 'static {
    /// The output. If `keep`, there will be a way back.
    fn forward(&self, inputs: &[FlexTensor], keep: bool) -> Result<FlexTensor, Error>;

    /// The gradients by the inputs: `None` where none is needed.
    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>>;
}

/// What the way back begins with.
#[derive(Debug)]
pub(crate) struct BackwardArgs<'a> {
    /// The inputs of the way forward.
    pub inputs: &'a [FlexTensor],
    /// Its output.
    pub output: &'a FlexTensor,
    /// The gradient by that output.
    pub output_grad: FlexTensor,
    /// Whether each input needs a gradient.
    pub needs_grad: &'a [bool],
}

/// Runs an operation that nothing can be wrong with.
///
/// # Panics
/// If a tensor is not on the Flex backend.
pub(crate) fn run<const D: usize>(
    op: Arc<dyn Operation>,
    inputs: Vec<DispatchTensor>,
) -> Tensor<D> {
    try_run(op, inputs).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs an operation; its output takes part in Burn's autodiff if one of its inputs does.
///
/// # Panics
/// If a tensor is not on the Flex backend.
pub(crate) fn try_run<const D: usize>(
    op: Arc<dyn Operation>,
    inputs: Vec<DispatchTensor>,
) -> Result<Tensor<D>, Error> {
    let context = inputs
        .iter()
        .fold(DispatchAutodiffContext::Disabled, |context, tensor| context.merge(tensor.autodiff));
    match context {
        DispatchAutodiffContext::Disabled => {
            let inputs: Vec<_> = inputs.into_iter().map(plain).collect();
            Ok(Tensor::from_primitive::<Flex>(op.forward(&inputs, false)?))
        }
        DispatchAutodiffContext::Enabled(GradientCheckpointingStrategy::Balanced) => {
            tracked::<D, BalancedCheckpointing>(op, inputs)
        }
        DispatchAutodiffContext::Enabled(_) => tracked::<D, NoCheckpointing>(op, inputs),
    }
}

/// A tensor that takes part in autodiff.
type Tracked = FloatTensor<Autodiff<Flex>>;

fn plain(tensor: DispatchTensor) -> FlexTensor {
    Tensor::<1>::from_dispatch(tensor)
        .try_into_primitive::<Flex>()
        .unwrap_or_else(|why| panic!("Regard computes on the Flex backend: {why:?}"))
}

fn tracked<const D: usize, C>(
    op: Arc<dyn Operation>,
    inputs: Vec<DispatchTensor>,
) -> Result<Tensor<D>, Error>
where
    C: CheckpointStrategy,
    DispatchTensor: DispatchKindConversion<Autodiff<Flex, C>>,
{
    let lift = |tensor: DispatchTensor| match tensor.autodiff {
        DispatchAutodiffContext::Disabled => Autodiff::<Flex, C>::from_inner(plain(tensor)),
        DispatchAutodiffContext::Enabled(_) => Tensor::<1>::from_dispatch(tensor)
            .try_into_primitive::<Autodiff<Flex, C>>()
            .unwrap_or_else(|why| panic!("Regard computes on the Flex backend: {why:?}")),
    };
    let inputs: Vec<Tracked> = inputs.into_iter().map(lift).collect();
    let output = match inputs.len() {
        1 => node::<C, 1>(op, &inputs),
        2 => node::<C, 2>(op, &inputs),
        3 => node::<C, 3>(op, &inputs),
        4 => node::<C, 4>(op, &inputs),
        5 => node::<C, 5>(op, &inputs),
        6 => node::<C, 6>(op, &inputs),
        7 => node::<C, 7>(op, &inputs),
        8 => node::<C, 8>(op, &inputs),
        9 => node::<C, 9>(op, &inputs),
        10 => node::<C, 10>(op, &inputs),
        11 => node::<C, 11>(op, &inputs),
        n => unreachable!("no operation has {n} inputs"),
    };
    Ok(Tensor::from_primitive::<Autodiff<Flex, C>>(output?))
}

/// A step of the graph with `N` inputs, which Burn wants to know when it compiles.
fn node<C: CheckpointStrategy, const N: usize>(
    op: Arc<dyn Operation>,
    inputs: &[Tracked],
) -> Result<Tracked, Error> {
    let plain: Vec<FlexTensor> = inputs.iter().map(|t| t.primitive().clone()).collect();
    let nodes = std::array::from_fn::<_, N, _>(|i| inputs[i].node());
    match Step.prepare::<C>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut step) => {
            let ids = std::array::from_fn(|i| step.checkpoint(&inputs[i]));
            let output = op.forward(&plain, true)?;
            Ok(step.finish((ids, output.clone(), op), output))
        }
        OpsKind::UnTracked(step) => Ok(step.finish(op.forward(&plain, false)?)),
    }
}

#[derive(Debug)]
struct Step;

impl<const N: usize> Backward<Flex, N> for Step {
    type State = ([NodeId; N], FlexTensor, Arc<dyn Operation>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, kept: &mut Checkpointer) {
        let output_grad = grads.consume::<Flex>(&ops.node);
        let (ids, output, op) = ops.state;
        let inputs: [FlexTensor; N] = ids.map(|id| kept.retrieve_node_output(id));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let back =
            BackwardArgs { inputs: &inputs, output: &output, output_grad, needs_grad: &wanted };
        for (parent, gradient) in ops.parents.into_iter().zip(op.backward(back)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}
