//! Rows of a table, looked up by number.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::tensors::{dense, numbers, only_f32, rows, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::{Int, Tensor};
use std::sync::Arc;

/// Row `ids[i, j]` of `table [entries, features]` for each: `ids [batch, length]`, the result is `[batch, length, features]`.
pub fn embedding(table: Tensor<2>, ids: Tensor<2, Int>) -> Result<Tensor<3>, Error> {
    let ([entries, _], sizes) = (table.dims(), ids.dims());
    let mut chosen = Vec::with_capacity(sizes[0] * sizes[1]);
    for (place, id) in ids.into_data().iter::<i64>().enumerate() {
        match usize::try_from(id).ok().filter(|id| *id < entries) {
            Some(id) => chosen.push(id),
            None => return Err(Error::Id { place, found: id, entries }),
        }
    }
    Ok(run(Arc::new(Lookup { ids: chosen, sizes }), vec![table.into_dispatch()]))
}

#[derive(Debug)]
struct Lookup {
    ids: Vec<usize>,
    sizes: [usize; 2],
}

impl Operation for Lookup {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("embedding", inputs);
        let table = dense(&inputs[0]);
        let ([_, width], all) = (rows(&table), numbers::<f32>(&table));
        let mut y = Vec::with_capacity(self.ids.len() * width);
        for id in &self.ids {
            y.extend_from_slice(&all[id * width..][..width]);
        }
        Ok(tensor(y, &[self.sizes[0], self.sizes[1], width]))
    }

    /// The rows of a gradient that have the same number, added up in their order.
    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let ([entries, width], output_grad) = (rows(&back.inputs[0]), dense(&back.output_grad));
        let by_table = || {
            let mut d = vec![0.0; entries * width];
            for (id, row) in self.ids.iter().zip(numbers::<f32>(&output_grad).chunks(width.max(1)))
            {
                for (d, x) in d[id * width..][..width].iter_mut().zip(row) {
                    *d += x;
                }
            }
            tensor(d, &[entries, width])
        };
        vec![back.needs_grad[0].then(by_table)]
    }
}
