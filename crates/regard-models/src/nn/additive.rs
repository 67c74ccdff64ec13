//! The attention of recurrent translators: Bahdanau et al. 2015 and Luong et al. 2015.

use super::linear::Linear;
use crate::error::Error;
use crate::files::LuongScore;
use crate::recorder::Recorder;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard_burn::{Activation, Attention, Similarity, attention, linear};

/// Scores `score . tanh(query q + key k)`: a small network with one hidden layer that sees a query and a key.
#[derive(Module, Debug)]
pub struct Bahdanau {
    /// `[hidden, q_dim]`, without a bias.
    pub query: Linear,
    /// `[hidden, k_dim]`, without a bias.
    pub key: Linear,
    /// `[hidden]`
    pub score: Param<Tensor<1>>,
}

impl Bahdanau {
    /// For queries and keys of so many features, with random weights.
    #[must_use]
    pub fn new([q_dim, k_dim, hidden]: [usize; 3], device: &Device) -> Self {
        Self {
            query: Linear::new([q_dim, hidden], false, device),
            key: Linear::new([k_dim, hidden], false, device),
            score: score(hidden, device),
        }
    }

    /// `queries [batch, q_len, q_dim]` over `keys [batch, k_len, k_dim]` and `values [batch, k_len, v_dim]`:
    /// `[batch, q_len, v_dim]`.
    ///
    /// A trace cannot tell of such scores: a recorder that is on is refused, and [`weights`](Self::weights) are for looking.
    pub fn forward(
        &self,
        queries: Tensor<3>,
        keys: Tensor<3>,
        values: Tensor<3>,
        mask: &Mask,
        recorder: &mut Recorder,
    ) -> Result<Tensor<3>, Error> {
        recordable(recorder)?;
        self.attend(queries, self.project(keys), values, mask)
    }

    /// What keys are for all queries, `[batch, k_len, hidden]`. A decoder asks for it once.
    #[must_use]
    pub fn project(&self, keys: Tensor<3>) -> Tensor<3> {
        self.key.forward(keys)
    }

    /// As [`forward`](Self::forward), over keys that are [projected](Self::project).
    pub fn attend(
        &self,
        queries: Tensor<3>,
        projected: Tensor<3>,
        values: Tensor<3>,
        mask: &Mask,
    ) -> Result<Tensor<3>, Error> {
        attended([queries, projected, values], &self.options(mask), &mut Recorder::off())
    }

    /// What each query sees of each key, `[batch, q_len, k_len]`. For looking: this is all of it in memory.
    pub fn weights(
        &self,
        queries: Tensor<3>,
        keys: Tensor<3>,
        mask: &Mask,
    ) -> Result<Tensor<3>, Error> {
        weights(queries, self.project(keys), &self.options(mask))
    }

    // ANCHOR: options
    fn options(&self, mask: &Mask) -> Attention {
        let similarity = Similarity::Additive {
            w_q: self.query.weight.val().transpose().unsqueeze(),
            w_k: None,
            v: self.score.val().unsqueeze(),
        };
        Attention { mask: mask.clone(), similarity, ..Attention::default() }
    }
    // ANCHOR_END: options
}

/// Unscaled products, or a small network. Which it is, is told by the parameters that it has: none for `q . k`.
#[derive(Module, Debug)]
pub struct Luong {
    /// `[q_dim, k_dim]`, without a bias.
    pub general: Option<Linear>,
    /// `[hidden, q_dim + k_dim]`, without a bias.
    pub concat: Option<Linear>,
    /// `[hidden]`, beside `concat`.
    pub score: Option<Param<Tensor<1>>>,
}

impl Luong {
    /// For queries and keys of so many features, with random weights.
    #[must_use]
    pub fn new(kind: LuongScore, [q_dim, k_dim]: [usize; 2], device: &Device) -> Self {
        let none = Self { general: None, concat: None, score: None };
        match kind {
            LuongScore::Dot => none,
            LuongScore::General => {
                Self { general: Some(Linear::new([k_dim, q_dim], false, device)), ..none }
            }
            LuongScore::Concat { hidden } => Self {
                concat: Some(Linear::new([q_dim + k_dim, hidden], false, device)),
                score: Some(score(hidden, device)),
                ..none
            },
        }
    }

    /// As [`Bahdanau::forward`]. Products can be told of in a trace; a concatenation is refused by a recorder that is on.
    pub fn forward(
        &self,
        queries: Tensor<3>,
        keys: Tensor<3>,
        values: Tensor<3>,
        mask: &Mask,
        recorder: &mut Recorder,
    ) -> Result<Tensor<3>, Error> {
        self.check(&queries, &keys)?;
        let keys = self.project(keys.clone()).unwrap_or(keys);
        self.attend([queries, keys, values], mask, recorder)
    }

    /// What keys are for all queries: `W k`, or what they add to the hidden layer. Nothing else than they are for `q . k`. A decoder
    /// asks for it once.
    pub(crate) fn project(&self, keys: Tensor<3>) -> Option<Tensor<3>> {
        if let Some(general) = &self.general {
            return Some(general.forward(keys));
        }
        let (w, k_dim) = (self.concat.as_ref()?.weight.val(), keys.dims()[2]);
        let of_keys = w.clone().narrow(1, w.dims()[1] - k_dim, k_dim);
        Some(linear(keys, of_keys, None, Activation::None))
    }

    /// As [`forward`](Self::forward), over keys that are [projected](Self::project).
    pub(crate) fn attend(
        &self,
        [queries, keys, values]: [Tensor<3>; 3],
        mask: &Mask,
        recorder: &mut Recorder,
    ) -> Result<Tensor<3>, Error> {
        if self.concat.is_some() {
            recordable(recorder)?;
        }
        let options = self.options(&queries, mask);
        attended([queries, keys, values], &options, recorder)
    }

