//! Models by what they do, with their vocabularies: text or images in, text or numbers out.

mod causal_lm;
mod classifier;
mod encoder;
mod image_classifier;
#[cfg(feature = "burn")]
mod recurrent;
mod text;
mod translator;

pub use causal_lm::{CausalLm, OnText, TextOptions, TextStream};
pub use classifier::{Classification, Classifier, WeightedSentence};
pub use encoder::Encoder;
pub use image_classifier::ImageClassifier;
#[cfg(feature = "burn")]
pub use recurrent::sentences;
pub use text::GenerationOutput;
pub use translator::Translator;

use crate::error::Error;
use crate::files::{ModelFiles, Tokens, TransformerFiles, fits};
use crate::image::Image;
use crate::infer::{KvDtype, Transformer};
use regard_scope::Trace;
use std::path::Path;
use text::Vocabulary;

/// A model that was opened, by what it does.
#[derive(Debug)]
pub enum Model {
    /// Continues a text.
    CausalLm(CausalLm),
    /// Writes another text than it reads.
    Translator(Translator),
    /// Makes a vector of a text.
    Encoder(Encoder),
    /// Tells the class of a text.
    Classifier(Classifier),
    /// Tells the class of an image.
    ImageClassifier(ImageClassifier),
}

/// A model of one task, or an error that names what it is instead.
macro_rules! task {
    ($(#[$doc:meta])* $method:ident, $kind:ident, $verb:literal, $known:literal) => {
        $(#[$doc])*
        pub fn $method(&self) -> Result<&$kind, Error> {
            match self {
                Self::$kind(model) => Ok(model),
                _ => Err(Error::unsupported($verb, &self.task(), $known)),
            }
        }
    };
}

impl Model {
    /// Opens a folder of Hugging Face or of ours, a `.gguf` or a `.safetensors`.
    pub fn open(path: &Path) -> Result<Self, Error> {
        match TransformerFiles::is_layout_of(path) {
            true => Self::of_transformer(TransformerFiles::open(path)?),
            false => Self::new(ModelFiles::open(path)?),
        }
        .map_err(|e| e.of(path))
    }

    /// A Transformer of files that are open.
    pub fn of_transformer(files: TransformerFiles) -> Result<Self, Error> {
        let TransformerFiles { config, weights, tokens, target_tokens, title, notes, .. } = files;
        if let Some((patches, processor)) = config.patches().zip(files.image_processor) {
            let model = Transformer::new(config, weights)?;
            let model = ImageClassifier { title, notes, patches, processor, model };
            return Ok(Self::ImageClassifier(model));
        }
        let vocabulary = Vocabulary::new(title, tokens, target_tokens, &config);
        let model = Transformer::new(config, weights)?;
        Ok(Self::of_parts(Vocabulary { notes, ..vocabulary? }, model))
    }

    fn of_parts(vocabulary: Vocabulary, model: Transformer) -> Self {
        let labels = model.config().labels.clone();
        let config = model.config();
        match (&config.encoder, &config.decoder) {
            (Some(_), Some(_)) => {
                let kind = translator::Kind::Transformer(Box::new(vocabulary), Box::new(model));
                Self::Translator(Translator::new(kind))
            }
            (None, _) => Self::CausalLm(CausalLm { vocabulary, model }),
            (Some(_), None) if labels.is_empty() => Self::Encoder(Encoder { vocabulary, model }),
            (Some(_), None) => {
                let kind = classifier::Kind::Transformer(Box::new(model));
                Self::Classifier(Classifier { vocabulary, labels, kind })
            }
        }
    }

    /// A model of our own files that are open.
    pub fn new(files: ModelFiles) -> Result<Self, Error> {
        let ModelFiles { config, weights, tokens, target_tokens, title } = files;
        fits(&config, &weights)?;
        let Some(transformer) = config.transformer()? else {
            return recurrent(ModelFiles { config, weights, tokens, target_tokens, title });
        };
        let vocabulary = Vocabulary::new(title, tokens, target_tokens, &transformer);
        let model = Transformer::of_config(&config, weights)?;
        Ok(match (Self::of_parts(vocabulary?, model), config.translate) {
            (Self::CausalLm(model), Some(template)) => {
                let kind = translator::Kind::Prompted(Box::new(model), template);
                Self::Translator(Translator::new(kind))
            }
            (model, _) => model,
        })
    }

    fn task(&self) -> &'static str {
        match self {
            Self::CausalLm(_) => "a causal language model",
            Self::Translator(_) => "a translator",
            Self::Encoder(_) => "an encoder",
            Self::Classifier(_) => "a classifier",
            Self::ImageClassifier(_) => "an image classifier",
        }
    }

    task!(
        /// A model that continues texts.
        causal_lm, CausalLm, "generate", "a causal language model can do that");
    task!(
        /// A model that translates.
        translator, Translator, "translate",
        "an encoder with a decoder can do that, or a decoder whose configuration has a template");
    task!(
        /// A model that makes vectors.
        encoder, Encoder, "embed", "an encoder (BERT) can do that");
    task!(
        /// A model that classifies.
        classifier, Classifier, "classify",
        "an encoder with a classification head can do that, or hierarchical attention (han)");
    task!(
        /// A model that classifies images.
        image_classifier, ImageClassifier, "classify an image",
        "a vision transformer with a classification head (vit) can do that");

    /// Sets the languages of a [translator of many](Translator::set_languages).
    ///
    /// # Errors
    ///
    /// If it is no such model, or has no such language.
    pub fn set_languages(
        &mut self,
        source: Option<&str>,
        target: Option<&str>,
    ) -> Result<(), Error> {
        self.translator()?;
        match self {
            Self::Translator(model) => model.set_languages(source, target),
            _ => Ok(()),
        }
    }

    /// Sets the type of numbers in the KV cache of a language model. What other models keep while they work stays `f32`.
    pub fn set_kv_dtype(&mut self, dtype: KvDtype) {
        if let Self::CausalLm(model) = self {
            model.model.set_kv_dtype(dtype);
        }
    }

    /// Lets what every head looks at come with norms of values, for [`Trace::value_weighted`].
    ///
    /// # Errors
    ///
    /// If the model is no Transformer.
    pub fn record_value_norms(&mut self) -> Result<(), Error> {
        let model = match self {
            Self::CausalLm(model) => Some(&mut model.model),
            Self::Translator(model) => model.transformer(),
            Self::Encoder(model) => Some(&mut model.model),
            Self::Classifier(model) => model.transformer(),
            Self::ImageClassifier(model) => Some(&mut model.model),
        };
        let known = "a Transformer has them";
        let model =
            model.ok_or_else(|| Error::unsupported("norms of values", &"this model", known));
        model.map(|model| model.set_value_norms(true))
    }

    /// Its vocabulary, or the model of images that it is.
    fn vocabulary(&self) -> Result<&Vocabulary, &ImageClassifier> {
        match self {
            Self::CausalLm(model) => Ok(&model.vocabulary),
            Self::Translator(model) => Ok(model.vocabulary()),
            Self::Encoder(model) => Ok(&model.vocabulary),
            Self::Classifier(model) => Ok(&model.vocabulary),
            Self::ImageClassifier(model) => Err(model),
        }
    }

    /// What to call it.
    #[must_use]
    pub fn title(&self) -> &str {
        self.vocabulary().map_or_else(|model| &model.title, |own| &own.title)
    }

    /// How its text is divided; none of a model of images.
    #[must_use]
    pub fn tokens(&self) -> Option<&Tokens> {
        self.vocabulary().ok().map(|own| &own.tokens)
    }

    /// What of its files is followed in part only, or was left out: a message each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        self.vocabulary().map_or_else(|model| &model.notes, |own| &own.notes)
    }

    /// What every head looks at in a text; of a translator, in a text and its best translation.
    pub fn look(&self, text: &str) -> Result<Trace, Error> {
        match self {
            Self::CausalLm(model) => model.look(text),
            Self::Translator(model) => model.look(text, None),
            Self::Encoder(model) => model.look(text),
            Self::Classifier(model) => model.look(text),
            Self::ImageClassifier(_) => {
                Err(Error::unsupported("look at a text", &self.task(), "give it an image"))
            }
        }
    }

    /// What every head looks at in an image.
    pub fn look_at_image(&self, image: &Image) -> Result<Trace, Error> {
        self.image_classifier()?.look(image)
    }

    /// The same with a given translation: what a translator looks at as it writes each token of it.
    pub fn look_at(&self, text: &str, target: &str) -> Result<Trace, Error> {
        match self {
            Self::Translator(model) => model.look(text, Some(target)),
            _ => Err(Error::unsupported("target", &self.task(), "a model that translates has one")),
        }
    }
}

