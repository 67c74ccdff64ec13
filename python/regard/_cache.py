"""Decoding: keys and values of the past in pages, and attention over them where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from . import _arrays, _regard
from ._call import Options, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CachedAux(NamedTuple):
    """What a call over a cache has found beside its output, in the library of q."""

    lse: Any
    """`ln(sum of e^score)` of each row, `[sequences, heads, q_len]`; `[total, heads]` where q is packed."""
    entropy: Any
    """The entropy of each row's weights, if it was asked for."""
    max_score: Any
    """The largest score of each row, if the entropy was asked for."""


class KvCache:
    """The keys and values of many sequences, within a budget of bytes.

        cache = regard.KvCache(heads=2, qk_dim=64, v_dim=64, budget=1 << 30)
        sequence = cache.start()
        cache.append(sequence, k, v)             # [heads, n, dim]: a prompt, or the next position
        other = cache.fork(sequence)             # shares its pages until one of the two goes on
        out = cache.attention(q, [sequence, other], mask="causal")

    A sequence is known by the handle that :meth:`start` or :meth:`fork` returned. Nothing is allocated before it is needed. A call
    that fails changes nothing. Threads may share a cache.
    """

    def __init__(self, heads: int, qk_dim: int, v_dim: int, dtype: Any = "f32", budget: int = 1 << 30, *, page: int = 64):
        """`page` is the number of neighbouring positions that are allocated, shared and forgotten together."""
        self.heads, self.qk_dim, self.v_dim, self.page = heads, qk_dim, v_dim, page
        self._cache = _regard.Cache(_arrays.name_of(dtype), (heads, qk_dim, v_dim, page), budget)

    @property
    def dtype(self) -> str:
        """`f32`, `f64`, `f16` or `bf16`."""
        return self._cache.dtype

    def start(self) -> _regard.Sequence:
        """A new, empty sequence."""
        return self._cache.start()

    def append(self, sequence: _regard.Sequence, k: Any, v: Any) -> None:
        """Appends n positions: `k [heads, n, qk_dim]` and `v [heads, n, v_dim]`, or the same with a batch axis of 1."""
        k, v = (_arrays.rows(x if x.ndim != 3 else x[None]) for x in (k, v))
        self._cache.append(sequence, _arrays.memory(k), _arrays.memory(v))

    def fork(self, sequence: _regard.Sequence) -> _regard.Sequence:
        """A second sequence with the same positions, in the same pages."""
        return self._cache.fork(sequence)

    def truncate(self, sequence: _regard.Sequence, length: int) -> None:
        """Forgets the positions from `length` on."""
        self._cache.truncate(sequence, length)

    def evict(self, sequence: _regard.Sequence, before: int) -> int:
        """Forgets the whole pages before position `before`, as a sliding window does; returns the first position that is held."""
        return self._cache.evict(sequence, before)

    def free(self, sequence: _regard.Sequence) -> None:
        """Forgets a sequence. Its handle is stale from then on."""
        self._cache.free(sequence)

    def len(self, sequence: _regard.Sequence) -> int:
        """Positions of a sequence, with those that were evicted: the number of the next one."""
        return self._cache.len(sequence)

    def first(self, sequence: _regard.Sequence) -> int:
        """The first position that a sequence still holds; its length if it holds none."""
        return self._cache.first(sequence)

    def pages_held(self, sequence: _regard.Sequence) -> int:
        """Pages that a sequence holds, alone or with others."""
        return self._cache.pages_held(sequence)

    def shared_prefix(self, sequences: Sequence[_regard.Sequence]) -> range:
        """The positions that all these sequences hold in the very same pages, whole pages only."""
        return range(*self._cache.shared_prefix(list(sequences)))

    def row(self, sequence: _regard.Sequence, head: int, position: int) -> tuple[Any, Any]:
        """Copies of the key and the value of a head at a position, as NumPy arrays."""
        k, v = self._cache.row(sequence, head, position)
        return _arrays.numpy_of(k), _arrays.numpy_of(v)

    @property
    def bytes(self) -> int:
        """Bytes of all pages, in use or waiting to be used again."""
        return self._cache.bytes()[0]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the pages that sequences hold, shared ones once."""
        return self._cache.bytes()[1]

    @property
    def budget(self) -> int:
        """Bytes that all pages together may have."""
        return self._cache.bytes()[2]

    def attention(self, q: Any, sequences: Sequence[_regard.Sequence], *, return_aux: bool = False, **options: Unpack[Options]) -> Any:
        """Attention of `q [sequences, heads, q_len, qk_dim]` over what each sequence holds: `[sequences, heads, q_len, v_dim]`.

        Options are those of `regard.attention`. The last query of each sequence stands at its last position, unless `align` says
        otherwise; masks count keys from the first position that is still held. With `q_offsets`, q is `[total, heads, qk_dim]`.
        NumPy arrays, or PyTorch tensors without gradients.
        """
        if "k_offsets" in options:
            raise TypeError("k_offsets: the keys lie in the cache; leave it out")
        _arrays.without_gradients("KvCache.attention", q=q)
        call = describe(q := _arrays.rows(q), **options).beside(q)
        kept = self._cache.attention(call.native(q), list(sequences))
        out = _arrays.like(q, kept.out)
        if not return_aux:
            return out
        found = (kept.lse, kept.entropy, kept.max_score)
        return out, CachedAux(*(None if x is None else _arrays.like(q, x) for x in found))
