"""The functions of FlashAttention-2 (`flash_attn` 2.8) on the CPU: same names, keywords and semantics.

    import regard.flash_attn
    regard.flash_attn.install()          # now `import flash_attn` imports these functions
    from flash_attn import flash_attn_func

Tensors are `[batch, length, heads, dim]`, or `[total, heads, dim]` for packed sequences. Causal masks are aligned to the bottom right: the
last query is aligned with the last key. `window_size` is (left, right): visible keys before and after the position of a query; -1 is
unlimited. GQA and MQA are supported, v may have another head dimension than k, and dtypes are f16, bf16, f32 and f64.

Differences: the lse of a query without visible keys is -inf; lse and `alibi_slopes` have gradients; `return_attn_probs` with dropout is not
supported. Results are always `deterministic`, and `num_splits` is ignored.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from . import masks
from .torch import attention

__all__ = [
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "index_first_axis", "index_put_first_axis", "install", "pad_input",
    "unpad_input",
]

_PADDING = ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of `q [batch, q_len, heads, dim]` over `k`, `v [batch, k_len, kv_heads, dim]`: output of the shape of q; with
    `return_attn_probs` also the lse `[batch, heads, q_len]` and an empty tensor."""
    options = _options(softmax_scale, causal, window_size, softcap, dropout_p, return_attn_probs)
    out, lse = _dense(q, k, v, alibi_slopes, options)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor, `[batch, k_len, 2, kv_heads, dim]`."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor, `[batch, length, 3, heads, dim]`."""
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """Attention of packed sequences: item b is rows `cu_seqlens_q[b]:cu_seqlens_q[b + 1]` of `q [total, heads, dim]`; k and v use
    `cu_seqlens_k`. With a `block_table [batch, blocks]`, k and v are paged, `[pages, page_size, kv_heads, dim]`.

    Returns `out [total, heads, dim]`; with `return_attn_probs` also the lse `[heads, total]` and an empty tensor. `max_seqlen_q` and
    `max_seqlen_k` are ignored.
    """
    options = _options(softmax_scale, causal, window_size, softcap, dropout_p, return_attn_probs)
    if block_table is not None:
        cu_seqlens_k = cu_seqlens_k.long()
        lengths, room = cu_seqlens_k.diff(), k.shape[1] * block_table.shape[1]
        if int(lengths.max()) > room:
            raise ValueError(f"cu_seqlens_k: {int(lengths.max())} keys of one item, but block_table has pages for {room}")
        k, v, _ = _gathered(k, v, block_table.long(), torch.zeros_like(lengths), lengths)
    out, lse = _packed(q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, options)
    return (out, lse, q.new_empty(0)) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor, `[total, 2, kv_heads, dim]`."""
    k, v = _unpacked("kv", kv, 2, 4)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return flash_attn_varlen_func(
        q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor, `[total, 3, heads, dim]`."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return flash_attn_varlen_func(
        q, k, v, *lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of `q [batch, q_len, heads, dim]` over a KV cache `[items, capacity, kv_heads, dim]`, or, with a `block_table
    [batch, blocks]`, over a paged one `[pages, page_size, kv_heads, dim]`. New `k`, `v [batch, new, kv_heads, dim]` are written into the
    cache at `cache_seqlens` and are visible. Keys of item b before `cache_leftpad[b]` are masked. Without gradients.

    RoPE with `rotary_cos` and `rotary_sin [positions, rotary_dim / 2]` rotates the new k from position `cache_seqlens` on before it is
    written, and q: at the same positions with a causal mask or a window, else all rows at position `cache_seqlens`.
    """
    batch, new = q.shape[0], 0 if k is None else k.shape[1]
    _check_cache(k, v, rotary_cos, rotary_sin, cache_seqlens, cache_leftpad, cache_batch_idx, block_table)
    page = k_cache.shape[1]
    pages = _pages_of(cache_batch_idx, block_table, batch)
    before = _lengths("cache_seqlens", page * pages.shape[1] if cache_seqlens is None else cache_seqlens, batch)
    starts, ends = _lengths("cache_leftpad", 0 if cache_leftpad is None else cache_leftpad, batch), before + new
    if int(ends.max()) > page * pages.shape[1]:
        raise ValueError(
            f"cache_seqlens: {int(ends.max())} keys including {new} new ones exceed the capacity of the cache, {page * pages.shape[1]}"
        )
    options = _options(softmax_scale, causal, window_size, softcap)
    if rotary_cos is not None and rotary_sin is not None and k is not None:
        q = _rotated(q, rotary_cos, rotary_sin, before, 0 if options["mask"] is None else 1, rotary_interleaved)
        k = _rotated(k, rotary_cos, rotary_sin, before, 1, rotary_interleaved)
    if k is not None and v is not None:
        at = before[:, None] + torch.arange(new)
        place = (pages.gather(1, at // page), at % page)
        k_cache[place], v_cache[place] = k, v

    same_lengths = bool((starts == starts[0]).all() and (ends == ends[0]).all())
    if cache_batch_idx is None and block_table is None and (same_lengths or alibi_slopes is None):
        keys = slice(int(starts.min()), int(ends.max()))
        if not same_lengths:
            options["mask"] = _ranges(starts - keys.start, ends - keys.start, q.shape[1], causal, window_size)
        out, lse = _dense(q, k_cache[:batch, keys], v_cache[:batch, keys], alibi_slopes, options)
    else:
        k, v, k_offsets = _gathered(k_cache, v_cache, pages, starts, ends)
        q_offsets = torch.arange(batch + 1) * q.shape[1]
        out, lse = _packed(q.flatten(0, 1), k, v, q_offsets, k_offsets, alibi_slopes, options)
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return (out, lse) if return_softmax_lse else out


def _options(
    scale: Optional[float], causal: bool, window: Tuple[int, int], softcap: float, dropout: float = 0.0, probabilities: bool = False
) -> dict[str, Any]:
    """Options of `regard.torch.attention`."""
    if probabilities and dropout > 0.0:
        raise NotImplementedError(
            "return_attn_probs with dropout_p is not supported; call without dropout, or use regard.AttentionView"
        )
    left, right = _bounds(causal, window)
    mask = None if left is None and right is None else masks.band(left, right)
    return {"mask": mask, "scale": scale, "softcap": softcap if softcap > 0.0 else None, "dropout": dropout}


def _bounds(causal: bool, window: Tuple[int, int]) -> Tuple[Optional[int], Optional[int]]:
    """Visible keys before and after the position of a row; None is unlimited."""
    left, right = [None if keys < 0 else int(keys) for keys in window]
    return left, 0 if causal else right


def _unpacked(name: str, packed: Tensor, count: int, ndim: int) -> Tuple[Tensor, ...]:
    if packed.ndim != ndim or packed.shape[-3] != count:
        raise ValueError(f"{name}: expected {ndim} axes with {count} at axis {ndim - 3}, found {list(packed.shape)}")
    return packed.unbind(-3)


def _slopes(alibi_slopes: Optional[Tensor], batch: int) -> List[Optional[Tensor]]:
    """ALiBi slopes of each batch item."""
    if alibi_slopes is None or alibi_slopes.ndim == 1:
        return [alibi_slopes] * batch
    if alibi_slopes.ndim != 2 or alibi_slopes.shape[0] != batch:
        raise ValueError(f"alibi_slopes: expected [heads] or [{batch}, heads], found {list(alibi_slopes.shape)}")
    return list(alibi_slopes.unbind())


def _dense(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Optional[Tensor], options: dict[str, Any]) -> Tuple[Tensor, Tensor]:
    """out `[batch, q_len, heads, dim]` and lse `[batch, heads, q_len]`. The engine takes slopes per head: slopes per
    item need one call per item."""
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        slopes = _slopes(alibi_slopes, q.shape[0])
        found = [_dense(q[b : b + 1], k[b : b + 1], v[b : b + 1], slopes[b], options) for b in range(q.shape[0])]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])
    q, k, v = [x.transpose(1, 2) for x in (q, k, v)]
    out, aux = attention(q, k, v, alibi=alibi_slopes, return_aux=True, **options)
    return out.transpose(1, 2), aux.lse


