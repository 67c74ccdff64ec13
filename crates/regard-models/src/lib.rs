//! Models on Regard and Burn: transformers and recurrent nets with attention, real weights, generation, and what every head looks at.
//!
//! A line from files to text: [`files`] reads what others have written ([`Config`](files::Config), [`Weights`](files::Weights),
//! [`Tokens`](files::Tokens)) ─► [`load()`] gives each parameter its numbers by the path of its fields ─► [`generate`] asks a model for
//! the next token ─► [`Model`] is all of it, for text. A [`Recorder`] keeps what attention saw as a
//! [`Trace`](regard_scope::Trace) for the microscope. `docs/models.md` tells the rest.
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
//!     print!("{text}"); // as it is written
//!     ControlFlow::Continue(())
//! };
//! let prompt = "The capital of France is";
//! let written = model.generate(&[prompt], &DecodingStrategy::Greedy, 16, &mut told)?;
//! println!("\n{} tokens, ended by {:?}", written[0].tokens.len(), written[0].finish_reason);
//!
//! let trace = model.look(prompt)?; // what every head looks at
//! assert_eq!(trace.layers.len(), 30);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

// The map.
//
// Ground
//   generate     tokens from a model: greedily, by chance, by beam search; knows no tensors
//   error        every way that a model can fail to be had
//   files        configurations, weights, tokens, models known by name
//   recorder     what attention saw, as a trace
//   pass         one pass through a model: what is dropped, how sharply attention looks, what is kept
//   kv_cache     keys and values of each layer, and the state of a decoder
//
// What models are made of
//   nn           attention, blocks, norms, feed-forward layers, positions, GRUs, levels of a hierarchy
//   stack        what the models of a `Config` have in common
//   load         weights into modules and out of them, by the path of fields
//
// Models
//   gpt          decoders: GPT-2, Llama
//   bert         encoders
//   transformer  an encoder with a decoder
//   vit          the same blocks over patches of an image
//   seq2seq      a recurrent translator with Bahdanau's or Luong's attention
//   e2k          another, with several heads
//   han          hierarchical attention: words, sentences, documents
//
//   model        any of them that works with text, with its tokens

mod bert;
mod e2k;
mod error;
pub mod files;
pub mod generate;
mod gpt;
mod han;
mod kv_cache;
mod load;
mod model;
pub mod nn;
mod pass;
mod recorder;
mod seq2seq;
mod stack;
mod transformer;
mod vit;

pub use bert::{Bert, Sentences};
pub use e2k::{E2k, E2kMemory, E2kSession};
pub use error::Error;
pub use files::{AttentionScore, HanConfig, Seq2SeqConfig};
pub use gpt::{Gpt, GptSession};
pub use han::{Han, HanWeights};
pub use kv_cache::{DecoderState, LayerCache};
pub use load::{load, parameters, save};
pub use model::{Classification, GenerationOutput, Model, sentences};
pub use nn::DropoutRates;
pub use pass::{Entropies, LayerEntropy, Pass};
pub use recorder::Recorder;
pub use seq2seq::{LuongDecoder, RecurrentState, Seq2Seq, Seq2SeqMemory, Seq2SeqSession};
pub use stack::ids;
pub use transformer::{Transformer, TransformerSession};
pub use vit::{Vit, VitConfig};
