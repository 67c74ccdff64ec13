"""Regard as an attention backend of Hugging Face Transformers.

    import regard.hf
    regard.hf.register()
    model = AutoModel.from_pretrained(..., attn_implementation="regard")      # or model.set_attn_implementation("regard")

`register` puts two functions into Transformers: `mask`, which a model calls once in each forward pass to say who may see whom, and
`attention`, which each layer calls. What the first returns, a `Seen`, is handed to the second untouched: rules and ranges of keys,
O(length) memory, never a matrix of queries by keys.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
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
from regard import _watch, masks

__all__ = ["HARMLESS", "Seen", "attention", "attentions", "mask", "register", "report"]

HARMLESS = {
    "cache_position", "deterministic", "image_sizes", "labels", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx", "token_type_ids",
    "use_cache",
}  # fmt: skip
"""Keywords that models pass on to each layer and that do not change its attention. Any other is refused unless it is None; add a name
here if yours does not change it either."""

STRIP = 1 << 22
"""Pairs of query and key that are looked at together where a mask is a function that only its maker knows: 4 MB of booleans."""


def register(name: str = "regard", precision: str | None = "f32") -> None:
    """Makes `attn_implementation=name` known to Transformers. Calling it again changes nothing but the precision.

    `precision` is that of `regard.attention`. "f32" lets f32 tensors use a CPU's matrix tiles, at no more error than f32 arithmetic has;
    with "strict" the same model has the same bits on every CPU.
    """
    for taken in ("flash", "sdpa", "flex_attention", "eager", "paged|", "/"):
        if taken in name:
            raise ValueError(f"name: {name!r} holds {taken!r}, by which Transformers takes it for another backend; choose another name")
    AttentionInterface.register(name, functools.partial(attention, precision=precision))
    AttentionMaskInterface.register(name, mask)


@dataclass(frozen=True)
class Seen:
    """Who may see whom in one forward pass: `mask`, with row 0 standing at key `align`. `how` says where it is from, for `report`.

    It stands where a model has a tensor of `shape` [batch, 1, q_len, k_len], and is one only as far as being passed on goes.
    """

    mask: masks.Mask
    align: int
    shape: tuple[int, int, int, int]
    how: str = "rules"
    ndim = 4

    def contiguous(self) -> Seen:
        """Itself: generation asks this of masks that it makes ahead."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_NO_TENSOR}")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(f"mask[..]: {_NO_TENSOR}")

    @classmethod
    def __torch_function__(cls, function: Callable, *_: Any) -> Any:
        # A TypeError would be hidden by the operators of tensors.
        raise RuntimeError(f"{getattr(function, '__name__', function)}: {_NO_TENSOR}")


_NO_TENSOR = "a mask of regard is rules, not a tensor; models that compute with their masks need attn_implementation='eager'"


