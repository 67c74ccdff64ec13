"""Linear attention (Katharopoulos et al. 2020): linear cost in the sequence length. A different function from softmax attention."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional

from . import _arrays, _regard
from ._call import Call, describe


def followed(attend: Callable[..., tuple[Any, Any]], q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """Call `attend`, which returns output and aux; registers the backward pass with autograd if an input requires a gradient."""
    q, k, v = _arrays.rows(q), _arrays.rows(k), _arrays.rows(v)
    if not any(_arrays.waits_for_gradient(x) for x in (q, k, v)):
        return attend(q, k, v)
    found: list[Any] = []
    out = _step().apply(attend, found, q, k, v)
    return out, found[0]


@functools.lru_cache(maxsize=None)
def _step() -> Any:
    """`torch.autograd.Function` of a call. Created on first use, because PyTorch is optional."""
    import torch

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, attend: Any, found: list[Any], q: Any, k: Any, v: Any) -> Any:
            out, aux = attend(q.detach(), k.detach(), v.detach())
            ctx.save_for_backward(q, k, v)
            ctx.aux = aux
            found.append(aux)
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d_out: Any) -> Any:
            _ = ctx.saved_tensors  # raises if a tensor was modified in place
            return None, None, *ctx.aux.backward(d_out)

    return Step


class LinearGrads(NamedTuple):
    """Gradients with respect to q, k and v."""

    q: Any
    k: Any
    v: Any


class LinearAux:
    """Backward pass of a call."""

    def __init__(self, attention: LinearAttention, call: Call, tensors: tuple[Any, ...], kept: Any):
        self._attention, self._call, self._tensors, self._kept = attention, call, tensors, kept

    def backward(self, d_out: Any) -> LinearGrads:
        """Gradients with respect to q, k and v, given the gradient `d_out` of the output. Random features are constants."""
        d_out = _arrays.rows(d_out)
        found = self._kept.backward(self._call.native(*self._tensors), self._attention._how, _arrays.memory(d_out))
        return LinearGrads(*(_arrays.like(d_out, x) for x in found))


class LinearAttention:
    """Linear attention (Katharopoulos et al. 2020): the weight of a pair is the dot product of the feature
    maps of query and key.

        attention = regard.LinearAttention("elu", causal=True)
        out = attention(q, k, v)
        out, aux = attention(q, k, v, return_aux=True)
        d_q, d_k, d_v = aux.backward(d_out)

    Feature maps: `"elu"` is `elu(x) + 1`; `"relu"`; `"random 256"` is 256 positive random features of a `seed`, which estimate softmax
    attention (Performer, Choromanski et al. 2021). Not a faster softmax attention: the model must be trained with it.
    """

    def __init__(self, map: str = "elu", *, causal: bool = False, seed: int = 0):
        self.map, self.causal, self.seed = map, causal, seed

    @property
    def _how(self) -> tuple[str, int, bool]:
        return self.map, self.seed, self.causal

    def __repr__(self) -> str:
        return f"LinearAttention({self.map!r}, causal={self.causal}, seed={self.seed})"

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        q_offsets: Any = None,
        k_offsets: Any = None,
        threads: Optional[int] = None,
        return_aux: bool = False,
    ) -> Any:
        """Attention of `q [batch, heads, q_len, dim]` over `k [batch, kv_heads, k_len, dim]` and `v [batch, kv_heads, k_len, v_dim]`: NumPy
        arrays, or PyTorch tensors with autograd. If causal, the last query is aligned with the last key. Offsets: packed sequences, as in
        `regard.attention`."""

        def attend(*tensors: Any) -> tuple[Any, LinearAux]:
            call = describe(tensors[0], q_offsets=q_offsets, k_offsets=k_offsets, threads=threads).beside(q)
            kept = _regard.linear(call.native(*tensors), self._how)
            return _arrays.like(tensors[0], kept.out), LinearAux(self, call, tensors, kept)

        out, aux = followed(attend, q, k, v)
        return (out, aux) if return_aux else out

    def state(self, batch: int, heads: int, dim: int, v_dim: int, *, dtype: Any = "f32") -> LinearState:
        """Empty decoder state. `heads`: number of key heads."""
        if not self.causal:
            raise ValueError("state: only causal attention has a decoder state; use LinearAttention(.., causal=True)")
        return LinearState(_regard.State(_arrays.name_of(dtype), self.map, self.seed, (batch, heads, dim, v_dim)))


class LinearState:
    """Decoder state of causal linear attention, of constant size. Created by `LinearAttention.state`."""

    def __init__(self, state: Any):
        self._state = state

    @property
    def dtype(self) -> str:
        """`f32`, `f64`, `f16` or `bf16`."""
        return self._state.dtype

    def step(self, q: Any, k: Any, v: Any, *, q_offsets: Any = None, k_offsets: Any = None, threads: Optional[int] = None) -> Any:
        """Append new positions, a prompt or one token, and return their outputs `[batch, heads, q_len, v_dim]`. With fewer queries than
        keys, the queries are those of the last positions."""
        _arrays.without_gradients("LinearState.step", q=q, k=k, v=v)
        tensors = (_arrays.rows(q), _arrays.rows(k), _arrays.rows(v))
        call = describe(tensors[0], q_offsets=q_offsets, k_offsets=k_offsets, threads=threads).beside(q)
        return _arrays.like(tensors[0], self._state.step(call.native(*tensors)))

    def absorb(self, k: Any, v: Any, *, threads: Optional[int] = None) -> None:
        """Append positions without computing outputs."""
        self.step(k[:, :, :0], k, v, threads=threads)

    def fork(self) -> LinearState:
        """Copy the state of all sequences."""
        return LinearState(self._state.fork())
