//! All options of a problem together, in their order: the definition of a pair's score, the passes over a tile of scores,
//! the backward pass through them, and what weights are multiplied by after the softmax.

use crate::description::problem::Problem;
use crate::description::score::{BiasGrads, Derivatives, Factor, LOG2_E, Scored, pass};
use crate::description::similarity::Similarity;
use crate::machine::simd::{Element, GROUP, Isa, Lanes, Number, leaf};
use crate::tensor::index::{At, Keys, Pair, RowMask, RowTile, Scope};

impl<E: Element> Problem<'_, E> {
    /// The definition: from the similarity of a pair to its score, in any number type.
    pub(crate) fn define<N: Number>(&self, at: Pair, similarity: N) -> Scored<N> {
        self.score.define(at, self.distance(at), similarity * N::from_f64(self.scale()))
    }

    /// `key - position`
    pub(crate) fn distance(&self, at: Pair) -> i64 {
        self.scope(at.batch, at.head).distance(at.row, at.key)
    }

    /// Where a row stands among those of all heads and items.
    fn row_of(&self, at: Pair) -> usize {
        self.row_index(self.scope(at.batch, at.head), at.row)
    }

    /// The same for the rows of a tile that are computed.
    #[inline(always)]
    fn rows_of(&self, at: At<'_>) -> [usize; GROUP] {
        let mut rows = [0; GROUP];
        for (lane, row) in rows.iter_mut().enumerate().take(at.span.end).skip(at.span.start) {
            *row = self.row_index(at.scope, at.rows.row(lane));
        }
        rows
    }

    /// Whether a pair counts, by a choice that was made before.
    pub(crate) fn keeps(&self, at: Pair) -> bool {
        self.selection.is_none_or(|kept| kept.keeps(self.row_of(at), at.key))
    }

    /// What a weight is multiplied by after the softmax, by definition.
    pub(crate) fn factor<N: Number>(&self, at: Pair) -> N {
        let dropped = self
            .dropout
            .map_or(1.0, |dropout| if dropout.keeps(at) { dropout.growth() } else { 0.0 });
        let near = self.local.map_or(N::one(), |local| local.factor(self.row_of(at), at.key));
        N::from_f64(dropped) * near
    }

    /// `key - p`, of local attention.
    pub(crate) fn beyond_center<N: Number>(&self, at: Pair) -> N {
        self.local.map_or(N::zero(), |local| local.beyond(self.row_of(at), at.key))
    }

    /// The factor that goes into the queries of a dot product; other similarities are scaled in [`Problem::apply`].
    pub(crate) fn query_factor(&self) -> f64 {
        if self.similarity.is_linear() { self.scale() * LOG2_E } else { 1.0 }
    }

    /// What the sum of `d_score k` (of `d_score (k - q)`, for distances) is multiplied by to be the gradient of a query.
    pub(crate) fn query_grad_factor(&self) -> f64 {
        match self.similarity {
            Similarity::Distance => 2.0 * self.scale(),
            _ => self.scale(),
        }
    }

    /// The same for a key, from the sum of `d_score q`; a projected query carries its scale already.
    pub(crate) fn key_grad_factor(&self) -> f64 {
        match self.similarity {
            Similarity::General(_) => 1.0,
            _ => self.query_grad_factor(),
        }
    }

    /// What the sum of `weight d_weight (key - p)` is multiplied by to be the gradient of a center, where there are centers.
    pub(crate) fn centre_grad_factor(&self) -> Option<f64> {
        self.local.map(|local| local.grad_factor())
    }

    /// Whether a dot product with the scaled query is the score already.
    #[inline(always)]
    pub(crate) fn is_plain_dot(&self) -> bool {
        self.score.is_plain() && self.similarity.is_linear() && self.selection.is_none()
    }

    /// The same for the scores between these rows and a block of keys.
    pub(crate) fn is_plain_dot_at(
        &self,
        scope: &Scope,
        rows: RowTile,
        keys: (Keys<'_>, usize),
    ) -> bool {
        let is_plain = self.similarity.is_linear() && self.selection.is_none();
        is_plain && self.score.is_plain_at(scope, rows, keys)
    }

    /// Whether a score may become `-inf`, which hides its pair.
    #[inline(always)]
    pub(crate) fn may_hide(&self) -> bool {
        self.score.may_hide() || self.selection.is_some()
    }

    /// Whether weights are multiplied by something after the softmax.
    #[inline(always)]
    pub(crate) fn has_factors(&self) -> bool {
        self.dropout.is_some() || self.local.is_some()
    }
}

