//! Models that are part of the program: they work right after it is installed.

use anyhow::Result;
use regard_models::Model;
use regard_models::files::{Config, ModelFiles, Tokens, Weights};

/// A model whose files are in the program.
#[derive(Debug)]
pub struct Shipped {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) license: &'static str,
    config: &'static str,
    weights: &'static [u8],
    tokens: &'static str,
    target: &'static str,
}

pub(crate) const SHIPPED: &[Shipped] = &[
    #[cfg(feature = "shipped")]
    Shipped {
        name: "zh-en",
        what: "our own small Transformer from Chinese to English, for short everyday sentences",
        license: "MIT or Apache-2.0; learned from Tatoeba (CC BY 2.0 FR)",
        config: include_str!("../../zh-en/config.json"),
        weights: include_bytes!("../../zh-en/model.safetensors"),
        tokens: include_str!("../../zh-en/source_tokenizer.json"),
        target: include_str!("../../zh-en/target_tokenizer.json"),
    },
];

impl Shipped {
    /// The one of this name; none in a build without the feature `shipped`.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        SHIPPED.iter().find(|own| own.name == name)
    }

    /// Its files: names and contents.
    #[must_use]
    pub fn files(&self) -> [(&'static str, &'static [u8]); 4] {
        [
            ("config.json", self.config.as_bytes()),
            ("model.safetensors", self.weights),
            ("source_tokenizer.json", self.tokens.as_bytes()),
            ("target_tokenizer.json", self.target.as_bytes()),
        ]
    }

    /// Numbers that were learned, and bytes that they take.
    pub(crate) fn size(&self) -> Result<(usize, usize)> {
        Ok((self.weights()?.parameters(), self.weights.len()))
    }

    fn weights(&self) -> Result<Weights> {
        Ok(Weights::safetensors(self.weights.to_vec())?)
    }

    /// Opens it.
    pub fn open(&self) -> Result<Model> {
        Ok(Model::new(ModelFiles {
            config: Config::from_json(self.config)?,
            weights: self.weights()?,
            tokens: Some(Tokens::from_json(self.tokens.as_bytes())?),
            target_tokens: Some(Tokens::from_json(self.target.as_bytes())?),
            title: self.name.into(),
        })?)
    }
}

#[cfg(all(test, feature = "shipped"))]
mod tests {
    use super::*;
    use regard_models::generate::DecodingStrategy;

    #[test]
    fn the_sentence_of_the_documents_is_translated() {
        let model = Shipped::named("zh-en").unwrap().open().unwrap();
        for search in
            [DecodingStrategy::Greedy, DecodingStrategy::Beam { width: 5, length_penalty: 1.0 }]
        {
            let written = model
                .translator()
                .unwrap()
                .translate(&["好久不见", "好久不见。"], &search, 32)
                .unwrap();
            for one in written {
                let plain: String = one
                    .text
                    .to_lowercase()
                    .chars()
                    .filter(|c| c.is_alphabetic() || *c == ' ')
                    .collect();
                assert_eq!(plain.trim(), "long time no see");
            }
        }
    }

    #[test]
    fn what_is_shipped_is_small() {
        for one in SHIPPED {
            let (parameters, bytes) = one.size().unwrap();
            assert!(bytes <= 10_000_000, "{}: {parameters} parameters, {bytes} bytes", one.name);
        }
    }
}
