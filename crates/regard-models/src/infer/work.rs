//! Memory of a pass, and the panels of rows that threads take through it.

use crate::error::Error;
use crate::files::StackConfig;
use half::bf16;
use rayon::prelude::*;
use regard::plan::ScratchPool;
use regard_matmul::Rows;
use std::sync::{Mutex, PoisonError};

/// Memory of a pass, kept from one to the next.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) attended: Vec<f32>,
    pub(super) lse: Vec<f32>,
    pub(super) scratch: ScratchPool<f32>,
    /// Queries and what attention gives, for a cache of such numbers.
    pub(super) narrow: [Vec<bf16>; 2],
    /// One for each thread.
    panels: Vec<Panel>,
}

/// Memory for one panel of rows at a time, between calls of attention.
#[derive(Debug, Default)]
pub(super) struct Panel {
    /// Input of the layer that runs.
    pub(super) rows: Rows,
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    /// What the layer adds to the residual stream.
    pub(super) output: Vec<f32>,
    /// What attention adds, where the feed-forward net reads the same input.
    pub(super) parallel: Vec<f32>,
}

/// Some rows of a pass.
#[derive(Debug)]
pub(super) struct Part<'a> {
    /// The number of the first row.
    pub(super) first: usize,
    /// The residual stream.
    pub(super) x: &'a mut [f32],
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    pub(super) attended: &'a [f32],
}

/// Rows of a panel, at most: what is computed of them between calls of attention stays in the L2 cache.
const PANEL: usize = 128;

/// Below this, reading the weights once for each panel takes longer than the products.
const FEWEST: usize = 64;

/// Rows of each panel. All of them if there are few: threads share the outputs of each product then.
fn panel_rows(rows: usize, threads: usize) -> usize {
    let rounds = rows.div_ceil(threads * PANEL).max(1);
    let panel = rows.div_ceil(threads * rounds).next_multiple_of(16);
    if panel < FEWEST { rows } else { panel }
}

impl Workspace {
    /// Does some work for all rows of the residual stream, panel by panel: one start of the threads for all that rows do by
    /// themselves.
    pub(super) fn each_part(
        &mut self,
        x: &mut [f32],
        config: &StackConfig,
        work: impl Fn(Part<'_>, &mut Panel) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let [q_width, kv_width] = config.widths();
        let rows = x.len() / config.d_model;
        let threads = rayon::current_num_threads();
        let panel = panel_rows(rows, threads).max(1);
        if self.panels.len() < threads {
            self.panels.resize_with(threads, Panel::default);
        }
        let Self { q, k, v, attended, panels, .. } = self;
        for (list, width) in [
            (&mut *q, q_width),
            (&mut *k, kv_width),
            (&mut *v, kv_width),
            (&mut *attended, q_width),
        ] {
            list.resize(rows * width, 0.0);
        }
        let own = q.chunks_mut(panel * q_width);
        let own = own.zip(k.chunks_mut(panel * kv_width).zip(v.chunks_mut(panel * kv_width)));
        let own = own.zip(attended.chunks(panel * q_width));
        let parts = x.chunks_mut(panel * config.d_model).zip(own).enumerate();
        let parts = parts.map(|(i, (x, ((q, (k, v)), attended)))| Part {
            first: i * panel,
            x,
            q,
            k,
            v,
            attended,
        });
        let (count, parts) = (parts.len().min(threads), Mutex::new(parts));
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run = |panel: &mut Panel| {
            while let Some(part) = next() {
                work(part, panel)?;
            }
            Ok(())
        };
        match &mut panels[..count] {
            [panel] => run(panel),
            panels => panels.par_iter_mut().try_for_each(run),
        }
    }
}

/// Room in a list, of any content.
pub(super) fn room(list: &mut Vec<f32>, len: usize) -> &mut [f32] {
    list.resize(len, 0.0);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_are_of_about_the_same_size_and_as_many_as_threads() {
        assert_eq!([1, 17, 127].map(|rows| panel_rows(rows, 2)), [1, 17, 64]);
        assert_eq!([256, 257, 300].map(|rows| panel_rows(rows, 2)), [128, 80, 80]);
        assert_eq!([256, 4096].map(|rows| panel_rows(rows, 8)), [256, 128]);
        assert_eq!([64, 200, 256].map(|rows| panel_rows(rows, 1)), [64, 112, 128]);
    }
}
