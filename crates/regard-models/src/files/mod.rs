//! Model files: what they hold, read without trust.
//!
//! [`ModelFiles::open`] takes a folder, a GGUF or a safetensors file to its parts: a [`Config`] in our own words, [`Weights`] under our
//! own names, and [`Tokens`]. [`KnownModel`] has models by name, and fetches them.

mod chat;
mod config;
mod dtype;
mod fit;
mod folder;
mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
mod known;
mod layouts;
mod manifest;
mod map;
mod names;
mod shards;
mod tokens;
mod transformer_files;
mod weights;
mod write;

pub use chat::{ChatTemplate, Message};
pub use config::{
    Activation, AddedPositions, Architecture, AttentionScore, Config, DenseActivation, DenseConfig,
    HanConfig, HeadConfig, Heads, ImageProcessorConfig, LayerConfig, LuongScore, NormConfig,
    NormOrder, PairLayout, PatchConfig, Pooling, Positions, QkNorm, RelativeConfig, Resample,
    RopeConfig, Seq2SeqConfig, StackConfig, TransformerConfig,
};
pub use dtype::Dtype;
pub(crate) use fit::fits;
pub use folder::ModelFiles;
pub use gguf::{Gguf, Metadata, Numbers, Value};
pub use known::{KNOWN_MODELS, KnownModel, Member, Origin, cache_dir};
pub(crate) use map::Bytes;
pub use names::{Layout, NameMap, Rule};
pub use tokens::{Stream, Symbols, Tokens, Unknown};
pub use transformer_files::TransformerFiles;
pub use weights::{WeightFormat, Weights, save, save_as};
pub(crate) use write::atomically;
