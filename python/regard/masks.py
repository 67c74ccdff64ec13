"""Who may see whom. Rules are values, joined by `&` (both) and `|` (either):

    causal() & window(4096)
    causal() & lengths([7, 5])
    causal() | prefix(10)

Row `i` stands at a position among the keys, which `align` of a call says; causal, windows, blocks and strides go by it. No rule but
`bits` holds more than a few numbers for each position.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import numpy as np

from . import _arrays

__all__ = [
    "Mask", "band", "bits", "blocks", "causal", "columns", "dilated", "fixed", "full", "global_", "lengths", "longformer", "of", "parse",
    "prefix", "ranges", "segments", "segments_between", "spans", "strided", "window",
]


class Mask:
    """A rule, or rules joined by `&` and `|`. `str(mask)` is its text; arrays in it are numbered `$0`, `$1`, .."""

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
        """The arrays that it holds, each with what it is called."""
        return [part for part in self._parts if not isinstance(part, str)]

    def text(self, first: int = 0) -> str:
        """The rules, with arrays numbered from `first` on."""
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
    raise TypeError(f"expected a mask or its text, found {type(other).__name__}; regard.masks.bits makes a mask of booleans")


def of(mask: Any) -> Mask:
    """A mask from a mask, its text, or booleans."""
    return mask if isinstance(mask, Mask) else parse(mask) if isinstance(mask, str) else bits(mask)


def parse(text: str) -> Mask:
    """A mask from its text, as `causal & (window 128 | dilated 128)`."""
    return Mask((" ".join(text.split()),), either="|" in text)


def _held(*arrays: tuple[str, Any]) -> Mask:
    return Mask([(name, _arrays.dense(_arrays.cast(array, "i64", name))) for name, array in arrays])


def full() -> Mask:
    """Everything sees everything."""
    return parse("full")


def causal() -> Mask:
    """A row sees the keys up to its own position."""
    return parse("causal")


def window(keys: int) -> Mask:
    """Keys less than `keys` away from the row's position, which counts as the first."""
    return parse(f"window {_arrays.whole('window', keys)}")


def band(back: Optional[int], ahead: Optional[int]) -> Mask:
    """Keys from `back` before the row's position to `ahead` after it; `None` is without bound."""
    bounds = ["all" if bound is None else _arrays.whole("band", bound) for bound in (back, ahead)]
    return parse(f"band {bounds[0]} {bounds[1]}")


def prefix(keys: int) -> Mask:
    """The first `keys` keys."""
    return parse(f"prefix {_arrays.whole('prefix', keys)}")


def lengths(lengths: Any) -> Mask:
    """Keys before `lengths[b]`: `[batch]`, or `[1]` for all items."""
    return _held(("lengths", lengths))


def spans(spans: Any) -> Mask:
    """Keys from `spans[b, 0]` to before `spans[b, 1]`: `[batch, 2]`, or `[1, 2]` for all items."""
    return _held(("spans", spans))


def segments(documents: Any) -> Mask:
    """Keys of the row's own document, named for each key: `[k_len]` or `[batch, k_len]`."""
    return _held(("segments", documents))


def segments_between(q: Any, k: Any) -> Mask:
    """The same with documents named for each row too: `[q_len]` or `[batch, q_len]`."""
    return _held(("segments_q", q), ("segments_k", k))


def global_(positions: Any) -> Mask:
    """Positions that see every key, and that every row sees."""
    return _held(("global", positions))


def blocks(size: int) -> Mask:
    """Keys of the row's own block of `size` positions."""
    return parse(f"blocks {_arrays.whole('blocks', size)}")


def dilated(stride: int) -> Mask:
    """Keys at a distance that is a multiple of `stride`."""
    return parse(f"dilated {_arrays.whole('dilated', stride)}")


def columns(block: int, width: int) -> Mask:
    """The last `width` keys of each block of `block`."""
    return parse(f"columns {_arrays.whole('columns', block)} {_arrays.whole('columns', width)}")


def strided(stride: int) -> Mask:
    """The strided pattern of Child et al. 2019; usually joined with `causal`."""
    return parse(f"strided {_arrays.whole('strided', stride)}")


def fixed(block: int, summary: int) -> Mask:
    """The fixed pattern of Child et al. 2019; usually joined with `causal`."""
    return parse(f"fixed {_arrays.whole('fixed', block)} {_arrays.whole('fixed', summary)}")


def longformer(reach: int, positions: Any) -> Mask:
    """Keys less than `reach` away, and global positions (Beltagy et al. 2020)."""
    return window(reach) | global_(positions)


def ranges(ranges: Any) -> Mask:
    """For each row a few ranges of keys, `[batch or 1, heads or 1, q_len or 1, n, 2]`: where each begins, ascending, and where it ends;
    empty ones are skipped. Any mask whose rows see few stretches of keys, in memory for the rows alone."""
    return _held(("ranges", ranges))


def bits(visible: Any) -> Mask:
    """Any pairs at all, booleans `[batch or 1, heads or 1, q_len or 1, k_len]`: `True` may see."""
    visible = visible if _arrays.is_torch(visible) else np.asarray(visible)
    if _arrays.dtype_of(visible) != "bool":
        raise TypeError(f"expected booleans, True where a row may see a key; found {visible.dtype}")
    if visible.ndim > 4:
        raise ValueError(f"expected at most 4 axes, found {visible.ndim}")
    whole = visible.reshape((1,) * (4 - visible.ndim) + tuple(visible.shape))
    return Mask([("bits", _arrays.dense(whole))])
