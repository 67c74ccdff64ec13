//! What is asked of a model, in JSON.

use crate::refused;
use pyo3::prelude::*;
use regard_models::generate::{Constraint, DecodingStrategy, LogitsProcessors, Sampling};
use regard_models::{CausalLm, TextOptions};
use serde::Deserialize;

/// Options of generation and translation; what is missing has the defaults of the command.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Request {
    pub(crate) max_tokens: usize,
    num_beams: Option<usize>,
    length_penalty: Option<f32>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: u64,
    stop: Vec<String>,
    repetition_penalty: Option<f32>,
    json_schema: Option<String>,
    regex: Option<String>,
}

impl Request {
    pub(crate) fn new(json: &str) -> PyResult<Self> {
        let request: Self = serde_json::from_str(json).map_err(refused)?;
        request.strategy().check().map_err(refused)?;
        Ok(request)
    }

    /// Greedy search, unless beams or one of the options of sampling are given.
    pub(crate) fn strategy(&self) -> DecodingStrategy {
        let Self { temperature, top_k, top_p, min_p, seed, .. } = *self;
        match self.num_beams {
            None | Some(1) if temperature.or(top_p).or(min_p).is_none() && top_k.is_none() => {
                DecodingStrategy::Greedy
            }
            Some(width) => {
                let length_penalty = self.length_penalty.unwrap_or(1.0);
                DecodingStrategy::Beam { width, length_penalty }
            }
            None => {
                let temperature = temperature.unwrap_or(1.0);
                DecodingStrategy::Sample(Sampling { temperature, top_k, top_p, min_p, seed })
            }
        }
    }

    /// The same for a language model.
    pub(crate) fn options(&self, model: &CausalLm) -> Result<TextOptions, regard_models::Error> {
        let mut processors = LogitsProcessors::default();
        if let Some(penalty) = self.repetition_penalty {
            processors.repetition_penalty = penalty;
        }
        Ok(TextOptions {
            stop: self.stop.clone(),
            processors,
            constraint: self.constraint(model)?,
            ..TextOptions::new(self.strategy(), self.max_tokens)
        })
    }

    fn constraint(
        &self,
        model: &CausalLm,
    ) -> Result<Option<Box<dyn Constraint>>, regard_models::Error> {
        Ok(Some(match (&self.json_schema, &self.regex) {
            (Some(schema), _) => Box::new(model.grammars()?.json_schema(schema)?),
            (None, Some(regex)) => Box::new(model.grammars()?.regex(regex)?),
            (None, None) => return Ok(None),
        }))
    }
}
