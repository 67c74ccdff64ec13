"""Attention on NumPy arrays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Optional, overload

import numpy as np

from . import _arrays, _regard
from ._call import Call, Options, describe, described, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Grads(NamedTuple):
    """Gradients with respect to q, k, v and the options."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    learned: dict[str, np.ndarray]
    """Gradient of each array option: `bias`, `alibi`, `relative`, `sinks`, `centers`, `w`, `w_q`, `w_k`, `w_v`."""
    scale: float
    temperature: float


class Aux:
    """Results of a call besides the output: log-sum-exp, entropies, and the backward pass."""

    def __init__(self, call: Call, tensors: tuple[np.ndarray, ...], kept: Any):
        self._call, self._tensors, self._kept = call, tensors, kept

    @property
    def lse(self) -> np.ndarray:
        """Log-sum-exp of the scores of each query, `[batch, heads, q_len]`; `-inf` if no key is visible. `[total, heads]` if packed."""
        return _arrays.numpy_of(self._kept.lse)

    @property
    def entropy(self) -> Optional[np.ndarray]:
        """Entropy of the weights of each query, with `entropy=True`; else None."""
        return None if self._kept.entropy is None else _arrays.numpy_of(self._kept.entropy)

    @property
    def max_score(self) -> Optional[np.ndarray]:
        """Largest score of each query, with `entropy=True`; else None."""
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
        """Gradients of a loss, given its gradient `d_out` with respect to the output.

        `d_lse` and `d_entropy`: gradients with respect to lse and entropy. `advantage`: REINFORCE advantage of each query, for
        `normalizer="sampled"`. `straight_through`: straight-through estimator for hard and sampled attention.
        """
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
      mask         attention mask: `regard.masks`, its text (`"causal & window 512"`), or a boolean array, True = visible
      align        key position of row 0: `"end"` (the last query is aligned with the last key), `"start"`, or a number
      scale        factor of the scores; default `1 / sqrt(dim)`
      temperature  divisor of the scores
      softcap      soft limit of the scores, `softcap * tanh(score / softcap)`
      interventions  list of changes of some edges, see `docs/options.md`: `{"heads": [3], "rows": (40, 60), "keys": (0, 40), "drop": True}`
      bias         `[batch|1, heads|1, q_len|1, k_len|1]`, added after the softcap; -inf masks
      alibi        ALiBi slopes `[heads]`
      relative     relative position bias: `("t5", table, max_distance, bidirectional)`, `("clipped", table, reach)`; table
                   `[buckets, heads]`
      sinks        `[heads]`: attention sink, one more term of the softmax without a value
      local        `(centers [batch, heads, q_len], reach)`: Gaussian local attention around a center per query (Luong et al. 2015)
      similarity   `"dot"`, `"distance"`, `("general", w)`, `("additive", w_q, w_k, v)`
      normalizer   `"softmax"`, `"top-8"`, `"hard"`, `"sampled-7"`, `"sparsemax"`
      dropout      dropout probability, with `seed=(seed, offset)`
      entropy      also compute `aux.entropy` and `aux.max_score`
      precision    precision of matrix products: `"strict"`, `"full"`, `"high"`
      q_offsets, k_offsets   packed sequences: tensors are `[total, heads, dim]`, item b is `offsets[b]:offsets[b + 1]`
      threads      maximum number of threads
      return_aux   also return an `Aux`: lse, entropies, and `backward`
    """
    call = described(q := _arrays.rows(q), options)
    tensors = (q, _arrays.rows(k), _arrays.rows(v))
    if not return_aux and call.is_plain and type(q) is np.ndarray and q.ndim == tensors[1].ndim == tensors[2].ndim == 4:
        return call.attend(*tensors)
    kept = _regard.forward(call.native(*tensors))
    out = _arrays.numpy_of(kept.out)
    if not return_aux:
        return out
    out.flags.writeable = False  # the backward pass reads it
    return out, Aux(call, tensors, kept)


def plan(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> str:
    """Execution plan of a call in one line: instruction set, dtype, tiles, threads."""
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
    """`torch.nn.functional.scaled_dot_product_attention` with the same signature and semantics, for NumPy arrays and PyTorch tensors.

    The causal mask is aligned to the top left. A boolean mask is True = visible; any other mask is added to the scores. The output of a
    query without visible keys is 0. Axes before the heads broadcast.
    """
    whole = query.ndim == key.ndim == value.ndim == 4 and query.shape[0] == key.shape[0] == value.shape[0]
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (query, key)]
    if not enable_gqa and heads[0] != heads[1]:
        raise ValueError(f"heads: q has {heads[0]}, k has {heads[1]}; use enable_gqa=True for grouped-query attention")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal: give only one of them")
    if not whole:
        query, key, value = _of_one_batch(query, key, value)
    options: Options = {"align": "start", "dropout": dropout_p, "scale": scale}
    if is_causal:
        options["mask"] = "causal"
    elif attn_mask is not None:
        options.update(_mask_or_bias(attn_mask, query, key))
    q, k, v = (query, key, value) if whole else [_to_4d(x) for x in (query, key, value)]
    if _arrays.is_torch(query):
        from . import torch

        out: Any = torch.attention(q, k, v, **options)
    else:
        if dropout_p:
            options["seed"] = tuple(int(x) for x in np.random.randint(0, 2**62, 2))
        out = attention(q, k, v, **options)
    return out if query.ndim == 4 else out.reshape(tuple(query.shape[:-1]) + (out.shape[-1],))


def _of_one_batch(*tensors: Any) -> tuple[Any, ...]:
    """Broadcast the axes before the last three."""
    batches = [tuple(x.shape[:-3]) for x in tensors]
    if batches[0] == batches[1] == batches[2]:
        return tensors
    library = sys.modules["torch"] if _arrays.is_torch(tensors[0]) else np
    try:
        batch = tuple(library.broadcast_shapes(*batches))
    except (ValueError, RuntimeError):
        q, k, v = map(list, batches)
        raise ValueError(f"batch: q has {q}, k has {k}, v has {v}; they must be equal, or 1 where they differ") from None
    return tuple(_expanded(x, (*batch, *x.shape[-3:])) for x in tensors)


def _expanded(x: Any, sizes: tuple[int, ...]) -> Any:
    if tuple(x.shape) == sizes:
        return x
    return x.expand(sizes) if _arrays.is_torch(x) else np.broadcast_to(x, sizes)


def _mask_or_bias(mask: Any, query: Any, key: Any) -> Options:
    """Convert an `attn_mask` to the option `mask` (boolean) or `bias` (added), with 4 axes."""
    axes = (1,) * (query.ndim - mask.ndim) + tuple(mask.shape)
    mask = mask.reshape(axes)
    is_bool = _arrays.dtype_of(mask) == "bool"
    if not is_bool:
        mask = mask.to(query.dtype) if _arrays.is_torch(mask) else mask.astype(query.dtype, copy=False)
    sizes = (*query.shape[:-3], *axes[-3:]) if query.ndim > 4 else axes
    if is_bool:
        sizes = (*sizes[:-1], key.shape[-2])
    mask = _to_4d(_expanded(mask, sizes))
    return {"mask": mask} if is_bool else {"bias": mask}


def _to_4d(x: Any) -> Any:
    """Reshape to 4 axes; all axes before the last three become one."""
    if x.ndim == 4:
        return x
    if x.ndim < 4:
        return x.reshape((1,) * (4 - x.ndim) + tuple(x.shape))
    return x.reshape((-1,) + tuple(x.shape[-3:]))
