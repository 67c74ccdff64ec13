//! Whole models.

use crate::golden::{Golden, device};
use burn::tensor::{Int, Tensor};
use regard_burn::{CrossEntropy, cross_entropy};
use regard_models::files::{Activation, Architecture, Config, Heads, PairLayout, Positions};
use regard_models::{Bert, DropoutRates, Gpt, Pass, Sentences, Transformer, Vit, VitConfig};

const NONE: DropoutRates = DropoutRates { rate: 0.0, attention: 0.0 };

/// What a golden says of its model, in the words of a config.
pub(crate) fn config(golden: &Golden, architecture: Architecture) -> Config {
    let size = |field: &str| golden.size(field);
    let has = |field: &str| golden.config.get(field).is_some();
    let (d_model, q) = (size("d_model"), size("n_heads"));
    let llama = architecture == Architecture::Llama;
    let translates = architecture == Architecture::Transformer;
    let layers = if translates { "n_encoder_layers" } else { "n_layers" };
    Config {
        architecture,
        d_model,
        n_layers: size(layers),
        decoder_layers: translates.then(|| size("n_decoder_layers")),
        heads: Heads { q, kv: if llama { size("n_kv_heads") } else { q } },
        head_dim: d_model / q,
        d_ff: Some(size("d_ff")),
        vocab: size(if translates { "source_vocab" } else { "vocab" }),
        target_vocab: translates.then(|| size("target_vocab")),
        token_types: has("token_types").then(|| size("token_types")),
        context: has("context").then(|| size("context")),
        norm_eps: golden.config["eps"].as_f64(),
        pre_norm: golden.config["norm"] == "pre",
        positions: match architecture {
            Architecture::Llama => Positions::Rotary { theta: 1e4, pairs: PairLayout::HalfSplit },
            Architecture::Transformer => {
                Positions::Sinusoidal { pairs: PairLayout::Interleaved, first: 0, inclusive: false }
            }
            _ => Positions::Learned,
        },
        activation: Some(match golden.config["activation"].as_str() {
            Some("relu") => Activation::Relu,
            Some("gelu") => Activation::Gelu,
            Some("gelu_tanh") => Activation::GeluTanh,
            Some("silu") => Activation::Silu,
            other => panic!("{other:?}"),
        }),
        attention_bias: !llama,
        feed_forward_bias: !llama,
        tie_embeddings: golden.config["tied"] == true,
        embedding_scale: translates.then(|| (d_model as f64).sqrt()),
        bos: None,
        eos: Vec::new(),
        pad: None,
        ..Config::of(architecture)
    }
}

pub(crate) fn loss(scores: Tensor<3>, labels: Tensor<2, Int>, smoothing: f64) -> Tensor<1> {
    let [batch, length, classes] = scores.dims();
    let how = CrossEntropy { smoothing, ignored: Some(-100) };
    let (scores, labels) =
        (scores.reshape([batch * length, classes]), labels.reshape([batch * length]));
    cross_entropy(scores, labels, how).expect("labels are classes")
}

#[test]
fn decoders_are_those_of_transformers() {
    for (name, architecture) in [("gpt", Architecture::Gpt2), ("llama", Architecture::Llama)] {
        let mut golden = Golden::open(name);
        let model = Gpt::new(&config(&golden, architecture), NONE, &device()).expect("a decoder");
        let model = golden.load(model);
        let scores =
            model.forward(golden.ids("ids"), &mut Pass::default()).expect("ids are tokens");
        golden.output("logits", &scores);
        golden.output("loss", &loss(scores, golden.ids("labels"), 0.0));
        golden.gradients(&model);
    }
}

#[test]
fn an_encoder_is_that_of_transformers() {
    let mut golden = Golden::open("bert");
    let model = golden
        .load(Bert::new(&config(&golden, Architecture::Bert), &device()).expect("an encoder"));
    // All positions, as PyTorch computes them; what lies beyond a sentence is hidden by its length.
    let (ids, token_types) = (golden.rows("ids", None), golden.rows("token_types", None));
    let hidden = model
        .forward_padded(
            &Sentences { tokens: &ids, token_types: Some(&token_types) },
            &golden.list("lengths"),
            &mut Pass::default(),
        )
        .expect("ids are tokens");
    golden.output("hidden", &hidden);
    golden.output("pooled", &model.pooled(hidden));
    golden.gradients(&model);
}

#[test]
fn a_transformer_is_that_of_pytorch() {
    let mut golden = Golden::open("transformer");
    let model = Transformer::new(&config(&golden, Architecture::Transformer), NONE, &device());
    let model = golden.load(model.expect("an encoder and a decoder"));
    let (lengths, mut pass) = (golden.list("source_lengths"), Pass::default());
    let memory =
        model.encode(golden.ids("source"), Some(&lengths), &mut pass).expect("ids are tokens");
    let scores = model
        .decode(&memory, Some(&lengths), golden.ids("target"), &mut pass)
        .expect("ids are tokens");
    golden.output("logits", &scores);
    let smoothing = golden.config["smoothing"].as_f64().expect("a share");
    golden.output("loss", &loss(scores, golden.ids("labels"), smoothing));
    golden.gradients(&model);
}

#[test]
fn a_vision_transformer_is_that_of_transformers() {
    let mut golden = Golden::open("vit");
    let config: VitConfig = serde_json::from_value(golden.config.clone()).expect("a config");
    let model = golden.load(Vit::new(&config, &device()).expect("sizes fit"));
    let pixels = golden.input::<4>("pixels");
    let scores = model.forward(pixels.clone(), &mut Pass::default()).expect("sizes fit");
    golden.output("logits", &scores);
    let loss = cross_entropy(scores, golden.ids("labels"), CrossEntropy::default());
    golden.output("loss", &loss.expect("labels are classes"));
    let grads = golden.gradients(&model);
    golden.gradient("pixels", &pixels, &grads);
}
