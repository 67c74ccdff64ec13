"""Conversion of the options of a call, for NumPy and PyTorch, to JSON and the arrays that the JSON refers to."""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import sys
from typing import Any, Callable, NamedTuple, Optional, TypedDict, TypeVar, Union

import numpy as np

from . import _arrays, _regard, masks

MaskLike = Union[masks.Mask, str, Any, None]


class Options(TypedDict, total=False):
    """Keywords of :func:`describe`, for type checkers: `**options: Unpack[Options]`."""

    mask: MaskLike
    align: Union[str, int]
    scale: Optional[float]
    temperature: float
    softcap: Optional[float]
    interventions: Any
    bias: Any
    alibi: Any
    relative: Optional[tuple[Any, ...]]
    sinks: Any
    local: Optional[tuple[Any, int]]
    similarity: Union[None, str, tuple[Any, ...]]
    normalizer: str
    dropout: float
    seed: Any
    entropy: bool
    precision: Optional[str]
    q_offsets: Any
    k_offsets: Any
    threads: Optional[int]
    isa: Optional[str]


class Call(NamedTuple):
    """Options of a call, without q, k and v."""

    text: str
    """Options in JSON."""
    learned: list[Any]
    """Tensors with gradients."""
    held: list[Any]
    """Arrays without gradients."""

    @property
    def is_plain(self) -> bool:
        """Whether no option is an array."""
        return not (self.learned or self.held)

    @property
    def names(self) -> list[str]:
        """Names of the tensors with gradients."""
        return _read(self.text).get("learned", [])

    def asks(self, option: str) -> bool:
        """Value of a boolean option."""
        return bool(_read(self.text).get(option, False))

    def on(self, threads: int) -> Call:
        """Set the number of threads, unless the call sets it."""
        return Call(_on(self.text, threads), self.learned, self.held)

    def beside(self, q: Any) -> Call:
        """Use as many threads as PyTorch if `q` is a tensor."""
        return self.on(sys.modules["torch"].get_num_threads()) if _arrays.is_torch(q) else self

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """Output of a call on NumPy arrays whose options have no arrays, in a new array. The fast path: no other results."""
        out = _arrays.like_rows(q, v.shape[-1])
        place = _arrays.place
        _regard.attend(self.text, place(q), place(k), place(v), place(out))
        return out

    def native(self, *tensors: Any) -> tuple[Any, ...]:
        """Arguments of the native functions; all arrays must stay alive until the native call returns."""
        return (self.text, [_arrays.memory(x) for x in tensors], *([_arrays.memory(x) for x in xs] for xs in (self.learned, self.held)))


