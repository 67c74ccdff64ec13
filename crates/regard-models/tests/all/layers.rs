//! Single layers.

use crate::golden::{Golden, device};
use regard::Mask;
use regard::problem::Heads;
use regard::rope::{Rope, RopePairs};
use regard_burn::{Activation, CrossEntropy, cross_entropy};
use regard_models::Pass;
use regard_models::nn::{
    Bias, Block, BlockConfig, BlockInputs, DropoutRates, Embedding, FeedForward, FeedForwardConfig,
    KeySource, Linear, Memory, MultiHead, MultiHeadConfig, Norm, NormKind, NormPlace, Sinusoid,
};

fn activation(name: &str) -> Activation {
    match name {
        "none" => Activation::None,
        "relu" => Activation::Relu,
        "gelu" => Activation::Gelu,
        "gelu_tanh" => Activation::GeluTanh,
        "silu" => Activation::Silu,
        other => panic!("{other}"),
    }
}

#[test]
fn linear_layers_are_those_of_pytorch() {
    for name in ["none", "relu", "gelu", "gelu_tanh", "silu"] {
        let mut golden = Golden::variant("linear", name);
        let sizes = [golden.size("in"), golden.size("out")];
        let layer = golden.load(Linear::new(sizes, true, &device())).activation(activation(name));
        let x = golden.input::<3>("x");
        golden.output("y", &layer.forward(x.clone()));
        let grads = golden.gradients(&layer);
        golden.gradient("x", &x, &grads);
    }
}

#[test]
fn norms_are_those_of_pytorch() {
    for (name, kind) in [("layer_norm", NormKind::Layer), ("rms_norm", NormKind::Rms)] {
        let mut golden = Golden::open(name);
        let eps = golden.config["eps"].as_f64().expect("a number");
        let norm = golden.load(Norm::new(kind, golden.size("dim"), eps, &device()));
        let x = golden.input::<3>("x");
        golden.output("y", &norm.forward(x.clone()));
        let grads = golden.gradients(&norm);
        golden.gradient("x", &x, &grads);
    }
}

#[test]
fn cross_entropy_is_that_of_pytorch() {
    for (name, smoothing) in [("plain", 0.0), ("smoothed", 0.1)] {
        let mut golden = Golden::variant("cross_entropy", name);
        let logits = golden.input::<3>("logits");
        let [batch, length, classes] = logits.dims();
        let labels = golden.ids::<2>("labels").reshape([batch * length]);
        let scores = logits.clone().reshape([batch * length, classes]);
        let loss = cross_entropy(scores, labels, CrossEntropy { smoothing, ignored: Some(-100) });
        golden.output("loss", &loss.expect("labels are classes"));
        let grads = golden.gradients(&Vec::<Linear>::new());
        golden.gradient("logits", &logits, &grads);
    }
}

#[test]
fn embeddings_are_those_of_pytorch() {
    let mut golden = Golden::open("embedding");
    let table =
        golden.load(Embedding::new([golden.size("count"), golden.size("dim")], 1.0, &device()));
    let y = table.forward(golden.ids::<2>("ids")).expect("ids are entries");
    golden.output("y", &y);
    golden.gradients(&table);
}

#[test]
fn positions_are_those_of_the_paper() {
    let mut golden = Golden::open("sinusoid");
    let sizes = [golden.size("length"), golden.size("dim")];
    golden.output("positions", &Sinusoid::default().at(0, sizes, &device()));
}

fn attend(mut golden: Golden, config: &MultiHeadConfig, mask: &Mask) {
    let layer = golden.load(MultiHead::new(config, &device()));
    let x = golden.input::<3>("x");
    let y = layer
        .forward(x.clone(), KeySource::Itself, mask, None, &mut Pass::default())
        .expect("sizes agree");
    golden.output("y", &y);
    let grads = golden.gradients(&layer);
    golden.gradient("x", &x, &grads);
}

#[test]
fn attention_over_itself_is_that_of_pytorch() {
    let golden = Golden::open("multi_head_self");
    let config = MultiHeadConfig::new(golden.size("d_model"), golden.size("n_heads"));
    let mask = Mask::causal().and(Mask::lengths(&golden.list("lengths")));
    attend(golden, &config, &mask);
}

