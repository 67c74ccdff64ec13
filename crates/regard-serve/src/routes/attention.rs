//! `"attention"` of a request: what chosen heads looked at when each token was generated.
//!
//! Positions are told and never words: a chat template or a system prompt may be before the prompt of a client. A page names the words of
//! a prompt only where the client gave all of it.

use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use regard_models::CausalLm;
use regard_models::generate::{AttentionProbe, AttentionRow};
use serde_json::{Value, json};

/// What is asked, before the model is known.
#[derive(Debug)]
pub(super) struct Attention {
    /// Told with each token.
    heads: Option<Heads>,
    /// Whether a page of all heads may be asked for after the answer.
    pub(super) page: bool,
}

#[derive(Debug)]
struct Heads {
    /// From the end if negative.
    layers: Vec<i64>,
    heads: Vec<usize>,
    top: usize,
}

/// Heads of all layers together.
const SITES: usize = 64;
/// Tokens of an answer with attention; without `max_tokens` it ends there.
pub(super) const ROWS: usize = 512;
/// Heads times tokens times keys: weights that are computed once more.
const COST: usize = 1 << 31;
/// Positions that are told, unless the request says how many.
const TOP: usize = 8;
/// Weights of all heads of a page: where a model has windows, they are all in memory, and this is 1 GiB; more is not recorded.
const PAGE: usize = 1 << 28;

impl Attention {
    pub(super) fn take(fields: &mut Fields, allowed: bool) -> Result<Option<Self>, ApiError> {
        let Some(value) = fields.take::<Value>("attention", "an object")? else { return Ok(None) };
        if !allowed {
            let why = "this server does not tell its attention; start it with --attention";
            return Err(ApiError::unsupported("attention", why));
        }
        let mut inner = Fields::of_value("attention", value)?;
        let page = inner.take("page", "true or false")?.unwrap_or(false);
        let told = !page || ["layers", "heads", "top_k"].iter().any(|name| inner.has(name));
        let heads = told.then(|| Heads::take(&mut inner)).transpose()?;
        inner.finish()?;
        Ok(Some(Self { heads, page }))
    }

    /// What is told with each token, for a model, a prompt and so many tokens.
    pub(super) fn probe(
        &self,
        model: &CausalLm,
        prompt: usize,
        tokens: usize,
    ) -> Result<Option<AttentionProbe>, ApiError> {
        let stack = model.transformer().config().decoder.as_ref();
        let size = stack.map_or([0; 2], |stack| [stack.layers.len(), stack.heads.q]);
        if self.page {
            check_page(size, prompt, tokens)?;
        }
        self.heads.as_ref().map(|heads| heads.probe(size, prompt, tokens)).transpose()
    }
}

/// Whether a page can be made, however long the answer gets.
fn check_page([layers, heads]: [usize; 2], prompt: usize, tokens: usize) -> Result<(), ApiError> {
    let (all, length) = (layers * heads, prompt + tokens);
    let cost = all.saturating_mul(length).saturating_mul(length);
    if cost <= PAGE {
        return Ok(());
    }
    let why = format!(
        "attention.page: {cost} weights ({all} heads, and {length} tokens: {prompt} of the prompt, {tokens} that may be generated); \
         {PAGE} at most, which are {} tokens; lower `max_tokens`, or shorten the prompt",
        (PAGE / all.max(1)).isqrt()
    );
    Err(ApiError::field("attention.page", why))
}

impl Heads {
    fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        let layers: Vec<i64> = fields.need("layers", "a list of layers, as [0, -1]")?;
        let heads: Vec<usize> = fields.need("heads", "a list of heads, as [0, 3]")?;
        let top = fields.count("top_k", [0, 64])?.unwrap_or(TOP);
        let sites = layers.len().saturating_mul(heads.len());
        if !(1..=SITES).contains(&sites) {
            let wanted = format!("1 to {SITES} heads in all layers together");
            return Err(wrong("attention", &json!({"layers": layers, "heads": heads}), &wanted));
        }
        Ok(Self { layers, heads, top })
    }

    fn probe(
        &self,
        [layers, heads]: [usize; 2],
        prompt: usize,
        tokens: usize,
    ) -> Result<AttentionProbe, ApiError> {
        if tokens > ROWS {
            let why = format!(
                "attention: {tokens} tokens may be generated; with attention {ROWS} at most; lower `max_tokens`"
            );
            return Err(ApiError::field("attention", why));
        }
        let cost = (self.layers.len() * self.heads.len() * tokens).saturating_mul(prompt + tokens);
        if cost > COST {
            let why = format!(
                "attention: {cost} weights (heads x tokens x positions); {COST} at most; ask for fewer layers or heads"
            );
            return Err(ApiError::field("attention", why));
        }
        let from_end = |layer: i64| match layer {
            ..0 => layers.checked_sub(usize::try_from(layer.unsigned_abs()).ok()?),
            _ => usize::try_from(layer).ok(),
        };
        let known: Option<Vec<usize>> = self.layers.iter().map(|layer| from_end(*layer)).collect();
        let Some(known) = known else {
            let wanted = format!("layers from -{layers} to {}", layers.saturating_sub(1));
            return Err(wrong("attention.layers", &json!(self.layers), &wanted));
        };
        let (heads_of, spans) = (self.heads.clone(), Vec::new());
        let probe = AttentionProbe { layers: known, heads: heads_of, top: self.top, spans };
        probe.check([layers, heads]).map_err(|e| ApiError::field("attention", e.to_string()))?;
        Ok(probe)
    }
}

/// What was looked at when the token of this position was chosen.
pub(super) fn told(position: usize, token: &str, rows: &[AttentionRow]) -> Value {
    let site = |row: &AttentionRow| {
        json!({
            "layer": row.layer, "head": row.head, "entropy": row.entropy, "distance": row.distance,
            "top": row.top,
        })
    };
    json!({"position": position, "token": token, "sites": rows.iter().map(site).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_could_not_be_made_is_refused_with_its_numbers() {
        // 1,024 heads leave room for 512 tokens.
        assert!(check_page([32, 32], 500, 12).is_ok());
        let error = check_page([32, 32], 500, 13).expect_err("513 tokens");
        assert_eq!(error.param.as_deref(), Some("attention.page"));
        for number in ["269485056 weights", "1024 heads", "513 tokens", "268435456", "512 tokens"] {
            assert!(error.message.contains(number), "{number}: {}", error.message);
        }
        assert!(check_page([usize::MAX >> 40, 1 << 20], usize::MAX >> 1, 1).is_err());
    }
}
