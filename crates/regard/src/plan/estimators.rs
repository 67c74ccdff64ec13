//! The backward pass where rows have chosen: the gradient of what was kept, and estimates where a choice has no gradient.

use super::Plan;
use crate::description::normalizer::{Normalizer, Rule, Selection};
use crate::error::Error;
use crate::machine::simd::Element;
use crate::plan::grads::{Grads, OutputGrads};
use crate::plan::output::{Output, OutputView};
use crate::tensor::view::{Inputs, Tensor};

impl<E: Element> Plan<'_, E> {
    /// The gradients of a call whose normalizer is not the softmax.
    pub(crate) fn backward_chosen<'b>(
        &self,
        inputs: Inputs<'b, E>,
        output: OutputView<'b, E>,
        output_grads: OutputGrads<'b, E>,
    ) -> Result<Grads<E>, Error> {
        let normalizer = self.problem().normalizer;
        let name = normalizer.name();
        let Some(selection) = output.selection else {
            return Err(Error::NoSelection { normalizer: name });
        };
        self.check_selection(selection)?;
        let chooses_one = matches!(normalizer, Normalizer::Hard | Normalizer::Sampled { .. });
        let estimates = [
            ("straight-through", output_grads.straight_through && !chooses_one),
            (
                "advantage",
                output_grads.advantage.is_some()
                    && !matches!(normalizer, Normalizer::Sampled { .. }),
            ),
        ];
        if let Some((estimate, _)) = estimates.into_iter().find(|(_, refused)| *refused) {
            return Err(Error::NoEstimate { estimate, normalizer: name });
        }
        if output_grads.straight_through && output_grads.advantage.is_some() {
            let estimate = "straight-through beside an advantage";
            return Err(Error::NoEstimate { estimate, normalizer: name });
        }
        let usual = output_grads.without_estimates();
        let (q, k, v) = inputs;
        let kept = self.selecting(selection, normalizer.rule());
        if normalizer == Normalizer::Sparsemax {
            if output_grads.lse.is_some() {
                return Err(Error::OnlySoftmax { option: "the gradient of lse", normalizer: name });
            }
            // score_j -> a_j = score_j - t, t the mean of the kept less 1 / their number: so the gradient of a score is that of
            // its weight less the mean of those kept. The pass back takes it from the output: it gets the mean of the values.
            let Output { out, .. } = self.selecting(selection, Rule::Uniform).forward(q, k, v)?;
            let mean = OutputView { out: out.view(), entropy: None, selection: None, ..output };
            return kept.backward(q, k, v, mean, usual);
        }
        if let Some(advantage) = output_grads.advantage {
            return self.backward_by_score_function(inputs, &kept, output, usual, advantage);
        }
        let mut grads = kept.backward(q, k, v, output, usual)?;
        if output_grads.straight_through {
            let soft = self.soft();
            let (output, of_v) = (soft.forward(q, k, v)?, grads.v.clone());
            // As if the output had been soft; lse and entropy are those of what was chosen.
            grads.add(&soft.backward(q, k, v, &output, usual.output_only())?);
            grads.v = of_v;
        }
        Ok(grads)
    }

    /// The score function: `advantage d ln p(chosen)`, and what the loss says of the value that was chosen.
    fn backward_by_score_function(
        &self,
        inputs: Inputs<'_, E>,
        kept: &Plan<'_, E>,
        output: OutputView<'_, E>,
        output_grads: OutputGrads<'_, E>,
        advantage: &[E::Num],
    ) -> Result<Grads<E>, Error> {
        let (q, k, v) = inputs;
        let rows = self.problem().rows();
        Error::unless_one_each_row("advantage", rows, advantage.len())?;
        // ln p(chosen) = score of the chosen - lse of all. The first is the lse of the kept.
        let given = |row: usize| output_grads.lse.map_or(E::Num::default(), |d_lse| d_lse[row]);
        if let Some(d_lse) = output_grads.lse {
            Error::unless_one_each_row("the gradient of lse", rows, d_lse.len())?;
        }
        let of_kept: Vec<_> = advantage.iter().enumerate().map(|(i, a)| *a + given(i)).collect();
        let mut grads = kept.backward(q, k, v, output, output_grads.lse(&of_kept))?;
        let soft = self.soft();
        let output = soft.forward(q, k, v)?;
        let nothing = Tensor::zeros_like(&output.out.view())?;
        let of_all: Vec<_> = advantage.iter().map(|a| -*a).collect();
        let rest = OutputGrads::new(nothing.view()).lse(&of_all);
        let rest = if output_grads.bias { rest.with_bias() } else { rest };
        grads.add(&soft.backward(q, k, v, &output, rest)?);
        Ok(grads)
    }

    pub(crate) fn check_selection(&self, selection: &Selection<E::Num>) -> Result<(), Error> {
        let rows = self.problem().rows();
        let most = self.problem().normalizer.most(self.problem().dims().k_len);
        Error::unless_one_each_row("selection", rows, selection.thresholds.len())?;
        Error::unless_same(
            "keys of a selection",
            ("the plan", most),
            ("the output", selection.most),
        )?;
        Error::unless_one_each_row("selection", rows * most, selection.keys.len())
    }
}

impl<E: Element> Grads<E> {
    /// Adds gradients of the same call.
    fn add(&mut self, other: &Self) {
        fn add<N: Element>(sum: &mut Tensor<N>, x: &Tensor<N>) {
            for (sum, x) in sum.data_mut().iter_mut().zip(x.data()) {
                *sum = N::narrow(sum.widen() + x.widen());
            }
        }
        // Without `..`: the compiler asks for a gradient that is new.
        let Self {
            q,
            k,
            v,
            scale,
            temperature,
            bias,
            alibi,
            relative,
            sinks,
            centers,
            w,
            additive,
        } = self;
        for (sum, x) in [(q, &other.q), (k, &other.k), (v, &other.v)] {
            add(sum, x);
        }
        *scale += other.scale;
        *temperature += other.temperature;
        let both = |sum: &mut Option<Tensor<E::Num>>, x: &Option<Tensor<E::Num>>| {
            sum.iter_mut().zip(x).for_each(|(sum, x)| add(sum, x));
        };
        both(bias, &other.bias);
        both(w, &other.w);
        for (sum, x) in additive.iter_mut().zip(&other.additive) {
            add(&mut sum.w_q, &x.w_q);
            add(&mut sum.v, &x.v);
            both(&mut sum.w_k, &x.w_k);
        }
        let lists = [
            (alibi, &other.alibi),
            (relative, &other.relative),
            (sinks, &other.sinks),
            (centers, &other.centers),
        ];
        for (sum, x) in lists {
            sum.iter_mut().zip(x).for_each(|(sum, x)| *sum = *sum + *x);
        }
    }
}