def describe(
    q: Any,
    *,
    mask: MaskLike = None,
    align: Union[str, int] = "end",
    scale: Optional[float] = None,
    temperature: float = 1.0,
    softcap: Optional[float] = None,
    interventions: Any = None,
    bias: Any = None,
    alibi: Any = None,
    relative: Optional[tuple[Any, ...]] = None,
    sinks: Any = None,
    local: Optional[tuple[Any, int]] = None,
    similarity: Union[None, str, tuple[Any, ...]] = None,
    normalizer: str = "softmax",
    dropout: float = 0.0,
    seed: Any = None,
    entropy: bool = False,
    precision: Optional[str] = None,
    q_offsets: Any = None,
    k_offsets: Any = None,
    threads: Optional[int] = None,
    isa: Optional[str] = None,
    **unknown: Any,
) -> Call:
    """Convert options to JSON and arrays. The engine validates them together with the tensors."""
    if unknown:
        raise TypeError(_unknown_option(next(iter(unknown))))
    learned: dict[str, Any] = {}
    held: list[tuple[str, Any]] = []
    options: dict[str, Any] = {"align": align if isinstance(align, str) else _arrays.whole("align", align)}
    number = _arrays.number_of(q)

    def table(name: str, x: Any) -> None:
        learned[name] = _arrays.dense(_arrays.cast(x, number, name))

    if mask is not None:
        mask = masks.of(mask)
        options["mask"] = mask.text()
        held += mask.arrays
    for name, value, usual in (
        ("scale", scale, None), ("temperature", temperature, 1.0), ("softcap", softcap, None), ("dropout", dropout, 0.0),
    ):
        found = usual if value is None else _arrays.number(name, value)
        if found != usual:
            options[name] = found
    for name, word in (("normalizer", normalizer), ("precision", precision), ("isa", isa)):
        if word is not None and not isinstance(word, str):
            raise TypeError(f"{name}: expected a string, found {word!r}")
        if word is not None and word != "softmax":
            options[name] = word
    if interventions is not None and not isinstance(interventions, (list, tuple)):
        raise TypeError(f"interventions: expected a list of dicts, found {type(interventions).__name__}")
    if interventions:
        options["interventions"] = [one for rule in interventions for one in _intervention(rule)]
    if entropy:
        options["entropy"] = True
    if threads is not None:
        options["threads"] = _arrays.count("threads", threads)
    if bias is not None:
        learned["bias"] = _arrays.rows(bias)
    for name, x in (("alibi", alibi), ("sinks", sinks)):
        if x is not None:
            table(name, x)
    if relative is not None:
        options["relative"] = _relative(relative)
        table("relative", relative[1])
    if local is not None:
        if not isinstance(local, (tuple, list)) or len(local) != 2:
            raise TypeError(f"local: expected (centers, reach), found {type(local).__name__}")
        options["reach"] = _arrays.whole("local", local[1])
        table("centers", local[0])
    if similarity is not None:
        options["similarity"] = _similarity(similarity, learned)
    if "dropout" in options:
        held.append(("seed", _arrays.dense(_arrays.cast((0, 0) if seed is None else seed, "i64", "seed"))))
    for name, x in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if x is not None:
            held.append((name, _arrays.dense(_arrays.cast(x, "i64", name))))
    options["learned"], options["held"] = list(learned), [name for name, _ in held]
    return Call(_text(options), list(learned.values()), [x for _, x in held])


def _unknown_option(name: str) -> str:
    near = difflib.get_close_matches(name, Options.__annotations__, 1)
    hint = f"did you mean {near[0]!r}?" if near else "see help(regard.attention)"
    return f"attention: unknown option {name!r}; {hint}"


_PLAIN = frozenset((str, int, float, bool, type(None)))


def described(q: Any, options: Any) -> Call:
    """:func:`describe`, cached if all options are strings, numbers and masks without arrays: it costs as much as a small call."""
    mask = options.get("mask")
    if type(mask) is masks.Mask and not mask.arrays:
        options = {**options, "mask": mask.text()}
    for value in options.values():
        if type(value) not in _PLAIN:
            return describe(q, **options)
    return _described(_arrays.number_of(q), **options)


@functools.lru_cache(maxsize=256, typed=True)
def _described(number: str, /, **options: Any) -> Call:
    return describe(np.empty(0, {"f32": "float32", "f64": "float64"}[number]), **options)


Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(function: Function) -> Function:
    """Replace `**options` by the names and defaults of the options in the signature, for `help` and `inspect.signature`."""
    own = inspect.signature(function)
    named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [one for one in inspect.signature(describe).parameters.values() if one.kind is one.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@functools.lru_cache(maxsize=256)
def _on(text: str, threads: int) -> str:
    return text if '"threads"' in text else f'{{"threads": {threads}, {text[1:]}'


@functools.lru_cache(maxsize=256)
def _read(text: str) -> dict[str, Any]:
    return json.loads(text)


def _text(value: Any) -> str:
    """JSON text. `torch.compile` cannot trace `json.dumps`."""
    if isinstance(value, dict):
        return "{" + ", ".join([f'"{name}": {_text(x)}' for name, x in value.items()]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_text(x) for x in value]) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    # Not repr: torch.compile does not support it for numbers that are not constants.
    return f"{value}"


