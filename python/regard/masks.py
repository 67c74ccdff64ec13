"""Attention masks. Rules are combined with `&` (and) and `|` (or):

    causal() & window(4096)
    causal() & lengths([7, 5])
    causal() | prefix(10)

The option `align` of a call sets the key position of each row; causal masks, windows, blocks and strides are relative to it. All rules
except `bits` need O(length) memory.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import numpy as np

from . import _arrays

__all__ = [
    "Mask", "band", "bits", "blocks", "causal", "columns", "dilated", "fixed", "full", "global_", "keys", "lengths", "longformer", "of",
    "parse", "prefix", "ranges", "segments", "segments_between", "spans", "strided", "tree", "window",
]


class Mask:
    """A rule, or rules combined with `&` and `|`. `str(mask)` is its text; arrays are numbered `$0`, `$1`, .."""

    __slots__ = ("_either", "_parts")

    def __init__(self, parts: Sequence[Union[str, tuple[str, Any]]], either: bool = False):
        self._parts = tuple(parts)
        self._either = either

    def __and__(self, other: Mask) -> Mask:
        return Mask((*self._bracketed(), " & ", *_mask(other)._bracketed()))

    def __or__(self, other: Mask) -> Mask:
        return Mask((*self._parts, " | ", *_mask(other)._parts), either=True)

    def _bracketed(self) -> tuple[Any, ...]:
        return ("(", *self._parts, ")") if self._either else self._parts

    @property
    def arrays(self) -> list[tuple[str, Any]]:
        """Arrays of the mask, each with its name."""
        return [part for part in self._parts if not isinstance(part, str)]

    def text(self, first: int = 0) -> str:
        """Text of the mask, arrays numbered from `first` on."""
        written, number = [], first
        for part in self._parts:
            if isinstance(part, str):
                written.append(part)
            else:
                written.append("" if part[0] == "segments_k" else f"${number}")
                number += 1
        return "".join(written)

    def __repr__(self) -> str:
        return self.text()


def _mask(other: Any) -> Mask:
    if isinstance(other, str):
        return parse(other)
    if isinstance(other, Mask):
        return other
    raise TypeError(f"expected a mask or its text, found {type(other).__name__}; use regard.masks.bits for a boolean array")


def of(mask: Any) -> Mask:
    """Convert a mask, its text, or a boolean array to a `Mask`."""
    return mask if isinstance(mask, Mask) else parse(mask) if isinstance(mask, str) else bits(mask)


def parse(text: str) -> Mask:
    """Parse the text of a mask, such as `causal & (window 128 | dilated 128)`."""
    return Mask((" ".join(text.split()),), either="|" in text)


def _held(*arrays: tuple[str, Any]) -> Mask:
    return Mask([(name, _arrays.dense(_arrays.cast(array, "i64", name))) for name, array in arrays])


def full() -> Mask:
    """No mask: all keys are visible."""
    return parse("full")


def causal() -> Mask:
    """Causal mask: keys up to the row's position."""
    return parse("causal")


def window(keys: int) -> Mask:
    """Sliding window: keys at a distance less than `keys` from the row's position, in both directions."""
    return parse(f"window {_arrays.whole('window', keys)}")


def band(back: Optional[int], ahead: Optional[int]) -> Mask:
    """Keys from `back` before the row's position to `ahead` after it; `None` is unbounded."""
    bounds = ["all" if bound is None else _arrays.whole("band", bound) for bound in (back, ahead)]
    return parse(f"band {bounds[0]} {bounds[1]}")


def prefix(keys: int) -> Mask:
    """The first `keys` keys."""
    return parse(f"prefix {_arrays.whole('prefix', keys)}")


def lengths(lengths: Any) -> Mask:
    """Padding mask: keys before `lengths[b]`; `[batch]`, or `[1]` for all items."""
    return _held(("lengths", lengths))


def spans(spans: Any) -> Mask:
    """Keys `spans[b, 0]:spans[b, 1]`; `[batch, 2]`, or `[1, 2]` for all items."""
    return _held(("spans", spans))


def segments(documents: Any) -> Mask:
    """Keys of the same document as the row, by document ids `[k_len]` or `[batch, k_len]`."""
    return _held(("segments", documents))


def segments_between(q: Any, k: Any) -> Mask:
    """The same with separate document ids of the rows, `[q_len]` or `[batch, q_len]`."""
    return _held(("segments_q", q), ("segments_k", k))


def global_(positions: Any) -> Mask:
    """Global attention: rows at these positions attend to all keys, and all rows attend to these keys."""
    return _held(("global", positions))


def blocks(size: int) -> Mask:
    """Block-local attention: keys in the same block of `size` positions."""
    return parse(f"blocks {_arrays.whole('blocks', size)}")


def dilated(stride: int) -> Mask:
    """Keys at a distance that is a multiple of `stride`."""
    return parse(f"dilated {_arrays.whole('dilated', stride)}")


def columns(block: int, width: int) -> Mask:
    """The last `width` keys of each block of `block`."""
    return parse(f"columns {_arrays.whole('columns', block)} {_arrays.whole('columns', width)}")


def strided(stride: int) -> Mask:
    """Strided pattern of the Sparse Transformer (Child et al. 2019); usually combined with `causal`."""
    return parse(f"strided {_arrays.whole('strided', stride)}")


def fixed(block: int, summary: int) -> Mask:
    """Fixed pattern of the Sparse Transformer (Child et al. 2019); usually combined with `causal`."""
    return parse(f"fixed {_arrays.whole('fixed', block)} {_arrays.whole('fixed', summary)}")


def longformer(reach: int, positions: Any) -> Mask:
    """Longformer (Beltagy et al. 2020): a window of `reach`, and global positions."""
    return window(reach) | global_(positions)


def keys(lists: Any, row_block: int = 1) -> Mask:
    """The listed keys: attention over retrieved keys. `lists [batch or 1, heads or 1, rows, n]` are indices in any order, padded with -1. With
    `row_block`, a list is that of as many consecutive rows, and there are `ceil(q_len / row_block)`; heads may also be a divisor of the query heads,
    such as the key heads: then each list is that of a group of them. The cost of a call is proportional to the lists."""
    return _held((f"keys {_arrays.whole('row_block', row_block)}", lists))


def tree(parents: Any) -> Mask:
    """Speculative decoding: the last rows are draft tokens of a tree. `parents [tokens]`, or `[batch or 1, tokens]`, has the index of the parent of
    each, which comes before it, or -1 for a token that follows the context. A token attends to the keys before the first draft token, to its
    ancestors and to itself; rows before the draft tokens are causal."""
    return _held(("tree", parents))


def ranges(ranges: Any) -> Mask:
    """Up to n ranges of keys for each row, `[batch or 1, heads or 1, q_len or 1, n, 2]`: start (ascending) and end of each; empty ranges
    are skipped. Memory is O(q_len * n)."""
    return _held(("ranges", ranges))


def bits(visible: Any) -> Mask:
    """Boolean mask `[batch or 1, heads or 1, q_len or 1, k_len]`, True = visible."""
    visible = visible if _arrays.is_torch(visible) else np.asarray(visible)
    if _arrays.dtype_of(visible) != "bool":
        raise TypeError(f"expected a boolean array, True = visible; found {visible.dtype}")
    if visible.ndim > 4:
        raise ValueError(f"expected a mask with at most 4 axes, found {visible.ndim}")
    whole = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
    return Mask([("bits", _arrays.dense(whole))])
