"""`regard.KvCache`: what a sequence holds, within its budget, and attention over it."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import masks

HEADS, DIM, V_DIM = 2, 16, 8
PAGE_BYTES = 64 * HEADS * (DIM + V_DIM) * 4


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def past(n, dtype=np.float32, seed=0):
    """Keys and values of n positions."""
    return normal(HEADS, n, DIM, dtype=dtype, seed=seed), normal(HEADS, n, V_DIM, dtype=dtype, seed=seed + 100)


def filled(lengths, dtype=np.float32, **options):
    """A cache with a sequence of each length, their handles, keys and values."""
    cache = regard.KvCache(HEADS, DIM, V_DIM, dtype=options.pop("name", "f32"), budget=1 << 22, **options)
    sequences, pasts = [], [past(n, dtype, seed) for seed, n in enumerate(lengths)]
    for k, v in pasts:
        sequences.append(cache.start())
        cache.append(sequences[-1], k, v)
    return cache, sequences, pasts


@pytest.mark.parametrize(
    "dtype, name", [(np.float32, "f32"), (np.float64, np.float64), (np.float16, "float16"), (ml_dtypes.bfloat16, "bf16")]
)
def test_attention_over_a_cache_is_that_over_tensors(dtype, name):
    lengths = [1, 63, 64, 150]
    cache, sequences, pasts = filled(lengths, dtype, name=name)
    for q_len in (1, 5):
        q = normal(4, 4, q_len, DIM, dtype=dtype, seed=9)
        out, aux = cache.attention(q, sequences, mask="causal & window 70", softcap=5.0, entropy=True, return_aux=True)
        assert out.dtype == dtype and out.shape == (4, 4, q_len, V_DIM)
        for i, (k, v) in enumerate(pasts):
            alone, of_it = regard.attention(
                q[i : i + 1], k[None], v[None], mask="causal & window 70", softcap=5.0, entropy=True, return_aux=True
            )
            close = {"f4": 1e-6, "f8": 1e-13}.get(np.dtype(dtype).str[1:], 2e-2)
            assert np.abs((out[i] - alone[0]).astype(np.float64)).max() < close
            for name_of in ("lse", "entropy", "max_score"):
                assert np.allclose(getattr(aux, name_of)[i], getattr(of_it, name_of)[0], atol=1e-5), name_of


@pytest.mark.parametrize("quantization, page_bytes", [("int8", 64 * HEADS * (DIM + V_DIM + 8)), ("fp8_e4m3", 64 * HEADS * (DIM + V_DIM))])
@pytest.mark.parametrize("dtype, name", [(np.float32, "f32"), (np.float16, "f16"), (ml_dtypes.bfloat16, "bf16")])
def test_a_cache_in_8_bits_is_exact_for_the_numbers_it_stores(quantization, page_bytes, dtype, name):
    lengths = [1, 63, 150]
    cache, sequences, pasts = filled(lengths, dtype, name=name, quantization=quantization)
    assert (cache.dtype, cache.quantization, cache.bytes_in_use) == (name, quantization, 5 * page_bytes)
    for q_len in (1, 5):
        q = normal(3, 4, q_len, DIM, dtype=dtype, seed=9)
        out = cache.attention(q, sequences, mask="causal")
        assert out.dtype == dtype
        for i, (k, v) in enumerate(pasts):
            rows = [[cache.row(sequences[i], head, at) for at in range(k.shape[1])] for head in range(HEADS)]
            stored = [np.stack([[row[part] for row in head] for head in rows]) for part in (0, 1)]
            assert stored[0].dtype == np.float32
            if quantization == "fp8_e4m3":
                for x, numbers in zip((k, v), stored):
                    assert np.array_equal(x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), numbers)
            else:
                largest = [np.abs(x.astype(np.float32)).max(-1, keepdims=True) for x in (k, v)]
                errors = [np.abs(x.astype(np.float32) - numbers) for x, numbers in zip((k, v), stored)]
                assert all((error <= size / 253.9).all() for error, size in zip(errors, largest))
            alone = regard.attention(q[i : i + 1].astype(np.float32), *(x[None] for x in stored), mask="causal")
            assert np.array_equal(alone[0].astype(dtype), out[i])


def test_a_prompt_may_come_in_chunks():
    k, v = past(200)
    q = normal(1, 4, 200, DIM, seed=9)
    expected = regard.attention(q, k[None], v[None], mask="causal")
    cache = regard.KvCache(HEADS, DIM, V_DIM)
    sequence, done = cache.start(), 0
    for n in (1, 70, 64, 1, 0, 64):
        chunk = slice(done, done + n)
        cache.append(sequence, k[:, chunk], v[:, chunk])
        found = cache.attention(q[:, :, chunk], [sequence], mask="causal")
        assert np.abs(found - expected[:, :, chunk]).max(initial=0) < 1e-6
        done += n
        assert cache.len(sequence) == done


def test_what_is_appended_may_lie_anyhow():
    k, v = past(10)
    cache = regard.KvCache(HEADS, DIM, V_DIM)
    ways = [
        (k, v),
        (k[None], v[None]),
        (np.ascontiguousarray(k.swapaxes(0, 1)).swapaxes(0, 1), np.repeat(v, 2, axis=-1)[..., ::2]),
        (k[:, ::-1][:, ::-1], np.asfortranarray(v)),
    ]
    for k_as, v_as in ways:
        sequence = cache.start()
        cache.append(sequence, k_as, v_as)
        for head, position in ((0, 0), (1, 9)):
            key, value = cache.row(sequence, head, position)
            assert np.array_equal(key, k[head, position]) and np.array_equal(value, v[head, position])


def test_a_fork_shares_pages_until_one_of_the_two_goes_on():
    cache, (sequence,), ((k, v),) = filled([150])
    assert cache.bytes_in_use == 3 * PAGE_BYTES == cache.bytes
    fork = cache.fork(sequence)
    assert fork != sequence and cache.bytes_in_use == 3 * PAGE_BYTES
    assert cache.shared_prefix([sequence, fork]) == range(0, 128)
    cache.append(fork, *past(1, seed=7))
    assert cache.bytes_in_use == 4 * PAGE_BYTES and (cache.len(sequence), cache.len(fork)) == (150, 151)
    assert np.array_equal(cache.row(sequence, 0, 149)[0], k[0, 149]) and np.array_equal(cache.row(fork, 0, 149)[0], k[0, 149])
    q = normal(2, 4, 1, DIM, seed=9)
    longer = [np.concatenate([x, y], axis=1)[None] for x, y in zip((k, v), past(1, seed=7))]
    out = cache.attention(q, [sequence, fork])
    assert np.abs(out[:1] - regard.attention(q[:1], k[None], v[None])).max() < 1e-6
    assert np.abs(out[1:] - regard.attention(q[1:], *longer)).max() < 1e-6


def test_positions_are_forgotten_at_both_ends():
    cache, (sequence,), ((k, v),) = filled([200])
    cache.truncate(sequence, 190)
    assert cache.evict(sequence, 140) == 128 == cache.first(sequence) and cache.len(sequence) == 190
    assert cache.pages_held(sequence) == 1 and cache.bytes_in_use == PAGE_BYTES and cache.bytes == 4 * PAGE_BYTES
    q = normal(1, 4, 3, DIM, seed=9)
    held = (k[None, :, 128:190], v[None, :, 128:190])
    assert np.abs(cache.attention(q, [sequence], mask="causal") - regard.attention(q, *held, mask="causal")).max() < 1e-6
    with pytest.raises(ValueError, match="truncate: 100 was evicted; give 128 or more"):
        cache.truncate(sequence, 100)
    with pytest.raises(ValueError, match="position: 5 was evicted"):
        cache.row(sequence, 0, 5)


def test_masks_for_single_keys_fit_what_is_held():
    cache, sequences, pasts = filled([9, 9])
    q = normal(2, 4, 3, DIM, seed=9)
    k, v = (np.stack([past[i] for past in pasts]) for i in (0, 1))
    visible = np.random.default_rng(1).random((2, 1, 3, 9)) < 0.6
    bias = normal(1, 4, 3, 9, seed=3)
    for options in ({"mask": visible}, {"bias": bias}, {"mask": masks.ranges([[[[[2, 5]]]]])}, {"mask": visible[:, :, :1]}):
        assert np.abs(cache.attention(q, sequences, **options) - regard.attention(q, k, v, **options)).max() < 1e-6
    with pytest.raises(ValueError, match="keys: the mask has 8, k has 9"):
        cache.attention(q, sequences, mask=visible[..., :8])


def test_queries_may_be_packed():
    cache, sequences, pasts = filled([70, 12, 90])
    q, offsets = normal(9, 4, DIM, seed=9), [0, 1, 6, 9]
    out, aux = cache.attention(q, sequences, mask="causal", q_offsets=offsets, return_aux=True)
    assert out.shape == (9, 4, V_DIM) and aux.lse.shape == (9, 4)
    for i, (k, v) in enumerate(pasts):
        rows = slice(offsets[i], offsets[i + 1])
        alone = regard.attention(q[rows].swapaxes(0, 1)[None], k[None], v[None], mask="causal")
        assert np.abs(out[rows].swapaxes(0, 1) - alone[0]).max() < 1e-6


def test_the_budget_is_kept_and_freed_pages_are_used_again():
    cache = regard.KvCache(HEADS, DIM, V_DIM, budget=2 * PAGE_BYTES + 100)
    assert cache.bytes == 0 and cache.budget == 2 * PAGE_BYTES + 100 and cache.dtype == "f32"
    first, second = cache.start(), cache.start()
    cache.append(first, *past(64))
    cache.append(second, *past(64))
    with pytest.raises(ValueError, match=f"{3 * PAGE_BYTES} bytes needed, the budget is {2 * PAGE_BYTES + 100}"):
        cache.append(first, *past(1))
    assert cache.len(first) == 64
    cache.free(second)
    assert cache.bytes_in_use == PAGE_BYTES and cache.bytes == 2 * PAGE_BYTES
    cache.append(first, *past(1))
    with pytest.raises(ValueError, match="freed, or of another"):
        cache.len(second)
    assert cache.start() != second


def test_a_smaller_page_wastes_less():
    cache, (sequence,), _ = filled([9], page=4)
    assert cache.pages_held(sequence) == 3 and cache.bytes_in_use == 3 * PAGE_BYTES // 16


def test_a_latent_cache_stores_keys_only():
    cache = regard.KvCache(1, DIM, V_DIM, budget=1 << 20, latent=True)
    sequence, latent = cache.start(), normal(1, 150, DIM)
    cache.append(sequence, latent)
    assert cache.bytes == 3 * 64 * DIM * 4
    k, v = cache.row(sequence, 0, 149)
    assert np.array_equal(k, latent[0, 149]) and np.array_equal(v, latent[0, 149, :V_DIM])
    q = normal(1, 16, 3, DIM, seed=9)
    for mask in ("causal", masks.tree([-1, 0, 0]), masks.keys([[[[3, 140, -1], [9, 2, 1], [0, -1, -1]]]])):
        out = cache.attention(q, [sequence], mask=mask)
        assert np.array_equal(out, regard.attention(q, latent[None], latent[None, ..., :V_DIM], mask=mask))
    with pytest.raises(ValueError, match="append_keys"):
        cache.append(sequence, latent, latent[..., :V_DIM])
    with pytest.raises(ValueError, match="features of v: 17"):
        regard.KvCache(1, DIM, DIM + 1, latent=True)


@pytest.mark.parametrize("quantization, page_bytes", [("int8", 64 * (DIM + 4)), ("fp8_e4m3", 64 * DIM)])
def test_a_latent_cache_in_8_bits_is_exact_for_the_numbers_it_stores(quantization, page_bytes):
    cache = regard.KvCache(1, DIM, V_DIM, quantization=quantization, latent=True)
    sequence = cache.start()
    cache.append(sequence, normal(1, 150, DIM))
    assert cache.bytes == 3 * page_bytes
    k, v = (np.stack(rows)[None, None] for rows in zip(*(cache.row(sequence, 0, at) for at in range(150))))
    assert np.array_equal(v, k[..., :V_DIM])
    q = normal(1, 16, 3, DIM, seed=9)
    for mask in ("causal", masks.tree([-1, 0, 0]), masks.keys([[[[3, 140, -1], [9, 2, 1], [0, -1, -1]]]])):
        assert np.array_equal(cache.attention(q, [sequence], mask=mask), regard.attention(q, k, v, mask=mask))


def test_drafts_of_sequences_of_different_lengths_are_trees_of_their_own():
    cache, sequences, pasts = filled([70, 5, 150])
    q, parents = normal(3, 4, 4, DIM, seed=9), np.array([[-1, 0, 0, 1], [-1, -1, 0, 2], [-1, 0, 1, 2]])
    out = cache.attention(q, sequences, mask=masks.tree(parents))
    for i, (k, v) in enumerate(pasts):
        alone = regard.attention(q[i : i + 1], k[None], v[None], mask=masks.tree(parents[i]))
        assert np.array_equal(out[i], alone[0])


def test_handles_are_names():
    cache, sequences, _ = filled([3, 4])
    assert len({*sequences, sequences[0]}) == 2
    other, same, _ = filled([3, 4])
    assert same == sequences, "layers of a model may share handles"
    assert other.len(sequences[1]) == 4


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda cache, s: cache.append(s, *reversed(past(3))), "features: k has 8, the cache has 16"),
        (lambda cache, s: cache.append(s, past(3)[0], past(4)[1]), "keys: k has 3, v has 4"),
        (lambda cache, s: cache.append(s, *(x[:1] for x in past(3))), "heads: k has 1, the cache has 2"),
        (lambda cache, s: cache.append(s, *past(3, np.float64)), "k: expected f32, found f64"),
        (lambda cache, s: cache.append(s, *(np.stack([x, x]) for x in past(3))), "batch: k has 2, a sequence has 1"),
        (lambda cache, s: cache.attention(normal(1, 3, 1, DIM), [s]), "heads: q has 3, k and v have 2"),
        (lambda cache, s: cache.attention(normal(2, 4, 1, DIM), [s]), "batch: q has 2, k has 1"),
        (lambda cache, s: cache.attention(normal(1, 4, 1, DIM).astype(np.float64), [s]), "q: expected f32, found f64"),
        (lambda cache, s: cache.attention(normal(1, 4, 1, DIM), [s], k_offsets=[0, 1]), "k_offsets: not an option of KvCache.attention"),
        (lambda cache, s: cache.attention(normal(1, 4, 1, DIM), [s], windows=3), "windows"),
        (lambda cache, s: cache.attention(normal(1, 4, 1, DIM), s), "not iterable"),
        (lambda cache, s: cache.truncate(s, 11), "truncate: 11 is out of range; give a value below 11"),
        (lambda cache, s: cache.row(s, 2, 0), "head: 2 is out of range"),
        (lambda cache, s: regard.KvCache(0, 1, 1), "heads: 0"),
        (lambda cache, s: regard.KvCache(1, 0, 1), "features: k has 0"),
        (lambda cache, s: regard.KvCache(1, 1, 1, "int8"), "dtype: int8 is how pages store numbers; give quantization='int8'"),
        (lambda cache, s: regard.KvCache(1, 1, 1, "i64"), "expected f32, f64, f16 or bf16, found i64"),
        (lambda cache, s: regard.KvCache(1, 1, 1, quantization="int4"), "quantization: expected int8 or fp8_e4m3, found int4"),
        (lambda cache, s: regard.KvCache(1, 1, 1, "f64", quantization="int8"), "int8: .* computed in f32, not in f64"),
    ],
)
def test_errors_say_what_is_wrong(wrong, message):
    cache, (sequence,), _ = filled([10])
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(cache, sequence)
    assert cache.len(sequence) == 10


def test_threads_may_share_a_cache():
    cache, sequences, pasts = filled([100, 100, 100, 100])
    q = normal(1, 4, 1, DIM, seed=9)
    expected = [regard.attention(q, k[None], v[None]) for k, v in pasts]
    wrong = []

    def decode(i):
        for step in range(30):
            twin = cache.fork(sequences[i])
            if np.abs(cache.attention(q, [twin]) - expected[i]).max() > 1e-6:
                wrong.append((i, step))
            cache.append(twin, *past(3))
            cache.free(twin)

    workers = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert not wrong and cache.bytes_in_use == 8 * PAGE_BYTES


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16"])
def test_tensors_of_torch_stay_tensors(name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    cache = regard.KvCache(HEADS, DIM, V_DIM, dtype=dtype)
    k, v, q = (torch.randn(*shape).to(dtype) for shape in ((70, HEADS, DIM), (70, HEADS, V_DIM), (1, 4, 2, DIM)))
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    sequence = cache.start()
    cache.append(sequence, k, v)
    out, aux = cache.attention(q, [sequence], mask="causal", entropy=True, return_aux=True)
    assert out.dtype == dtype and torch.is_tensor(aux.lse) and torch.is_tensor(aux.entropy)
    from regard.torch import attention

    expected = attention(q, k[None], v[None], mask="causal")
    assert (out - expected).abs().max() < (1e-5 if name in ("float32", "float64") else 2e-2)
    with pytest.raises(TypeError, match="q: requires a gradient, but KvCache.attention has no backward pass"):
        cache.attention(q.clone().requires_grad_(), [sequence])
    with torch.no_grad():
        found = cache.attention(q.clone().requires_grad_(), [sequence], mask="causal", entropy=True)
    assert torch.equal(found, out)
