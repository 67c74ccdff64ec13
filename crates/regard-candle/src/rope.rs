//! Rotary positions, with their way back.

use crate::error::Error;
use crate::tensors::{
    OpResult, StorageGuard, TensorElement, TensorSpec, in_order, no_type, viewable,
};
use candle_core::{CpuStorage, CustomOp1, DType, Layout as CandleLayout, Tensor};
use regard::rope::{Positions, Rope};
use regard::{Layout, Machine, bf16, f16};
use std::sync::Arc;

/// Where the rows of a tensor stand, as [`Positions`] has it, owned.
#[derive(Clone, Debug, PartialEq, Eq)]
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

/// Turns `x [batch, heads, length, features]` by its positions. The gradient is turned back.
pub fn rope(x: &Tensor, rope: &Rope, places: RopePositions) -> Result<Tensor, Error> {
    match x.dtype() {
        DType::F32 => turn::<f32>(x, rope, places),
        DType::F64 => turn::<f64>(x, rope, places),
        DType::F16 => turn::<f16>(x, rope, places),
        DType::BF16 => turn::<bf16>(x, rope, places),
        other => Err(no_type("x", other)),
    }
}

fn turn<E: TensorElement>(x: &Tensor, rope: &Rope, places: RopePositions) -> Result<Tensor, Error> {
    TensorSpec { name: "x", axes: (4, "[batch, heads, length, features]"), types: E::ONLY }
        .check(x)?;
    let x = viewable(x)?;
    let made = OpResult::new(turned::<E>(&x, rope, &places)?);
    let layout = made.layout;
    let out = x.apply_op1(Turn { back: rope.clone().inverse(), places, made })?;
    in_order(&out, layout)
}

/// A copy, turned; in memory in the order of the original.
fn turned<E: TensorElement>(
    x: &Tensor,
    rope: &Rope,
    places: &RopePositions,
) -> Result<regard::Tensor<E>, Error> {
    let mut data = Vec::with_capacity(x.elem_count());
    let held = StorageGuard::new(x);
    let x = held.view::<E>()?;
    let (shape, layout) = (x.shape(), x.layout());
    let [outer, inner] = match layout {
        Layout::Bhsd => [shape.heads, shape.len],
        Layout::Bshd => [shape.len, shape.heads],
    };
    for (batch, i) in (0..shape.batch).flat_map(|batch| (0..outer).map(move |i| (batch, i))) {
        for j in 0..inner {
            let (head, row) = if layout == Layout::Bhsd { (i, j) } else { (j, i) };
            data.extend_from_slice(x.row(batch, head, row));
        }
    }
    let mut copy = regard::Tensor::new(data, shape, layout)?;
    rope.apply(Machine::detect(), &mut copy.view_mut(), places.positions())?;
    Ok(copy)
}

/// A call in Candle's graph.
#[derive(Debug)]
struct Turn {
    back: Rope,
    places: RopePositions,
    made: OpResult,
}

impl CustomOp1 for Turn {
    fn name(&self) -> &'static str {
        "regard rope"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &CandleLayout,
    ) -> candle_core::Result<(CpuStorage, candle_core::Shape)> {
        self.made.take()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        // A turn is linear, so its gradient is a call like any other, and so is the gradient of that.
        let grad = in_order(grad, self.made.layout)?;
        Ok(Some(rope(&grad, &self.back, self.places.clone())?))
    }
}
