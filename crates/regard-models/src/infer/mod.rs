//! Inference of Transformers: weights in the format of their file, attention by the engine, no gradients, no Burn.
//!
//! A line: tokens ─► a stack embeds them ─► blocks change the rows of all sequences together ─► the head scores the last rows.
//! A family of models is a [`TransformerConfig`](crate::files::TransformerConfig), data that this code follows. A row has the same bits
//! whatever rows are computed beside it.

// The map: a module imports only modules that are listed before it.
//
//   cache     the KV cache of a layer, in the type that the model asks for
//   ops       what is done to rows between products
//   layers    linear maps and norms, taken from files
//   record    what attention sees, for the microscope
//   work      memory of a pass, and the panels of rows that threads take through it
//   block     attention, cross-attention, feed-forward net and their norms
//   stack     embeddings, blocks, final norm
//   model     encoder, decoder and head
//   session   generation with a KV cache
//   prompt_file   keys and values of the beginning of a prompt in a file

mod block;
mod cache;
mod layers;
mod model;
mod ops;
mod prompt_file;
mod record;
mod session;
mod stack;
mod work;

pub use cache::KvDtype;
pub use model::Transformer;
pub use session::{Session, State};
