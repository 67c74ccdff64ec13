"""Paged KV cache for decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Sequence

from . import _arrays, _regard
from ._call import Options, describe

if TYPE_CHECKING:
    from typing_extensions import Unpack


_IN_8_BITS = {"int8": "int8", "fp8_e4m3": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3"}


class CachedAux(NamedTuple):
    """Results of a call over a KV cache besides the output, in the library of q."""

    lse: Any
    """Log-sum-exp of the scores of each query, `[sequences, heads, q_len]`; `[total, heads]` if q is packed."""
    entropy: Any
    """Entropy of the weights of each query, with `entropy=True`; else None."""
    max_score: Any
    """Largest score of each query, with `entropy=True`; else None."""


class KvCache:
    """Paged KV cache for many sequences, with a byte budget.

        cache = regard.KvCache(heads=2, qk_dim=64, v_dim=64, budget=1 << 30)
        sequence = cache.start()
        cache.append(sequence, k, v)             # [heads, n, dim]: prompt or next token
        other = cache.fork(sequence)             # shares pages (copy-on-write)
        out = cache.attention(q, [sequence, other], mask="causal")

    :meth:`start` and :meth:`fork` return the handle of a sequence. Pages are allocated on demand. A call that raises leaves the cache
    unchanged. A cache is thread-safe.
    """

    def __init__(
        self,
        heads: int,
        qk_dim: int,
        v_dim: int,
        dtype: Any = "f32",
        budget: int = 1 << 30,
        *,
        page: int = 64,
        quantization: str | None = None,
        latent: bool = False,
    ):
        """`page`: positions per page, the unit of allocation, sharing and eviction. `budget`: maximum bytes of all pages. `dtype`: type of
        k, v, q and outputs. `quantization`: how pages store numbers if in 8 bits: `int8` (one scale for each key and value of a head) or
        `fp8_e4m3` (`float8_e4m3fn`, no scale, saturating); attention is exact for the numbers that are stored. `latent`: values are the
        first `v_dim` features of their keys and take no memory (MLA).
        """
        name = _arrays.name_of(dtype)
        if name in _IN_8_BITS:
            raise TypeError(f"dtype: {name} is how pages store numbers; give quantization={_IN_8_BITS[name]!r}, and as dtype that of k, v and q")
        self.heads, self.qk_dim, self.v_dim, self.page = heads, qk_dim, v_dim, page
        self._cache = _regard.Cache(name, (heads, qk_dim, v_dim, page), budget, quantization, latent)

    @property
    def dtype(self) -> str:
        """Type of k, v, q and outputs: `f32`, `f64`, `f16` or `bf16`."""
        return self._cache.dtype

    @property
    def quantization(self) -> str | None:
        """How pages store numbers in 8 bits: `int8` or `fp8_e4m3`; None if as `dtype`."""
        return self._cache.quantization

    def start(self) -> _regard.Sequence:
        """Start an empty sequence."""
        return self._cache.start()

    def append(self, sequence: _regard.Sequence, k: Any, v: Any = None) -> None:
        """Append n positions: `k [heads, n, qk_dim]` and `v [heads, n, v_dim]`, or the same with a batch axis of 1. No `v` for a latent cache."""
        k, v = (None if x is None else _arrays.rows(x if x.ndim != 3 else x[None]) for x in (k, v))
        self._cache.append(sequence, _arrays.memory(k), None if v is None else _arrays.memory(v))

    def fork(self, sequence: _regard.Sequence) -> _regard.Sequence:
        """Fork a sequence: the copy shares its pages."""
        return self._cache.fork(sequence)

    def truncate(self, sequence: _regard.Sequence, length: int) -> None:
        """Remove the positions from `length` on."""
        self._cache.truncate(sequence, length)

    def evict(self, sequence: _regard.Sequence, before: int) -> int:
        """Evict whole pages before position `before` (sliding window). Returns the first position that remains."""
        return self._cache.evict(sequence, before)

    def free(self, sequence: _regard.Sequence) -> None:
        """Free a sequence. Its handle becomes invalid."""
        self._cache.free(sequence)

    def len(self, sequence: _regard.Sequence) -> int:
        """Length of a sequence including evicted positions: the index of the next position."""
        return self._cache.len(sequence)

    def first(self, sequence: _regard.Sequence) -> int:
        """First position that is not evicted; the length if there is none."""
        return self._cache.first(sequence)

    def pages_held(self, sequence: _regard.Sequence) -> int:
        """Number of pages of a sequence, exclusive and shared."""
        return self._cache.pages_held(sequence)

    def shared_prefix(self, sequences: Sequence[_regard.Sequence]) -> range:
        """Positions that all these sequences store in the same pages; whole pages only."""
        return range(*self._cache.shared_prefix(list(sequences)))

    def row(self, sequence: _regard.Sequence, head: int, position: int) -> tuple[Any, Any]:
        """Key and value of one head at one position: copies, as NumPy arrays; with `quantization`, the numbers stored, in f32."""
        k, v = self._cache.row(sequence, head, position)
        return _arrays.numpy_of(k), _arrays.numpy_of(v)

    @property
    def bytes(self) -> int:
        """Bytes of all allocated pages, used and free."""
        return self._cache.bytes()[0]

    @property
    def bytes_in_use(self) -> int:
        """Bytes of used pages; a shared page counts once."""
        return self._cache.bytes()[1]

    @property
    def budget(self) -> int:
        """Maximum bytes of all pages."""
        return self._cache.bytes()[2]

    def attention(self, q: Any, sequences: Sequence[_regard.Sequence], *, return_aux: bool = False, **options: Unpack[Options]) -> Any:
        """Attention of `q [sequences, heads, q_len, qk_dim]` over the cached keys of each sequence: `[sequences, heads, q_len, v_dim]`.

        Options are those of `regard.attention`. By default the last query of each sequence is aligned with its last position (`align`);
        masks count keys from the first position that is not evicted. With `q_offsets`, q is `[total, heads, qk_dim]`. NumPy arrays, or
        PyTorch tensors without gradients.
        """
        if "k_offsets" in options:
            raise TypeError("k_offsets: not an option of KvCache.attention, the cache stores the lengths; leave it out")
        _arrays.without_gradients("KvCache.attention", q=q)
        call = describe(q := _arrays.rows(q), **options).beside(q)
        kept = self._cache.attention(call.native(q), list(sequences))
        out = _arrays.like(q, kept.out)
        if not return_aux:
            return out
        found = (kept.lse, kept.entropy, kept.max_score)
        return out, CachedAux(*(None if x is None else _arrays.like(q, x) for x in found))