@dataclass(frozen=True)
class _Place:
    """The sizes of a call, and how many positions lie before its first row and its first key."""

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
    """Keys from `back` before a row to `ahead` after it; None is without bound."""

    back: int | None = None
    ahead: int | None = None

    def join(self, other: _Band) -> _Band:
        def nearer(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return _Band(nearer(self.back, other.back), nearer(self.ahead, other.ahead))

    def hides(self, at: _Place) -> bool:
        """Whether any row of this call misses a key by it: the last row looks back farthest, the first one ahead."""
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
) -> Seen | None:
    """What Transformers calls to make a mask; None where nothing is hidden and nobody could take that for causal.

    `allow_is_causal_skip`, `local_size`, `dtype` and `config` are for other backends: `mask_function` says it all.
    """
    if isinstance(attention_mask, Seen):
        return attention_mask  # made ahead by generate
    at = _Place(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    shape = (batch_size, 1, q_length, kv_length)
    rule = _translate(mask_function, at)
    if rule is None:
        name = _name_of_unknown(mask_function)
        _warn_of(name)
        how = f"mask function {name}, evaluated for every pair"
        return Seen(_by_strips(mask_function, at, attention_mask, use_vmap, device), at.align, shape, how)
    padding = _padding(attention_mask, at)
    if isinstance(rule, _Band):
        rule = rule.mask() if rule.hides(at) else None
    if rule is None and padding is None and (q_length == 1 or allow_is_bidirectional_skip):
        return None
    found = rule if padding is None else padding if rule is None else rule & padding
    return Seen(masks.full() if found is None else found, at.align, shape)


# What the functions of `transformers.masking_utils` mean. Each reads from the closure what its maker has put there.


def _both(at: _Place, held: dict) -> _Band | masks.Mask | None:
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


def _either(at: _Place, held: dict) -> _Band | masks.Mask | None:
    parts = [part for function in held["mask_functions"] if (part := _translate(function, at)) is not None]
    if not parts or len(parts) < len(held["mask_functions"]):
        return None
    if any(isinstance(part, _Band) and not part.hides(at) for part in parts):
        return _Band()
    found, *others = [part.mask() if isinstance(part, _Band) else part for part in parts]
    for other in others:
        found = found | other
    return found


def _chunks(at: _Place, held: dict) -> masks.Mask:
    """The own chunk of each row, as the one range that it is; chunks are counted from the first token that is no padding."""
    size, padding = held["chunk_size"], held["left_padding"].reshape(-1, 1)
    rows = torch.arange(at.q_len) + at.q_offset
    start = (rows - padding).div(size, rounding_mode="floor") * size + padding - at.k_offset
    return masks.ranges(torch.stack([start, start + size], -1).clamp(0, at.k_len)[:, None, :, None, :])


def _documents(at: _Place, held: dict) -> masks.Mask | None:
    ids = held["packed_sequence_mask"]
    return _between(ids[:, at.rows], ids[:, at.keys], at)


def _groups(at: _Place, held: dict) -> masks.Mask | None:
    ids = held["block_sequence_ids"]
    rows, keys = ids[:, at.rows], ids[:, at.keys]
    # Those below 0 belong to no group, and must not meet each other.
    return _between(torch.where(rows < 0, 0, rows + 2), torch.where(keys < 0, 1, keys + 2), at)


def _real(at: _Place, held: dict) -> _Band | masks.Mask:
    padding = _padding(held["padding_mask"], at)
    return _Band() if padding is None else padding


def _between(rows: torch.Tensor, keys: torch.Tensor, at: _Place) -> masks.Mask | None:
    whole = rows.shape[-1] == at.q_len and keys.shape[-1] == at.k_len
    return masks.segments_between(rows, keys) if whole else None


_MEANINGS: dict[str, tuple[tuple, Callable[[_Place, dict], Any]]] = {
    "causal_mask_function": ((), lambda at, held: _Band(ahead=0)),
    "bidirectional_mask_function": ((), lambda at, held: _Band()),
    "sliding_window_overlay": ((1,), lambda at, held: _Band(back=held["sliding_window"] - 1)),
    "sliding_window_bidirectional_overlay": ((1,), lambda at, held: _Band(held["sliding_window"], held["sliding_window"])),
    "chunked_overlay": ((1, torch.zeros(1)), _chunks),
    "packed_sequence_mask_function": ((torch.zeros(1, 1),), _documents),
    "blockwise_overlay": ((torch.zeros(1, 1),), _groups),
    "padding_mask_function": ((torch.zeros(1, 1),), _real),
    "and_masks": ((), _both),
    "or_masks": ((), _either),
}


def _known() -> dict[Any, Callable[[_Place, dict], Any]]:
    """The meanings by code: closures of one maker share it, whatever they hold."""
    known = {}
    for name, (example, meaning) in _MEANINGS.items():
        maker = getattr(masking_utils, name, None)
        if maker is not None:
            known[(maker(*example) if example or name in ("and_masks", "or_masks") else maker).__code__] = meaning
    return known


_KNOWN = _known()


def _translate(function: Callable, at: _Place) -> _Band | masks.Mask | None:
    """A mask function of Transformers as a rule; None for any other."""
    meaning = _KNOWN.get(getattr(function, "__code__", None))
    if meaning is None:
        return None
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    try:
        return meaning(at, held)
    except KeyError:
        return None  # another version calls what it holds otherwise


def _name_of_unknown(function: Callable) -> str:
    """The name of a mask function without a meaning here; of those that others hold together, the one that has none."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = [one for cell in cells if isinstance(cell, (list, tuple)) for one in cell if callable(one)]
    unknown = [one for one in held if getattr(one, "__code__", None) not in _KNOWN]
    return getattr(unknown[0] if unknown else function, "__qualname__", repr(function))


@functools.cache
def _warn_of(name: str) -> None:
    """Once for each name."""
    warnings.warn(
        f"regard does not know the mask function {name}: it is evaluated for every pair of query and key in each forward pass, in strips of "
        f"rows. The result is the same; the time is that of the pairs. regard.hf.report(model) tells of each layer how it ran",
        stacklevel=4,
    )


def _padding(attention_mask: torch.Tensor | None, at: _Place) -> masks.Mask | None:
    """The keys that are no padding, from [batch, positions]; None if all are. Positions beyond are the empty end of a cache."""
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


def _by_strips(function: Callable, at: _Place, attention_mask: torch.Tensor | None, use_vmap: bool, device: Any) -> masks.Mask:
    """Any mask function at all, looked at in strips of rows and kept as ranges."""
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
        assert seen is not None  # only a skip would be None
        strips.append(_ranges(seen))
    most = max(strip.shape[3] for strip in strips)
    found = torch.cat([F.pad(strip, (0, 0, 0, most - strip.shape[3])) for strip in strips], 2)
    return masks.ranges(found[:1] if bool((found == found[:1]).all()) else found)


def _ranges(seen: torch.Tensor) -> torch.Tensor:
    """The runs of True along the last axis, [.., n, 2]; rows with fewer than n end in empty ones."""
    outside = F.pad(seen, (1, 1))
    edges = outside[..., 1:] != outside[..., :-1]
    nth = edges.cumsum(-1)
    most = max(int(nth[..., -1].max()) // 2, 1)
    found = torch.zeros(*seen.shape[:-1], 2 * most, dtype=torch.int64)
    *row, key = edges.nonzero(as_tuple=True)
    found[(*row, nth[edges] - 1)] = key
    return found.unflatten(-1, (most, 2))


@dataclass(frozen=True)
class _Wanted:
    """Whose weights are asked for; None is all. `turns` are those of modules that do not know which layer they are."""

    layers: frozenset[int] | None
    heads: tuple[int, ...] | None
    turns: dict[int, int]


_wanted: contextvars.ContextVar[_Wanted | None] = contextvars.ContextVar("regard.hf.attentions", default=None)


@contextlib.contextmanager
def attentions(layers: Iterable[int] | None = None, heads: Iterable[int] | None = None) -> Iterator[None]:
    """Narrows what `output_attentions=True` computes to some layers and heads.

        with regard.hf.attentions(layers=[0, 5], heads=[3]):
            found = model(**inputs, output_attentions=True).attentions      # two tensors [batch, 1, q_len, k_len]

    A layer is known by the `layer_idx` of its module, or, where it has none (encoders of images and sound), by its turn among those that
    have none. An encoder and a decoder each have a layer 0. Layers that are not asked for are missing from the answer.

    Weights are those before dropout (eager returns them after it), and no gradient flows through them.
    """
    chosen = frozenset(layers) if layers is not None else None
    if chosen and min(chosen) < 0:
        raise ValueError(f"layers: {min(chosen)} is below 0; count from the first layer, 0")
    token = _wanted.set(_Wanted(chosen, tuple(heads) if heads is not None else None, {}))
    try:
        yield
    finally:
        _wanted.reset(token)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Seen | torch.Tensor | None,
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
    """What each layer calls: query [batch, heads, q_len, dim], key and value [batch, kv_heads, k_len, dim].

    Returns [batch, q_len, heads, v_dim], and weights [batch, heads, q_len, k_len] where they are asked for and `attentions` leaves them.
    """
    unknown = [name for name, given in others.items() if name not in HARMLESS and given is not None]
    if unknown:
        raise TypeError(
            f"{unknown[0]}: regard does not know this keyword of {type(module).__name__}, which may change its attention; "
            f"use another attn_implementation, or add it to regard.hf.HARMLESS if it does not"
        )
    query, key, value = regard.torch.autocast(query, key, value)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = _mask_options(attention_mask, query, key, causal, sliding_window)
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        own = attention_mask is None
        sequences = _sequences(cu_seq_lens_q, cu_seq_lens_k, query, key, own, causal, sliding_window)
        options["mask"] = sequences if own or "mask" not in options else _as_mask(options["mask"]) & sequences
    if position_bias is not None:
        options["bias"] = (position_bias + options["bias"] if "bias" in options else position_bias).to(query.dtype)
    options.update(scale=scaling, softcap=softcap, sinks=s_aux, precision=precision)
    heads = _heads_wanted(module, query.shape[1]) if output_attentions or _collected() else []
    if not torch.compiler.is_compiling():
        how = _how(attention_mask, causal, cu_seq_lens_q)
        _ran[module] = _Ran(tuple(query.shape), tuple(key.shape), value.shape[-1], query.dtype, how, options)
    looked_at = bool(heads or _watch.watchers)
    found = regard.torch.attention(query, key, value, **options, dropout=dropout, return_aux=looked_at)
    out, aux = found if looked_at else (found, None)
    weights = _weights(query, key, aux, heads, options) if heads else None
    if _watch.watchers:
        _watch.tell(module, query, key, value, options, aux)
    return out.transpose(1, 2).contiguous(), weights


@dataclass(frozen=True)
class _Ran:
    """The last call of a layer: what `report` tells of it. Shapes of tensors in the place of tensors, which are not to be kept alive."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    v_dim: int
    dtype: torch.dtype
    how: str
    options: dict[str, Any]

    def __post_init__(self) -> None:
        tensors = {name: _Like(tuple(x.shape), x.dtype) for name, x in self.options.items() if isinstance(x, torch.Tensor)}
        object.__setattr__(self, "options", {**self.options, **tensors})

    def plan(self) -> str:
        q, k, v = (torch.zeros(shape, dtype=self.dtype) for shape in (self.query, self.key, (*self.key[:-1], self.v_dim)))
        options: Any = {name: torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, _Like) else x for name, x in self.options.items()}
        return regard.plan(q, k, v, **options)


