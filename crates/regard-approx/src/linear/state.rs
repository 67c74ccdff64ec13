//! Linear attention one position after another.

use super::map::Map;
use super::sums::Sums;
use super::{FeatureMap, LinearAttention};
use regard::{Element, Error, Machine, Tensor, View};

/// All that causal linear attention keeps of the positions before: sums over their keys, of a size that does not grow.
///
/// A clone of it is a fork of all its sequences.
#[derive(Clone, Debug)]
pub struct LinearState<E: Element> {
    map: Map<E::Num>,
    /// Batch, key heads, features of a key, features of a value.
    sizes: [usize; 4],
    /// `[batch, heads]`
    sums: Vec<Sums<E::Num>>,
}

impl<E: Element> LinearState<E> {
    /// Of `[batch, heads.kv, dim, v_dim]`, before the first position.
    pub fn new(map: FeatureMap, sizes: [usize; 4]) -> Result<Self, Error> {
        let [batch, heads, dim, v_dim] = sizes;
        if dim == 0 {
            return Err(Error::NoFeatures { tensor: "k" });
        }
        let map = Map::new(map, dim)?;
        let size = [map.features(), v_dim.saturating_add(1)];
        let count = [heads, size[0], size[1]].iter().try_fold(batch, |n, x| n.checked_mul(*x));
        let count = count.ok_or(Error::ShapeOverflow { shape: sizes })?;
        let refused = |_| Error::OutOfMemory { bytes: count.saturating_mul(size_of::<E::Num>()) };
        Vec::<E::Num>::new().try_reserve_exact(count).map_err(refused)?;
        let sums = (0..batch * heads).map(|_| Sums::new(size)).collect();
        Ok(Self { map, sizes, sums })
    }

    /// The outputs of new positions, `[batch, heads.q, q_len, v_dim]` in the layout of q, which is that of
    /// [`LinearAttention::forward`]'s last rows to rounding.
    ///
    /// Keys and values of the new positions come with them: `k [batch, heads.kv, k_len, dim]` and `v`. There may be fewer queries,
    /// for the last of them; a prompt whose outputs nobody needs has none. Items may be packed, each with its own number of
    /// new positions. The state is as before if the call is refused.
    pub fn step(
        &mut self,
        machine: Machine,
        q: View<'_, E>,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<Tensor<E>, Error> {
        let attention = LinearAttention::new(self.map.map).causal();
        attention.check((q, k, v))?;
        let found = [k.shape().batch, k.shape().heads, k.shape().dim, v.shape().dim];
        let axes = [("batch", "k"), ("heads", "k"), ("features", "k"), ("features", "v")];
        for ((axis, tensor), (own, found)) in
            axes.into_iter().zip(self.sizes.into_iter().zip(found))
        {
            Error::unless_same(axis, ("the state", own), (tensor, found))?;
        }
        let problem = attention.problem((q, k, v));
        for scope in (0..found[0]).map(|item| problem.scope(item, 0)) {
            let (found, limit) = (scope.q_len, scope.k_len + 1);
            if found >= limit {
                return Err(Error::OutOfRange { option: "queries of new positions", found, limit });
            }
        }
        let call = attention.call(&self.map, machine, (q, k, v));
        Ok(call.forward(Some(&mut self.sums))?.out)
    }

    /// Takes a prompt whose outputs nobody needs: `k [batch, heads.kv, k_len, dim]` and `v [batch, heads.kv, k_len, v_dim]`.
    pub fn absorb(
        &mut self,
        machine: Machine,
        k: View<'_, E>,
        v: View<'_, E>,
    ) -> Result<(), Error> {
        let [batch, heads, dim, _] = self.sizes;
        let nobody = View::bhsd(&[], [batch, heads, 0, dim])?;
        self.step(machine, nobody, k, v).map(|_| ())
    }
}
