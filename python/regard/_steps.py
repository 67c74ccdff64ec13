"""The definition with all its numbers, the check of this machine, and small helpers around attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional, Sequence

import numpy as np

from . import _arrays, _regard
from ._call import Options, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Steps(NamedTuple):
    """Every number between the inputs and the output of a small call, by definition."""

    similarities: Any
    """What a query and a key make, `[batch, heads, q_len, k_len]`; of hidden pairs too."""
    scores: Any
    """What the softmax sees, `[batch, heads, q_len, k_len]`; `-inf` where a pair is hidden."""
    weights: Any
    """`[batch, heads, q_len, k_len]`; 0 where a pair is hidden."""
    out: Any
    """`[batch, heads, q_len, v_dim]`"""


def steps(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> Steps:
    """The steps of a call one by one, for inputs so small that a person, or a test, can look at them: this holds queries x keys numbers
    three times over, which `regard.attention` never does. Options are the same; arrays are those of q's library, without gradients."""
    _arrays.without_gradients("steps", q=q, k=k, v=v)
    tensors = (_arrays.rows(q), _arrays.rows(k), _arrays.rows(v))
    found = _regard.steps(describe(tensors[0], **options).native(*tensors))
    return Steps(*(_arrays.like(tensors[0], x) for x in found))


def rope(
    x: Any,
    positions: Any = 0,
    *,
    dim: Optional[int] = None,
    pairs: str = "halves",
    base: float = 10000.0,
    scaling: float = 1.0,
    frequencies: Optional[Sequence[float]] = None,
    inverse: bool = False,
    threads: Optional[int] = None,
) -> Any:
    """Rotary position embedding: a copy of `x [batch, heads, len, features]` whose rows are turned by their positions.

    Options:
      positions    that of row 0, or of each row: `[len]`, or `[batch, len]`
      dim          turn only the first features, an even number of them
      pairs        which two turn together: `"halves"`, i and i + dim / 2 (as Hugging Face has it), or `"interleaved"`, 2i and 2i + 1
      base         pair i turns by `base ** (-2i / dim)` from one position to the next
      scaling      divides positions
      frequencies  the turn of each pair instead, `[dim / 2]`
      inverse      turn back: the inverse, and the gradient
    """
    _arrays.without_gradients("rope", x=x)
    x = _arrays.rows(x)
    one = isinstance(positions, (int, np.integer))
    places = None if one else _arrays.dense(_arrays.cast(positions, "i64", "positions"))
    given = None if frequencies is None else [float(f) for f in frequencies]
    how = {
        "dim": dim, "pairs": pairs, "base": float(base), "scaling": float(scaling), "frequencies": given, "inverse": bool(inverse),
        "threads": threads, "first": int(positions) if one else 0,
    }
    return _arrays.like(x, _regard.rope(_arrays.memory(x), json.dumps(how), None if one else _arrays.memory(places)))


def alibi_slopes(heads: int) -> np.ndarray:
    """The slopes of ALiBi (Press et al. 2022) for so many heads, `[heads]`: for the option `alibi`."""
    return _arrays.numpy_of(_regard.alibi_slopes(heads))


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Joins results of the same queries over different keys, `[batch, heads, q_len, v_dim]` and `[batch, heads, q_len]`, into the result
    over all of them: `(out, lse)`."""
    outs, lses = [_arrays.rows(x) for x in outs], list(lses)
    _arrays.without_gradients("merge", **{f"outs[{i}]": x for i, x in enumerate(outs)})
    lses = [_arrays.dense(_arrays.cast(lse, _arrays.number_of(out), "lse")) for out, lse in zip(outs, lses)] + lses[len(outs) :]
    out, lse = _regard.merge([_arrays.memory(x) for x in outs], [_arrays.memory(x) for x in lses])
    return _arrays.like(outs[0], out), _arrays.like(outs[0], lse)


@dataclass(frozen=True)
class Group:
    """The rows that have something in common, and the part of the allowed error that the worst of them took: 1 is the bound."""

    rows: int
    case: str
    """The name of the worst one."""
    out: float
    lse: float
    entropy: float
    grads: float


@dataclass(frozen=True)
class Failure:
    """A row that is wrong."""

    case: str
    isa: str
    threads: int
    why: str


@dataclass(frozen=True)
class Report:
    """What was run and how it went. `print(report)` is the whole of it."""

    rows: int
    isas: list[str]
    """The instruction sets covered."""
    groups: dict[str, Group]
    """The worst of each mask, score option, similarity, layout and type."""
    failures: list[Failure]
    text: str

    @property
    def is_green(self) -> bool:
        """Whether every row was right."""
        return not self.failures

    def __str__(self) -> str:
        return self.text


def check(progress: Optional[Callable[[int, int], Any]] = None, *, part: str = "") -> Report:
    """Runs the table of cases, attention both ways with every option, against its definition in f64, on every instruction set of this
    machine and several numbers of threads: minutes. `progress` is told of rows done and rows in all; `part` chooses the rows whose names
    have it in them."""
    found, text = _regard.check(part, progress)
    report = json.loads(found)

    def group(rows: int, case: str, **worst: Optional[float]) -> Group:
        return Group(rows, case, **{name: float("inf") if x is None else x for name, x in worst.items()})

    groups = {name: group(**x) for name, x in report["groups"].items()}
    return Report(report["rows"], report["isas"], groups, [Failure(**x) for x in report["failures"]], text)
