"""Regard as an attention backend of Hugging Face Transformers.

    import regard.hf
    regard.hf.register()
    model = AutoModel.from_pretrained(..., attn_implementation="regard")      # or model.set_attn_implementation("regard")

`register` registers two functions with Transformers: `mask`, which a model calls once per forward pass to create its attention mask, and
`attention`, which each layer calls. The mask, an `AttentionMask`, is a set of rules and key ranges in O(length) memory, not a `q_len x k_len` matrix.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.utils import output_capturing

import regard
import regard.torch
from regard import _callbacks, masks

__all__ = ["IGNORED_KEYS", "AttentionMask", "attention", "attentions", "delta_rule", "head_means", "intervene", "mask", "register", "report"]

IGNORED_KEYS = {
    "cache_position", "deterministic", "image_sizes", "labels", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx", "token_type_ids",
    "use_cache",
}  # fmt: skip
"""Ignored keywords: models pass them to each layer, and they do not change its attention. Any other keyword that is not None raises
TypeError; add its name here if it does not change the attention."""

STRIP = 1 << 22
"""Query-key pairs per strip when an unknown mask function is evaluated: 4 MB of booleans."""


def register(name: str = "regard", precision: str | None = "full") -> None:
    """Register Regard as `attn_implementation=name` with Transformers. A repeated call only changes the precision.

    `precision` is that of `regard.attention`. "full" uses AMX for f32 tensors where the CPU has it, with the accuracy of f32 arithmetic;
    "strict" gives bit-identical results on every CPU with AVX2.
    """
    for taken in ("flash", "sdpa", "flex_attention", "eager", "paged|", "/"):
        if taken in name:
            raise ValueError(f"name: {name!r} contains {taken!r}, which Transformers reserves for another backend; use another name")
    if precision not in (None, "strict", "full", "high"):
        raise ValueError(f"precision: {precision!r}; use 'strict', 'full' or 'high'")
    AttentionInterface.register(name, functools.partial(attention, precision=precision))
    AttentionMaskInterface.register(name, mask)


@dataclass(frozen=True)
class AttentionMask:
    """Attention mask of one forward pass: `mask`, with row 0 at key position `align`. `how` is its origin, for `report`.

    Takes the place of a tensor of `shape` [batch, 1, q_len, k_len] in the model, which may pass it on but not compute with it.
    """

    mask: masks.Mask
    align: int
    shape: tuple[int, int, int, int]
    how: str = "rules"
    first_key: int = 0
    """Position of the first key in the sequence: later than 0 in a sliding-window cache."""
    ndim = 4

    def contiguous(self) -> AttentionMask:
        """Return self: `generate` calls this method on precomputed masks."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_NO_TENSOR}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"mask[..]: {_NO_TENSOR}")

    @classmethod
    def __torch_function__(cls, function: Callable, *_: Any) -> Any:
        # Tensor operators would swallow a TypeError.
        raise RuntimeError(f"{getattr(function, '__name__', function)}: {_NO_TENSOR}")


_NO_TENSOR = "a mask of regard is a set of rules, not a tensor; models that compute with their masks need attn_implementation='eager'"


@dataclass(frozen=True)
class _CallShape:
    """Shape of a call, and the absolute positions of its first row and first key."""

    batch: int
    q_len: int
    k_len: int
    q_offset: int
    k_offset: int

    @property
    def align(self) -> int:
        return self.q_offset - self.k_offset

    @property
    def rows(self) -> slice:
        return slice(self.q_offset, self.q_offset + self.q_len)

    @property
    def keys(self) -> slice:
        return slice(self.k_offset, self.k_offset + self.k_len)


