"""Attention on NumPy arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, overload

import numpy as np

from . import _arrays, _regard
from ._call import Call, Options, describe, described, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Grads(NamedTuple):
    """Gradients of a loss by everything that an attention depends on."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    learned: dict[str, np.ndarray]
    """By each option that was an array: `bias`, `alibi`, `relative`, `sinks`, `centres`, `w`, `w_q`, `w_k`, `w_v`."""
    scale: float
    temperature: float


class Aux:
    """What a call has found beside its output, and the way back."""

    def __init__(self, call: Call, tensors: tuple[np.ndarray, ...], kept: Any):
        self._call, self._tensors, self._kept = call, tensors, kept

    @property
    def lse(self) -> np.ndarray:
        """`ln(sum of e^score)` of each row, `[batch, heads, q_len]`; `-inf` for one that sees nothing. `[total, heads]` where packed."""
        return _arrays.numpy_of(self._kept.lse)

    @property
    def entropy(self) -> Optional[np.ndarray]:
        """The entropy of each row's weights, if it was asked for."""
        return None if self._kept.entropy is None else _arrays.numpy_of(self._kept.entropy)

    @property
    def max_score(self) -> Optional[np.ndarray]:
        """The largest score of each row, if the entropy was asked for."""
        return None if self._kept.max_score is None else _arrays.numpy_of(self._kept.max_score)

    def backward(
        self,
        d_out: np.ndarray,
        *,
        d_lse: Optional[np.ndarray] = None,
        d_entropy: Optional[np.ndarray] = None,
        advantage: Optional[np.ndarray] = None,
        straight_through: bool = False,
    ) -> Grads:
        """The gradients of a loss whose gradient by the output is `d_out`."""
        number = _arrays.number_of(self._tensors[0])
        given = {"d_lse": d_lse, "d_entropy": d_entropy, "advantage": advantage}
        by_row = [None if x is None else _arrays.dense(_arrays.cast(x, number, name)) for name, x in given.items()]
        d_out = _arrays.rows(d_out)
        places = [None if x is None else _arrays.memory(x) for x in by_row]
        loss = (_arrays.memory(d_out), *places, "bias" in self._call.names, straight_through)
        found, scale, temperature = self._kept.backward(self._call.native(*self._tensors), loss)
        q, k, v = (_arrays.numpy_of(x) for x in found[:3])
        learned = {name: _arrays.numpy_of(x) for name, x in zip(self._call.names, found[3:]) if x is not None}
        return Grads(q, k, v, learned, scale, temperature)


@overload
def attention(q: Any, k: Any, v: Any, *, return_aux: Literal[False] = False, **options: Unpack[Options]) -> np.ndarray: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_aux: Literal[True], **options: Unpack[Options]) -> tuple[np.ndarray, Aux]: ...


@overload
def attention(q: Any, k: Any, v: Any, *, return_aux: bool, **options: Unpack[Options]) -> Any: ...


@spelled_out
def attention(q: Any, k: Any, v: Any, *, return_aux: bool = False, **options: Unpack[Options]) -> Any:
    """Attention of `q [batch, heads, q_len, dim]` over `k [batch, kv_heads, k_len, dim]` and `v [batch, kv_heads, k_len, v_dim]`:
    `[batch, heads, q_len, v_dim]`, in the memory order of q. f32, f64, f16, and bf16 of `ml_dtypes`.

    Options:
      mask         who may see whom: `regard.masks`, its text (`"causal & window 512"`), or booleans, True = may see
      align        where row 0 stands among the keys: `"end"` (the last query at the last key), `"start"`, or a number
      scale        multiplies scores; `1 / sqrt(dim)` unless given
      temperature  divides them
      softcap      bounds them, `cap tanh(score / cap)`
      bias         `[batch|1, heads|1, q_len|1, k_len|1]`, added after the softcap; -inf hides
      alibi        slopes `[heads]`
      relative     a bias by distance: `("t5", table, max_distance, bidirectional)`, `("clipped", table, reach)`; table `[buckets, heads]`
      sinks        `[heads]`: a score without a key in each row
      local        `(centres [batch, heads, q_len], reach)`: each row looks around a place of its own
      similarity   `"dot"`, `"distance"`, `("general", w)`, `("additive", w_q, w_k, v)`
      normalizer   `"softmax"`, `"top 8"`, `"hard"`, `"sampled 7"`, `"sparsemax"`
      dropout      the share of weights that is dropped, with `seed=(seed, offset)`
      entropy      whether `aux.entropy` and `aux.max_score` are asked for
      precision    `"strict"`, `"f32"`, `"high"`: how exact products are
      q_offsets, k_offsets   packed sequences: tensors are `[total, heads, dim]`, item b is `offsets[b]:offsets[b + 1]`
      threads      at most so many
      return_aux   also return an `Aux`: lse, entropies, and `backward`
    """
    call = described(q := _arrays.rows(q), options)
    tensors = (q, _arrays.rows(k), _arrays.rows(v))
    kept = _regard.forward(call.native(*tensors))
    out = _arrays.numpy_of(kept.out)
    if not return_aux:
        return out
    out.flags.writeable = False  # the way back reads it where it lies
    return out, Aux(call, tensors, kept)


def plan(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> str:
    """How a call would be run, in one line: instructions, type, tiles, threads."""
    call = describe(q := _arrays.rows(q), **options)
    return _regard.plan(call.native(q, k := _arrays.rows(k), v := _arrays.rows(v)))


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention`, its signature and its meaning, for NumPy arrays and for PyTorch's tensors:
    a causal mask starts at the top left, booleans say who may see, other masks are added to the scores. A row that sees nothing is 0.
    """
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key)]
    if not enable_gqa and heads[0] != heads[1]:
        raise ValueError(f"heads: q has {heads[0]}, k has {heads[1]}; enable_gqa=True lets several share one")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask beside is_causal: give one of them")
    options: Options = {"align": "start", "dropout": dropout_p, "scale": scale}
    if is_causal:
        options["mask"] = "causal"
    elif attn_mask is not None:
        options.update(_added_or_seen(attn_mask, query, key))
    q, k, v = (_four(x) for x in (query, key, value))
    if _arrays.is_torch(query):
        from . import torch

        out: Any = torch.attention(q, k, v, **options)
    else:
        if dropout_p:
            options["seed"] = tuple(int(x) for x in np.random.randint(0, 2**62, 2))
        out = attention(q, k, v, **options)
    return out if query.ndim == 4 else out.reshape(tuple(query.shape[:-1]) + (out.shape[-1],))


def _added_or_seen(mask: Any, query: Any, key: Any) -> Options:
    """A mask of PyTorch's as an option: booleans, or numbers that are added; with 4 axes, repeated over those before the last three."""
    axes = (1,) * (query.ndim - mask.ndim) + tuple(mask.shape)
    mask = mask.reshape(axes)
    seen = _arrays.dtype_of(mask) == "bool"
    if not seen:
        mask = mask.to(query.dtype) if _arrays.is_torch(mask) else mask.astype(query.dtype, copy=False)
    sizes = (*query.shape[:-3], *axes[-3:]) if query.ndim > 4 else axes
    if seen:
        sizes = (*sizes[:-1], key.shape[-2])
    if sizes != axes:
        mask = mask.expand(sizes) if _arrays.is_torch(mask) else np.broadcast_to(mask, sizes)
    return {"mask": _four(mask)} if seen else {"bias": _four(mask)}


def _four(x: Any) -> Any:
    """With 4 axes: those before the last three are one."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x.reshape((-1,) + tuple(x.shape[-3:]))