@dataclass(frozen=True)
class _Like:
    shape: tuple[int, ...]
    dtype: torch.dtype


_ran: weakref.WeakKeyDictionary[torch.nn.Module, _Ran] = weakref.WeakKeyDictionary()


def _how(given: Any, causal: bool, packed: Any) -> str:
    """Where the mask of a call is from."""
    if isinstance(given, Seen):
        found = given.how
    elif isinstance(given, torch.Tensor):
        found = "a dense mask of the model, read as it is" if given.dtype == torch.bool else "a dense bias of the model, read as it is"
    else:
        found = "none, causal" if causal else "none"
    return found if packed is None else f"{found}; packed sequences"


def report(model: torch.nn.Module) -> str:
    """How each attention of a model ran in its last forward pass: a line for each with the kernel and where its mask is from.

    Attentions that did not come through Regard are named too: those that another backend computed, and those that have not run.
    """
    lines = []
    for name, module in model.named_modules():
        if module in _ran:
            lines.append(f"{name}: {_ran[module].plan()}; mask: {_ran[module].how}")
        elif type(module).__name__.endswith("Attention") and not any(child in _ran for child in module.modules()):
            backend = getattr(getattr(module, "config", None), "_attn_implementation", None)
            told = f"attn_implementation is {backend!r}" if backend else "its code does not ask for one"
            lines.append(f"{name}: not by regard: {type(module).__name__} has not called it ({told})")
    return "\n".join(lines) or f"{type(model).__name__} has no attention that ran"


