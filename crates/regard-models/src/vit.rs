//! A vision transformer (Dosovitskiy et al. 2021): the same blocks, over patches of an image.

use crate::error::Error;
use crate::nn::{
    Block, BlockConfig, DropoutRates, FeedForwardConfig, Linear, MultiHeadConfig, Norm, NormKind,
    NormPlace,
};
use crate::pass::{Pass, RowSide};
use crate::stack::through;
use burn::module::{Initializer, Module, Param};
use burn::tensor::{Device, Tensor};
use regard::Mask;
use regard_burn::Activation;
use serde::{Deserialize, Serialize};

/// What a [`Vit`] is made of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VitConfig {
    /// Height and width of an image.
    pub image: usize,
    /// Height and width of a patch, of which images are whole numbers.
    pub patch: usize,
    /// Numbers of a pixel.
    pub channels: usize,
    /// What images are told apart into.
    pub classes: usize,
    /// Features of a patch.
    pub d_model: usize,
    /// Heads of each attention.
    pub n_heads: usize,
    /// Blocks.
    pub n_layers: usize,
    /// Features within feed-forward layers.
    pub d_ff: usize,
    /// Keeps norms from dividing by nothing.
    pub eps: f64,
}

/// Scores classes of images.
#[derive(Module, Debug)]
pub struct Vit {
    /// From the numbers of a patch, channel by channel and row by row, to features.
    pub patches: Linear,
    /// The row before all patches, in which the image is summed up: `[1, 1, d_model]`.
    pub class: Param<Tensor<3>>,
    /// A row for each position, `[patches + 1, d_model]`.
    pub positions: Param<Tensor<2>>,
    /// The stack.
    pub blocks: Vec<Block>,
    /// After it.
    pub norm: Norm,
    /// The scores of classes.
    pub head: Linear,
    #[module(skip)]
    config: VitConfig,
}

impl Vit {
    /// With random weights.
    pub fn new(config: &VitConfig, device: &Device) -> Result<Self, Error> {
        let VitConfig { image, patch, channels, classes, d_model, n_heads, n_layers, d_ff, eps } =
            *config;
        if patch == 0 || !image.is_multiple_of(patch) {
            return Err(Error::unsupported(
                "patch",
                &patch,
                format!("it must divide the image, {image}"),
            ));
        }
        if n_heads == 0 || !d_model.is_multiple_of(n_heads) {
            return Err(Error::unsupported(
                "n_heads",
                &n_heads,
                format!("it must divide d_model, {d_model}"),
            ));
        }
        let feed_forward = FeedForwardConfig {
            d_model,
            d_ff,
            activation: Activation::Gelu,
            gate: false,
            bias: true,
        };
        let block = BlockConfig {
            attention: MultiHeadConfig::new(d_model, n_heads),
            cross: None,
            feed_forward,
            norm: NormKind::Layer,
            place: NormPlace::Pre,
            eps,
            dropout: DropoutRates::default(),
        };
        let start = Initializer::Normal { mean: 0.0, std: 0.02 };
        let rows = (image / patch) * (image / patch) + 1;
        Ok(Self {
            patches: Linear::new([channels * patch * patch, d_model], true, device),
            class: start.init([1, 1, d_model], device),
            positions: start.init([rows, d_model], device),
            blocks: (0..n_layers).map(|_| Block::new(&block, device)).collect(),
            norm: Norm::new(NormKind::Layer, d_model, eps, device),
            head: Linear::new([d_model, classes], true, device),
            config: *config,
        })
    }

    /// `pixels [batch, channels, height, width]` to scores `[batch, classes]`.
    ///
    /// # Panics
    /// If the images have other sizes than the model was made for.
    pub fn forward(&self, pixels: Tensor<4>, pass: &mut Pass) -> Result<Tensor<2>, Error> {
        let VitConfig { image, patch, channels, d_model, .. } = self.config;
        let found = pixels.dims();
        let batch = found[0];
        assert!(
            found == [batch, channels, image, image],
            "pixels: {found:?}, the model has {:?}",
            [batch, channels, image, image]
        );
        let n = image / patch;
        let cut = pixels.reshape([batch, channels, n, patch, n, patch]).permute([0, 2, 4, 1, 3, 5]);
        let rows = self.patches.forward(cut.reshape([batch, n * n, channels * patch * patch]));
        let class = self.class.val().expand([batch, 1, d_model]);
        let places = self.positions.val().unsqueeze::<3>().expand([batch, n * n + 1, d_model]);
        let x = Tensor::cat(vec![class, rows], 1) + places;
        pass.now(RowSide::Source(None));
        let x = through(&self.blocks, x, ("encoder", "source"), &Mask::full(), None, pass)?;
        let first = self.norm.forward(x.narrow(1, 0, 1)).reshape([batch, d_model]);
        Ok(self.head.forward(first))
    }
}
