"""Attention mass on named spans of keys, recorded while a model runs: one number for each layer, head, step and span."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

import numpy as np

from . import masks
from ._record import Call, HeadView

Span = tuple[int, Optional[int]]


class SpanOptions(NamedTuple):
    """Options of `lens.mass`."""

    spans: dict[str, Span]
    heads: tuple[int, ...] | None
    last: bool

    @classmethod
    def of(cls, spans: Mapping[str, Any], heads: tuple[int, ...] | None, rows: str) -> SpanOptions:
        if not isinstance(spans, Mapping) or not spans:
            raise TypeError("spans: expected a dict of names and positions, for example {'instruction': (0, 40)}")
        if rows not in ("last", "all"):
            raise ValueError(f"rows: {rows!r}; use 'last' (one row for each forward pass) or 'all'")
        return cls({str(name): _span(name, span) for name, span in spans.items()}, heads, rows == "last")


def _span(name: Any, span: Any) -> Span:
    expected = "(start, stop), (start, None) up to the last key, or (-n, None), the last n positions up to the row"
    if not isinstance(span, (tuple, list, range)) or (not isinstance(span, range) and len(span) != 2):
        raise TypeError(f"spans[{name!r}]: expected {expected}, found {span!r}")
    start, stop = (span.start, span.stop) if isinstance(span, range) else span
    try:
        start, stop = operator.index(start), None if stop is None else operator.index(stop)
    except TypeError:
        raise TypeError(f"spans[{name!r}]: expected {expected}, found {span!r}") from None
    if (start < 0 and stop is not None) or (stop is not None and stop < start):
        raise ValueError(f"spans[{name!r}]: {start} to {stop}; use {expected}")
    return start, stop


class SpanRecord:
    """Mass on spans in one attention layer; grows with each forward pass."""

    def __init__(self, kind: str, layer: int, name: str, options: SpanOptions, first: int):
        self.kind, self.layer, self.name = kind, layer, name
        self.first, self.q_len = first, 0
        self.shape = (0, 0)
        """Batch size and number of heads."""
        self.positions: list[int] = []
        """Positions of the recorded rows."""
        self._options = options
        self._parts: list[np.ndarray] = []

    def add(self, call: Call, real: np.ndarray | None, slides: bool) -> None:
        """Record one call; see `Record.add`."""
        view, q_len = HeadView(call, self._options.heads), call.q.shape[2]
        self.shape = (view.batch, view.heads)
        position = self.first + self.q_len
        first, picked = 0, None
        if self._options.last:
            # Of each item the last row that is not padding.
            picked = np.full(view.batch, q_len - 1)
            if real is not None:
                picked = np.where(real.any(-1), q_len - 1 - real[:, ::-1].argmax(-1), q_len - 1)
            first = int(picked.min())
        offset = max(0, position - call.start) if slides else 0
        found = self._measure(view, (first, q_len), offset, call.k.shape[2])
        if picked is not None:
            found = np.take_along_axis(found, (picked - first)[:, None, None, None], 2)
        self._parts.append(found)
        self.positions += [position + q_len - 1] if self._options.last else range(position, position + q_len)
        self.q_len += q_len

    def _measure(self, view: HeadView, rows: tuple[int, int], offset: int, k_len: int) -> np.ndarray:
        """Mass of these rows on each span, `[batch, heads, rows, spans]`."""
        spans = self._options.spans.values()
        fixed = [[min(max(0, end - offset), k_len) for end in (start, k_len + offset if stop is None else stop)] for start, stop in spans if start >= 0]
        recent = [masks.band(-start - 1, 0) for start, _ in spans if start < 0]
        if recent and self.kind == "cross":
            raise ValueError("spans: (-n, None) counts from the position of a row, which cross-attention does not have; use keys of the source")
        found = np.empty((view.batch, view.heads, rows[1] - rows[0], len(spans)), np.float32)
        is_recent = np.array([start < 0 for start, _ in spans])
        if fixed:
            hull = [min(start for start, _ in fixed), max(stop for _, stop in fixed)]
            found[..., ~is_recent] = view.measure(rows=list(rows), keys=hull, spans=fixed)["span_mass"]
        if recent:
            masses = view.measure(rows=list(rows), mass=recent)
            found[..., is_recent] = np.stack([masses[f"mass {i}"] for i in range(len(recent))], -1)
        return found

    @property
    def values(self) -> np.ndarray:
        """`[batch, head, step, span]`"""
        return np.concatenate(self._parts, 2)