/// A recurrent model.
#[cfg(not(feature = "burn"))]
fn recurrent(files: ModelFiles) -> Result<Model, Error> {
    let value = files.config.architecture.name();
    Err(Error::unsupported("architecture", &value, "recurrent models need the feature `burn`"))
}

#[cfg(feature = "burn")]
fn recurrent(files: ModelFiles) -> Result<Model, Error> {
    use crate::files::Architecture;
    use crate::nn::DropoutRates;
    use crate::{E2k, Han, Seq2Seq, load};
    use burn::tensor::Device;

    let ModelFiles { config, mut weights, tokens, target_tokens, title } = files;
    let (device, none) = (Device::flex(), DropoutRates::default());
    let missing = |field: &str| {
        Error::format(field, "missing in the configuration; such a model has its sizes there")
    };
    let vocabulary = |title: String, tokens| {
        Ok::<_, Error>(Vocabulary {
            tokens: text::present(&title, tokens)?,
            title,
            target: target_tokens,
            context: config.context,
            bos: config.bos,
            eos: config.eos.clone(),
            notes: Vec::new(),
        })
    };
    let kind = match config.architecture {
        Architecture::Han => {
            let sizes = config.han.as_ref().ok_or_else(|| missing("han"))?;
            let model = load(Han::new(sizes, none, &device)?, &mut weights)?;
            let kind = classifier::Kind::Han(Box::new(model));
            let (vocabulary, labels) = (vocabulary(title, tokens)?, config.labels.clone());
            return Ok(Model::Classifier(Classifier { vocabulary, labels, kind }));
        }
        Architecture::Seq2Seq => {
            let sizes = config.seq2seq.as_ref().ok_or_else(|| missing("seq2seq"))?;
            let model = load(Seq2Seq::new(sizes, none, &device)?, &mut weights)?;
            translator::Kind::Seq2Seq(vocabulary(title, tokens)?, Box::new(model))
        }
        _ => {
            let model = load(E2k::new(&config, &device)?, &mut weights)?;
            translator::Kind::E2k(vocabulary(title, tokens)?, Box::new(model))
        }
    };
    Ok(Model::Translator(Translator::new(kind)))
}
