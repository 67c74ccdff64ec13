//! Rotary position embedding of a `config.json`: base and scaling as frequencies.
//!
//! Follows `transformers.modeling_rope_utils`.

use super::super::fields::{Fields, missing};
use super::super::{PairLayout, RopeConfig};
use crate::error::Error;
use serde_json::Value;
use std::f64::consts::TAU;

/// Names and default values of a family.
#[derive(Clone, Copy)]
pub(super) struct RopeKeys {
    /// Base of the angles, and what it is if nothing is said.
    pub(super) theta: (&'static str, f64),
    /// The same of layers with a window, in families that tell them apart; whether scaling is of these layers too.
    pub(super) local: Option<(&'static str, f64, bool)>,
    /// Share of the features of a head that are rotated.
    pub(super) partial: (&'static str, f64),
}

impl RopeKeys {
    pub(super) const fn theta(theta: f64) -> Self {
        Self { theta: ("rope_theta", theta), local: None, partial: ("partial_rotary_factor", 1.0) }
    }
}

/// Rotation in layers of both kinds.
pub(super) struct Ropes {
    pub(super) full: RopeConfig,
    pub(super) sliding: RopeConfig,
    /// Longest sequence that the frequencies are of, if the configuration has several sets.
    pub(super) context: Option<usize>,
}

/// Reads both spellings: `rope_theta` with `rope_scaling`, and `rope_parameters`, which may be nested by the kind of layer.
pub(super) fn ropes(
    fields: &mut Fields,
    keys: &RopeKeys,
    head_dim: usize,
    context: Option<usize>,
    notes: &mut Vec<String>,
) -> Result<Ropes, Error> {
    let theta = fields.number(keys.theta.0)?.unwrap_or(keys.theta.1);
    let partial = fields.number(keys.partial.0)?.unwrap_or(keys.partial.1);
    let local = keys.local.map(|(name, theta, scaled)| {
        Ok::<_, Error>((fields.number(name)?.unwrap_or(theta), scaled))
    });
    let local = local.transpose()?;
    let original = fields.optional_size("original_max_position_embeddings")?;
    let interleaved = fields.bool("rope_interleaved")?.unwrap_or(false);
    let pairs = if interleaved { PairLayout::Interleaved } else { PairLayout::HalfSplit };
    let scaling = fields.part("rope_scaling")?;
    let mut parameters = fields.part("rope_parameters")?.unwrap_or_default();
    let nested = ["full_attention", "sliding_attention"].map(|kind| parameters.part(kind));
    let [full, sliding] = nested;
    let (mut full, mut sliding) = (full?, sliding?);
    if full.is_none() && sliding.is_none() {
        let flat = (!parameters.map.is_empty()).then(|| std::mem::take(&mut parameters));
        if let (Some(flat), true) = (&flat, local.is_some()) {
            let known = "an object for each of full_attention and sliding_attention is known";
            let value = Value::Object(flat.map.clone());
            return Err(Error::unsupported("rope_parameters", &value, known));
        }
        full = scaling.clone().or(flat);
        sliding = match local {
            Some((_, false)) => None,
            _ => full.clone(),
        };
    } else if let Some(scaling) = scaling {
        let known = "rope_parameters stands in its place";
        return Err(Error::unsupported("rope_scaling", &Value::Object(scaling.map), known));
    }
    parameters.finish()?;
    let mut angles =
        Angles { theta, partial, head_dim, context, original, pairs, cut: None, notes };
    let full = angles.read(full.unwrap_or_default())?;
    angles.theta = local.map_or(theta, |(theta, _)| theta);
    let sliding = angles.read(sliding.unwrap_or_default())?;
    Ok(Ropes { full, sliding, context: angles.cut })
}

/// What frequencies follow from.
struct Angles<'a> {
    theta: f64,
    partial: f64,
    head_dim: usize,
    context: Option<usize>,
    original: Option<usize>,
    pairs: PairLayout,
    cut: Option<usize>,
    notes: &'a mut Vec<String>,
}

impl Angles<'_> {
    fn read(&mut self, mut fields: Fields) -> Result<RopeConfig, Error> {
        let theta = positive("rope_theta", fields.number("rope_theta")?.unwrap_or(self.theta))?;
        let partial = fields.number("partial_rotary_factor")?.unwrap_or(self.partial);
        let old = fields.text("type")?;
        let kind = fields.text("rope_type")?.or(old).unwrap_or_else(|| "default".into());
        // Says how it was made.
        fields.map.remove("finetuned");
        let dim = self.dim(partial)?;
        let inverse = |i: usize| theta.powf(-real(2 * i) / real(dim));
        let mut frequencies: Vec<f64> = (0..dim / 2).map(inverse).collect();
        let mut magnitude = 1.0;
        match kind.as_str() {
            "default" => {}
            "linear" => {
                let factor = factor(&mut fields)?;
                frequencies.iter_mut().for_each(|f| *f /= factor);
            }
            "dynamic" => {
                factor(&mut fields)?;
                let up_to = self.context.map_or_else(|| "the context".into(), |n| n.to_string());
                self.note(format!("rope_type = dynamic: followed up to {up_to} tokens"));
            }
            "llama3" => self.llama3(&mut fields, &mut frequencies)?,
            // `su` is its first name, and Phi-3 has called it `yarn`.
            "longrope" | "su" => magnitude = self.longrope(&mut fields, &mut frequencies)?,
            "yarn" if fields.map.contains_key("short_factor") => {
                magnitude = self.longrope(&mut fields, &mut frequencies)?;
            }
            "yarn" => magnitude = self.yarn(&mut fields, theta, &mut frequencies)?,
            other => {
                let known = "default, linear, dynamic, llama3, yarn and longrope are known";
                return Err(Error::unsupported("rope_type", &other, known));
            }
        }
        fields.finish()?;
        if let Some(wrong) = frequencies.iter().find(|f| !f.is_finite()) {
            return Err(Error::format("rope_parameters", format!("a frequency of {wrong}")));
        }
        let magnitude = positive("attention_factor", magnitude)?;
        Ok(RopeConfig { dim, pairs: self.pairs, frequencies, magnitude })
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of it")]
    fn dim(&self, partial: f64) -> Result<usize, Error> {
        if !(partial > 0.0 && partial <= 1.0) {
            let why = format!("{partial}; it must be above 0 and at most 1");
            return Err(Error::format("partial_rotary_factor", why));
        }
        let dim = (real(self.head_dim) * partial) as usize;
        if dim < 2 || !dim.is_multiple_of(2) {
            let why = format!("{dim} of {} features; rotated are pairs", self.head_dim);
            return Err(Error::format("head_dim", why));
        }
        Ok(dim)
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    /// Context that the frequencies were trained on. Phi-3 has it outside, which is meant first.
    fn original(&self, fields: &mut Fields) -> Result<f64, Error> {
        let own = fields.number("original_max_position_embeddings")?;
        let original = self.original.map(real).or(own).or(self.context.map(real));
        let name = "original_max_position_embeddings";
        positive(name, original.ok_or_else(|| missing(name))?)
    }

    fn llama3(&self, fields: &mut Fields, frequencies: &mut [f64]) -> Result<(), Error> {
        let factor = factor(fields)?;
        let mut bound = |name| positive(name, fields.number(name)?.ok_or_else(|| missing(name))?);
        let (low, high) = (bound("low_freq_factor")?, bound("high_freq_factor")?);
        let original = self.original(fields)?;
        for f in frequencies {
            let turns = original * *f / TAU;
            let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
            *f *= (1.0 - smooth) / factor + smooth;
        }
        Ok(())
    }

    fn yarn(&self, fields: &mut Fields, theta: f64, frequencies: &mut [f64]) -> Result<f64, Error> {
        let original = self.original(fields)?;
        let given = fields.number("factor")?.or(self.context.map(|n| real(n) / original));
        let factor = positive("factor", given.ok_or_else(|| missing("factor"))?)?;
        let fast = fields.number("beta_fast")?.filter(|b| *b != 0.0).unwrap_or(32.0);
        let slow = fields.number("beta_slow")?.filter(|b| *b != 0.0).unwrap_or(1.0);
        let truncate = fields.bool("truncate")?.unwrap_or(true);
        let scales = [fields.number("mscale")?, fields.number("mscale_all_dim")?];
        let own = fields.number("attention_factor")?;

        let dim = real(2 * frequencies.len());
        let pair = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(fast), pair(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // As Transformers has it against a division by zero.
        let width = if low == high { 0.001 } else { high - low };
        for (i, f) in frequencies.iter_mut().enumerate() {
            let ramp = ((real(i) - low) / width).clamp(0.0, 1.0);
            *f *= ramp / factor + (1.0 - ramp);
        }
        let scale = |m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        Ok(own.unwrap_or_else(|| match scales {
            [Some(one), Some(all)] if one != 0.0 && all != 0.0 => scale(one) / scale(all),
            _ => scale(1.0),
        }))
    }

    /// The factors of sequences within the trained context; those of longer ones are another set, which would turn what is cached.
    fn longrope(&mut self, fields: &mut Fields, frequencies: &mut [f64]) -> Result<f64, Error> {
        let original = self.original(fields)?;
        let [short, long] = ["short_factor", "long_factor"].map(|name| {
            let list = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect();
            let list: Option<Vec<f64>> = fields.read(name, "a list of numbers", list)?;
            let list = list.ok_or_else(|| missing(name))?;
            let (there, wanted) = (list.len(), frequencies.len());
            let why = format!("{there} numbers, {wanted} pairs are rotated; give one of each");
            if there == wanted { Ok(list) } else { Err(Error::format(name, why)) }
        });
        let (short, long) = (short?, long?);
        let ratio = self.context.map(|n| real(n) / original);
        let given = fields.number("factor")?.or(ratio);
        let own = fields.number("attention_factor")?;
        for (f, by) in frequencies.iter_mut().zip(&short) {
            *f /= by;
        }
        if short != long && ratio.is_some_and(|ratio| ratio > 1.0) {
            self.note(format!("rope_type = longrope: followed up to {original} tokens"));
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
            let cut = original as usize;
            self.cut = Some(cut);
        }
        let factor = given.ok_or_else(|| missing("factor"))?;
        let spread = || (1.0 + factor.ln() / original.ln()).sqrt();
        Ok(own.unwrap_or_else(|| if factor <= 1.0 { 1.0 } else { spread() }))
    }
}

fn factor(fields: &mut Fields) -> Result<f64, Error> {
    positive("factor", fields.number("factor")?.ok_or_else(|| missing("factor"))?)
}

fn positive(name: &str, number: f64) -> Result<f64, Error> {
    let why = || Error::format(name, format!("{number}; it must be above 0"));
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err(why()) }
}

/// A size as a number; sizes are far below what would be rounded.
#[expect(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
fn real(n: usize) -> f64 {
    n as f64
}
