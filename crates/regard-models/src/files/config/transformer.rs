//! Transformers of all families as data: what inference follows.
//!
//! A family (Llama, Gemma, BERT, Marian, ..) is a set of values here, never a branch of the code that computes. Readers of
//! configurations write it, `infer` follows it.

use super::{Activation, Heads, PairLayout};

/// A Transformer: a decoder, an encoder, or both.
#[derive(Clone, Debug, PartialEq)]
pub struct TransformerConfig {
    /// What its configuration calls the architecture, for messages.
    pub family: String,
    /// Reads the source, or is the whole model (BERT).
    pub encoder: Option<StackConfig>,
    /// Writes the next token; has cross-attention if there is an encoder.
    pub decoder: Option<StackConfig>,
    /// Makes scores of tokens, or of classes; none in models that only embed.
    pub head: Option<HeadConfig>,
    /// How an encoder makes one vector of a text.
    pub pooling: Pooling,
    /// Names of classes, if the head classifies.
    pub labels: Vec<String>,
    /// First token of a text; of a decoder with an encoder, the token that it starts with.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// Fills up a batch.
    pub pad: Option<u32>,
    /// Tokens that are never generated.
    pub suppressed: Vec<u32>,
    /// Token that a decoder always writes after `bos` (BART; the language of M2M-100).
    pub forced_bos: Option<u32>,
    /// Whether the decoder embeds by the table of the encoder, `source.weight`.
    pub shared_embedding: bool,
}

/// Embeddings, blocks and a final norm.
#[derive(Clone, Debug, PartialEq)]
pub struct StackConfig {
    /// Number of tokens; 1, the class token, in a stack that reads patches.
    pub vocab: usize,
    /// Patches of an image that follow the class token (ViT).
    pub patches: Option<PatchConfig>,
    /// Features of a token.
    pub d_model: usize,
    /// Multiplies embeddings.
    pub embedding_scale: Option<f64>,
    /// Norm of the embeddings (BERT).
    pub embedding_norm: bool,
    /// Rows of the table of token types (BERT's segments); row 0 is added to every token.
    pub token_types: Option<usize>,
    /// Position encoding that is added to embeddings.
    pub positions: AddedPositions,
    /// Longest sequence that the model was made for.
    pub context: Option<usize>,
    /// Query, key and value heads.
    pub heads: Heads,
    /// Features of a head.
    pub head_dim: usize,
    /// Features of the hidden layer of a feed-forward net.
    pub d_ff: usize,
    /// Activation of the feed-forward net, of the gate if there is one.
    pub activation: Activation,
    /// Whether `activation(gate x) * up x` (SwiGLU, GeGLU) stands in place of `activation(up x)`.
    pub gated: bool,
    /// All norms.
    pub norm: NormConfig,
    /// Where the norms of a block stand.
    pub order: NormOrder,
    /// Norm after the last block.
    pub final_norm: bool,
    /// Norm of each query and key (Qwen3, Gemma 3: of each head; OLMo 2: of all heads together).
    pub qk_norm: Option<QkNorm>,
    /// Biases of q, k and v.
    pub qkv_bias: bool,
    /// Bias of the output projection of attention.
    pub out_bias: bool,
    /// Biases of the feed-forward net.
    pub feed_forward_bias: bool,
    /// Multiplies scores; `1 / sqrt(head_dim)` by default, 1 in T5.
    pub scale: Option<f64>,
    /// Soft cap of scores (Gemma 2).
    pub softcap: Option<f64>,
    /// Learned bias by distance, one table for all layers (T5).
    pub relative: Option<RelativeConfig>,
    /// Multiplies what a block adds to the residual stream (Granite).
    pub residual_scale: Option<f64>,
    /// What differs between layers; its length is the number of layers.
    pub layers: Vec<LayerConfig>,
}

impl StackConfig {
    /// Numbers of a row of queries, and of a row of keys or values.
    #[must_use]
    pub fn widths(&self) -> [usize; 2] {
        [self.heads.q, self.heads.kv].map(|heads| heads * self.head_dim)
    }
}

impl TransformerConfig {
    /// Patches of the images that it reads, if it reads images.
    #[must_use]
    pub fn patches(&self) -> Option<PatchConfig> {
        self.encoder.as_ref().and_then(|stack| stack.patches)
    }
}

/// How an image is divided: each patch is a row of the sequence, by a linear map of its numbers, channel by channel and row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PatchConfig {
    /// Height and width of an image.
    pub image: [usize; 2],
    /// Height and width of a patch.
    pub patch: [usize; 2],
}