def _mask_options(given: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """The mask of a layer as options of `regard.torch.attention`. A mask that is given is whole: it holds the window already."""
    q_len, k_len = query.shape[2], key.shape[2]
    if isinstance(given, Seen):
        if given.shape[3] != k_len:
            raise ValueError(f"attention_mask: made for {given.shape[3]} keys, this layer has {k_len}; its model must make another mask")
        return {"mask": given.mask, "align": given.align}
    if given is None:
        # Without a mask, Transformers means rows that stand at the first keys, except for a single one.
        band = _Band(None if window is None else window - 1, 0 if causal else None if window is None else window - 1)
        at = _Place(query.shape[0], q_len, k_len, 0, 0) if q_len > 1 else _Place(query.shape[0], 1, k_len, k_len - 1, 0)
        return {"mask": band.mask(), "align": at.align} if band.hides(at) else {}
    if not isinstance(given, torch.Tensor) or given.ndim != 4:
        found = f"{given.ndim} axes" if isinstance(given, torch.Tensor) else type(given).__name__
        raise TypeError(f"attention_mask: expected None, what regard.hf.mask has made or a tensor of 4 axes, found {found}")
    if given.dtype == torch.bool:
        return {"mask": given}
    if not given.is_floating_point():
        raise TypeError(f"attention_mask: {given.dtype} is neither bool (True = may see) nor floating (added to scores); convert it")
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
    """Sequences packed behind each other in one item: each row sees one range of keys, in its own sequence.

    `own`: there is no other mask, so that causality and the window are told here too.
    """
    if cu_q is None or cu_k is None:
        raise TypeError("cu_seq_lens_q and cu_seq_lens_k go together, only one of them is given")
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: the batch has {query.shape[0]} items; packed sequences lie in 1")
    for name, ends, total in (("cu_seq_lens_q", cu_q, query.shape[2]), ("cu_seq_lens_k", cu_k, key.shape[2])):
        if int(ends[-1]) != total:
            raise ValueError(f"{name}: ends at {int(ends[-1])}, this layer has {total}; both must be equal")
    if not own and not torch.equal(cu_q, cu_k):
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k differ, so that an attention_mask over all of them means nothing; leave it out")
    cu_q, cu_k = cu_q.long(), cu_k.long()
    row = torch.arange(query.shape[2])
    of = torch.searchsorted(cu_q, row, right=True) - 1
    start, end = cu_k[of], cu_k[of + 1]
    stands = row - cu_q[of + 1] + end  # the last row of a sequence at its last key
    if own and window is not None:
        start, end = torch.maximum(start, stands - window + 1), torch.minimum(end, stands + window)
    if own and causal:
        end = torch.minimum(end, stands + 1)
    return masks.ranges(torch.stack([start, torch.maximum(start, end)], -1)[None, None, :, None, :])


def _collected() -> bool:
    """Whether the model around this layer collects weights. Some, like GPT-2, do so without telling their layers."""
    return any(key.endswith("attentions") for key in output_capturing._active_collector.get() or ())


def _heads_wanted(module: torch.nn.Module, heads: int) -> list[int]:
    wanted = _wanted.get()
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
            raise ValueError(f"heads: there is no head {head} in {type(module).__name__}, which has {heads}")
    return chosen


def _weights(query: torch.Tensor, key: torch.Tensor, aux: Any, heads: list[int], options: dict[str, Any]) -> torch.Tensor:
    """[batch, heads, q_len, k_len]: what was asked for, and no more."""
    batch, all_heads, q_len, _ = query.shape
    rows, keys = (0, q_len), (0, key.shape[2])
    held: Any = {name: given.detach() if isinstance(given, torch.Tensor) else given for name, given in options.items()}
    view = regard.AttentionView(query.detach(), key.detach(), aux, **held)
    if heads == list(range(all_heads)):
        found = torch.from_numpy(view.tile(rows, keys))
    else:
        found = torch.cat([torch.from_numpy(view.head(b, h).tile(rows, keys)) for b in range(batch) for h in heads])
    return found.unflatten(0, (batch, len(heads))).to(query.dtype)
