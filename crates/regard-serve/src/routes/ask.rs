//! What completions and chats are asked alike: fields become options.

use super::attention::Attention;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::models::Entry;
use crate::options::Options;
use regard_models::TextOptions;
use regard_models::generate::{Constraint, DecodingStrategy, LogitsProcessors, Sampling};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Fields that change nothing in an answer: OpenAI keeps accounts by them.
const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// Choices of a request.
const CHOICES: usize = 16;
/// Strings that end a text, and characters of each.
const STOPS: [usize; 2] = [16, 64];
/// Entries of `logit_bias`.
const BIASES: usize = 1024;
/// Log-probabilities with a token.
pub(super) const TOP: usize = 20;

/// What is asked, but for the prompt and the log-probabilities.
#[derive(Debug)]
pub(super) struct Ask {
    pub(super) n: usize,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// None: as many as there is room for.
    pub(super) max_tokens: Option<usize>,
    pub(super) options: TextOptions,
    pub(super) attention: Option<Attention>,
    format: Option<Format>,
}

#[derive(Debug)]
enum Format {
    Object,
    Schema(Value),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Some(Vec<String>),
}

impl Ask {
    /// Takes the fields that both have, within what the server allows.
    pub(super) fn take(fields: &mut Fields, allowed: &Options) -> Result<Self, ApiError> {
        let attention = Attention::take(fields, allowed.attention)?;
        fields.ignore(IGNORED);
        let n = fields.count("n", [1, CHOICES])?.unwrap_or(1);
        fields.only("best_of", &[json!(1)], "choices are not ranked; give `n`")?;
        let stream = fields.take("stream", "true or false")?.unwrap_or(false);
        let include_usage = include_usage(fields)?;
        let range = [1, allowed.max_tokens];
        let newer = fields.count("max_completion_tokens", range)?;
        let max_tokens = newer.or(fields.count("max_tokens", range)?);
        let options = TextOptions {
            stop: stops(fields)?,
            processors: processors(fields)?,
            ..TextOptions::new(strategy(fields)?, 1)
        };
        let format = format(fields)?;
        Ok(Self { n, stream, include_usage, max_tokens, options, attention, format })
    }

    /// Makes the constraint of the format, which takes a while.
    pub(super) fn constrain(&mut self, entry: &Entry) -> Result<(), ApiError> {
        let Some(format) = self.format.take() else { return Ok(()) };
        let schema = match format {
            Format::Object => json!({"type": "object"}),
            Format::Schema(schema) => schema,
        };
        let compiler = entry.grammars()?;
        let grammar = compiler.json_schema(&schema.to_string());
        let grammar = grammar.map_err(|e| ApiError::field("response_format", e.to_string()))?;
        let constraint: Box<dyn Constraint> = Box::new(grammar);
        self.options.constraint = Some(constraint);
        Ok(())
    }
}

fn include_usage(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(value) = fields.take::<Value>("stream_options", "an object")? else {
        return Ok(false);
    };
    let mut inner = Fields::of_value("stream_options", value)?;
    let include = inner.take("include_usage", "true or false")?.unwrap_or(false);
    inner.only("include_obfuscation", &[json!(false)], "nothing is added to chunks")?;
    inner.finish()?;
    Ok(include)
}

/// Greedy at temperature 0, else by chance; the defaults are OpenAI's.
fn strategy(fields: &mut Fields) -> Result<DecodingStrategy, ApiError> {
    let temperature = fields.number("temperature", [0.0, 2.0])?.unwrap_or(1.0);
    // Of 0, the likeliest token is left, as of the smallest number.
    let top_p = fields.number("top_p", [0.0, 1.0])?.map(|p| p.max(f32::MIN_POSITIVE));
    let min_p = fields.number("min_p", [0.0, 1.0])?;
    let top_k = fields.count("top_k", [1, usize::MAX >> 1])?;
    let seed = match fields.take::<Value>("seed", "a whole number")? {
        None => crate::app::random(),
        Some(seed) => match (seed.as_u64(), seed.as_i64()) {
            (Some(seed), _) => seed,
            (None, Some(seed)) => seed.cast_unsigned(),
            (None, None) => return Err(wrong("seed", &seed, "a whole number of 64 bits")),
        },
    };
    if temperature == 0.0 {
        return Ok(DecodingStrategy::Greedy);
    }
    let strategy = DecodingStrategy::Sample(Sampling { temperature, top_k, top_p, min_p, seed });
    strategy.check().map_err(|e| ApiError::generate(&e))?;
    Ok(strategy)
}

fn processors(fields: &mut Fields) -> Result<LogitsProcessors, ApiError> {
    let presence_penalty = fields.number("presence_penalty", [-2.0, 2.0])?.unwrap_or(0.0);
    let frequency_penalty = fields.number("frequency_penalty", [-2.0, 2.0])?.unwrap_or(0.0);
    let wanted = "an object of token ids and numbers from -100 to 100, as {\"42\": -1.5}";
    let given = fields.take::<BTreeMap<String, f32>>("logit_bias", wanted)?.unwrap_or_default();
    if given.len() > BIASES {
        let why = format!("logit_bias: {} entries; give {BIASES} at most", given.len());
        return Err(ApiError::field("logit_bias", why));
    }
    let mut logit_bias = BTreeMap::new();
    for (token, bias) in given {
        let id = token.parse::<u32>().ok().filter(|_| (-100.0..=100.0).contains(&bias));
        let id = id.ok_or_else(|| wrong("logit_bias", &json!({token: bias}), wanted))?;
        logit_bias.insert(id, bias);
    }
    let none = LogitsProcessors::default();
    Ok(LogitsProcessors { presence_penalty, frequency_penalty, logit_bias, ..none })
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let [most, length] = STOPS;
    let wanted =
        format!("a string, or a list of {most} at most, each of {length} characters at most");
    let stops = match fields.take("stop", &wanted)? {
        None => Vec::new(),
        Some(Stop::One(stop)) => vec![stop],
        Some(Stop::Some(stops)) => stops,
    };
    match stops.len() <= most && stops.iter().all(|stop| stop.chars().count() <= length) {
        true => Ok(stops),
        false => Err(ApiError::field("stop", format!("stop: give {wanted}"))),
    }
}

fn format(fields: &mut Fields) -> Result<Option<Format>, ApiError> {
    let Some(value) = fields.take::<Value>("response_format", "an object")? else {
        return Ok(None);
    };
    let mut inner = Fields::of_value("response_format", value)?;
    let kinds = "`text`, `json_object` or `json_schema`";
    let kind: String = inner.need("type", kinds)?;
    let format = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Format::Object),
        "json_schema" => {
            let value = inner.need("json_schema", "{\"name\": .., \"schema\": ..}")?;
            let mut inner = Fields::of_value("response_format.json_schema", value)?;
            // Every schema is followed to the letter.
            inner.ignore(&["name", "description", "strict"]);
            let schema = inner.need::<Value>("schema", "a JSON schema")?;
            inner.finish()?;
            Some(Format::Schema(schema))
        }
        other => return Err(wrong("response_format.type", &json!(other), kinds)),
    };
    inner.finish()?;
    Ok(format)
}
