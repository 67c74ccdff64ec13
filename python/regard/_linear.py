"""Linear attention: a function of its own, whose cost grows with the length and not with its square."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional

from . import _arrays, _regard
from ._call import Call, describe


def followed(attend: Callable[..., tuple[Any, Any]], q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """What `attend` returns, an output and its way back, where autograd knows of it too."""
    q, k, v = _arrays.rows(q), _arrays.rows(k), _arrays.rows(v)
    if not any(_arrays.waits_for_gradient(x) for x in (q, k, v)):
        return attend(q, k, v)
    found: list[Any] = []
    out = _step().apply(attend, found, q, k, v)
    return out, found[0]


@functools.lru_cache(maxsize=None)
def _step() -> Any:
    """The step of autograd; made when it is needed, for PyTorch may not be there."""
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
            _ = ctx.saved_tensors  # raises if one of them has been changed since
            return None, None, *ctx.aux.backward(d_out)

    return Step


class LinearGrads(NamedTuple):
    """Gradients of a loss by q, k and v."""

    q: Any
    k: Any
    v: Any


class LinearAux:
    """The way back of a call."""

    def __init__(self, attention: LinearAttention, call: Call, tensors: tuple[Any, ...], kept: Any):
        self._attention, self._call, self._tensors, self._kept = attention, call, tensors, kept

    def backward(self, d_out: Any) -> LinearGrads:
        """The gradients of a loss whose gradient by the output is `d_out`. Random directions of a map are constants."""
        d_out = _arrays.rows(d_out)
        found = self._kept.backward(self._call.native(*self._tensors), self._attention._how, _arrays.memory(d_out))
        return LinearGrads(*(_arrays.like(d_out, x) for x in found))


class LinearAttention:
    """Linear attention (Katharopoulos et al. 2020): the weight of a pair is a product of features of its query and its key.

        attention = regard.LinearAttention("elu", causal=True)
        out = attention(q, k, v)
        out, aux = attention(q, k, v, return_aux=True)
        d_q, d_k, d_v = aux.backward(d_out)

    Maps, what queries and keys become: `"elu"` is `elu(x) + 1`; `"relu"`; `"random 256"`, so many random directions of a `seed`, whose
    products estimate the weights of softmax attention (Choromanski et al. 2021). It is not softmax attention made faster: a model must
    have been trained with it.
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
        """`q [batch, heads, q_len, dim]` over `k [batch, kv_heads, k_len, dim]` and `v [batch, kv_heads, k_len, v_dim]`, NumPy arrays or
        PyTorch tensors, which autograd follows; causal, the last query stands at the last key. Packed with offsets, as `regard.attention`
        has it."""

        def attend(*tensors: Any) -> tuple[Any, LinearAux]:
            call = describe(tensors[0], q_offsets=q_offsets, k_offsets=k_offsets, threads=threads).beside(q)
            kept = _regard.linear(call.native(*tensors), self._how)
            return _arrays.like(tensors[0], kept.out), LinearAux(self, call, tensors, kept)

        out, aux = followed(attend, q, k, v)
        return (out, aux) if return_aux else out

    def state(self, batch: int, heads: int, dim: int, v_dim: int, *, dtype: Any = "f32") -> LinearState:
        """What decoding keeps of the positions before, of so many items and key heads, before the first position."""
        if not self.causal:
            raise ValueError("state: positions come one after another; make the attention with causal=True")
        return LinearState(_regard.State(_arrays.name_of(dtype), self.map, self.seed, (batch, heads, dim, v_dim)))


class LinearState:
    """All that causal linear attention keeps of the positions before, of a size that does not grow. `LinearAttention.state` makes it."""

    def __init__(self, state: Any):
        self._state = state

    @property
    def dtype(self) -> str:
        """`f32`, `f64`, `f16` or `bf16`."""
        return self._state.dtype

    def step(self, q: Any, k: Any, v: Any, *, q_offsets: Any = None, k_offsets: Any = None, threads: Optional[int] = None) -> Any:
        """The outputs of new positions, `[batch, heads, q_len, v_dim]`, whose keys and values come with them: one position, or a prompt.
        There may be fewer queries than keys, for the last of them."""
        _arrays.without_gradients("LinearState.step", q=q, k=k, v=v)
        tensors = (_arrays.rows(q), _arrays.rows(k), _arrays.rows(v))
        call = describe(tensors[0], q_offsets=q_offsets, k_offsets=k_offsets, threads=threads).beside(q)
        return _arrays.like(tensors[0], self._state.step(call.native(*tensors)))

    def absorb(self, k: Any, v: Any, *, threads: Optional[int] = None) -> None:
        """Takes a prompt whose outputs nobody needs."""
        self.step(k[:, :, :0], k, v, threads=threads)

    def fork(self) -> LinearState:
        """A second state that knows the same: a fork of all its sequences."""
        return LinearState(self._state.fork())
