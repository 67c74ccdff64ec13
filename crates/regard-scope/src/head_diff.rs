//! How far apart two traces of the same text are, head by head: of two models, or of one before and after an intervention.

use crate::error::Error;
use crate::measure::{Divergence, diff};
use crate::trace::{Layer, LayerData, Site, Trace};
use regard::Machine;

/// How far apart the weights of one head are in two traces, over the queries.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadDiff {
    /// Which head.
    pub site: Site,
    /// The mean over the queries.
    pub mean: Divergence,
    /// The largest of a query.
    pub most: Divergence,
    /// The query with the largest Jensen-Shannon divergence.
    pub worst: usize,
}

/// Queries whose weights are in memory at a time, where one of the traces holds weights.
const ROWS: usize = 128;

/// The divergence of every head of the first trace from the same head of the second. Both need the same layers, heads and tokens.
/// `progress` is called with layers done and layers in all. Costs the weights of both.
pub fn head_diffs(
    first: &Trace,
    second: &Trace,
    machine: Machine,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<HeadDiff>, Error> {
    if let Some(more) = second.sites().iter().find(|site| first.layer(site).is_err()) {
        let why = "only the second trace has it; compare runs of the same model";
        return Err(Error::format(more.to_string(), why));
    }
    let mut all = Vec::new();
    for (i, layer) in first.layers.iter().enumerate() {
        let site = |head| Site { layer: layer.layer, kind: layer.kind.clone(), head };
        let other = second.layer(&site(layer.data.heads().saturating_sub(1)))?;
        check((first, layer), (second, other))?;
        let rows = divergences(&layer.data, &other.data, machine)?;
        let q_len = layer.data.size()[0];
        let of_head = |head| HeadDiff::new(site(head), &rows[head * q_len..][..q_len]);
        all.extend((0..layer.data.heads()).map(of_head));
        progress(i + 1, first.layers.len());
    }
    Ok(all)
}

/// Refuses layers of different texts.
fn check((first, layer): (&Trace, &Layer), (second, other): (&Trace, &Layer)) -> Result<(), Error> {
    let place = || format!("{} layer {}", layer.kind, layer.layer);
    let ([rows, cols], [other_rows, other_cols]) = (layer.data.size(), other.data.size());
    if [rows, cols] != [other_rows, other_cols] {
        let why = format!(
            "{rows} queries and {cols} keys in the first trace, {other_rows} and {other_cols} in the second; compare runs over the same text"
        );
        return Err(Error::format(place(), why));
    }
    let labels = |trace: &'_ Trace, axis: &str| trace.labels(axis).labels.clone();
    if labels(first, &layer.rows) != labels(second, &other.rows)
        || labels(first, &layer.cols) != labels(second, &other.cols)
    {
        let why = "the words are not the same; compare runs over the same text";
        return Err(Error::format(place(), why));
    }
    Ok(())
}

/// The divergence of each query, `[heads, rows]`.
fn divergences(
    first: &LayerData,
    second: &LayerData,
    machine: Machine,
) -> Result<Vec<Divergence>, Error> {
    if let (LayerData::Inputs(a), LayerData::Inputs(b)) = (first, second) {
        return Ok(diff(&a.view(machine)?, &b.view(machine)?)?);
    }
    let [q_len, k_len] = first.size();
    let mut all = Vec::new();
    for head in 0..first.heads() {
        for start in (0..q_len).step_by(ROWS) {
            let rows = start..q_len.min(start + ROWS);
            let [a, b] = [first, second].map(|data| data.weights(machine, head, rows.clone()));
            let (a, b) = (a?, b?);
            let pairs = a.chunks(k_len.max(1)).zip(b.chunks(k_len.max(1)));
            all.extend(pairs.map(|(a, b)| Divergence::of_rows(a, b)));
        }
    }
    Ok(all)
}

impl HeadDiff {
    fn new(site: Site, rows: &[Divergence]) -> Self {
        let (mean, most) = (Divergence::default(), Divergence::default());
        let mut all = Self { site, mean, most, worst: 0 };
        for (i, row) in rows.iter().enumerate() {
            all.mean.kl += row.kl / rows.len() as f64;
            all.mean.js += row.js / rows.len() as f64;
            if row.js > all.most.js {
                all.worst = i;
            }
            all.most = Divergence { kl: all.most.kl.max(row.kl), js: all.most.js.max(row.js) };
        }
        all
    }
}