@dataclass(frozen=True)
class _Band:
    """Keys from `back` before a row to `ahead` after it; None is unbounded."""

    back: int | None = None
    ahead: int | None = None

    def join(self, other: _Band) -> _Band:
        def nearer(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return _Band(nearer(self.back, other.back), nearer(self.ahead, other.ahead))

    def hides(self, at: _CallShape) -> bool:
        """Whether it masks any pair of this call: the last row is farthest from the first key, the first row from the last key."""
        last = at.align + at.q_len - 1
        return (self.back is not None and last > self.back) or (self.ahead is not None and at.align + self.ahead < at.k_len - 1)

    def mask(self) -> masks.Mask:
        return masks.band(self.back, self.ahead)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    *,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
) -> AttentionMask | None:
    """Mask function of the backend, called by Transformers. Returns None if no pair is masked and None cannot be taken for causal.

    `allow_is_causal_skip`, `local_size`, `dtype` and `config` are ignored: `mask_function` is sufficient.
    """
    if isinstance(attention_mask, AttentionMask):
        return attention_mask  # precomputed by generate
    at = _CallShape(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    shape = (batch_size, 1, q_length, kv_length)
    rule = _translate(mask_function, at)
    if rule is None:
        name = _name_of_unknown(mask_function)
        _warn_of(name)
        how = f"mask function {name}, evaluated for every pair"
        found = _evaluate_in_strips(mask_function, at, attention_mask, use_vmap, device)
        return AttentionMask(found, at.align, shape, how, at.k_offset)
    padding = _padding(attention_mask, at)
    if isinstance(rule, _Band):
        rule = rule.mask() if rule.hides(at) else None
    # Rules of `intervene` need the positions of the call.
    if rule is None and padding is None and (q_length == 1 or allow_is_bidirectional_skip) and not _callbacks.interventions:
        return None
    seen = rule if padding is None else padding if rule is None else rule & padding
    return AttentionMask(masks.full() if seen is None else seen, at.align, shape, first_key=at.k_offset)


# Translations of the functions of `transformers.masking_utils`. Parameters are read from the closure of the function.


def _both(at: _CallShape, held: dict) -> _Band | masks.Mask | None:
    band: _Band = _Band()
    found: masks.Mask | None = None
    for function in held["mask_functions"]:
        part = _translate(function, at)
        if part is None:
            return None
        if isinstance(part, _Band):
            band = band.join(part)
        else:
            found = part if found is None else found & part
    if found is None:
        return band
    return band.mask() & found if band.hides(at) else found


def _either(at: _CallShape, held: dict) -> _Band | masks.Mask | None:
    parts = [part for function in held["mask_functions"] if (part := _translate(function, at)) is not None]
    if not parts or len(parts) < len(held["mask_functions"]):
        return None
    if any(isinstance(part, _Band) and not part.hides(at) for part in parts):
        return _Band()
    found, *others = [part.mask() if isinstance(part, _Band) else part for part in parts]
    for other in others:
        found = found | other
    return found


def _chunks(at: _CallShape, held: dict) -> masks.Mask:
    """The chunk of each row, as one range of keys; chunks start at the first token that is not padding."""
    size, padding = held["chunk_size"], held["left_padding"].reshape(-1, 1)
    rows = torch.arange(at.q_len) + at.q_offset
    start = (rows - padding).div(size, rounding_mode="floor") * size + padding - at.k_offset
    return masks.ranges(torch.stack([start, start + size], -1).clamp(0, at.k_len)[:, None, :, None, :])


def _documents(at: _CallShape, held: dict) -> masks.Mask | None:
    ids = held["packed_sequence_mask"]
    return _between(ids[:, at.rows], ids[:, at.keys], at)


def _groups(at: _CallShape, held: dict) -> masks.Mask | None:
    ids = held["block_sequence_ids"]
    rows, keys = ids[:, at.rows], ids[:, at.keys]
    # Ids below 0 belong to no group and must not attend to each other.
    return _between(torch.where(rows < 0, 0, rows + 2), torch.where(keys < 0, 1, keys + 2), at)


def _not_padding(at: _CallShape, held: dict) -> _Band | masks.Mask:
    padding = _padding(held["padding_mask"], at)
    return _Band() if padding is None else padding


def _between(rows: torch.Tensor, keys: torch.Tensor, at: _CallShape) -> masks.Mask | None:
    whole = rows.shape[-1] == at.q_len and keys.shape[-1] == at.k_len
    return masks.segments_between(rows, keys) if whole else None


_TRANSLATIONS: dict[str, tuple[tuple, Callable[[_CallShape, dict], Any]]] = {
    "causal_mask_function": ((), lambda at, held: _Band(ahead=0)),
    "bidirectional_mask_function": ((), lambda at, held: _Band()),
    "sliding_window_overlay": ((1,), lambda at, held: _Band(back=held["sliding_window"] - 1)),
    "sliding_window_bidirectional_overlay": ((1,), lambda at, held: _Band(held["sliding_window"], held["sliding_window"])),
    "chunked_overlay": ((1, torch.zeros(1)), _chunks),
    "packed_sequence_mask_function": ((torch.zeros(1, 1),), _documents),
    "blockwise_overlay": ((torch.zeros(1, 1),), _groups),
    "padding_mask_function": ((torch.zeros(1, 1),), _not_padding),
    "and_masks": ((), _both),
    "or_masks": ((), _either),
}


def _translations_by_code() -> dict[Any, Callable[[_CallShape, dict], Any]]:
    """Translations by code object, which all closures of one factory function share."""
    known = {}
    for name, (example, meaning) in _TRANSLATIONS.items():
        maker = getattr(masking_utils, name, None)
        if maker is not None:
            known[(maker(*example) if example or name in ("and_masks", "or_masks") else maker).__code__] = meaning
    return known


_BY_CODE = _translations_by_code()


def _translate(function: Callable, at: _CallShape) -> _Band | masks.Mask | None:
    """Translate a mask function of Transformers to a rule; None if it is unknown."""
    meaning = _BY_CODE.get(getattr(function, "__code__", None))
    if meaning is None:
        return None
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    try:
        return meaning(at, held)
    except KeyError:
        return None  # another version of Transformers has other closure variables


def _name_of_unknown(function: Callable) -> str:
    """Name of an unknown mask function; of a combination, the name of the unknown part."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = [one for cell in cells if isinstance(cell, (list, tuple)) for one in cell if callable(one)]
    unknown = [one for one in held if getattr(one, "__code__", None) not in _BY_CODE]
    return getattr(unknown[0] if unknown else function, "__qualname__", repr(function))


@functools.cache
def _warn_of(name: str) -> None:
    """Warn once per name."""
    warnings.warn(
        f"unknown mask function {name}: evaluated for all query-key pairs in each forward pass. The result is exact, the time quadratic; "
        f"regard.hf.report(model) shows how each layer ran",
        stacklevel=4,
    )


def _padding(attention_mask: torch.Tensor | None, at: _CallShape) -> masks.Mask | None:
    """Keys that are not padding, from [batch, positions]; None if no key is padding. Later positions are unused cache."""
    if attention_mask is None:
        return None
    keys = attention_mask[:, at.keys].bool()
    if keys.shape[1] == at.k_len and bool(keys.all()):
        return None
    count = keys.sum(-1)
    first = keys.int().argmax(-1) if keys.shape[1] else count
    end = (keys * torch.arange(1, keys.shape[1] + 1)).amax(-1) if keys.shape[1] else count
    if bool(((end - first == count) | (count == 0)).all()):
        return masks.spans(torch.stack([first, first + count], -1))
    return masks.ranges(_ranges(keys[:, None, None, :]))


def _evaluate_in_strips(function: Callable, at: _CallShape, attention_mask: torch.Tensor | None, use_vmap: bool, device: Any) -> masks.Mask:
    """Evaluate any mask function in strips of rows, and store it as key ranges."""
    rows = max(1, STRIP // max(1, at.batch * at.k_len))
    strips = []
    for start in range(0, at.q_len, rows):
        seen = masking_utils.sdpa_mask(
            batch_size=at.batch,
            q_length=min(rows, at.q_len - start),
            kv_length=at.k_len,
            q_offset=at.q_offset + start,
            kv_offset=at.k_offset,
            mask_function=function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert seen is not None  # None only if skipping is allowed
        strips.append(_ranges(seen))
    most = max(strip.shape[3] for strip in strips)
    found = torch.cat([F.pad(strip, (0, 0, 0, most - strip.shape[3])) for strip in strips], 2)
    return masks.ranges(found[:1] if bool((found == found[:1]).all()) else found)


def _ranges(seen: torch.Tensor) -> torch.Tensor:
    """Runs of True along the last axis, [.., n, 2]; padded with empty ranges."""
    outside = F.pad(seen, (1, 1))
    edges = outside[..., 1:] != outside[..., :-1]
    nth = edges.cumsum(-1)
    most = max(int(nth[..., -1].max()) // 2, 1)
    found = torch.zeros(*seen.shape[:-1], 2 * most, dtype=torch.int64)
    *row, key = edges.nonzero(as_tuple=True)
    found[(*row, nth[edges] - 1)] = key
    return found.unflatten(-1, (most, 2))


@dataclass(frozen=True)
class _Selection:
    """Layers and heads whose weights are returned; None is all. `turns`: call order of modules without a `layer_idx`."""

    layers: frozenset[int] | None
    heads: tuple[int, ...] | None
    turns: dict[int, int]


_selection: contextvars.ContextVar[_Selection | None] = contextvars.ContextVar("regard.hf.attentions", default=None)


@contextlib.contextmanager
def attentions(layers: Iterable[int] | None = None, heads: Iterable[int] | None = None) -> Iterator[None]:
    """Restrict `output_attentions=True` to some layers and heads.

        with regard.hf.attentions(layers=[0, 5], heads=[3]):
            found = model(**inputs, output_attentions=True).attentions      # two tensors [batch, 1, q_len, k_len]

    A layer is identified by the `layer_idx` of its module, or, without one (vision and audio encoders), by its call order among such
    modules. Encoder and decoder each have a layer 0. Other layers are left out of the result.

    Weights are those before dropout (eager returns them after dropout), and are detached.
    """
    chosen = frozenset(layers) if layers is not None else None
    if chosen and min(chosen) < 0:
        raise ValueError(f"layers: {min(chosen)} is below 0; count from the first layer, 0")
    token = _selection.set(_Selection(chosen, tuple(heads) if heads is not None else None, {}))
    try:
        yield
    finally:
        _selection.reset(token)


@contextlib.contextmanager
def delta_rule(model: torch.nn.Module) -> Iterator[None]:
    """Compute the gated delta rule of a model with `regard.DeltaRule` inside the context: forward, backward and generation, on the CPU.

        with regard.hf.delta_rule(model):               # Qwen3-Next, Qwen3.5, Qwen4-Exp, OLMo Hybrid: models with linear attention layers
            model.generate(**inputs)

    Replaces `torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule` in the Python modules of the model's layers, to which
    Transformers falls back without the package fla. Other models of these modules change too. With gradient checkpointing, call
    `backward` inside the context. Packed sequences (`cu_seqlens`) work, which they do not in that fallback.
    """
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    modules = {type(layer).__module__ for layer in model.modules()}
    found = [(sys.modules[module], name) for module in sorted(modules) for name in names if hasattr(sys.modules.get(module), name)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no layer that computes the gated delta rule ({', '.join(names)})")
    originals = [getattr(module, name) for module, name in found]
    for module, name in found:
        setattr(module, name, _delta_rule)
    try:
        yield
    finally:
        for (module, name), original in zip(found, originals):
            setattr(module, name, original)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`torch_chunk_gated_delta_rule` and `torch_recurrent_gated_delta_rule` of Transformers: `[batch, len, heads, ..]` everywhere."""
    rule = regard.DeltaRule(qk_l2norm=use_qk_l2norm_in_kernel)
    tensors = [query, key.to(query.dtype), value.to(query.dtype), g, beta]
    tensors = [x.transpose(1, 2) if cu_seqlens is None else x.squeeze(0) for x in tensors]
    q, k, v, g, beta = tensors
    out, aux = rule(q, k, v, g=g, beta=beta, state=initial_state, offsets=cu_seqlens, return_aux=True)
    out = out.transpose(1, 2) if cu_seqlens is None else out.unsqueeze(0)
    return out, aux.state if output_final_state else None


@contextlib.contextmanager
def intervene(model: torch.nn.Module, rules: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Change the attention of a model inside the context, during forward, backward and generation.

        rules = [
            {"layers": [5], "heads": [3], "rows": (40, None), "keys": (0, 40), "drop": True},     # attention knockout
            {"layers": [2], "keys": (7, 9), "times": 0.5},                                      # half the weight, then normalized
        ]
        with regard.hf.intervene(model, rules):
            model.generate(**inputs)

    Where a rule applies; what is left out is all:
      kind    `self`, `cross`, `encoder`, ..; encoder and decoder each have a layer 0
      layers  layer indices
      items   batch items
      heads   indices of query heads
      rows    positions of queries in the sequence, `(start, stop)` or `(start, None)`
      keys    positions of keys
    What it does, one of:
      drop    True: hides the keys from the rows, as a mask does; a row without any key left has output 0
      times   multiplies weights before the softmax normalizes them: adds `ln times` to scores; 0 drops
      add     adds a number to scores
      output  replaces the outputs of heads: 0, a tensor that broadcasts to `[batch, heads, rows, v_dim]`, or the result of `head_means`
      pattern  the weights of another run, a `regard.lens.capture` with `keep=True` of a run with the same rows and keys

    Layers that no rule concerns compute the same bits as without the context. Contexts may be nested. With gradient checkpointing, call
    `backward` inside the context. A rule that concerned no call causes a warning.
    """
    from ._intervene import Interventions
    from ._sites import switched

    active = Interventions(model, rules)
    with switched(model), active.calls.hooked(), _callbacks.added(_callbacks.interventions, active):
        yield
    for i in range(len(active.rules)):
        if active.calls.forward and i not in active.used:
            rule = active.rules[i]
            where = f"layers {sorted(rule.layers)}" if rule.layers is not None else "all layers"
            warnings.warn(f"rules[{i}]: {where}, kind {rule.kind or 'any'}: there is no such layer in {type(model).__name__}", stacklevel=3)


@contextlib.contextmanager
def head_means(model: torch.nn.Module) -> Iterator[Any]:
    """Mean outputs of all heads over the tokens that a model reads inside the context, for mean ablation.

        with regard.hf.head_means(model) as means:
            model(**reference)
        with regard.hf.intervene(model, [{"layers": [5], "heads": [3], "output": means}]):
            model(**inputs)

    `means[5]` is `[heads, v_dim]` of layer 5; `means["cross", 5]` of cross-attention. Padding counts as well.
    """
    from ._intervene import HeadMeans
    from ._sites import switched

    means = HeadMeans(model)
    with switched(model), means.calls.hooked(), _callbacks.added(_callbacks.head_means, means):
        yield means


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: AttentionMask | torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    precision: str | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function of the backend, called by each layer.

    `query` is [batch, heads, q_len, dim], `key` and `value` are [batch, kv_heads, k_len, dim].

    Returns the output [batch, q_len, heads, v_dim], and the weights [batch, heads, q_len, k_len] if requested and selected by `attentions`.
    """
    unknown = [name for name, given in others.items() if name not in IGNORED_KEYS and given is not None]
    if unknown:
        raise TypeError(
            f"{unknown[0]}: unknown keyword of {type(module).__name__}, which may change its attention; "
            f"use another attn_implementation, or add it to regard.hf.IGNORED_KEYS if it does not"
        )
    if torch.is_autocast_enabled("cpu"):
        query, key, value = regard.torch.autocast(query, key, value)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = _mask_options(attention_mask, query, key, causal, sliding_window)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        own = attention_mask is None
        sequences = _sequences(cu_seq_lens_q, cu_seq_lens_k, query, key, own, causal, sliding_window)
        options["mask"] = sequences if own or "mask" not in options else _as_mask(options["mask"]) & sequences
    if position_bias is not None:
        options["bias"] = (position_bias + options["bias"] if "bias" in options else position_bias).to(query.dtype)
    for name, given in (("scale", scaling), ("softcap", softcap), ("sinks", s_aux), ("precision", precision), ("dropout", dropout or None)):
        if given is not None:
            options[name] = given
    heads = _selected_heads(module, query.shape[1]) if output_attentions or _collected() else []
    if not torch.compiler.is_compiling():
        how = _how(attention_mask, causal, cu_seq_lens_q)
        _last_calls[module] = _LastCall(query.shape, key.shape, value.shape[-1], query.dtype, how, options)
    first_key = attention_mask.first_key if isinstance(attention_mask, AttentionMask) else 0
    # Not a comprehension: torch.compile does not support one over these variables.
    changes = []
    for one in _callbacks.interventions:
        change = one.plan(module, query, key, options, first_key)
        if change is not None:
            changes.append(change)
    if edges := [rule for change in changes for rule in change.options(query, key)]:
        options["interventions"] = edges
    needs_aux = bool(heads or _callbacks.callbacks)
    found = regard.torch.attention(query, key, value, **options, return_aux=needs_aux)
    out, aux = found if needs_aux else (found, None)
    weights = _weights(query, key, aux, heads, options) if heads else None
    if _callbacks.callbacks:
        _callbacks.notify(module, query, key, value, options, aux)
    for change in changes:
        out = change.output(out, change.frozen(value, query, key))
    for means in _callbacks.head_means:
        means.add(module, out)
    return out.transpose(1, 2).contiguous(), weights


class _LastCall:
    """Last call of a layer, for `report`. Stores shapes instead of tensors, so that it keeps no tensor alive. One is made in each call, and
    a dataclass takes several times as long."""

    __slots__ = ("dtype", "how", "key", "options", "query", "v_dim")

    def __init__(self, query: torch.Size, key: torch.Size, v_dim: int, dtype: torch.dtype, how: str, options: dict[str, Any]) -> None:
        self.query, self.key, self.v_dim, self.dtype, self.how = query, key, v_dim, dtype, how
        self.options = {name: _TensorSpec(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for name, x in options.items()}

    def plan(self) -> str:
        q, k, v = (torch.zeros(shape, dtype=self.dtype) for shape in (self.query, self.key, (*self.key[:-1], self.v_dim)))
        options: Any = {name: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, _TensorSpec) else x for name, x in self.options.items()}
        return regard.plan(q, k, v, **options)


@dataclass(frozen=True)
class _TensorSpec:
    shape: torch.Size
    dtype: torch.dtype


_last_calls: weakref.WeakKeyDictionary[torch.nn.Module, _LastCall] = weakref.WeakKeyDictionary()


def _how(given: Any, causal: bool, packed: Any) -> str:
    """Origin of the mask of a call."""
    if isinstance(given, AttentionMask):
        found = given.how
    elif isinstance(given, torch.Tensor):
        found = "dense mask from the model" if given.dtype == torch.bool else "dense bias from the model"
    else:
        found = "none, causal" if causal else "none"
    return found if packed is None else f"{found}; packed sequences"


def report(model: torch.nn.Module) -> str:
    """Report how each attention layer of a model ran in its last forward pass: one line per layer with the kernel and the mask.

    Also lists the layers that did not call Regard: those of another backend, and those that did not run.
    """
    lines = []
    for name, module in model.named_modules():
        if module in _last_calls:
            lines.append(f"{name}: {_last_calls[module].plan()}; mask: {_last_calls[module].how}")
        elif type(module).__name__.endswith("Attention") and not any(child in _last_calls for child in module.modules()):
            backend = getattr(getattr(module, "config", None), "_attn_implementation", None)
            reason = f"attn_implementation is {backend!r}" if backend else "it does not use the attention interface"
            lines.append(f"{name}: not computed by regard: {type(module).__name__} ({reason})")
    return "\n".join(lines) or f"{type(model).__name__}: no attention layer ran"


def _mask_options(given: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """Convert the mask of a layer to options of `regard.torch.attention`. A given mask already includes the window."""
    q_len, k_len = query.shape[2], key.shape[2]
    if isinstance(given, AttentionMask):
        if given.shape[3] != k_len:
            raise ValueError(f"attention_mask: created for {given.shape[3]} keys, this layer has {k_len}; the model must create a new mask")
        return {"mask": given.mask, "align": given.align}
    if given is None and window is None and (q_len == 1 or not causal):
        return {}
    if given is None:
        # Without a mask, Transformers aligns rows with the first keys; a single row with the last key.
        band = _Band(None if window is None else window - 1, 0 if causal else None if window is None else window - 1)
        at = _CallShape(query.shape[0], q_len, k_len, 0, 0) if q_len > 1 else _CallShape(query.shape[0], 1, k_len, k_len - 1, 0)
        return {"mask": band.mask(), "align": at.align} if band.hides(at) else {}
    if not isinstance(given, torch.Tensor) or given.ndim != 4:
        found = f"{given.ndim} axes" if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"attention_mask: expected None, a mask from regard.hf.mask or a tensor with 4 axes, found {found}")
    if given.dtype == torch.bool:
        return {"mask": given}
    if not given.is_floating_point():
        raise TypeError(f"attention_mask: {given.dtype} is neither bool (True = visible) nor floating point (added to scores); convert it")
    return {"bias": given.to(query.dtype)}


def _as_mask(given: masks.Mask | torch.Tensor) -> masks.Mask:
    return given if isinstance(given, masks.Mask) else masks.bits(given)


def _sequences(
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    own: bool,
    causal: bool,
    window: int | None,
) -> masks.Mask:
    """Mask of packed sequences in one batch item: one range of keys per row, in its own sequence.

    `own`: there is no other mask, so the range includes the causal mask and the window.
    """
    if cu_q is None or cu_k is None:
        raise TypeError("cu_seq_lens_q and cu_seq_lens_k: give both")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: the batch has {query.shape[0]} items; packed sequences need a batch of 1")
    for name, ends, total in (("cu_seq_lens_q", cu_q, query.shape[2]), ("cu_seq_lens_k", cu_k, key.shape[2])):
        if int(ends[-1]) != total:
            raise ValueError(f"{name}: ends at {int(ends[-1])}, this layer has {total}; both must be equal")
    if not own and not torch.equal(cu_q, cu_k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ, which does not allow an attention_mask; leave it out")
    cu_q, cu_k = cu_q.long(), cu_k.long()
    row = torch.arange(query.shape[2])
    of = torch.searchsorted(cu_q, row, right=True) - 1
    start, end = cu_k[of], cu_k[of + 1]
    position = row - cu_q[of + 1] + end  # the last row of a sequence is aligned with its last key
    if own and window is not None:
        start, end = torch.maximum(start, position - window + 1), torch.minimum(end, position + window)
    if own and causal:
        end = torch.minimum(end, position + 1)
    return masks.ranges(torch.stack([start, torch.maximum(start, end)], -1)[None, None, :, None, :])


def _collected() -> bool:
    """Whether the model collects attention weights. Some, such as GPT-2, do not pass `output_attentions` to their layers."""
    return any(key.endswith("attentions") for key in output_capturing._active_collector.get() or ())


def _selected_heads(module: torch.nn.Module, heads: int) -> list[int]:
    wanted = _selection.get()
    if wanted is None:
        return list(range(heads))
    if wanted.layers is not None:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            layer = wanted.turns.setdefault(id(module), len(wanted.turns))
        if layer not in wanted.layers:
            return []
    chosen = list(range(heads)) if wanted.heads is None else list(wanted.heads)
    for head in chosen:
        if not 0 <= head < heads:
            raise ValueError(f"heads: no head {head} in {type(module).__name__}, which has {heads}")
    return chosen


def _weights(query: torch.Tensor, key: torch.Tensor, aux: Any, heads: list[int], options: dict[str, Any]) -> torch.Tensor:
    """Weights of the selected heads, [batch, heads, q_len, k_len]."""
    batch, all_heads, q_len, _ = query.shape
    rows, keys = (0, q_len), (0, key.shape[2])
    held: Any = {name: given.detach() if isinstance(given, torch.Tensor) else given for name, given in options.items()}
    view = regard.AttentionView(query.detach(), key.detach(), aux, **held)
    if heads == list(range(all_heads)):
        found = torch.from_numpy(view.tile(rows, keys))
    else:
        found = torch.cat([torch.from_numpy(view.head(b, h).tile(rows, keys)) for b in range(batch) for h in heads])
    return found.unflatten(0, (batch, len(heads))).to(query.dtype)
