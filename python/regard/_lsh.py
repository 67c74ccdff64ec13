"""LSH attention (Reformer, Kitaev et al. 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _arrays, _regard
from ._call import Call, describe
from ._linear import LinearGrads, followed


class RowFraction(NamedTuple):
    """Mean and minimum of a fraction over queries."""

    mean: float
    worst: float


class Recall(NamedTuple):
    """Recall of LSH attention with respect to full attention, over sampled queries."""

    mass: RowFraction
    """Attention mass of full attention on the keys that the query is compared with."""
    top: RowFraction
    """The same for the top-k weights of full attention, relative to their sum."""
    rows: int
    """Number of sampled queries, over all heads and batch items."""


class LshAux:
    """Results of a call besides the output: log-sum-exp, backward pass, and recall."""

    def __init__(self, attention: LshAttention, call: Call, tensors: tuple[Any, ...], kept: Any):
        self._attention, self._call, self._tensors, self._kept = attention, call, tensors, kept

    @property
    def lse(self) -> Any:
        """Log-sum-exp of each query over the keys it is compared with, `[batch, heads, q_len]`."""
        return _arrays.like(self._tensors[0], self._kept.lse)

    def backward(self, d_out: Any, *, d_lse: Any = None) -> LinearGrads:
        """Gradients with respect to q, k and v, given the gradient `d_out` of the output. The selection of keys is constant."""
        number = _arrays.number_of(self._tensors[0])
        d_out = _arrays.rows(d_out)
        d_lse = None if d_lse is None else _arrays.dense(_arrays.cast(d_lse, number, "d_lse"))
        places = (_arrays.memory(d_out), None if d_lse is None else _arrays.memory(d_lse))
        found = self._kept.backward(self._call.native(*self._tensors), self._attention._how, *places)
        return LinearGrads(*(_arrays.like(d_out, x) for x in found))

    def recall(self, top: int = 8, rows: int = 64) -> Recall:
        """Compare up to `rows` evenly spaced queries of each head with full attention: recall of the attention mass, and of the
        `top` largest weights."""
        mass, largest, seen = self._kept.recall(self._call.native(*self._tensors), top, rows)
        return Recall(RowFraction(*mass), RowFraction(*largest), seen)

    def is_visible(self, batch: int, head: int, row: int, key: int) -> bool:
        """Whether a query is compared with a key in any round."""
        return self._kept.is_visible(batch, head, row, key)


class LshAttention:
    """LSH attention (Reformer, Kitaev et al. 2020): softmax of each query over the keys in nearby hash buckets. An approximation of full
    attention with linear cost.

        attention = regard.LshAttention(rounds=8, bucket_size=64, causal=True)
        out, aux = attention(q, k, v, return_aux=True)
        aux.recall(top=8).mass.worst

    In each of `rounds` rounds, queries and keys are hashed by random projections and sorted by hash. A query is compared with the keys of
    its own block of `bucket_size` and of the adjacent blocks. A pair found in several rounds counts once. Deterministic for a given seed.
    """

    def __init__(
        self, rounds: int = 8, bucket_size: int = 64, causal: bool = False, seed: int = 0, *, scale: Optional[float] = None
    ):
        """`scale`: factor of the scores; default `1 / sqrt(dim)`."""
        self.rounds, self.bucket_size, self.causal, self.seed, self.scale = rounds, bucket_size, causal, seed, scale

    @property
    def _how(self) -> tuple[int, int, bool, int, Optional[float]]:
        return self.rounds, self.bucket_size, self.causal, self.seed, self.scale

    def __repr__(self) -> str:
        return f"LshAttention({self.rounds}, {self.bucket_size}, causal={self.causal}, seed={self.seed}, scale={self.scale})"

    def __call__(self, q: Any, k: Any, v: Any, *, threads: Optional[int] = None, return_aux: bool = False) -> Any:
        """Attention of `q [batch, heads, q_len, dim]` over `k [batch, kv_heads, k_len, dim]` and `v [batch, kv_heads, k_len, v_dim]`: NumPy
        arrays, or PyTorch tensors with autograd through the output only. The last query is aligned with the last key."""

        def attend(*tensors: Any) -> tuple[Any, LshAux]:
            call = describe(tensors[0], threads=threads).beside(q)
            kept = _regard.lsh(call.native(*tensors), self._how)
            return _arrays.like(tensors[0], kept.out), LshAux(self, call, tensors, kept)

        out, aux = followed(attend, q, k, v)
        return (out, aux) if return_aux else out