    /// As [`Bahdanau::weights`].
    pub fn weights(
        &self,
        queries: Tensor<3>,
        keys: Tensor<3>,
        mask: &Mask,
    ) -> Result<Tensor<3>, Error> {
        self.check(&queries, &keys)?;
        let options = self.options(&queries, mask);
        weights(queries, self.project(keys.clone()).unwrap_or(keys), &options)
    }

    /// How queries meet keys that are projected.
    fn options(&self, queries: &Tensor<3>, mask: &Mask) -> Attention {
        let plain = Attention { mask: mask.clone(), scale: Some(1.0), ..Attention::default() };
        let (Some(concat), Some(score)) = (&self.concat, &self.score) else { return plain };
        let w_q = concat.weight.val().narrow(1, 0, queries.dims()[2]).transpose().unsqueeze();
        let similarity = Similarity::Additive { w_q, w_k: None, v: score.val().unsqueeze() };
        Attention { similarity, ..plain }
    }

    /// Refuses queries and keys whose features are not those of a concatenation.
    fn check(&self, queries: &Tensor<3>, keys: &Tensor<3>) -> Result<(), Error> {
        let Some(concat) = &self.concat else { return Ok(()) };
        let (width, q_dim, k_dim) =
            (concat.weight.lazy_shape()[1], queries.dims()[2], keys.dims()[2]);
        if width == q_dim + k_dim {
            return Ok(());
        }
        let why =
            format!("q has {q_dim} and k has {k_dim}, W is made for {width}; it must be their sum");
        Err(Error::format("features", why))
    }
}

fn score(hidden: usize, device: &Device) -> Param<Tensor<1>> {
    let reach = 1.0 / (hidden.max(1) as f64).sqrt();
    Initializer::Uniform { min: -reach, max: reach }.init([hidden], device)
}

fn recordable(recorder: &Recorder) -> Result<(), Error> {
    match recorder.is_on() {
        true => Err(Error::NotRecorded { what: "the scores of a hidden layer".into() }),
        false => Ok(()),
    }
}

/// Attention of one head; what is seen by products is kept. Where there is nothing to see, 0.
pub(super) fn attended(
    [q, k, v]: [Tensor<3>; 3],
    options: &Attention,
    recorder: &mut Recorder,
) -> Result<Tensor<3>, Error> {
    let ([batch, q_len, _], [_, k_len, v_dim]) = (q.dims(), v.dims());
    if batch * q_len * k_len == 0 {
        return Ok(Tensor::zeros([batch, q_len, v_dim], &v.device().inner()));
    }
    let [q, k, v] = [q, k, v].map(|x| x.unsqueeze_dim::<4>(1));
    let seen = recorder.is_on().then(|| (q.clone(), k.clone()));
    let attended = attention(q, k, v, options)?;
    if let Some((q, k)) = seen {
        recorder.record(q, k, &attended, options)?;
    }
    Ok(attended.out.squeeze_dim(1))
}

/// The weights themselves, `[batch, q_len, k_len]`: what attention makes of values that are the rows of an identity.
fn weights(q: Tensor<3>, k: Tensor<3>, options: &Attention) -> Result<Tensor<3>, Error> {
    let ([_, q_len, _], [batch, n, _], device) = (q.dims(), k.dims(), k.device().inner());
    if batch * n == 0 {
        return Ok(Tensor::zeros([batch, q_len, n], &device));
    }
    let identity = Tensor::<2>::eye(n, &device).unsqueeze::<3>().expand([batch, n, n]);
    attended([q, k, identity], options, &mut Recorder::off())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::numbers;
    use burn::tensor::Distribution;

    fn input(sizes: [usize; 3]) -> Tensor<3> {
        Tensor::random(sizes, Distribution::Default, &Device::flex())
    }

    #[test]
    fn weights_of_a_row_sum_to_1_and_those_of_one_that_sees_nothing_to_0() {
        let layer = Bahdanau::new([3, 4, 5], &Device::flex());
        let found = layer
            .weights(input([2, 3, 3]), input([2, 6, 4]), &Mask::lengths(&[0, 4]))
            .expect("sizes fit");
        let sums = numbers(found.sum_dim(2));
        assert_eq!(sums[..3], [0.0; 3]);
        assert!(sums[3..].iter().all(|sum| (sum - 1.0).abs() < 1e-6), "{sums:?}");
    }

    #[test]
    fn products_are_recorded_and_hidden_layers_refused() {
        let (queries, keys) = (input([1, 3, 4]), input([1, 6, 4]));
        let run = |kind: LuongScore, recorder: &mut Recorder| {
            let layer = Luong::new(kind, [4, 4], &Device::flex());
            layer.forward(queries.clone(), keys.clone(), keys.clone(), &Mask::full(), recorder)
        };
        let mut recorder = Recorder::on();
        recorder.at(0, "cross", "target");
        run(LuongScore::Dot, &mut recorder).expect("a product");
        run(LuongScore::General, &mut recorder).expect("a product");
        let error = run(LuongScore::Concat { hidden: 5 }, &mut recorder).unwrap_err();
        assert!(error.to_string().contains("hidden layer"), "{error}");
        assert_eq!(recorder.trace("", &[]).layers.len(), 2);
    }

    #[test]
    fn a_concatenation_of_other_features_is_refused() {
        let layer = Luong::new(LuongScore::Concat { hidden: 5 }, [4, 4], &Device::flex());
        let keys = input([1, 6, 3]);
        let error = layer.forward(
            input([1, 3, 4]),
            keys.clone(),
            keys,
            &Mask::full(),
            &mut Recorder::off(),
        );
        assert!(error.unwrap_err().to_string().contains("made for 8"));
    }
}
