//! Rotary positions, with their way back.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, try_run};
use crate::tensors::{by_type, from_engine, view, viewable};
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use regard::rope::{Positions, Rope};
use regard::{Layout, Machine};
use std::sync::Arc;

/// Where the rows of a tensor stand, as [`Positions`] has it, owned.
#[derive(Clone, Debug, PartialEq)]
pub enum RopePositions {
    /// Row `i` of every item stands here + `i`.
    From(i64),
    /// A position for each row: `[batch, len]`, or `[len]` for all items.
    List(Arc<[i64]>),
}

impl RopePositions {
    fn positions(&self) -> Positions<'_> {
        match self {
            Self::From(first) => Positions::From(*first),
            Self::List(list) => Positions::List(list),
        }
    }
}

/// Turns `x [batch, heads, length, features]` by its positions.
pub fn rope(x: Tensor<4>, rope: &Rope, places: RopePositions) -> Result<Tensor<4>, Error> {
    try_run(Arc::new(Turn { rope: rope.clone(), places }), vec![x.into_dispatch()])
}

#[derive(Debug)]
struct Turn {
    rope: Rope,
    places: RopePositions,
}

impl Turn {
    fn turned(&self, x: &FlexTensor, rope: &Rope) -> Result<FlexTensor, Error> {
        let x = viewable(x);
        by_type!(x, E => {
            let from = view::<E>(&x)?;
            let (shape, layout) = (from.shape(), from.layout());
            let mut data = Vec::with_capacity(shape.batch * shape.heads * shape.len * shape.dim);
            let [outer, inner] = match layout {
                Layout::Bhsd => [shape.heads, shape.len],
                Layout::Bshd => [shape.len, shape.heads],
            };
            for (batch, i, j) in (0..shape.batch).flat_map(|b| (0..outer).flat_map(move |i| (0..inner).map(move |j| (b, i, j)))) {
                let (head, row) = if layout == Layout::Bhsd { (i, j) } else { (j, i) };
                data.extend_from_slice(from.row(batch, head, row));
            }
            let mut to = regard::Tensor::new(data, shape, layout)?;
            rope.apply(Machine::detect(), &mut to.view_mut(), self.places.positions())?;
            Ok(from_engine(to))
        })
    }
}

impl Operation for Turn {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        self.turned(&inputs[0], &self.rope)
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let back_turned = || self.turned(&back.output_grad, &self.rope.clone().inverse());
        vec![back.needs_grad[0].then(|| back_turned().expect("forward has checked the call"))]
    }
}
