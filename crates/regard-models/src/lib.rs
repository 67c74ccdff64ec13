//! Models on Regard: inference of Transformers from Hugging Face folders and GGUF files, generation, attention of every head; modules for
//! training with Burn, and recurrent models.
//!
//! From files to text: [`files`] reads a [`TransformerConfig`](files::TransformerConfig), [`Weights`](files::Weights) and
//! [`Tokens`](files::Tokens) ─► [`infer`] runs the Transformer that they describe ─► [`generate`] chooses the next tokens ─► [`Model`] is
//! all of it for text, as [`CausalLm`], [`Translator`], [`Encoder`] or [`Classifier`], and for images, as [`ImageClassifier`]. None of this needs Burn. The feature `burn`, a
//! default, adds modules that learn, which `load` and `save` connect with files, and recurrent models. `look` returns the attention of a
//! text as a [`Trace`](regard_scope::Trace) for the microscope. `docs/models.md` tells the rest.
//!
//! ```no_run
//! use regard_models::Model;
//! use regard_models::files::{KnownModel, cache_dir};
//! use regard_models::generate::DecodingStrategy;
//! use std::ops::ControlFlow;
//!
//! # fn main() -> Result<(), regard_models::Error> {
//! let base = cache_dir(|name| std::env::var_os(name)).expect("HOME or REGARD_CACHE");
//! let path = KnownModel::named("smollm2").expect("a known name").fetch(&base, "python3")?; // once
//! let model = Model::open(&path)?; // or any folder, .gguf or .safetensors
//!
//! let mut told = |_row: usize, text: &str| {
//!     print!("{text}"); // as it is generated
//!     ControlFlow::Continue(())
//! };
//! let prompt = "The capital of France is";
//! let written = model.causal_lm()?.generate(&[prompt], &DecodingStrategy::Greedy, 16, &mut told)?;
//! println!("\n{} tokens, ended by {:?}", written[0].tokens.len(), written[0].finish_reason);
//!
//! let trace = model.look(prompt)?; // what every head looks at
//! assert_eq!(trace.layers.len(), 30);
//! # Ok(())
//! # }
//! ```

// One place maps files: `files::map`.
#![deny(unsafe_code)]

// The map.
//
// Ground
//   generate     tokens from a model: greedily, by chance, by beam search; knows no tensors
//   error        every way that a model can fail to be had
//   batches      many texts in batches of like length
//   files        configurations, weights, tokens, models known by name, models of the Hub
//   image        PNG and JPEG, and the numbers that a model reads of them
//   infer        Transformers for inference: weights as they are stored, KV caches, no Burn
//
// With the feature `burn`: what models that learn are made of
//   recorder     what attention saw, as a trace
//   pass         one pass through a model: what is dropped, how sharply attention looks, what is kept
//   nn           attention, blocks, norms, feed-forward layers, positions, GRUs, levels of a hierarchy
//   stack        what the models of a `Config` have in common
//   load         weights into modules and out of them, by the path of fields
//
// With the feature `burn`: models that learn
//   gpt          decoders: GPT-2, Llama
//   bert         encoders
//   transformer  an encoder with a decoder
//   vit          the same blocks over patches of an image
//   seq2seq      a recurrent translator with Bahdanau's or Luong's attention
//   e2k          another, with several heads
//   han          hierarchical attention: words, sentences, documents
//
// Text and images
//   model        models by task, with their tokens: `CausalLm`, `Translator`, `Encoder`, `Classifier`, `ImageClassifier`

mod batches;
#[cfg(feature = "burn")]
mod bert;
#[cfg(feature = "burn")]
mod e2k;
mod error;
pub mod files;
pub mod generate;
#[cfg(feature = "burn")]
mod gpt;
#[cfg(feature = "burn")]
mod han;
mod image;
pub mod infer;
#[cfg(feature = "burn")]
mod load;
mod model;
#[cfg(feature = "burn")]
pub mod nn;
#[cfg(feature = "burn")]
mod pass;
#[cfg(feature = "burn")]
mod recorder;
#[cfg(feature = "burn")]
mod seq2seq;
#[cfg(feature = "burn")]
mod stack;
#[cfg(feature = "burn")]
mod transformer;
#[cfg(feature = "burn")]
mod vit;

#[cfg(feature = "burn")]
pub use bert::{Bert, Sentences};
#[cfg(feature = "burn")]
pub use e2k::{E2k, E2kMemory, E2kSession};
pub use error::Error;
pub use files::{AttentionScore, HanConfig, Seq2SeqConfig};
#[cfg(feature = "burn")]
pub use gpt::Gpt;
#[cfg(feature = "burn")]
pub use han::{Han, HanWeights};
pub use image::Image;
#[cfg(feature = "burn")]
pub use load::{gradients, load, parameters, save};
#[cfg(feature = "burn")]
pub use model::sentences;
pub use model::{
    CausalLm, Classification, Classifier, Encoder, GenerationOutput, ImageClassifier, Model,
    OnText, TextOptions, TextStream, Translator, WeightedSentence,
};
#[cfg(feature = "burn")]
pub use nn::DropoutRates;
#[cfg(feature = "burn")]
pub use pass::{Entropies, LayerEntropy, Pass};
#[cfg(feature = "burn")]
pub use recorder::Recorder;
#[cfg(feature = "burn")]
pub use seq2seq::{LuongDecoder, RecurrentState, Seq2Seq, Seq2SeqMemory, Seq2SeqSession};
#[cfg(feature = "burn")]
pub use stack::ids;
#[cfg(feature = "burn")]
pub use transformer::Transformer;
#[cfg(feature = "burn")]
pub use vit::{Vit, VitConfig};
