"""Attention among rows and keys that random directions sort near each other."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _arrays, _regard
from ._call import Call, describe
from ._linear import LinearGrads, followed


class Share(NamedTuple):
    """A share of each of several rows."""

    mean: float
    worst: float


class Recall(NamedTuple):
    """What hashing kept of full attention, of the rows that were looked at."""

    mass: Share
    """Of all weights of a row in full attention, the sum of those it kept."""
    top: Share
    """Of the largest weights of a row in full attention, the sum of those it kept, over the sum of them."""
    rows: int
    """The rows that were looked at, of all heads and items."""


class LshAux:
    """What a call has found beside its output, the way back, and what was lost."""

    def __init__(self, attention: LshAttention, call: Call, tensors: tuple[Any, ...], kept: Any):
        self._attention, self._call, self._tensors, self._kept = attention, call, tensors, kept

    @property
    def lse(self) -> Any:
        """`ln(sum of e^score)` of each row over the keys it met, `[batch, heads, q_len]`."""
        return _arrays.like(self._tensors[0], self._kept.lse)

    def backward(self, d_out: Any, *, d_lse: Any = None) -> LinearGrads:
        """The gradients of a loss whose gradient by the output is `d_out`, with the keys that rows met held constant."""
        number = _arrays.number_of(self._tensors[0])
        d_out = _arrays.rows(d_out)
        d_lse = None if d_lse is None else _arrays.dense(_arrays.cast(d_lse, number, "d_lse"))
        places = (_arrays.memory(d_out), None if d_lse is None else _arrays.memory(d_lse))
        found = self._kept.backward(self._call.native(*self._tensors), self._attention._how, *places)
        return LinearGrads(*(_arrays.like(d_out, x) for x in found))

    def recall(self, top: int = 8, rows: int = 64) -> Recall:
        """Compares up to `rows` rows of each head, evenly spaced, with full attention: how much of its mass was kept, and how much of that
        of its `top` largest weights."""
        mass, largest, seen = self._kept.recall(self._call.native(*self._tensors), top, rows)
        return Recall(Share(*mass), Share(*largest), seen)

    def is_visible(self, batch: int, head: int, row: int, key: int) -> bool:
        """Whether a row has met a key in any round."""
        return self._kept.is_visible(batch, head, row, key)


class LshAttention:
    """Softmax attention of each row over the keys that hashing puts near it (Reformer, Kitaev et al. 2020): another function than full
    attention, linear in the length.

        attention = regard.LshAttention(rounds=8, bucket_size=64, causal=True)
        out, aux = attention(q, k, v, return_aux=True)
        aux.recall(top=8).mass.worst

    In each round rows and keys are hashed by random directions and sorted; a row meets the keys of its own block of `bucket_size` and
    of its neighbours. However often a pair meets, it counts once. The same seed gives the same bits.
    """

    def __init__(
        self, rounds: int = 8, bucket_size: int = 64, causal: bool = False, seed: int = 0, *, scale: Optional[float] = None
    ):
        """`scale` multiplies scores; `1 / sqrt(dim)` unless given."""
        self.rounds, self.bucket_size, self.causal, self.seed, self.scale = rounds, bucket_size, causal, seed, scale

    @property
    def _how(self) -> tuple[int, int, bool, int, Optional[float]]:
        return self.rounds, self.bucket_size, self.causal, self.seed, self.scale

    def __repr__(self) -> str:
        return f"LshAttention({self.rounds}, {self.bucket_size}, causal={self.causal}, seed={self.seed}, scale={self.scale})"

    def __call__(self, q: Any, k: Any, v: Any, *, threads: Optional[int] = None, return_aux: bool = False) -> Any:
        """`q [batch, heads, q_len, dim]` over `k [batch, kv_heads, k_len, dim]` and `v [batch, kv_heads, k_len, v_dim]`, NumPy arrays or
        PyTorch tensors, which autograd follows from the output alone; the last query stands at the last key."""

        def attend(*tensors: Any) -> tuple[Any, LshAux]:
            call = describe(tensors[0], threads=threads).beside(q)
            kept = _regard.lsh(call.native(*tensors), self._how)
            return _arrays.like(tensors[0], kept.out), LshAux(self, call, tensors, kept)

        out, aux = followed(attend, q, k, v)
        return (out, aux) if return_aux else out
