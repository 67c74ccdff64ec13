//! Sizes that a configuration claims, held against the tensors that are there.
//!
//! A file may claim any size. Modules are made only after each claim was found in a tensor, whose bytes are in the file: so what a
//! model takes is bounded by its file, and a claim that is wrong is refused before anything is allocated for it.

use super::config::{Architecture, AttentionScore, Config};
use super::weights::Weights;
use crate::error::Error;
use std::collections::BTreeSet;

/// A size in a configuration, and the axis of a tensor that has the same.
struct Claim {
    field: &'static str,
    size: usize,
    tensor: &'static str,
    axis: usize,
}

fn claim(field: &'static str, size: usize, tensor: &'static str, axis: usize) -> Claim {
    Claim { field, size, tensor, axis }
}

/// Refuses a configuration whose sizes are not those of the tensors, which have our names.
pub(crate) fn fits(config: &Config, weights: &Weights) -> Result<(), Error> {
    let (d_model, vocab) = (config.d_model, config.vocab);
    let target = config.target_vocab.unwrap_or(vocab);
    let mut claims = Vec::new();
    match config.architecture {
        Architecture::Llama | Architecture::Gpt2 | Architecture::Bert => {
            layers(weights, "n_layers", config.n_layers, "blocks.")?;
            claims.push(claim("vocab", vocab, "embedding.weight", 0));
            claims.push(claim("d_model", d_model, "embedding.weight", 1));
            claims.extend(block(config, BLOCK));
            if config.architecture != Architecture::Llama {
                let context = config.context.map(|n| claim("context", n, "positions.weight", 0));
                claims.extend(context);
            }
            claims.extend(
                config
                    .token_types
                    .map(|token_types| claim("token_types", token_types, "token_types.weight", 0)),
            );
        }
        Architecture::Transformer => {
            let decoder = config.decoder_layers.unwrap_or(config.n_layers);
            layers(weights, "n_layers", config.n_layers, "encoder.")?;
            layers(weights, "decoder_layers", decoder, "decoder.")?;
            claims.push(claim("vocab", vocab, "source.weight", 0));
            claims.push(claim("d_model", d_model, "source.weight", 1));
            if !config.shared_vocabulary {
                claims.push(claim("target_vocab", target, "target.weight", 0));
            }
            claims.extend(block(config, ENCODER));
        }
        Architecture::E2k => {
            claims.push(claim("vocab", vocab, "source.weight", 0));
            claims.push(claim("d_model", d_model, "source.weight", 1));
            claims.push(claim("target_vocab", target, "target.weight", 0));
        }
        Architecture::Seq2Seq => claims.extend(recurrent(config)),
        Architecture::Han => claims.extend(hierarchy(config)),
    }
    claims.iter().try_for_each(|claim| claim.check(weights))
}

impl Claim {
    fn check(&self, weights: &Weights) -> Result<(), Error> {
        let Self { field, size, tensor, axis } = *self;
        let shape = weights.shape(tensor).ok_or_else(|| weights.missing(tensor))?;
        match shape.get(axis) {
            Some(there) if *there == size => Ok(()),
            Some(there) => {
                let why = format!(
                    "{size} in the configuration, {there} in the weights (axis {axis} of tensor `{tensor}`)"
                );
                Err(Error::format(field, format!("{why}; {TOGETHER}")))
            }
            None => {
                let why = format!("has {} axes, {} are needed", shape.len(), axis + 1);
                Err(Error::format(format!("tensor `{tensor}`"), why))
            }
        }
    }
}

const TOGETHER: &str = "give the configuration that belongs to these weights";

/// Holds a number of layers against how many there are, each of them with a tensor at least.
fn layers(weights: &Weights, field: &str, claimed: usize, prefix: &str) -> Result<(), Error> {
    let layer = |name: &str| -> Option<usize> {
        name.strip_prefix(prefix)?.split_once('.').and_then(|(layer, _)| layer.parse().ok())
    };
    let there = weights.names().filter_map(layer).collect::<BTreeSet<_>>().len();
    if there == claimed {
        return Ok(());
    }
    let why =
        format!("{claimed} in the configuration, {there} in the weights (`{prefix}0.` and on)");
    Err(Error::format(field, format!("{why}; {TOGETHER}")))
}

/// The first block of a stack: its queries, its keys, and what its feed-forward net is wide.
const BLOCK: [&str; 3] = [
    "blocks.0.attention.q.weight",
    "blocks.0.attention.k.weight",
    "blocks.0.feed_forward.up.weight",
];
const ENCODER: [&str; 3] = [
    "encoder.0.attention.q.weight",
    "encoder.0.attention.k.weight",
    "encoder.0.feed_forward.up.weight",
];

fn block(config: &Config, [q, k, up]: [&'static str; 3]) -> [Claim; 3] {
    let features = |heads: usize| heads.saturating_mul(config.head_dim);
    let d_ff = config.d_ff.unwrap_or(config.d_model.saturating_mul(4));
    [
        claim("heads.q x head_dim", features(config.heads.q), q, 0),
        claim("heads.kv x head_dim", features(config.heads.kv), k, 0),
        claim("d_ff", d_ff, up, 0),
    ]
}

fn recurrent(config: &Config) -> Vec<Claim> {
    let Some(sizes) = config.seq2seq else { return Vec::new() };
    let of_decoder = |tensor| claim("decoder_hidden", sizes.decoder_hidden, tensor, 0);
    let (score, luong) = match sizes.attention_score {
        AttentionScore::Additive => ("attention.score", vec![]),
        AttentionScore::General => {
            ("", ["luong.attention.general.weight", "luong.combine.weight"].map(of_decoder).into())
        }
        AttentionScore::Dot | AttentionScore::Concat => {
            ("luong.attention.score", vec![of_decoder("luong.combine.weight")])
        }
    };
    let hidden = sizes.attention_hidden.map(|n| claim("attention_hidden", n, score, 0));
    let mut claims = vec![
        claim("source_vocab", sizes.source_vocab, "source.weight", 0),
        claim("embedding", sizes.embedding, "source.weight", 1),
        claim("target_vocab", sizes.target_vocab, "target.weight", 0),
        claim("encoder_hidden", sizes.encoder_hidden, "encoder.forward.hidden.weight", 1),
        claim("decoder_hidden", sizes.decoder_hidden, "decoder.hidden.weight", 1),
    ];
    claims.extend(hidden.into_iter().chain(luong));
    claims
}

fn hierarchy(config: &Config) -> Vec<Claim> {
    let Some(sizes) = config.han else { return Vec::new() };
    vec![
        claim("vocab", sizes.vocab, "embedding.weight", 0),
        claim("embedding", sizes.embedding, "embedding.weight", 1),
        claim("word_hidden", sizes.word_hidden, "words.gru.forward.hidden.weight", 1),
        claim("word_attention", sizes.word_attention, "words.attention.context", 0),
        claim("sentence_hidden", sizes.sentence_hidden, "sentences.gru.forward.hidden.weight", 1),
        claim("sentence_attention", sizes.sentence_attention, "sentences.attention.context", 0),
        claim("classes", sizes.classes, "head.weight", 0),
    ]
}
