//! A group of queries as it meets the keys: in lanes, projected if the similarity asks for it, scaled.

use crate::description::problem::Problem;
use crate::description::similarity::Similarity;
use crate::kernel::lanes::{load_head, prefetch_l1};
use crate::kernel::micro::Layer;
use crate::kernel::project::{Projection, Transpose};
use crate::machine::simd::{GROUP, Isa, Lanes, Number, each};
use crate::tensor::index::{BLOCK_KEYS, RowTile};
use crate::tensor::source::{AnyHead, rows};

/// The queries of a group of rows.
#[derive(Debug)]
pub(crate) struct Queries<N> {
    pub(crate) rows: RowTile,
    /// As given, `[features][lanes]`, where they are projected.
    pub(crate) raw: Vec<Lanes<N>>,
    /// As they meet the keys, `[features][lanes]`.
    pub(crate) lanes: Vec<Lanes<N>>,
    /// The hidden layer of an additive similarity.
    pub(crate) layer: Layer<N>,
}

impl<N: Number> Queries<N> {
    /// Room for a group.
    pub(crate) fn new(problem: &Problem<'_, N>) -> Self {
        let (dims, similarity) = (problem.dims(), &problem.similarity);
        let zeros = |n| vec![Lanes([N::zero(); GROUP]); n];
        Self {
            raw: zeros(if similarity.of_queries().is_some() { dims.q_dim } else { 0 }),
            lanes: zeros(dims.qk_dim),
            ..Self::elsewhere(similarity.hidden())
        }
    }

    /// No room: tiles have queries of their own.
    pub(crate) fn elsewhere(hidden: usize) -> Self {
        let layer = Layer::new(hidden, BLOCK_KEYS);
        Self { rows: RowTile::NONE, raw: Vec::new(), lanes: Vec::new(), layer }
    }

    /// Takes rows of a head.
    pub(crate) fn take(
        &mut self,
        isa: Isa,
        problem: &Problem<'_, N>,
        head: usize,
        (q, rows): (AnyHead<'_, N>, RowTile),
    ) {
        let Self { raw, lanes, layer, .. } = self;
        self.rows = rows;
        if rows.step > 1 {
            (0..rows.count).for_each(|i| each!(q, q => prefetch_l1(q.row(rows.row(i)))));
        }
        let factor = N::from_f64(problem.query_factor());
        let Some(w) = problem.similarity.of_queries() else {
            return load_head(isa, q, rows, factor, lanes);
        };
        load_head(isa, q, rows, factor, raw);
        let w = self::rows(w.serving_head(0, head));
        let projection = Projection { w, direction: Transpose::Yes };
        projection.multiply(isa, (raw, rows.count), &mut Vec::new(), lanes);
        if let Similarity::Additive(weights) = &problem.similarity {
            let v = self::rows(weights.v.serving_head(0, head));
            layer.v_mut().iter_mut().enumerate().for_each(|(unit, to)| *to = v.number(0, unit));
            layer.take_queries(isa, lanes, rows.count);
        }
    }
}
