//! Our own configurations as Transformers that inference follows.

use super::{
    AddedPositions, Architecture, Config, HeadConfig, LayerConfig, NormConfig, NormOrder,
    PairLayout, Pooling, Positions, RopeConfig, StackConfig, TransformerConfig,
};
use crate::error::Error;

impl Config {
    /// The same for inference. None for recurrent models.
    pub fn transformer(&self) -> Result<Option<TransformerConfig>, Error> {
        let stack = |layers| self.stack(layers);
        let (encoder, decoder) = match self.architecture {
            Architecture::Llama | Architecture::Gpt2 => (None, Some(stack(self.n_layers)?)),
            Architecture::Bert => (Some(stack(self.n_layers)?), None),
            Architecture::Transformer => {
                let vocab = self.target_vocab.unwrap_or(self.vocab);
                let decoder = stack(self.decoder_layers.unwrap_or(self.n_layers))?;
                (Some(stack(self.n_layers)?), Some(StackConfig { vocab, ..decoder }))
            }
            Architecture::E2k | Architecture::Seq2Seq | Architecture::Han => return Ok(None),
        };
        let head = HeadConfig {
            tied: self.tie_embeddings,
            bias: self.architecture == Architecture::Transformer && !self.tie_embeddings,
            dense: None,
            scale: None,
            softcap: None,
        };
        Ok(Some(TransformerConfig {
            family: self.architecture.name(),
            head: (self.architecture != Architecture::Bert).then_some(head),
            encoder,
            decoder,
            pooling: Pooling::Mean,
            labels: Vec::new(),
            bos: self.bos,
            eos: self.eos.clone(),
            pad: self.pad,
            suppressed: Vec::new(),
            forced_bos: None,
            shared_embedding: self.shared_vocabulary,
        }))
    }

    fn stack(&self, layers: usize) -> Result<StackConfig, Error> {
        let (is_llama, is_bert) =
            (self.architecture == Architecture::Llama, self.architecture == Architecture::Bert);
        let missing = |field: &str| Error::format(field, "missing in the configuration");
        let rope = match self.positions {
            Positions::Rotary { theta, pairs } => {
                Some(RopeConfig::plain(self.head_dim, theta, pairs))
            }
            _ => None,
        };
        let positions = match self.positions {
            Positions::None | Positions::Rotary { .. } => AddedPositions::None,
            Positions::Learned => {
                let entries = self.context.ok_or_else(|| missing("context"))?;
                AddedPositions::Learned { entries, offset: 0 }
            }
            Positions::Sinusoidal { pairs, first, inclusive } => {
                AddedPositions::Sinusoidal { pairs, first, inclusive }
            }
        };
        Ok(StackConfig {
            vocab: self.vocab,
            patches: None,
            d_model: self.d_model,
            embedding_scale: self.embedding_scale,
            embedding_norm: is_bert,
            token_types: self.token_types,
            positions,
            context: self.context,
            heads: self.heads,
            head_dim: self.head_dim,
            d_ff: self.d_ff.unwrap_or(4 * self.d_model),
            activation: self.activation.ok_or_else(|| missing("activation"))?,
            gated: is_llama,
            norm: NormConfig {
                rms: is_llama,
                bias: true,
                eps: self.norm_eps.unwrap_or(1e-5),
                plus_one: false,
            },
            order: if self.pre_norm { NormOrder::Pre } else { NormOrder::Post },
            final_norm: self.pre_norm,
            qk_norm: None,
            qkv_bias: self.attention_bias,
            out_bias: self.attention_bias,
            feed_forward_bias: self.feed_forward_bias,
            scale: None,
            softcap: None,
            relative: None,
            residual_scale: None,
            layers: vec![LayerConfig { rope, ..LayerConfig::default() }; layers],
        })
    }
}

impl RopeConfig {
    /// All features of a head, frequencies `theta^(-2i / dim)`.
    #[must_use]
    pub fn plain(dim: usize, theta: f64, pairs: PairLayout) -> Self {
        let frequency = |i: usize| theta.powf(-((2 * i) as f64) / dim as f64);
        let frequencies = (0..dim / 2).map(frequency).collect();
        Self { dim, pairs, frequencies, magnitude: 1.0 }
    }
}
