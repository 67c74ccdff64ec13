"""A call as the engine takes it: its options as text, and the arrays that they name. Both doors, NumPy and PyTorch, come through here."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from typing import Any, Callable, NamedTuple, Optional, TypedDict, TypeVar, Union

import numpy as np

from . import _arrays, masks

MaskLike = Union[masks.Mask, str, Any, None]


class Options(TypedDict, total=False):
    """The keywords of :func:`describe`, for checkers of types: `**options: Unpack[Options]`."""

    mask: MaskLike
    align: Union[str, int]
    scale: Optional[float]
    temperature: float
    softcap: Optional[float]
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
    """What is asked for, without q, k and v."""

    text: str
    """Options in JSON."""
    learned: list[Any]
    """Tensors that have gradients."""
    held: list[Any]
    """Arrays that have none."""

    @property
    def names(self) -> list[str]:
        """What the tensors that have gradients are called."""
        return _read(self.text).get("learned", [])

    def asks(self, option: str) -> bool:
        """Whether an option that is on or off is on."""
        return bool(_read(self.text).get(option, False))

    def on(self, threads: int) -> Call:
        """The same on so many threads, unless it says how many."""
        return self if '"threads"' in self.text else Call(f'{{"threads": {threads}, {self.text[1:]}', self.learned, self.held)

    def beside(self, q: Any) -> Call:
        """The same on as many threads as the library of `q` uses."""
        return self.on(sys.modules["torch"].get_num_threads()) if _arrays.is_torch(q) else self

    def native(self, *tensors: Any) -> tuple[Any, ...]:
        """For the engine; everything must be kept until it has returned."""
        return (self.text, [_arrays.memory(x) for x in tensors], *([_arrays.memory(x) for x in xs] for xs in (self.learned, self.held)))


def describe(
    q: Any,
    *,
    mask: MaskLike = None,
    align: Union[str, int] = "end",
    scale: Optional[float] = None,
    temperature: float = 1.0,
    softcap: Optional[float] = None,
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
) -> Call:
    """Options become text, arrays are named by it. The engine checks them, all at once, with the tensors."""
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
            raise TypeError(f"{name}: expected a word, found {word!r}")
        if word is not None and word != "softmax":
            options[name] = word
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
            raise TypeError(f"local: expected (centres, reach), found {type(local).__name__}")
        options["reach"] = _arrays.whole("local", local[1])
        table("centres", local[0])
    if similarity is not None:
        options["similarity"] = _similarity(similarity, learned)
    if "dropout" in options:
        held.append(("seed", _arrays.dense(_arrays.cast((0, 0) if seed is None else seed, "i64", "seed"))))
    for name, x in (("q_offsets", q_offsets), ("k_offsets", k_offsets)):
        if x is not None:
            held.append((name, _arrays.dense(_arrays.cast(x, "i64", name))))
    options["learned"], options["held"] = list(learned), [name for name, _ in held]
    return Call(_text(options), list(learned.values()), [x for _, x in held])


_PLAIN = frozenset((str, int, float, bool, type(None)))


def described(q: Any, options: Any) -> Call:
    """:func:`describe`, once for the same options where they are words and numbers: that takes as long as a small call."""
    for value in options.values():
        if type(value) not in _PLAIN:
            return describe(q, **options)
    return _described(_arrays.number_of(q), **options)


@functools.lru_cache(maxsize=256, typed=True)
def _described(number: str, /, **options: Any) -> Call:
    return describe(np.empty(0, {"f32": "float32", "f64": "float64"}[number]), **options)


Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(function: Function) -> Function:
    """Gives `**options` their names and defaults where Python asks for them: in `help`, notebooks and `inspect.signature`."""
    own = inspect.signature(function)
    named = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [one for one in inspect.signature(describe).parameters.values() if one.kind is one.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


@functools.lru_cache(maxsize=256)
def _read(text: str) -> dict[str, Any]:
    return json.loads(text)


def _text(value: Any) -> str:
    """JSON. Not by `json`, which `torch.compile` cannot look into."""
    if isinstance(value, dict):
        return "{" + ", ".join([f'"{name}": {_text(x)}' for name, x in value.items()]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_text(x) for x in value]) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    # Not repr, which torch.compile lacks for numbers that it does not take for constants.
    return f"{value}"


def _relative(relative: tuple[Any, ...]) -> dict[str, Any]:
    expected = "('t5', table, max_distance, bidirectional) or ('clipped', table, reach)"
    if not isinstance(relative, (tuple, list)) or not relative:
        raise TypeError(f"relative: expected {expected}, found {type(relative).__name__}")
    kind, *rest = relative[0], *relative[2:]
    if kind == "t5" and len(rest) == 2:
        return {"t5": {"max_distance": _arrays.whole("relative", rest[0]), "bidirectional": bool(rest[1])}}
    if kind == "clipped" and len(rest) == 1:
        return {"clipped": {"reach": _arrays.whole("relative", rest[0])}}
    raise ValueError(f"relative: expected {expected}, found {kind!r} with {len(relative) - 1} more")


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
