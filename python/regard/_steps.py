"""Reference computation step by step, self-check, RoPE, ALiBi slopes, and merging of partial results."""

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
    """All intermediate values of an attention call."""

    similarities: Any
    """Similarity of each query and key, masked pairs included, `[batch, heads, q_len, k_len]`."""
    scores: Any
    """Input of the softmax, `[batch, heads, q_len, k_len]`; `-inf` where masked."""
    weights: Any
    """Attention weights, `[batch, heads, q_len, k_len]`; 0 where masked."""
    out: Any
    """Output, `[batch, heads, q_len, v_dim]`."""


def steps(q: Any, k: Any, v: Any, **options: Unpack[Options]) -> Steps:
    """Compute attention step by step and return all intermediate values: for small inputs, tests and teaching.

    Unlike `regard.attention`, it stores three `q_len x k_len` matrices. Same options. Results are in the library of q, without gradients.
    """
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
    """Rotary position embedding: a copy of `x [batch, heads, len, features]`, each row rotated by its position.

    Options:
      positions    position of row 0, or of each row: `[len]` or `[batch, len]`
      dim          rotate only the first `dim` features (even); default all
      pairs        rotated pairs: `"halves"`, features i and i + dim / 2 (Hugging Face), or `"interleaved"`, features 2i and 2i + 1
      base         frequency of pair i is `base ** (-2i / dim)` radians per position
      scaling      divisor of the positions
      frequencies  frequencies of the pairs, `[dim / 2]`, instead of `base`
      inverse      apply the inverse rotation, which is also the gradient
      threads      maximum number of threads
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
    """ALiBi slopes (Press et al. 2022), `[heads]`, for the option `alibi`."""
    return _arrays.numpy_of(_regard.alibi_slopes(heads))


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """Merge partial results of the same queries over disjoint sets of keys into the result over all keys, `(out, lse)`.

    `outs` are `[batch, heads, q_len, v_dim]`, `lses` are `[batch, heads, q_len]`.
    """
    outs, lses = [_arrays.rows(x) for x in outs], list(lses)
    _arrays.without_gradients("merge", **{f"outs[{i}]": x for i, x in enumerate(outs)})
    lses = [_arrays.dense(_arrays.cast(lse, _arrays.number_of(out), "lse")) for out, lse in zip(outs, lses)] + lses[len(outs) :]
    out, lse = _regard.merge([_arrays.memory(x) for x in outs], [_arrays.memory(x) for x in lses])
    return _arrays.like(outs[0], out), _arrays.like(outs[0], lse)


@dataclass(frozen=True)
class Group:
    """Test cases with a common property, and their largest errors relative to the tolerance: at most 1 passes."""

    rows: int
    case: str
    """Name of the case with the largest error."""
    out: float
    lse: float
    entropy: float
    grads: float


@dataclass(frozen=True)
class Failure:
    """Failed test case."""

    case: str
    isa: str
    threads: int
    why: str


@dataclass(frozen=True)
class Report:
    """Results of :func:`check`. `print(report)` shows the full report."""

    rows: int
    isas: list[str]
    """Tested instruction sets."""
    groups: dict[str, Group]
    """Largest errors for each mask, score option, similarity, layout and dtype."""
    failures: list[Failure]
    text: str

    @property
    def is_green(self) -> bool:
        """Whether all test cases passed."""
        return not self.failures

    def __str__(self) -> str:
        return self.text


def check(progress: Optional[Callable[[int, int], Any]] = None, *, part: str = "") -> Report:
    """Test this installation: forward and backward pass of all options against the f64 reference, on every instruction set of this CPU and
    several thread counts. Takes minutes. `progress(done, total)` is a callback; `part` selects the cases whose names contain it."""
    found, text = _regard.check(part, progress)
    report = json.loads(found)

    def group(rows: int, case: str, **worst: Optional[float]) -> Group:
        return Group(rows, case, **{name: float("inf") if x is None else x for name, x in worst.items()})

    groups = {name: group(**x) for name, x in report["groups"].items()}
    return Report(report["rows"], report["isas"], groups, [Failure(**x) for x in report["failures"]], text)
