"""Attention weights of a call, recomputed row by row without the full matrix."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from . import _arrays, _regard, masks
from ._call import Call, Options, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionView:
    """Attention weights of a call, recomputed on request from q, k and the log-sum-exp.

    `known` is the `aux` of the call, or its lse; options are those of the call. Results are NumPy arrays whose first axis is
    `batch * heads`, or 1 after :meth:`head`. Needs no memory besides the results.
    """

    def __init__(self, q: Any, k: Any, known: Any, **options: Unpack[Options]):
        call = describe(q := _arrays.rows(q), **options)
        self._of(call, (q, _arrays.rows(k)), known, {})

    def _of(self, call: Call, tensors: tuple[Any, ...], known: Any, where: dict[str, Any]) -> AttentionView:
        self._call, self._tensors, self._where = call, tensors, where
        kept = getattr(known, "_kept", None)
        if kept is None and hasattr(known, "lse"):
            known = known.lse
        self._known = known if kept is None else kept
        if kept is None and not isinstance(known, _regard.SavedForward):
            known = known.detach() if _arrays.is_torch(known) else known
            self._known = _arrays.dense(_arrays.cast(known, _arrays.number_of(tensors[0]), "lse"))
        return self

    def _narrowed(self, **where: Any) -> AttentionView:
        return AttentionView.__new__(AttentionView)._of(self._call, self._tensors, self._known, {**self._where, **where})

    def head(self, batch: int, head: int) -> AttentionView:
        """Select one head of one batch item."""
        return self._narrowed(head=[_arrays.count("batch", batch), _arrays.count("head", head)])

    def rows(self, start: int, stop: int) -> AttentionView:
        """Select queries `start:stop`."""
        return self._narrowed(rows=[_arrays.count("rows", start), _arrays.count("rows", stop)])

    def every(self, step: int) -> AttentionView:
        """Select every `step`-th query."""
        return self._narrowed(every=_arrays.count("every", step))

    def measure(self, *, mass: Any = (), **stats: Any) -> dict[str, np.ndarray]:
        """Several statistics in one pass over the weights: `entropy=True, mean_distance=True, col_sum=True, top_k=8,
        pooled=(64, 64, "mean"), sink_mass=True, keys=(0, 100), mass=[masks], spans=[(0, 40)]`."""
        call, texts = self._call, []
        for mask in mass:
            mask = masks.of(mask)
            texts.append(mask.text(len(call.held)))
            options = json.loads(call.text)
            options["held"] += [name for name, _ in mask.arrays]
            call = Call(json.dumps(options), call.learned, call.held + [x for _, x in mask.arrays])
        question = {**self._where, **stats, "mass": texts}
        known = self._known if isinstance(self._known, _regard.SavedForward) else _arrays.memory(self._known)
        found = _regard.look(call.native(*self._tensors), known, json.dumps(question))
        return {name: _arrays.numpy_of(x) for name, x in found.items()}

    def tile(self, rows: tuple[int, int], keys: tuple[int, int]) -> np.ndarray:
        """Weights of queries `rows[0]:rows[1]` for keys `keys[0]:keys[1]`, `[heads, rows, keys]`."""
        ends = [[_arrays.count(name, end) for end in ends] for name, ends in (("rows", rows), ("keys", keys))]
        return self.measure(tile=ends)["tile"]

    def row(self, row: int) -> np.ndarray:
        """Weights of one query for all keys, `[heads, k_len]`; -1 is the last query."""
        q_len, k_len = self._length("q_offsets", 0), self._length("k_offsets", 1)
        if not -q_len <= row < q_len:
            raise IndexError(f"row {row}: out of range, there are {q_len} queries")
        row %= q_len
        return self.tile((row, row + 1), (0, k_len))[:, 0]

    def _length(self, offsets: str, tensor: int) -> int:
        """Number of queries or keys; of the selected item if packed."""
        held = json.loads(self._call.text)["held"]
        if offsets not in held:
            return self._tensors[tensor].shape[-2]
        if "head" not in self._where:
            raise ValueError("packed: the lengths of the items differ; choose one with head(batch, head)")
        ends, item = self._call.held[held.index(offsets)], self._where["head"][0]
        return int(ends[item + 1] - ends[item])

    def pooled(self, rows: int, cols: int, pool: str = "mean") -> np.ndarray:
        """Attention map pooled to at most `rows x cols` cells, `[heads, rows, cols]`: `"mean"`, `"max"` or `"sum"` of each cell."""
        return self.measure(pooled=[_arrays.count("rows", rows), _arrays.count("cols", cols), pool])["pooled"]

    def top_k(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys with the k largest weights of each query, and the weights, `[heads, rows, k]`; key -1 if fewer are visible."""
        found = self.measure(top_k=_arrays.count("top_k", k))
        return found["top_keys"], found["top_weights"]

    def entropy(self) -> np.ndarray:
        """Entropy of the weights of each query, `[heads, rows]`."""
        return self.measure(entropy=True)["entropy"]

    def col_sum(self) -> np.ndarray:
        """Attention that each key receives, summed over queries, `[heads, k_len]`."""
        return self.measure(col_sum=True)["col_sum"]

    def mean_distance(self) -> np.ndarray:
        """Mean attention distance of each query, `[heads, rows]`."""
        return self.measure(mean_distance=True)["mean_distance"]

    def mass(self, mask: Any) -> np.ndarray:
        """Attention mass of each query inside a mask, `[heads, rows]`."""
        return self.measure(mass=[mask])["mass 0"]

    def span_mass(self, *spans: tuple[int, int]) -> np.ndarray:
        """Attention mass of each query on the keys `start:stop` of each span, `[heads, rows, spans]`."""
        return self.measure(spans=[[_arrays.count("spans", end) for end in span] for span in spans])["span_mass"]

    def sink_mass(self) -> np.ndarray:
        """Attention mass of the sink, for each query, `[heads, rows]`."""
        return self.measure(sink_mass=True)["sink_mass"]