impl PatchConfig {
    /// Red, green and blue.
    pub const CHANNELS: usize = 3;

    /// Patches below each other and beside each other.
    #[must_use]
    pub fn grid(&self) -> [usize; 2] {
        let count = |axis: usize| self.image[axis].checked_div(self.patch[axis]).unwrap_or(0);
        [count(0), count(1)]
    }

    /// Numbers of a patch.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.patch.iter().fold(Self::CHANNELS, |all, n| all.saturating_mul(*n))
    }
}

/// One layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerConfig {
    /// Keys that a query sees: in a decoder itself and those before it, so many together; in an encoder so many on each side.
    pub window: Option<usize>,
    /// Rotation of queries and keys; none if positions are added, or in layers without positions.
    pub rope: Option<RopeConfig>,
    /// Whether attention reads its input without a norm (ModernBERT's first layer, which follows the norm of embeddings).
    pub no_attention_norm: bool,
}

/// Rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Features of a head that are rotated, the first ones.
    pub dim: usize,
    /// Which features form pairs.
    pub pairs: PairLayout,
    /// Radians per position of each pair, `dim / 2` of them: base and scaling (linear, llama3, yarn, longrope, ..) are in it.
    pub frequencies: Vec<f64>,
    /// Multiplies rotated queries and keys (yarn, longrope); 1 in others.
    pub magnitude: f64,
}

/// A norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormConfig {
    /// Root mean square, without subtracting the mean.
    pub rms: bool,
    /// Whether layer norms have a bias.
    pub bias: bool,
    /// Added to the variance.
    pub eps: f64,
    /// Whether the stored weight is the weight less one (Gemma).
    pub plus_one: bool,
}

/// Where the norms of a block stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOrder {
    /// Of the input of each layer (GPT-2, Llama).
    Pre,
    /// Of the sum (BERT, Marian).
    Post,
    /// Of input and output of each layer (Gemma 2, 3).
    PreAndPost,
    /// Of the output of each layer alone (OLMo 2).
    OutputOnly,
    /// Attention and feed-forward net read the same input, each by its own norm (GPT-NeoX).
    Parallel,
    /// The same by one norm for both (Phi-1, 2; GPT-J).
    ParallelShared,
}

/// Norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself.
    Head,
    /// All heads of a token together.
    Token,
}

/// Position encodings that are added to embeddings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedPositions {
    /// None.
    None,
    /// A table; position `i` has row `i + offset` (OPT, BART: 2; RoBERTa: `pad + 1`).
    Learned {
        /// Rows of the table.
        entries: usize,
        /// Row of the first position.
        offset: usize,
    },
    /// Sines and cosines (Vaswani et al. 2017).
    Sinusoidal {
        /// Where they stand: `HalfSplit` has all sines before all cosines (Marian).
        pairs: PairLayout,
        /// Number of the first position (M2M-100: 2, tensor2tensor: 1).
        first: usize,
        /// Whether the slowest of `n` pairs has frequency `1 / 10000`: `10000^(-i / (n - 1))` (tensor2tensor, M2M-100). Else
        /// `10000^(-i / n)`.
        inclusive: bool,
    },
}

/// T5's bias by distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativeConfig {
    /// Rows of the table.
    pub buckets: usize,
    /// Distances from here on share a bucket.
    pub max_distance: usize,
}

/// From the last norm to scores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadConfig {
    /// Whether its matrix is the embedding.
    pub tied: bool,
    /// Whether it has a bias.
    pub bias: bool,
    /// A projection before it: BERT's prediction head, RoBERTa's classifier.
    pub dense: Option<DenseConfig>,
    /// Multiplies its input (T5 with tied embeddings).
    pub scale: Option<f64>,
    /// Soft cap of its scores (Gemma 2).
    pub softcap: Option<f64>,
}

/// `norm(activation(dense x))` before the scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseConfig {
    /// Activation.
    pub activation: DenseActivation,
    /// Whether the projection has a bias.
    pub bias: bool,
    /// Whether a norm follows, of the kind of the stack.
    pub norm: bool,
}

/// Activation of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenseActivation {
    /// Hyperbolic tangent (BERT's pooler).
    Tanh,
    /// One of those of feed-forward nets.
    Of(Activation),
}

/// How an encoder makes one vector of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// Mean over tokens.
    #[default]
    Mean,
    /// First token.
    First,
    /// Last token.
    Last,
}
