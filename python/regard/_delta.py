"""The gated delta rule (Yang et al. 2025): linear attention whose state forgets, and replaces what it predicts for a key."""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple, Optional, Tuple

from . import _arrays, _regard

_Native = Tuple[Any, Any, Any]


class DeltaGrads(NamedTuple):
    """Gradients with respect to the tensors of a call; `g` and `beta` are None without one."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any
    state: Any


class _Call(NamedTuple):
    """A call: its settings and the tensors that have no gradients."""

    scale: Optional[float]
    qk_l2norm: bool
    threads: Optional[int]
    offsets: Any
    added_axes: frozenset[str]
    """Which of `g` and `beta` were given without an axis of features, and got one of size 1."""

    def native(self, tensors: tuple[Any, ...]) -> _Native:
        """Arguments of the native functions; all arrays must stay alive until the native call returns."""
        *qkv, g, beta, state = [None if x is None else _arrays.memory(x) for x in tensors]
        return qkv, [g, beta, state], None if self.offsets is None else _arrays.memory(self.offsets)

    @property
    def how(self) -> tuple[Optional[float], bool, Optional[int]]:
        return self.scale, self.qk_l2norm, self.threads

    def forward(self, tensors: tuple[Any, ...]) -> tuple[Any, Any]:
        out, state = _regard.delta_rule(self.native(tensors), self.how)
        return _arrays.like(tensors[0], out), _arrays.like(tensors[0], state)

    def backward(self, tensors: tuple[Any, ...], d_out: Any, d_state: Any) -> DeltaGrads:
        d_out = _arrays.rows(d_out)
        if d_state is not None:
            d_state = _arrays.dense(_arrays.cast(d_state, _arrays.number_of(tensors[0]), "d_state"))
        places = _arrays.memory(d_out), None if d_state is None else _arrays.memory(d_state)
        found = _regard.delta_rule_backward(self.native(tensors), self.how, *places)
        return DeltaGrads(*(None if x is None else _arrays.like(d_out, x) for x in found))


@functools.lru_cache(maxsize=None)
def _step() -> Any:
    """`torch.autograd.Function` of a call. Created on first use, because PyTorch is optional."""
    import torch

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: _Call, *tensors: Any) -> Any:
            ctx.call = call
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(False)
            return call.forward(tuple(x if x is None else x.detach() for x in tensors))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, d_out: Any, d_state: Any) -> Any:
            tensors = ctx.saved_tensors
            if d_out is None:
                heads = max((tensors[0], tensors[2]), key=lambda x: x.shape[-2 if x.ndim == 3 else 1])
                d_out = tensors[2].new_zeros((*heads.shape[:-1], tensors[2].shape[-1]))
            grads = ctx.call.backward(tensors, d_out, d_state)
            return None, *(grad if x is not None else None for x, grad in zip(tensors, grads))

    return Step


class DeltaAux:
    """Final states and backward pass of a call."""

    def __init__(self, call: _Call, tensors: tuple[Any, ...], state: Any):
        self._call, self._tensors, self._state = call, tensors, state

    @property
    def state(self) -> Any:
        """States after the last position, `[batch, heads, dim, v_dim]` in f32 (f64 for f64 tensors). With PyTorch, autograd tracks them."""
        return self._state

    def backward(self, d_out: Any, *, d_state: Any = None) -> DeltaGrads:
        """Gradients with respect to all tensors, given those of the output and, optionally, of the final states."""
        tensors = tuple(x.detach() if x is not None and _arrays.is_torch(x) else x for x in self._tensors)
        grads = self._call.backward(tensors, d_out, d_state)
        return grads._replace(**{name: getattr(grads, name)[..., 0] for name in self._call.added_axes})


class DeltaRule:
    """The gated delta rule of Qwen3-Next and Kimi Linear (Yang et al. 2025), the delta rule, and linear attention with decay and without.
    Each head of v has a state `S [dim, v_dim]`:

        S_t   = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
        out_t = scale S_t^T q_t

        rule = regard.DeltaRule(qk_l2norm=True)
        out = rule(q, k, v, g=g, beta=beta)
        out, aux = rule(q, k, v, g=g, beta=beta, state=state, return_aux=True)
        grads = aux.backward(d_out)

    Without `g` nothing decays. Without `beta` the state predicts nothing: `S_t = exp(g_t) S_{t-1} + k_t v_t^T`. `scale` is `dim ** -0.5`
    unless given. `qk_l2norm` divides queries and keys by `sqrt(x . x + 1e-6)`; the delta rule needs keys of norm 1 or less.
    """

    def __init__(self, *, scale: Optional[float] = None, qk_l2norm: bool = False):
        self.scale = None if scale is None else _arrays.number("scale", scale)
        self.qk_l2norm = bool(qk_l2norm)

    def __repr__(self) -> str:
        return f"DeltaRule(scale={self.scale}, qk_l2norm={self.qk_l2norm})"

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        g: Any = None,
        beta: Any = None,
        state: Any = None,
        offsets: Any = None,
        threads: Optional[int] = None,
        return_aux: bool = False,
    ) -> Any:
        """Outputs `[batch, heads, len, v_dim]`: NumPy arrays, or PyTorch tensors with autograd.

        `q` and `k [batch, heads, len, dim]` and `v [batch, v_heads, len, v_dim]`; `v_heads` is a multiple of the heads of k, and a multiple
        or a divisor of those of q. `g [batch, v_heads, len]` is the logarithm of the decay, or `[batch, v_heads, len, dim]`, one per feature
        of the key. `beta [batch, v_heads, len]`: how much of the error of a prediction is corrected. `state [batch, v_heads, dim, v_dim]`:
        the states before the first position, 0 by default. `offsets`: packed sequences, `q [total, heads, dim]` and so on, one state each."""
        call, tensors = self._call(q, k, v, g, beta, state, offsets=offsets, threads=threads)
        if any(_arrays.waits_for_gradient(x) for x in tensors if x is not None):
            out, final = _step().apply(call, *tensors)
        else:
            out, final = call.forward(tensors)
        return (out, DeltaAux(call, tensors, final)) if return_aux else out

    def _call(self, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *, offsets: Any, threads: Optional[int]) -> tuple[_Call, tuple]:
        tensors = [_arrays.rows(x) for x in (q, k, v)]
        number = _arrays.number_of(tensors[0])
        threads = None if threads is None else _arrays.count("threads", threads)
        if threads is None and _arrays.is_torch(tensors[0]):
            threads = sys.modules["torch"].get_num_threads()
        if offsets is not None:
            offsets = _arrays.dense(_arrays.cast(offsets, "i64", "offsets"))
        added = set()
        for name, x in (("g", g), ("beta", beta)):
            if x is not None:
                x = _arrays.cast(x, number, name)
                if x.ndim == tensors[2].ndim - 1:
                    x = x[..., None]
                    added.add(name)
            tensors.append(x if x is None else _arrays.rows(x))
        tensors.append(None if state is None else _arrays.rows(_arrays.cast(state, number, "state")))
        return _Call(self.scale, self.qk_l2norm, threads, offsets, frozenset(added)), tuple(tensors)

    def state(self, batch: int, heads: int, dim: int, v_dim: int, *, dtype: Any = "f32") -> DeltaState:
        """Empty decoder states. `heads`: number of heads of v."""
        return DeltaState(self, _regard.DeltaState(_arrays.name_of(dtype), (self.scale, self.qk_l2norm, None), (batch, heads, dim, v_dim)))


class DeltaState:
    """Decoder states of the delta rule, of constant size. Created by `DeltaRule.state`."""

    def __init__(self, rule: DeltaRule, state: Any):
        self._rule, self._state = rule, state

    @property
    def dtype(self) -> str:
        """`f32`, `f64`, `f16` or `bf16`: of q, k and v."""
        return self._state.dtype

    def step(self, q: Any, k: Any, v: Any, *, g: Any = None, beta: Any = None, offsets: Any = None, threads: Optional[int] = None) -> Any:
        """Append new positions, a prompt or one token, and return their outputs `[batch, heads, len, v_dim]`."""
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        _arrays.without_gradients("DeltaState.step", **{name: x for name, x in tensors.items() if x is not None})
        call, all_ = self._rule._call(q, k, v, g, beta, None, offsets=offsets, threads=threads)
        return _arrays.like(all_[0], self._state.step(call.native(all_), call.threads))

    def numpy(self) -> Any:
        """Copy of the states, `[batch, heads, dim, v_dim]`."""
        return _arrays.numpy_of(self._state.array())

    def fork(self) -> DeltaState:
        """Copy the states of all sequences."""
        return DeltaState(self._rule, self._state.fork())