#[test]
fn grouped_attention_with_rotary_positions_is_that_of_llama() {
    let golden = Golden::open("multi_head_grouped");
    let (d_model, q, kv) =
        (golden.size("d_model"), golden.size("n_heads"), golden.size("n_kv_heads"));
    let config = MultiHeadConfig {
        heads: Heads { q, kv },
        bias: false,
        rope: Some(Rope::new(d_model / q, RopePairs::HalfSplit)),
        ..MultiHeadConfig::new(d_model, q)
    };
    attend(golden, &config, &Mask::causal());
}

#[test]
fn attention_with_a_bias_by_distance_is_that_of_t5_and_alibi() {
    for (name, causal) in [("full", false), ("causal", true)] {
        let golden = Golden::variant("t5_bias", name);
        let by_distance = Bias::T5 {
            buckets: golden.size("buckets"),
            max_distance: golden.size("max_distance"),
            bidirectional: !causal,
        };
        let heads = MultiHeadConfig::new(golden.size("d_model"), golden.size("n_heads"));
        let config = MultiHeadConfig { bias: false, by_distance, scale: Some(1.0), ..heads };
        attend(golden, &config, &if causal { Mask::causal() } else { Mask::full() });
    }
    let golden = Golden::open("alibi");
    let heads = MultiHeadConfig::new(golden.size("d_model"), golden.size("n_heads"));
    attend(golden, &MultiHeadConfig { by_distance: Bias::Alibi, ..heads }, &Mask::causal());
}

#[test]
fn attention_over_a_memory_is_that_of_pytorch() {
    let mut golden = Golden::open("multi_head_cross");
    let config = MultiHeadConfig::new(golden.size("d_model"), golden.size("n_heads"));
    let layer = golden.load(MultiHead::new(&config, &device()));
    let (x, memory) = (golden.input::<3>("x"), golden.input::<3>("memory"));
    let mask = Mask::lengths(&golden.list("memory_lengths"));
    let y = layer.forward(x.clone(), KeySource::Memory(&memory), &mask, None, &mut Pass::default());
    golden.output("y", &y.expect("sizes agree"));
    let grads = golden.gradients(&layer);
    golden.gradient("x", &x, &grads);
    golden.gradient("memory", &memory, &grads);
}

#[test]
fn feed_forward_layers_are_those_of_pytorch() {
    for (name, gate) in [("feed_forward", false), ("feed_forward_gated", true)] {
        let mut golden = Golden::open(name);
        let (d_model, d_ff) = (golden.size("d_model"), golden.size("d_ff"));
        let config =
            FeedForwardConfig { d_model, d_ff, activation: Activation::Gelu, gate, bias: !gate };
        let layer = golden.load(FeedForward::new(&config, &device()));
        let x = golden.input::<3>("x");
        golden.output("y", &layer.forward(x.clone()));
        let grads = golden.gradients(&layer);
        golden.gradient("x", &x, &grads);
    }
}

#[test]
fn blocks_are_those_of_pytorch() {
    for name in
        ["encoder_block_pre", "encoder_block_post", "decoder_block_pre", "decoder_block_post"]
    {
        let mut golden = Golden::open(name);
        let (d_model, d_ff, decodes) =
            (golden.size("d_model"), golden.size("d_ff"), name.starts_with("dec"));
        let attention = MultiHeadConfig::new(d_model, golden.size("n_heads"));
        let activation = activation(golden.config["activation"].as_str().expect("a name"));
        let config = BlockConfig {
            cross: decodes.then(|| attention.clone()),
            attention,
            feed_forward: FeedForwardConfig { d_model, d_ff, activation, gate: false, bias: true },
            norm: NormKind::Layer,
            place: if name.ends_with("pre") { NormPlace::Pre } else { NormPlace::Post },
            eps: 1e-5,
            dropout: DropoutRates::default(),
        };
        let block = golden.load(Block::new(&config, &device()));
        let x = golden.input::<3>("x");
        let memory = decodes
            .then(|| (golden.input::<3>("memory"), Mask::lengths(&golden.list("memory_lengths"))));
        let mask = if decodes { Mask::causal() } else { Mask::lengths(&golden.list("lengths")) };
        let mut pass = Pass::default();
        let seen = memory.as_ref().map(|(memory, mask)| Memory { rows: memory, mask });
        let around = BlockInputs { mask: &mask, memory: seen, place: 0, pass: &mut pass };
        golden.output("y", &block.forward(x.clone(), around).expect("sizes agree"));
        let grads = golden.gradients(&block);
        golden.gradient("x", &x, &grads);
        if let Some((memory, _)) = &memory {
            golden.gradient("memory", memory, &grads);
        }
    }
}