def _intervention(rule: Any) -> list[Any]:
    """`{"heads": [3], "rows": (40, 60), "keys": (0, 40), "drop": True}` as `[bias or None, [items, heads, rows, keys]]`, one for each run of
    items and of heads."""
    where = "'items', 'heads' (indices), 'rows', 'keys' (start, stop)"
    if not isinstance(rule, dict):
        raise TypeError(f"interventions: expected dicts with {where} and one of 'drop', 'times', 'add', found {type(rule).__name__}")
    unknown = [name for name in rule if name not in ("items", "heads", "rows", "keys", "drop", "times", "add")]
    if unknown:
        raise ValueError(f"interventions: unknown key {unknown[0]!r}; use {where} and one of 'drop', 'times', 'add'")
    bias = bias_of(rule)
    rows, keys = (None if rule.get(name) is None else _span(name, rule[name]) for name in ("rows", "keys"))
    return [
        [bias, [items, heads, rows, keys]] for items in _runs("items", rule.get("items")) for heads in _runs("heads", rule.get("heads"))
    ]


def bias_of(rule: dict[str, Any]) -> Optional[float]:
    """What an intervention adds to scores; None if it hides edges."""
    actions = [name for name in ("drop", "times", "add") if rule.get(name) is not None and rule[name] is not False]
    if len(actions) != 1:
        raise ValueError(f"interventions: expected one of 'drop', 'times', 'add', found {', '.join(actions) or 'none'}")
    if actions == ["drop"]:
        return None
    found = _arrays.number(f"interventions, {actions[0]}", rule[actions[0]])
    if actions == ["add"]:
        return found
    if found < 0:
        raise ValueError(f"interventions, times: {found} is invalid; use a number >= 0")
    return math.log(found) if found else None


def _span(name: str, span: Any) -> list[int]:
    if not isinstance(span, (tuple, list)) or len(span) != 2:
        raise TypeError(f"interventions, {name}: expected (start, stop), found {span!r}")
    start, stop = (_arrays.count(f"interventions, {name}", end) for end in span)
    if stop < start:
        raise ValueError(f"interventions, {name}: {start} to {stop}; use (start, stop) with start <= stop")
    return [start, stop]


def _runs(name: str, given: Any) -> list[Optional[list[int]]]:
    """Runs of consecutive indices; `[None]` for all."""
    if given is None:
        return [None]
    indices = sorted({_arrays.count(f"interventions, {name}", one) for one in (given if isinstance(given, (list, tuple, range, set, frozenset)) else [given])})
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] = index + 1
        else:
            runs.append([index, index + 1])
    return list(runs)


def _relative(relative: tuple[Any, ...]) -> dict[str, Any]:
    expected = "('t5', table, max_distance, bidirectional) or ('clipped', table, reach)"
    if not isinstance(relative, (tuple, list)) or not relative:
        raise TypeError(f"relative: expected {expected}, found {type(relative).__name__}")
    kind, *rest = relative[0], *relative[2:]
    if kind == "t5" and len(rest) == 2:
        return {"t5": {"max_distance": _arrays.whole("relative", rest[0]), "bidirectional": bool(rest[1])}}
    if kind == "clipped" and len(rest) == 1:
        return {"clipped": {"reach": _arrays.whole("relative", rest[0])}}
    raise ValueError(f"relative: expected {expected}, found {kind!r} with {len(relative) - 1} more elements")


def _similarity(similarity: Union[str, tuple[Any, ...]], learned: dict[str, Any]) -> str:
    """`"dot"`, `"distance"`, `("general", w)`, `("additive", w_q, w_k or None, v)`."""
    expected = "'dot', 'distance', ('general', w) or ('additive', w_q, w_k or None, v)"
    if not isinstance(similarity, (str, tuple, list)) or not similarity:
        raise TypeError(f"similarity: expected {expected}, found {type(similarity).__name__}")
    kind, *weights = (similarity,) if isinstance(similarity, str) else similarity
    names = {"dot": (), "distance": (), "general": ("w",), "additive": ("w_q", "w_k", "w_v")}.get(kind if isinstance(kind, str) else "")
    if names is None or len(names) != len(weights):
        raise ValueError(f"similarity: expected {expected}, found {kind!r} with {len(weights)} arrays")
    for name, x in zip(names, weights):
        if x is not None:
            learned[name] = _arrays.rows(x)
    return kind
