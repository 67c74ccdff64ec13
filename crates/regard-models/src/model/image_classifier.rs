//! Models that tell images apart.

use super::classifier::{Classification, classified};
use super::encoder::BATCH;
use crate::batches::in_batches;
use crate::error::Error;
use crate::files::{ImageProcessorConfig, PatchConfig};
use crate::image::Image;
use crate::infer::Transformer;
use regard_scope::{Labels, Trace};

/// A model that knows classes of images: ViT.
#[derive(Debug)]
pub struct ImageClassifier {
    pub(super) title: String,
    /// What was left out when the files were read.
    pub(super) notes: Vec<String>,
    pub(super) patches: PatchConfig,
    pub(super) processor: ImageProcessorConfig,
    pub(super) model: Transformer,
}

impl ImageClassifier {
    /// The network.
    #[must_use]
    pub fn transformer(&self) -> &Transformer {
        &self.model
    }

    /// How pixels become the numbers that it reads.
    #[must_use]
    pub fn processor(&self) -> &ImageProcessorConfig {
        &self.processor
    }

    /// What each image is, of the classes that the model knows.
    pub fn classify(&self, images: &[Image]) -> Result<Vec<Classification>, Error> {
        let [down, across] = self.patches.grid();
        let labels = &self.model.config().labels;
        in_batches(&vec![down * across + 1; images.len()], BATCH, |some| {
            let pixels = some.iter().map(|i| images[*i].pixels(&self.processor));
            let scores = self.model.classify_images(&pixels.collect::<Result<Vec<_>, _>>()?)?;
            scores.iter().map(|scores| classified(labels, scores, Vec::new())).collect()
        })
    }

    /// What every head looks at in an image: `cls`, and patches by row and column, `0,0` at the top left.
    pub fn look(&self, image: &Image) -> Result<Trace, Error> {
        let [down, across] = self.patches.grid();
        let patches = (0..down).flat_map(|row| (0..across).map(move |col| format!("{row},{col}")));
        let labels = Labels::new("patch", std::iter::once("cls".into()).chain(patches).collect());
        let layers = self.model.look_at_image(image.pixels(&self.processor)?)?;
        Ok(Trace {
            title: self.title.clone(),
            axes: [("patch".to_owned(), labels)].into(),
            layers,
            ..Trace::default()
        })
    }
}
