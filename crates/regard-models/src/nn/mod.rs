//! The parts that models are made of. Each is a Burn module whose parameters have the names and the layout of PyTorch's: a linear
//! layer has `weight [out, in]`.

mod additive;
mod attention;
mod block;
mod embedding;
mod feed_forward;
mod gru;
mod hierarchy;
mod linear;
mod norm;
mod position;

pub use additive::{Bahdanau, Luong};
pub(crate) use attention::split;
pub use attention::{Bias, KeySource, MultiHead, MultiHeadConfig};
pub use block::{Block, BlockConfig, BlockInputs, DropoutRates, Memory, NormPlace};
pub use embedding::Embedding;
pub use feed_forward::{FeedForward, FeedForwardConfig};
pub use gru::{Gru, GruCell, GruStates};
pub use hierarchy::{ContextAttention, Level};
pub use linear::Linear;
pub use norm::{Norm, NormKind};
pub use position::Sinusoid;
