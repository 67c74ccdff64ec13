//! Sequences with a common past: read once for all of them, and joined with what each has of its own.

use super::Plan;
use crate::description::mask::Mask;
use crate::description::problem::Problem;
use crate::error::Error;
use crate::kernel::block_loop::Call;
use crate::machine::simd::Element;
use crate::plan::output::Output;
use crate::tensor::cache::{KvCache, Sequence};
use crate::tensor::source::Source;
use crate::tensor::view::{Layout, Shape, Tensor, View};

/// Positions that a shared past must have to be worth a call of its own.
const MIN_SHARED_KEYS: usize = 256;

impl<E: Element> Plan<'_, E> {
    /// [`forward_cached`](Self::forward_cached), but the pages that all sequences share
    /// ([`KvCache::shared_prefix`]) are read once for all of them: the same function, rounded in another order.
    ///
    /// Where nothing is shared, or the problem has more than one query for each sequence or an option that tells sequences
    /// or positions apart, it is `forward_cached` itself.
    #[inline(never)]
    pub fn forward_shared(
        &self,
        q: View<'_, E>,
        cache: &KvCache<E>,
        sequences: &[Sequence],
    ) -> Result<Output<E>, Error> {
        let call = self.check_cached(q, cache, sequences)?;
        let shared = cache.shared_prefix(sequences)?;
        let mut from_the_start = true;
        for sequence in sequences {
            from_the_start &= cache.first(*sequence)? == shared.start;
        }
        let length = shared.len();
        let shape = q.shape();
        let alike = shape.len == 1
            && q.offsets().is_none()
            && self.problem().treats_all_keys_alike()
            && from_the_start;
        if !alike || sequences.len() < 2 || length < MIN_SHARED_KEYS {
            return Self::forward_from(self.core(), call);
        }
        let own = Self::forward_from(&self.core().clone().beyond(length), call)?;
        // One item whose queries are those of all sequences.
        let q = q.items_as_rows();
        let k = Shape { batch: 1, heads: cache.shape().heads, len: length, dim: shape.dim };
        let v = Shape { dim: self.problem().dims().v_dim, ..k };
        let problem = self.problem();
        let problem = Problem::of_shapes(q.shape(), k, v)
            .score(problem.score.clone())
            .precision(problem.precision)
            .mask(Mask::full())
            .quantized(cache.quantization());
        let first = &sequences[..1];
        let source = |values| Source::cache(cache, first, values);
        let plan = Plan::new(problem, self.machine())?;
        let problem = plan.core().problem();
        let call = Call { problem, q: q.erase(), k: source(false), v: source(true) };
        let common = Self::forward_from(plan.core(), call)?;
        Output::merge(self.machine(), &[rows_as_items(common, own.out.shape())?, own])
    }
}

/// `[1, heads, items, dim]` as `[items, heads, 1, dim]`.
fn rows_as_items<E: Element>(from: Output<E>, shape: Shape) -> Result<Output<E>, Error> {
    let Shape { batch: items, heads, dim, .. } = shape;
    let order = (0..items * heads).map(|row| row % heads * items + row / heads);
    let view = from.out.view();
    let mut data = Vec::with_capacity(items * heads * dim);
    for b in 0..items {
        (0..heads).for_each(|head| data.extend_from_slice(view.row(0, head, b)));
    }
    Ok(Output {
        out: Tensor::new(data, shape, Layout::Bhsd)?,
        lse: order.clone().map(|row| from.lse[row]).collect(),
        states: order.map(|row| from.states[row]).collect(),
        entropy: None,
        max_score: None,
        selection: None,
    })
}
