//! Cross entropy, with label smoothing.

use crate::error::Error;
use crate::op::{BackwardArgs, Operation, run};
use crate::rows::{RowWork, by_few, changed};
use crate::tensors::{dense, numbers, only_f32, rows, sizes, tensor};
use burn::backend::flex::FlexTensor;
use burn::tensor::{Int, Tensor};
use regard_matmul::math::{LANES, exp};
use regard_matmul::sum;
use std::sync::{Arc, OnceLock};

/// How a [`cross_entropy`] is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// The share of a target that is spread over all classes (Szegedy et al. 2016).
    pub smoothing: f64,
    /// Rows with this target do not count, as padding does not.
    pub ignored: Option<i64>,
}

/// The mean of `-ln p(target)` over the rows that count: `scores [rows, classes]`, `targets [rows]`; 0 if none does.
///
/// Nothing of the size of the scores is kept for the way back, and only one such thing is made there: their gradient.
pub fn cross_entropy(
    scores: Tensor<2>,
    targets: Tensor<1, Int>,
    how: CrossEntropy,
) -> Result<Tensor<1>, Error> {
    let ([rows, classes], [found]) = (scores.dims(), targets.dims());
    if rows != found {
        return Err(Error::Targets { rows, found });
    }
    if !(0.0..1.0).contains(&how.smoothing) {
        return Err(Error::Smoothing { found: how.smoothing });
    }
    let mut kept = Vec::with_capacity(rows);
    for (row, target) in targets.into_data().iter::<i64>().enumerate() {
        let class = usize::try_from(target).ok().filter(|class| *class < classes);
        match class {
            _ if Some(target) == how.ignored => kept.push(None),
            Some(class) => kept.push(Some(class)),
            None => return Err(Error::Target { row, found: target, classes }),
        }
    }
    #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
    let op = Loss { smoothing: how.smoothing as f32, targets: kept, lse: OnceLock::new() };
    Ok(run(Arc::new(op), vec![scores.into_dispatch()]))
}

#[derive(Debug)]
struct Loss {
    smoothing: f32,
    targets: Vec<Option<usize>>,
    /// `ln(sum of e^score)` of each row.
    lse: OnceLock<Vec<f32>>,
}

impl Loss {
    fn counted(&self) -> f32 {
        self.targets.iter().flatten().count().max(1) as f32
    }
}

#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (steps, rest) = row.as_chunks::<LANES>();
    for step in steps {
        for (lane, x) in lanes.iter_mut().zip(step) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    let mut top = f32::NEG_INFINITY;
    for lane in lanes {
        top = top.max(lane);
    }
    for x in rest {
        top = top.max(*x);
    }
    top
}

/// The lse of a row of scores, and its loss.
struct Lost<'a>(&'a Loss, &'a [f32]);

impl RowWork for Lost<'_> {
    #[inline(always)]
    fn row(&self, i: usize, to: &mut [f32]) {
        let Self(loss, scores) = *self;
        let classes = scores.len() / loss.targets.len();
        let row = &scores[i * classes..][..classes];
        let top = largest(row);
        let lse = top + sum!(x in row => exp(x - top)).ln();
        to[0] = lse;
        if let Some(target) = loss.targets[i] {
            let share = loss.smoothing;
            let mean = if share > 0.0 { sum!(x in row => x) / classes as f32 } else { 0.0 };
            to[1] = lse - (1.0 - share) * row[target] - share * mean;
        }
    }
}

/// A row of scores to its gradient.
struct ByScores<'a>(&'a Loss, &'a [f32], f32);

impl RowWork for ByScores<'_> {
    #[inline(always)]
    fn row(&self, i: usize, d: &mut [f32]) {
        let Self(loss, lse, scale) = *self;
        let Some(target) = loss.targets[i] else {
            d.fill(0.0);
            return;
        };
        let (lse, spread) = (lse[i], loss.smoothing / d.len() as f32);
        for x in d.iter_mut() {
            *x = (exp(*x - lse) - spread) * scale;
        }
        d[target] -= (1.0 - loss.smoothing) * scale;
    }
}

impl Operation for Loss {
    fn forward(&self, inputs: &[FlexTensor], _: bool) -> Result<FlexTensor, Error> {
        only_f32("cross entropy", inputs);
        let scores = dense(&inputs[0]);
        // Two numbers a row: its lse and its loss.
        let mut found = vec![0.0; 2 * self.targets.len()];
        by_few(&mut found, 2, &Lost(self, numbers(&scores)));
        let total: f64 = found.chunks(2).map(|row| f64::from(row[1])).sum();
        let _ = self.lse.set(found.chunks(2).map(|row| row[0]).collect());
        #[expect(clippy::cast_possible_truncation, reason = "numbers are f32")]
        Ok(tensor(vec![(total / f64::from(self.counted())) as f32], &[1]))
    }

    fn backward(&self, back: BackwardArgs<'_>) -> Vec<Option<FlexTensor>> {
        let (scores, output_grad) = (dense(&back.inputs[0]), dense(&back.output_grad));
        let [_, classes] = rows(&scores);
        let scale = numbers::<f32>(&output_grad)[0] / self.counted();
        let lse = self.lse.get().expect("forward has been before backward");
        let undo = ByScores(self, lse, scale);
        let by_scores = || tensor(changed(numbers(&scores), classes, &undo), &sizes(&scores));
        vec![back.needs_grad[0].then(by_scores)]
    }
}