def _packed(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, alibi_slopes: Optional[Tensor], options: dict[str, Any]
) -> Tuple[Tensor, Tensor]:
    """out `[total, heads, dim]` and lse `[heads, total]`."""
    if alibi_slopes is not None and alibi_slopes.ndim != 1:
        q_at, k_at = q_offsets.tolist(), k_offsets.tolist()
        found = []
        for b, slopes in enumerate(_slopes(alibi_slopes, len(q_at) - 1)):
            rows, keys = slice(q_at[b], q_at[b + 1]), slice(k_at[b], k_at[b + 1])
            found.append(_dense(q[None, rows], k[None, keys], v[None, keys], slopes, options))
        return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)
    out, aux = attention(q, k, v, alibi=alibi_slopes, q_offsets=q_offsets, k_offsets=k_offsets, return_aux=True, **options)
    return out, aux.lse.t().contiguous()


def _pages_of(cache_batch_idx: Optional[Tensor], block_table: Optional[Tensor], batch: int) -> Tensor:
    """Page indices of each item, `[batch, n]`. A cache that is not paged has one page per item."""
    if block_table is not None:
        return block_table.long()
    return (torch.arange(batch) if cache_batch_idx is None else cache_batch_idx.long())[:, None]


def _gathered(k: Tensor, v: Tensor, pages: Tensor, starts: Tensor, ends: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Keys and values `starts[b]:ends[b]` of all items, packed, and their offsets."""
    page, lengths = k.shape[1], ends - starts
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    item = torch.repeat_interleave(lengths)
    at = torch.arange(len(item)) - (offsets[:-1] - starts)[item]
    place = (pages[item, at // page], at % page)
    return k[place], v[place], offsets


def _ranges(starts: Tensor, ends: Tensor, q_len: int, causal: bool, window: Tuple[int, int]) -> masks.Mask:
    """The mask of `_options` for items with different lengths."""
    left, right = _bounds(causal, window)
    at = ends[:, None] - q_len + torch.arange(q_len)
    first = starts[:, None].expand_as(at) if left is None else torch.maximum(at - left, starts[:, None])
    last = ends[:, None].expand_as(at) if right is None else torch.minimum(at + right + 1, ends[:, None])
    return masks.ranges(torch.stack([first, last], -1).clamp(min=0)[:, None, :, None])


def _check_cache(
    k: Any, v: Any, rotary_cos: Any, rotary_sin: Any, cache_seqlens: Any, cache_leftpad: Any, cache_batch_idx: Any, block_table: Any
) -> None:
    if (k is None) != (v is None):
        raise ValueError("k and v: give both or none")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: required with new k and v")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: give both or none")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: only new keys are rotated; give k and v")
    if block_table is not None and cache_batch_idx is not None:
        raise NotImplementedError("cache_batch_idx with block_table is not supported; leave out cache_batch_idx")
    if block_table is not None and cache_leftpad is not None:
        raise NotImplementedError("cache_leftpad with block_table is not supported; leave out the padding pages")


def _lengths(name: str, lengths: Union[int, Tensor], batch: int) -> Tensor:
    if isinstance(lengths, int):
        return torch.full((batch,), lengths)
    if lengths.shape != (batch,):
        raise ValueError(f"{name}: expected a number or [{batch}], found {list(lengths.shape)}")
    return lengths.long()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, first: Tensor, step: int, interleaved: bool) -> Tensor:
    """`x [batch, length, heads, dim]`, row i of item b rotated by position `first[b] + step * i`; further features are unchanged."""
    at = first[:, None] + step * torch.arange(x.shape[1])
    if at.numel() and int(at.max()) >= cos.shape[0]:
        raise ValueError(f"rotary_cos: expected more than {int(at.max())} positions, found {cos.shape[0]}")
    dim = 2 * cos.shape[1]
    if dim > x.shape[-1]:
        raise ValueError(f"rotary_cos: rotates {dim} features, the head dimension is {x.shape[-1]}")
    cos, sin = cos[at][:, :, None].float(), sin[at][:, :, None].float()
    rotated, rest = x[..., :dim].float(), x[..., dim:]
    a, b = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, -1)
    pair = (a * cos - b * sin, a * sin + b * cos)
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([rotated.to(x.dtype), rest], -1)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Gather rows along axis 0."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Inverse of `index_first_axis`: scatter rows along axis 0, 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> Tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of `hidden_states [batch, length, ..]` that the mask `[batch, length]` keeps. Returns the tokens, their indices in
    the flattened batch, `cu_seqlens`, the maximum length, and the lengths without the tokens of `unused_mask`."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, offsets, int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Inverse of `unpad_input`: `[batch, seqlen, ..]`, padded with 0."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def install(force: bool = False) -> types.ModuleType:
    """Register a package `flash_attn` with these functions in `sys.modules`, and return it. Raises ImportError if a real one is installed,
    unless `force`."""
    taken = sys.modules.get("flash_attn")
    if taken is not None and getattr(taken, "__regard__", False):
        return taken
    if not force and (taken is not None or importlib.util.find_spec("flash_attn") is not None):
        raise ImportError("flash_attn: a package of this name is installed; install(force=True) overrides it")
    for name in [name for name in sys.modules if name.startswith("flash_attn.")]:
        del sys.modules[name]
    functions = {name: globals()[name] for name in __all__ if name.startswith("flash_attn_")}
    padding = {name: globals()[name] for name in _PADDING}
    interface = _module("flash_attn.flash_attn_interface", functions)
    own = {"__version__": "2.8.3+regard", "__path__": [], "__regard__": True}
    return _module("flash_attn", {**functions, **own, "flash_attn_interface": interface, "bert_padding": _module("flash_attn.bert_padding", padding)})


def _module(name: str, members: dict[str, Any]) -> types.ModuleType:
    module = types.ModuleType(name, __doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == "flash_attn")
    vars(module).update(members)
    sys.modules[name] = module
    return module