/// For kernels, which know what is computed in alone.
impl<N: Number> Problem<'_, N> {
    /// Room for the derivatives of tiles of up to `keys` keys.
    pub(crate) fn derivatives(&self, keys: usize) -> Derivatives<N> {
        let bent = self.selection.is_some_and(|kept| kept.is_sparse());
        self.score.derivatives(keys, !self.similarity.is_linear(), bent)
    }

    /// Turns a tile of similarities `[keys][rows]` into scores times `log2 e`: one pass for each option in use.
    ///
    /// `derivatives` gets what each one multiplies a gradient by in the backward pass.
    pub(crate) fn apply(
        &self,
        isa: Isa,
        at: At<'_>,
        tile: &mut [Lanes<N>],
        derivatives: Option<&mut Derivatives<N>>,
    ) {
        apply_options(isa, self, at, tile, derivatives);
    }

    /// Adds to the gradients of the options, and carries those of the scores back to the similarities.
    pub(crate) fn backward(&self, isa: Isa, undo: OptionsBackward<'_, N>) {
        options_backward(isa, self, undo);
    }

    /// What the weights of a tile are multiplied by after the softmax, `[keys][rows]`.
    pub(crate) fn factors(&self, isa: Isa, at: At<'_>, to: &mut [Lanes<N>]) {
        match &self.dropout {
            Some(dropout) => dropout.factors(isa, at, to),
            None => to.fill(Lanes([N::one(); GROUP])),
        }
        if let (Some(local), Some(centers)) = (&self.local, self.centers(at)) {
            local.multiply(isa, (at, &centers), to);
        }
    }

    /// The centers of a group of rows, where there are centers.
    pub(crate) fn centers(&self, at: At<'_>) -> Option<Lanes<N>> {
        self.local.map(|local| local.centers(&self.rows_of(at), at.span))
    }
}

leaf! {
    fn apply_options<'t, N>(
        s: S,
        problem: &'t Problem<'t, N>,
        at: At<'t>,
        tile: &'t mut [Lanes<N>],
        derivatives: Option<&'t mut Derivatives<N>>,
    ) {
        let mut derivatives = derivatives;
        if !problem.similarity.is_linear() {
            // Of distances the tile holds the squares, without their sign.
            let sign = if matches!(problem.similarity, Similarity::Distance) { -1.0 } else { 1.0 };
            if let Some(derivatives) = &mut derivatives {
                let kept = &mut derivatives.similarities[..tile.len()];
                kept.copy_from_slice(tile);
                pass(s, at, kept, &Factor(N::from_f64(sign)));
            }
            pass(s, at, tile, &Factor(N::from_f64(sign * problem.scale() * LOG2_E)));
        }
        problem.score.apply(s, at, tile, derivatives.as_deref_mut());
        if let Some(kept) = &problem.selection {
            kept.apply(s, (at, &problem.rows_of(at)), tile, derivatives);
        }
    }
}

/// What the gradients of a tile's scores, `[keys][rows]`, say of the options: see [`Problem::backward`].
pub(crate) struct OptionsBackward<'t, N> {
    pub(crate) at: At<'t>,
    /// Which rows see each key, if not all do.
    pub(crate) visible: Option<&'t [RowMask]>,
    pub(crate) d_scores: &'t mut [Lanes<N>],
    pub(crate) derivatives: &'t Derivatives<N>,
    /// What each row adds to the gradient of the scale.
    pub(crate) by_scale: &'t mut Lanes<N>,
    pub(crate) biases: BiasGrads<'t, N>,
}

leaf! {
    fn options_backward<'t, N>(s: S, problem: &'t Problem<'t, N>, undo: OptionsBackward<'t, N>) {
        let OptionsBackward { at, visible, d_scores, derivatives, by_scale, biases } = undo;
        problem.score.add_grads(s, at, d_scores, biases);
        derivatives.backward(s, (at, visible), d_scores, by_scale);
    }
}
