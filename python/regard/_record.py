"""Record of one attention layer: statistics of each row, a pooled attention map, complete rows, and, on request, q and k.

During generation a record grows: the prompt is one call, and each decoding step appends rows. Rows and keys are numbered by their position
in the sequence, also if the KV cache contains only a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from . import masks
from ._view import AttentionView

BY_ROW = ("entropy", "mean_distance", "first_mass", "largest", "max_score", "sink_mass")
"""Statistics with one value per row."""

STATS = (*BY_ROW, "col_sum", "top_k")
"""All statistics."""

SMALL = 512
"""Maximum number of rows and of keys for a full weight matrix."""

STRIP = 1 << 20
"""Weights per strip while rows are added to a map."""


class TopK(NamedTuple):
    """Largest weights of each row, in descending order: `[batch, heads, rows, k]`."""

    keys: np.ndarray
    """Key positions in the sequence; -1 if fewer keys are visible."""
    weights: np.ndarray


class CaptureOptions(NamedTuple):
    """Options of `capture`."""

    stats: frozenset[str]
    top_k: int
    rows: frozenset[int]
    map: int
    heads: tuple[int, ...] | None
    keep: bool


class Call(NamedTuple):
    """One attention call: detached PyTorch tensors."""

    q: Any
    k: Any
    lse: Any
    options: dict[str, Any]

    @property
    def start(self) -> int:
        """Key position of row 0."""
        align = self.options.get("align", "end")
        return self.k.shape[2] - self.q.shape[2] if align == "end" else 0 if align == "start" else int(align)

    @property
    def reach(self) -> int:
        """Number of keys that can be visible: a causal mask excludes keys after the last row, for example unused cache."""
        k_len, mask = self.k.shape[2], self.options.get("mask")
        rules = str(mask).split(" & ") if isinstance(mask, (str, masks.Mask)) else []
        causal = any(rule == "causal" or (rule.startswith("band ") and rule.endswith(" 0")) for rule in rules)
        return max(1, min(k_len, self.start + self.q.shape[2])) if causal and "|" not in str(mask) else k_len

    def view(self) -> AttentionView:
        return AttentionView(self.q, self.k, self.lse, **self.options)


class HeadView:
    """Weights of selected heads of a call; results are `[batch, heads, ..]`."""

    def __init__(self, call: Call, heads: tuple[int, ...] | None):
        batch, all_heads = call.q.shape[:2]
        self.batch, self.heads = batch, all_heads if heads is None else len(heads)
        view = call.view()
        self._views = [view] if heads is None else [view.head(b, h) for b in range(batch) for h in heads]

    def measure(self, **stats: Any) -> dict[str, np.ndarray]:
        """Several statistics in one pass."""
        found = [view.measure(**stats) for view in self._views]
        return {name: self._stacked([one[name] for one in found]) for name in found[0]}

    def tile(self, rows: tuple[int, int], keys: tuple[int, int]) -> np.ndarray:
        return self._stacked([view.tile(rows, keys) for view in self._views])

    def _stacked(self, arrays: list[np.ndarray]) -> np.ndarray:
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        return whole.reshape(self.batch, self.heads, *whole.shape[1:])


class Overview:
    """Max-pooled attention map, `[batch, heads, down, across]`, to which rows can be appended.

    The first rows are divided into cells of equal size. Each later row and key adds a cell; above twice the initial number of cells,
    adjacent cells are merged in pairs.
    """

    def __init__(self, values: np.ndarray, q_len: int, k_len: int, most: int):
        self.values, self._most = values, most
        self.starts = [cell_starts(n, cells) for n, cells in ((q_len, values.shape[2]), (k_len, values.shape[3]))]
        """Starts of the cells, down and across, and the end of the last one."""

    @property
    def exact(self) -> bool:
        """Whether each cell is a single weight."""
        return all(len(starts) == starts[-1] + 1 for starts in self.starts)

    def add(self, weights: np.ndarray, first_key: int) -> None:
        """Append rows `[batch, heads, rows, keys]`, whose first key has position `first_key`."""
        rows, keys = weights.shape[2:]
        for side, more in enumerate((rows, first_key + keys - self.starts[1][-1])):
            end = self.starts[side][-1]
            self.starts[side] = np.concatenate([self.starts[side], np.arange(end + 1, end + 1 + more)])
        down, across = (len(starts) - 1 for starts in self.starts)
        self.values = np.pad(self.values, [(0, 0), (0, 0), (0, down - self.values.shape[2]), (0, across - self.values.shape[3])])
        cells = np.searchsorted(self.starts[1], np.arange(first_key, first_key + keys), "right") - 1
        first = np.flatnonzero(np.diff(cells, prepend=-1))
        self.values[:, :, down - rows :, cells[first]] = np.maximum.reduceat(weights, first, axis=3)
        for side in (0, 1):
            while len(self.starts[side]) - 1 > 2 * self._most:
                self._merge(side)

    def _merge(self, side: int) -> None:
        """Merge adjacent cells in pairs."""
        starts = self.starts[side]
        self.values = np.maximum.reduceat(self.values, np.arange(0, len(starts) - 1, 2), axis=2 + side)
        self.starts[side] = np.append(starts[:-1:2], starts[-1])


def cell_starts(n: int, cells: int) -> np.ndarray:
    """Starts of `cells` cells of equal size, and the end."""
    return -(-np.arange(cells + 1) * n // max(cells, 1))


class Record:
    """Recorded attention of one layer. Arrays are `[batch, heads, ..]`, with the heads selected in `capture`, in that order.

    Statistics are attributes: `entropy`, `mean_distance`, `first_mass`, `largest`, `max_score`, `sink_mass` `[batch, heads, rows]`,
    `col_sum` `[batch, heads, keys]`, and `top_k`. Available are those listed in `capture(.., stats=)`.
    """

    def __init__(self, kind: str, layer: int, name: str, capture_options: CaptureOptions, first: int):
        self.kind, self.layer, self.name = kind, layer, name
        """Kind (`self`, `encoder`, `cross`, ..), layer index within the kind, and module name in the model."""
        self.first, self.q_len, self.k_len = first, 0, 0
        """Position of the first row, number of rows, number of keys."""
        self._overview: Overview | None = None
        self._options = capture_options
        self._by_row: dict[str, list[np.ndarray]] = {}
        self._sums: dict[str, np.ndarray] = {}
        self._top: list[np.ndarray] = []
        self._top_weights: list[np.ndarray] = []
        self._col_sum: np.ndarray | None = None
        self._whole: dict[int, tuple[int, np.ndarray]] = {}
        self._calls: list[tuple[int, int, Call]] = []
        self._keys: list[Any] = []

    def __repr__(self) -> str:
        stats = ", ".join(name for name in STATS if name in self._options.stats)
        return f"<{self.kind} layer {self.layer}: {self.q_len} rows, {self.k_len} keys, {self.shape[1]} heads; {stats}>"

    @property
    def heads(self) -> tuple[int, ...]:
        """Indices of the recorded heads."""
        return tuple(range(self.shape[1])) if self._options.heads is None else self._options.heads

    @property
    def shape(self) -> tuple[int, int]:
        """Batch size and number of heads."""
        of = self._sums["queries"].shape
        return of[0], of[1]

    # ---- recording ----

    def add(self, call: Call, real: np.ndarray | None, slides: bool) -> None:
        """Record one call. `real [batch, q_len]`: rows that are not padding. `slides`: the first key of the call may be later than the
        first position of the sequence, as in a sliding-window cache."""
        head_view, capture_options = HeadView(call, self._options.heads), self._options
        q_len, k_len = call.q.shape[2], call.reach
        offset = max(0, self.first + self.q_len - call.start) if slides else 0
        top = capture_options.top_k if "top_k" in capture_options.stats else 1
        query: dict[str, Any] = {"keys": [0, k_len], "entropy": True, "mean_distance": True, "top_k": top, "mass": ["prefix 1"]}
        if self._overview is None:
            query["pooled"] = [capture_options.map, capture_options.map, "max"]
        for name in {"col_sum", "sink_mass"} & capture_options.stats:
            query[name] = True
        found = head_view.measure(**query)
        found["first_mass"] = found.pop("mass 0") * (offset == 0)
        self._take_rows(found, self._lse(call), real)
        self._take_keys(found, offset, k_len)
        if self._overview is None:
            self._overview = Overview(found["pooled"], q_len, k_len, capture_options.map)
            for row in self._selected_rows(0, q_len):
                self._whole[row] = (0, head_view.tile((row, row + 1), (0, k_len))[:, :, 0])
        else:
            self._take_weights(head_view, q_len, k_len, offset)
        if capture_options.keep:
            self._keep(call, offset)
        self.q_len, self.k_len = self.q_len + q_len, max(self.k_len, offset + k_len)

    def _lse(self, call: Call) -> np.ndarray:
        heads = self._options.heads
        return (call.lse if heads is None else call.lse[:, list(heads)]).numpy()

    def _take_rows(self, found: dict[str, np.ndarray], lse: np.ndarray, real: np.ndarray | None) -> None:
        found["largest"] = found["top_weights"][..., 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            found["max_score"] = np.where(np.isneginf(lse), lse, lse + np.log(found["largest"]))
        for name in BY_ROW:
            if name in self._options.stats:
                self._by_row.setdefault(name, []).append(np.ascontiguousarray(found[name]))
        counted = ~np.isneginf(lse)
        if real is not None:
            counted &= real[:, None, :]
        self._sum("queries", counted.sum(-1))
        for name in ("entropy", "mean_distance", "first_mass", "largest"):
            self._sum(name, np.where(counted, found[name], 0).sum(-1, dtype=np.float64))
        highest = np.where(counted, found["max_score"], -np.inf).max(-1, initial=-np.inf)
        self._sums["max_score"] = np.maximum(self._sums.get("max_score", -np.inf), highest)

    def _sum(self, name: str, numbers: np.ndarray) -> None:
        self._sums[name] = self._sums.get(name, 0) + numbers

    def _take_keys(self, found: dict[str, np.ndarray], offset: int, k_len: int) -> None:
        if "top_k" in self._options.stats:
            keys = found["top_keys"]
            self._top.append(np.where(keys < 0, -1, keys + offset).astype(np.int32))
            self._top_weights.append(found["top_weights"])
        if "col_sum" in self._options.stats:
            before = self._col_sum
            whole = np.zeros((*found["col_sum"].shape[:2], max(self.k_len, offset + k_len)), found["col_sum"].dtype)
            if before is not None:
                whole[..., : before.shape[-1]] = before
            whole[..., offset : offset + k_len] += found["col_sum"]
            self._col_sum = whole

    def _take_weights(self, head_view: HeadView, q_len: int, k_len: int, offset: int) -> None:
        """Add the weights of a decoding step to the map and to the complete rows."""
        strip = max(1, STRIP // max(1, head_view.batch * head_view.heads * k_len))
        rows = self._selected_rows(self.q_len, self.q_len + q_len)
        for begin in range(0, q_len, strip):
            tile = head_view.tile((begin, min(begin + strip, q_len)), (0, k_len))
            self.overview.add(tile, offset)
            for row in rows:
                if 0 <= row - self.q_len - begin < tile.shape[2]:
                    self._whole[row] = (offset, tile[:, :, row - self.q_len - begin].copy())

    def _selected_rows(self, begin: int, end: int) -> list[int]:
        """Rows of `begin:end`, the newest rows, that are selected by index or may be selected by a negative index at the end. Drops earlier
        rows that a negative index can no longer select."""
        last = end - max((-row for row in self._options.rows if row < 0), default=0)
        for row in [row for row in self._whole if row not in self._options.rows and row < last]:
            del self._whole[row]
        return [row for row in range(begin, end) if row in self._options.rows or row >= last]

    def _keep(self, call: Call, offset: int) -> None:
        """Store q and the new keys: a KV cache passes earlier keys again in every step."""
        q_len, at = call.q.shape[2], offset + call.start
        known = sum(keys.shape[2] for keys in self._keys)
        if not self._keys:
            self._keys.append(call.k.clone())
        elif self.kind != "cross" and at >= known:
            self._keys.append(call.k[:, :, call.start : call.start + q_len].clone())
        elif self.kind != "cross":  # a preallocated cache
            self.all_keys()[:, :, at : at + q_len] = call.k[:, :, call.start : call.start + q_len]
        self._calls.append((offset, call.k.shape[2], call._replace(q=call.q.clone(), k=None)))

    # ---- results ----

    def __getattr__(self, name: str) -> Any:
        if name not in STATS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        if name not in self._options.stats:
            raise AttributeError(f"{name}: not recorded; use capture(.., stats=({name!r},))")
        if name == "top_k":
            return TopK(np.concatenate(self._top, 2), np.concatenate(self._top_weights, 2))
        return self._col_sum if name == "col_sum" else np.concatenate(self._by_row[name], 2)

    @property
    def means(self) -> dict[str, np.ndarray]:
        """Statistics of each head, `[batch, heads]`, averaged over the rows that are not padding and have a visible key: `entropy`, `keys`
        (e to the entropy: effective number of keys), `distance`, `first` (weight of the first key), `largest`; and the maximum of
        `max_score`. Always recorded."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = {name: self._sums[name] / self._sums["queries"] for name in ("entropy", "mean_distance", "first_mass", "largest")}
        entropy = mean["entropy"]
        of = {"entropy": entropy, "keys": np.exp(entropy), "distance": mean["mean_distance"], "first": mean["first_mass"]}
        return {**of, "largest": mean["largest"], "max_score": self._sums["max_score"]}

    @property
    def whole_rows(self) -> list[int]:
        """Indices of the rows that are recorded completely."""
        return sorted(row for row in self._whole if row in self._options.rows or row - self.q_len in self._options.rows)

    @property
    def overview(self) -> Overview:
        """Pooled attention map."""
        if self._overview is None:
            raise ValueError("nothing recorded; run the model inside the context")
        return self._overview

    @property
    def map(self) -> np.ndarray:
        """Max-pooled attention map, `[batch, heads, down, across]`; `cells` are the rows and keys of its cells."""
        return self.overview.values

    @property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts of the cells of the map, down and across, and the end of the last one."""
        down, across = self.overview.starts
        return down, across

    @property
    def exact(self) -> bool:
        """Whether the map is not pooled: each cell is one weight."""
        return self.overview.exact

    @property
    def has_inputs(self) -> bool:
        """Whether q and k are stored."""
        return bool(self._calls)

    def row(self, row: int) -> np.ndarray:
        """Weights of one row for all keys, `[batch, heads, keys]`; -1 is the last row. 0 where masked."""
        if not -self.q_len <= row < self.q_len:
            raise IndexError(f"row {row}: out of range, there are {self.q_len} rows")
        row %= self.q_len
        if row not in self._whole:
            return self.tile((row, row + 1), (0, self.k_len), f"row {row}")[:, :, 0]
        offset, weights = self._whole[row]
        found = np.zeros((*self.shape, self.k_len), weights.dtype)
        found[..., offset : offset + weights.shape[-1]] = weights
        return found

    def tile(self, rows: tuple[int, int], keys: tuple[int, int], what: str = "tile") -> np.ndarray:
        """Weights of rows `rows[0]:rows[1]` for keys `keys[0]:keys[1]`, `[batch, heads, rows, keys]`. Needs `keep=True`, or an exact
        map."""
        (first, end), (left, right) = ((max(0, a), min(b, n)) for (a, b), n in ((rows, self.q_len), (keys, self.k_len)))
        if self.has_inputs:
            found = np.zeros((*self.shape, max(0, end - first), max(0, right - left)), self._lse(self._calls[0][2]).dtype)
            for at, offset, call in self.calls(first, end):
                begin, stop = max(first, at), min(end, at + call.q.shape[2])
                tile = HeadView(call, self._options.heads).tile((begin - at, stop - at), (max(0, left - offset), max(0, right - offset)))
                shift = max(0, offset - left)
                found[:, :, begin - first : stop - first, shift : shift + tile.shape[-1]] = tile
            return found
        if self.exact:
            return self.map[:, :, first:end, left:right]
        raise ValueError(
            f"{what}: not recorded in {self.kind} layer {self.layer}; "
            f"use capture(.., keep=True), rows=(..), or map={max(self.q_len, self.k_len)} for all weights"
        )

    def weights(self) -> np.ndarray:
        """All weights, `[batch, heads, rows, keys]`; at most 512 rows and keys."""
        if max(self.q_len, self.k_len) > SMALL:
            raise ValueError(
                f"weights: {self.kind} layer {self.layer} has {self.q_len} rows and {self.k_len} keys, more than {SMALL}; "
                f"use row() or tile()"
            )
        return self.tile((0, self.q_len), (0, self.k_len), "weights")

    def calls(self, first: int = 0, end: int | None = None) -> Iterable[tuple[int, int, Call]]:
        """Stored calls that contain any of these rows: first row, position of the first key, and the call."""
        at = 0
        for offset, k_len, call in self._calls:
            rows = call.q.shape[2]
            if at < (self.q_len if end is None else end) and at + rows > first:
                yield at, offset, call._replace(k=self.all_keys()[:, :, offset : offset + k_len])
            at += rows

    def all_keys(self) -> Any:
        """Stored keys, `[batch, kv_heads, keys, dim]`."""
        if len(self._keys) > 1:
            self._keys = [torch.cat(self._keys, 2)]
        return self._keys[0]
