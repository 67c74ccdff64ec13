"""The NumPy front end: memory, types, errors, threads, packing, and the helpers around attention."""

from __future__ import annotations

import ast
import gc
import inspect
import multiprocessing
import pathlib
import random
import sys
import threading
import time
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import _call, _regard, masks

BF16 = ml_dtypes.bfloat16


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def definition(q, k, v, visible=None, scale=None):
    """Attention in f64, one matrix at a time; key heads serve several query heads."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    most = np.max(scores, axis=-1, keepdims=True, initial=-1e300)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    with np.errstate(divide="ignore"):
        return weights @ v, np.log(total[..., 0]) + most[..., 0]


# -- memory ----------------------------------------------------------------------------------------------------------------------------


def layouts(x):
    """The same numbers in memory in several ways that the engine reads as they are."""
    wide = np.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), np.nan, x.dtype)
    wide[..., 1:-2, 2:-3] = x
    fixed = x.copy()
    fixed.flags.writeable = False
    return {
        "dense": x,
        "by position": np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "heads outside": np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1),
        "slice": wide[..., 1:-2, 2:-3],
        "read-only": fixed,
    }


def copies(x):
    """The same numbers in ways that must be copied first."""
    return {
        "back to front": np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
        "features apart": np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
        "features back to front": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "every second": np.repeat(x, 2, axis=-1)[..., ::2],
        "unaligned": unaligned(x),
    }


def unaligned(x):
    memory = np.empty(x.nbytes + 1, np.uint8)
    shifted = memory[1:].view(x.dtype).reshape(x.shape) if x.itemsize == 1 else np.ndarray(x.shape, x.dtype, memory.data, 1)
    shifted[...] = x
    return shifted


def test_arrays_are_read_where_they_lie():
    x = normal(2, 4, 1024, 64)
    expected = regard.attention(x, x, x, mask="window 8")
    for name, view in layouts(x).items():
        tracemalloc.start()
        out = regard.attention(view, view, view, mask="window 8")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(out, expected), name
        copied = peak - out.nbytes
        assert copied < x.nbytes // 10, f"{name}: {copied} bytes beside the output, of an input of {x.nbytes}"


def test_arrays_with_odd_strides_give_the_same_bits():
    x = normal(2, 3, 9, 8)
    d_out = normal(2, 3, 9, 8, seed=1)
    expected, aux = regard.attention(x, x, x, return_aux=True)
    back = aux.backward(d_out)
    for name, view in {**layouts(x), **copies(x)}.items():
        out, aux = regard.attention(view, view, view, return_aux=True)
        assert np.array_equal(out, expected), name
        for other in {**layouts(d_out), **copies(d_out)}.values():
            assert all(np.array_equal(a, b) for a, b in zip(aux.backward(other)[:3], back[:3])), name


def test_one_entry_may_serve_a_whole_axis():
    k = normal(1, 1, 7, 8)
    wide = np.broadcast_to(k, (3, 2, 7, 8))
    q = normal(3, 2, 5, 8, seed=1)
    assert np.array_equal(regard.attention(q, wide, wide), regard.attention(q, wide.copy(), wide.copy()))


def test_the_output_has_the_memory_order_of_q():
    x = normal(2, 4, 6, 8)
    assert regard.attention(x, x, x).flags.c_contiguous
    by_position = layouts(x)["by position"]
    out, aux = regard.attention(by_position, x, x, return_aux=True)
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous and aux.lse.flags.c_contiguous
    grads = aux.backward(x)
    assert grads.q.transpose(0, 2, 1, 3).flags.c_contiguous and grads.k.flags.c_contiguous


def test_an_output_outlives_everything_else():
    x = normal(2, 4, 600, 64)
    out, aux = regard.attention(x, x, x, entropy=True, return_aux=True)
    expected, lse = out.copy(), aux.lse
    del aux, x
    gc.collect()
    _ = [np.ones((2, 4, 600, 64), np.float32) for _ in range(8)]
    assert np.array_equal(out, expected) and np.isfinite(lse).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16])
def test_every_type_is_returned_as_it_came(dtype):
    q, k, v = normal(2, 4, 5, 16, dtype=dtype), normal(2, 2, 9, 16, dtype=dtype, seed=1), normal(2, 2, 9, 8, dtype=dtype, seed=2)
    out, aux = regard.attention(q, k, v, entropy=True, return_aux=True)
    number = np.float64 if dtype == np.float64 else np.float32
    assert out.dtype == dtype and {aux.lse.dtype, aux.entropy.dtype, aux.max_score.dtype} == {np.dtype(number)}
    expected, lse = definition(q, k, v)
    close = {np.float32: 1e-6, np.float64: 1e-14, np.float16: 2e-3, BF16: 2e-2}[dtype]
    assert np.abs(out.astype(np.float64) - expected).max() < close and np.abs(aux.lse - lse).max() < 1e-5
    grads = aux.backward(np.ones_like(out))
    assert {grads.q.dtype, grads.k.dtype, grads.v.dtype} == {np.dtype(dtype)}
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("shape", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 0, 5, 7), (2, 2, 0, 0)])
def test_axes_may_be_empty(shape):
    batch, heads, q_len, k_len = shape
    q, k = np.ones((batch, heads, q_len, 8), np.float32), np.ones((batch, heads, k_len, 8), np.float32)
    out, aux = regard.attention(q, k, k[..., :4], mask="causal", entropy=True, return_aux=True)
    assert out.shape == (batch, heads, q_len, 4) and not out.any()
    assert aux.lse.shape == (batch, heads, q_len) and (k_len > 0 or (aux.lse == -np.inf).all())
    grads = aux.backward(np.ones_like(out))
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, (batch, heads, k_len, 4)] and not grads.k.any()
    assert regard.attention(q, k, k[..., :0]).shape == (batch, heads, q_len, 0)


def test_a_row_that_sees_nothing_is_zero_both_ways():
    x = normal(1, 2, 6, 8)
    visible = np.ones((6, 6), bool)
    visible[3] = False
    out, aux = regard.attention(x, x, x, mask=visible, return_aux=True)
    assert not out[:, :, 3].any() and (aux.lse[:, :, 3] == -np.inf).all()
    assert not aux.backward(np.ones_like(out)).q[:, :, 3].any()


# -- threads ---------------------------------------------------------------------------------------------------------------------------


def test_any_number_of_threads_gives_the_same_bits():
    x = normal(1, 4, 300, 32)
    found = [regard.attention(x, x, x, mask="causal", threads=n, return_aux=True) for n in (None, 1, 2, 7)]
    assert all(np.array_equal(out, found[0][0]) for out, _ in found)
    grads = [aux.backward(x) for _, aux in found]
    assert all(np.array_equal(a, b) for grad in grads for a, b in zip(grad[:3], grads[0][:3]))
    assert "t1" in regard.plan(x, x, x, threads=1) and "t2" in regard.plan(x, x, x, threads=2)


def test_other_threads_run_during_a_call():
    x = normal(1, 4, 2048, 64)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)

    interval, worker = sys.getswitchinterval(), threading.Thread(target=count)
    sys.setswitchinterval(10.0)  # nobody is made to let go of the interpreter: they let go themselves, or they do not
    try:
        worker.start()
        while counted[0] == 0:
            time.sleep(0.001)
        _, aux = regard.attention(x, x, x, return_aux=True)
        for call in (lambda: regard.attention(x, x, x), lambda: aux.backward(x), lambda: regard.AttentionView(x, x, aux).entropy()):
            before = counted[0]
            call()
            assert counted[0] - before > 10
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        worker.join()


def test_calls_may_run_at_once():
    xs = [normal(1, 2, 200 + 10 * i, 16, seed=i) for i in range(8)]
    expected = [regard.attention(x, x, x, mask="causal") for x in xs]
    found = [None] * len(xs)

    def run(i):
        found[i] = regard.attention(xs[i], xs[i], xs[i], mask="causal")

    workers = [threading.Thread(target=run, args=(i,)) for i in range(len(xs))]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))


# -- packing ---------------------------------------------------------------------------------------------------------------------------


def test_packed_sequences_have_the_bits_of_separate_calls():
    q, k, v = normal(12, 4, 16), normal(17, 2, 16, seed=1), normal(17, 2, 8, seed=2)
    q_offsets, k_offsets = [0, 5, 5, 12], np.array([0, 9, 10, 17], np.int32)
    d_out = normal(12, 4, 8, seed=3)
    out, aux = regard.attention(q, k, v, mask="causal & window 4", q_offsets=q_offsets, k_offsets=k_offsets, return_aux=True)
    grads = aux.backward(d_out)
    assert out.shape == (12, 4, 8) and aux.lse.shape == (12, 4)

    def item(x, ends, i):
        return x[ends[i] : ends[i + 1]].swapaxes(0, 1)[None]

    for i in range(3):
        parts = [item(q, q_offsets, i), item(k, k_offsets, i), item(v, k_offsets, i)]
        alone, of_it = regard.attention(*parts, mask="causal & window 4", return_aux=True)
        assert np.array_equal(item(out, q_offsets, i), alone)
        assert np.array_equal(aux.lse[q_offsets[i] : q_offsets[i + 1]].T[None], of_it.lse)
        back = of_it.backward(item(d_out, q_offsets, i))
        for found, ends, expected in ((grads.q, q_offsets, back.q), (grads.k, k_offsets, back.k), (grads.v, k_offsets, back.v)):
            assert np.array_equal(item(found, ends, i), expected)


def test_ranges_serve_packed_sequences_item_by_item():
    q, k = normal(8, 1, 8), normal(11, 1, 8, seed=1)
    options = {"q_offsets": [0, 3, 8], "k_offsets": [0, 5, 11]}
    seen = masks.ranges(np.array([[1, 3], [2, 6]]).reshape(2, 1, 1, 1, 2))
    out = regard.attention(q, k, k, mask=seen, **options)
    first = regard.attention(q[:3].swapaxes(0, 1)[None], k[1:3].swapaxes(0, 1)[None], k[1:3].swapaxes(0, 1)[None])
    second = regard.attention(q[3:].swapaxes(0, 1)[None], k[7:11].swapaxes(0, 1)[None], k[7:11].swapaxes(0, 1)[None])
    assert np.allclose(out[:3].swapaxes(0, 1)[None], first) and np.allclose(out[3:].swapaxes(0, 1)[None], second)
    for rows in (2, 3, 8):  # `rows` of heads, of features, of anything: packed items share no axis of queries
        wide = masks.ranges(np.zeros((1, 1, rows, 1, 2), int))
        with pytest.raises(ValueError, match=f"queries: ranges has {rows}.*packed"):
            regard.attention(q, k, k, mask=wide, **options)
    with pytest.raises(ValueError, match="no common axis of keys"):
        regard.attention(q, k, k, mask=np.ones((1, 11), bool), **options)


# -- errors ----------------------------------------------------------------------------------------------------------------------------

X = np.zeros((2, 4, 6, 8), np.float32)


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((X, X[..., :6], X), {}, "features: q has 8, k has 6"),
        ((X, X[:1], X[:1]), {}, "batch: q has 2, k has 1"),
        ((X, X[:, :3], X[:, :3]), {}, "heads: q has 4, k and v have 3"),
        ((X, X, X[:, :, :5]), {}, "keys: k has 6, v has 5"),
        ((X, X, X[:, :2]), {}, "heads: k has 4, v has 2"),
        ((X[0], X, X), {}, r"q: expected \[batch, heads, length, features\], found f32 \[4, 6, 8\]"),
        ((X, X.astype(np.float64), X), {}, "k: expected f32, found f64"),
        ((X, X, X), {"bias": np.zeros((1, 1, 6, 5), np.float32)}, r"bias: shape \[1, 1, 6, 5\] cannot be broadcast to the scores \[2, 4, 6, 6\]"),
        ((X, X, X), {"bias": np.zeros((1, 1, 6, 6))}, "bias: expected f32, found f64"),
        ((X, X, X), {"alibi": [1.0]}, "alibi: 1 entries; give 4"),
        ((X, X, X), {"sinks": [1.0, 2.0]}, "sinks: 2 entries; give 4"),
        ((X, X, X), {"mask": np.ones((3, 1, 6, 6), bool)}, "batch: the mask has 3, the scores have 2"),
        ((X, X, X), {"mask": np.ones((5, 6), bool)}, "queries: the mask has 5, the scores have 6"),
        ((X, X, X), {"mask": np.ones((6, 5), bool)}, "keys: the mask has 5, k has 6"),
        ((X, X, X), {"mask": np.ones((6, 6))}, "expected a boolean array.*found float64"),
        ((X, X, X), {"mask": "casual"}, "casual"),
        ((X, X, X), {"mask": masks.lengths([1, 2, 3])}, "3"),
        ((X, X, X), {"mask": masks.lengths([-1, 2])}, "lengths: -1"),
        ((X, X, X), {"mask": masks.ranges(np.zeros((1, 1, 6, 2)).astype(int))}, r"ranges: expected \[batch"),
        ((X, X, X), {"align": "middle"}, "align: expected end, start or a whole number, found \"middle\""),
        ((X, X, X), {"align": 1.5}, "align: expected an integer, found 1.5"),
        ((X, X, X), {"scale": float("nan")}, "scale: nan"),
        ((X, X, X), {"scale": "large"}, "scale: expected a number, found 'large'"),
        ((X, X, X), {"temperature": 0.0}, "temperature: 0"),
        ((X, X, X), {"softcap": -1.0}, "softcap: -1"),
        ((X, X, X), {"interventions": {"drop": True}}, "interventions: expected a list of dicts, found dict"),
        ((X, X, X), {"interventions": ["drop"]}, "interventions: expected dicts with 'items', 'heads'"),
        ((X, X, X), {"interventions": [{"head": 1, "drop": True}]}, "interventions: unknown key 'head'; use 'items', 'heads'"),
        ((X, X, X), {"interventions": [{"heads": [1]}]}, "interventions: expected one of 'drop', 'times', 'add', found none"),
        ((X, X, X), {"interventions": [{"drop": True, "add": 1.0}]}, "found drop, add"),
        ((X, X, X), {"interventions": [{"times": -2}]}, "interventions, times: -2.0 is invalid; use a number >= 0"),
        ((X, X, X), {"interventions": [{"add": float("nan")}]}, "interventions, add: nan"),
        ((X, X, X), {"interventions": [{"rows": (4, 2), "drop": True}]}, "interventions, rows: 4 to 2"),
        ((X, X, X), {"interventions": [{"keys": 3, "drop": True}]}, r"interventions, keys: expected \(start, stop\), found 3"),
        ((X, X, X), {"dropout": 1.5}, "dropout.*1.5"),
        ((X, X, X), {"dropout": 0.5, "seed": [1, 2, 3]}, "seed: expected seed and offset"),
        ((X, X, X), {"threads": 0}, "threads: 0; it must be at least 1"),
        ((X, X, X), {"threads": 1.5}, "threads: expected an integer, found 1.5"),
        ((X, X, X), {"precision": "low"}, "precision: expected strict, full, high, found \"low\""),
        ((X, X, X), {"normalizer": "softplus"}, "normalizer: expected softmax, top-K, hard, sampled-SEED or sparsemax"),
        ((X, X, X), {"similarity": "cosine"}, "similarity: expected 'dot', 'distance'"),
        ((X, X, X), {"relative": ("t5", [1.0])}, "relative: expected"),
        ((X, X, X), {"q_offsets": [0, 6]}, r"q: expected \[total, heads, features\]"),
        ((X[0], X[0], X[0]), {"q_offsets": [0, 3], "k_offsets": [0, 4]}, r"offsets\[1\]: 3.*give 4"),
        ((X[0], X[0], X[0]), {"q_offsets": [0, -4], "k_offsets": [0, 4]}, "q_offsets: -4 is not usable"),
        ((X.astype(int), X, X), {}, "expected f32, f64, f16 or bf16, found i64"),
        ((X.astype(complex), X, X), {}, "expected f32, f64, f16 or bf16, found complex128"),
    ],
)
def test_errors_name_what_is_wrong_with_both_numbers(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        regard.attention(*arguments, **options)


@pytest.mark.parametrize("dtype, k_len", [(np.float32, 70), (np.float64, 70), (np.float32, 9000)])
def test_interventions_are_biases_of_rectangles(dtype, k_len):
    """Dropped, scaled and biased edges; 9,000 keys of one row take the path of a decoding step."""
    chance, q_len = np.random.default_rng(0), 1 if k_len == 9000 else 70
    q, k, v = (chance.normal(size=(2, heads, n, 16)).astype(dtype) for heads, n in ((4, q_len), (2, k_len), (2, k_len)))
    rules = [
        {"heads": [0, 1, 3], "keys": (3, 66), "times": 2.5},
        {"items": [1], "rows": (0, 40), "keys": (0, 5), "drop": True},
        {"heads": 2, "rows": [0, 99], "add": -0.5, "keys": (1, 2)},
        {"heads": [1], "rows": (20, 21), "times": 0},
    ]
    bias = np.zeros((2, 4, q_len, k_len), dtype)
    bias[:, [0, 1, 3], :, 3:66] += np.log(2.5)
    bias[:, 2, :, 1] -= 0.5
    bias[1, :, :40, :5] = -np.inf
    bias[:, 1, 20:21] = -np.inf
    out, aux = regard.attention(q, k, v, mask="causal", interventions=rules, return_aux=True)
    expected, other = regard.attention(q, k, v, mask="causal", bias=bias, return_aux=True)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(aux.lse, other.lse, atol=2e-6)
    plain = regard.attention(q, k, v, mask="causal")
    np.testing.assert_array_equal(regard.attention(q, k, v, mask="causal", interventions=[]), plain)
    if q_len > 1:
        assert not out[:, 1, 20].any()
        one = regard.attention(q, k, v, mask="causal", interventions=rules[2:3])
        np.testing.assert_array_equal(one[:, [0, 1, 3]], plain[:, [0, 1, 3]])  # heads that no rule reaches


def test_unknown_keywords_are_refused():
    for call in (regard.attention, regard.plan, regard.steps):
        with pytest.raises(TypeError, match=r"attention: unknown option 'softcaps'; did you mean 'softcap'\?"):
            call(X, X, X, softcaps=3.0)
        with pytest.raises(TypeError, match=r"attention: unknown option 'windows'; see help\(regard.attention\)"):
            call(X, X, X, windows=3)


NONSENSE = [
    None, True, False, 0, 1, -1, 7, 2**40, -(2**40), 2**63, -(2**63), 2**64, 2**70, 0.5, -3.7, float("nan"),
    float("inf"), 1e300, 1e-300, "", "x",
    "causal", "full & ", "window -1", "window 99999999999999999999", "$0", "$7",
    "(" * 100, "\x00", "causal | \"", (), [], [1, 2], [[1, 2], [3]],
    (None, None), {}, object(), b"bytes", 1j, np.zeros(0), np.zeros((0, 0)), np.zeros((2, 2)),
    np.ones((6, 6), bool), np.ones((1, 1, 1, 1), bool),
    np.array(3), np.array([-1, 5]), np.array(["a"]), np.array([None]), np.zeros((2, 4, 6, 8), np.float32),
    np.zeros((1, 1, 6, 6), np.float32),
    np.zeros((2, 4, 6, 8), np.float16), np.full((1, 4, 1, 1), np.nan, np.float32),
    np.array([2**62, 2**63 - 1]), np.zeros((1, 1, 6, 1, 2), int),
    np.broadcast_to(np.float32(1), (1 << 30, 1 << 20, 1, 8)),
    np.broadcast_to(np.float32(1), (1, 1, 1 << 45, 8)), ("t5", [0.0] * 32, 8, True),
    ("clipped", [0.0] * 12, 1), ("general", np.eye(8, dtype=np.float32)), ([0.0], 3), np.array([0, 3, 6]), np.array([6, 0]), [0, 2**62],
]  # fmt: skip
KEYWORDS = (
    "mask align scale temperature softcap interventions bias alibi relative sinks local similarity normalizer dropout seed entropy precision q_offsets "
    "k_offsets threads"
).split()  # fmt: skip


def nonsense_mask(chance):
    makers = ("window prefix lengths spans segments global_ blocks every strided bits ranges parse").split()
    try:
        made = getattr(masks, chance.choice(makers))(chance.choice(NONSENSE))
        return made & masks.causal() if chance.random() < 0.3 else made
    except Exception:
        return None


@pytest.fixture
def little_memory():
    """What asks for too much is refused by the system, and not granted until it ends us."""
    resource = pytest.importorskip("resource")
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    usual = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), usual[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, usual)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nonsense_is_refused_and_never_crashes(little_memory):
    chance, refused, answered = random.Random(2), 0, 0
    good = {"temperature": 1.0, "normalizer": "softmax", "align": "end", "dropout": 0.0}
    for _ in range(4000):
        tensors = [chance.choice(NONSENSE) if chance.random() < 0.1 else X for _ in range(3)]
        options = {name: chance.choice(NONSENSE) for name in chance.sample(KEYWORDS, chance.choice([0, 1, 1, 2, 3]))}
        if options.get("threads") is not None:
            options["threads"] = chance.choice([-1, 0, 1, 2, "2", 2.5, None])  # a machine may well have 7, and not 2^40
        if chance.random() < 0.3:
            options["mask"] = nonsense_mask(chance)
        options = {**good, **options}
        try:
            out, aux = regard.attention(*tensors, return_aux=True, **options)
            answered += 1
            aux.backward(out if chance.random() < 0.5 else chance.choice(NONSENSE), d_lse=chance.choice([None, aux.lse, *NONSENSE]))
        except Exception:  # a panic of the engine is not an Exception
            refused += 1
    assert refused > 1000 and answered > 20, (refused, answered)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nonsense_is_refused_by_everything_else(little_memory):
    chance = random.Random(3)
    pick = lambda: chance.choice([X, *NONSENSE])  # noqa: E731
    x = normal(1, 2, 6, 8)
    _, aux = regard.attention(x, x, x, return_aux=True)
    small = [n for n in NONSENSE if not (isinstance(n, (int, np.ndarray)) and np.size(n) > 1000 or isinstance(n, int) and n > 1000)]
    calls = [
        lambda: regard.rope(pick(), chance.choice(small), dim=chance.choice([None, 2, 3, -1, 2**40])),
        lambda: regard.merge([pick(), pick()], [pick(), pick()]),
        lambda: regard.alibi_slopes(chance.choice(NONSENSE)),
        lambda: regard.steps(chance.choice(small), chance.choice([x, *small]), x),
        lambda: regard.AttentionView(x, x, chance.choice([aux, *NONSENSE])).row(pick()),
        lambda: regard.AttentionView(x, x, aux).head(chance.choice(small), chance.choice(small)).entropy(),
        lambda: regard.AttentionView(x, x, aux).rows(pick(), pick()).every(pick()).col_sum(),
        lambda: regard.AttentionView(x, x, aux).tile((pick(), pick()), (pick(), pick())),
        lambda: regard.AttentionView(x, x, aux).pooled(chance.choice(small), chance.choice(small), chance.choice(["mean", "max", "x"])),
        lambda: regard.AttentionView(x, x, aux).top_k(chance.choice(NONSENSE)),
        lambda: regard.AttentionView(x, x, aux).mass(pick()),
        lambda: regard.scaled_dot_product_attention(pick(), x, x, pick()),
        lambda: regard.KvCache(chance.choice(small), chance.choice(NONSENSE), 8, chance.choice(["f32", pick()]), chance.choice(NONSENSE)),
        lambda: regard.LinearAttention(chance.choice(["elu", "random 8", "random 99999999999", pick()]), causal=pick())(pick(), x, x),
        lambda: regard.LshAttention(chance.choice(small), chance.choice(small), causal=True, seed=chance.choice(NONSENSE))(x, pick(), x),
    ]
    refused = 0
    for _ in range(60):
        for call in calls:
            try:
                call()
            except Exception:
                refused += 1
    assert refused > 300


# -- torch's signature -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 4), (4,), (3, 2, 4)])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "bool keys", "float", "float whole", "scale"])
def test_scaled_dot_product_attention_is_that_of_torch(lead, kind):
    torch = pytest.importorskip("torch")
    q, k, v = normal(*lead, 5, 16), normal(*lead, 9, 16, seed=1), normal(*lead, 9, 8, seed=2)
    visible = np.random.default_rng(3).random((5, 9)) < 0.6
    visible[:, 0] = True
    options = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": visible},
        "bool keys": {"attn_mask": visible[:1]},
        "float": {"attn_mask": normal(5, 9, seed=4)},
        "float whole": {"attn_mask": normal(*lead, 5, 9, seed=4)},
        "scale": {"scale": 0.7},
    }[kind]
    tensors = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), **tensors).numpy()
    found = regard.scaled_dot_product_attention(q, k, v, **options)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5
    found = regard.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, v)), **tensors)
    assert torch.is_tensor(found) and np.abs(found.numpy() - expected).max() < 1e-5


def test_scaled_dot_product_attention_shares_heads_only_if_asked():
    torch = pytest.importorskip("torch")
    q, k = normal(2, 4, 5, 16), normal(2, 2, 9, 16, seed=1)
    with pytest.raises(ValueError, match="heads: q has 4, k has 2; use enable_gqa=True"):
        regard.scaled_dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match="attn_mask and is_causal"):
        regard.scaled_dot_product_attention(q, q, q, np.ones((5, 5), bool), is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*map(torch.from_numpy, (q, k, k)), enable_gqa=True).numpy()
    assert np.abs(regard.scaled_dot_product_attention(q, k, k, enable_gqa=True) - expected).max() < 1e-5


@pytest.mark.parametrize("leads", [((4,), (2, 4)), ((2, 4), (4,)), ((1, 4), (3, 4)), ((3, 1, 4), (2, 4))])
def test_scaled_dot_product_attention_broadcasts_the_batch(leads):
    torch = pytest.importorskip("torch")
    q, k, v = normal(*leads[0], 5, 16), normal(*leads[1], 9, 16, seed=1), normal(*leads[1], 9, 8, seed=2)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors).numpy()
    for found in (regard.scaled_dot_product_attention(q, k, v), regard.scaled_dot_product_attention(*tensors).numpy()):
        assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-5
    with pytest.raises(ValueError, match=r"batch: q has \[2\], k has \[3\], v has \[3\]; they must be equal, or 1"):
        regard.scaled_dot_product_attention(normal(2, 4, 5, 16), normal(3, 4, 9, 16), normal(3, 4, 9, 16))


def test_a_mask_of_torch_serves_the_axes_it_lacks():
    torch = pytest.importorskip("torch")
    q = normal(3, 2, 4, 5, 8)
    for shape in ((2, 4, 5, 5), (2, 1, 5, 5), (1, 2, 1, 5, 5), (5, 1), (4, 1, 1)):
        for mask in (np.random.default_rng(1).random(shape) < 0.9, normal(*shape)):
            tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (q, q, q, mask)]
            expected = torch.nn.functional.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3]).numpy()
            seen = np.isfinite(expected)  # a row that sees nothing is NaN in some versions, and 0 here
            found = regard.scaled_dot_product_attention(q, q, q, mask)
            assert np.abs(found - expected)[seen].max() < 1e-5 and not found[~seen].any(), shape


def test_dropout_keeps_the_mean_and_drops_its_share():
    n = 400
    q, v = np.zeros((1, 1, n, 4), np.float32), np.eye(n, dtype=np.float32)[None, None]
    weights = regard.scaled_dot_product_attention(q, np.zeros_like(q), v, dropout_p=0.3)[0, 0] * n
    kept = weights != 0
    assert abs(kept.mean() - 0.7) < 0.01 and np.allclose(weights[kept], 1 / 0.7)
    again = regard.attention(q, q, v, dropout=0.3, seed=(1, 2))
    assert np.array_equal(again, regard.attention(q, q, v, dropout=0.3, seed=(1, 2)))
    assert not np.array_equal(again, regard.attention(q, q, v, dropout=0.3, seed=(1, 3)))


# -- types -----------------------------------------------------------------------------------------------------------------------------


def test_the_stub_names_what_the_native_module_has():
    """`main` is there only in builds with the command line."""
    folder = pathlib.Path(regard.__file__).parent
    assert (folder / "py.typed").exists()
    tree = ast.parse((folder / "_regard.pyi").read_text())

    def public(names):
        return {name for name in names if not name.startswith("_")}

    stubs = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert public(stubs) | {"VERSION"} == public(dir(_regard)) | {"main"}
    for name, node in stubs.items():
        if isinstance(node, ast.ClassDef):
            methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            assert public(methods) == public(vars(getattr(_regard, name))), name
        elif hasattr(_regard, name):
            written = getattr(_regard, name).__text_signature__.strip("()").split(", ")
            assert [argument.arg for argument in node.args.args] == [one for one in written if one], name


def test_the_typed_keywords_are_those_that_are_taken():
    taken = [name for name, one in inspect.signature(_call.describe).parameters.items() if one.kind is one.KEYWORD_ONLY]
    assert list(_call.Options.__annotations__) == taken


# -- helpers ---------------------------------------------------------------------------------------------------------------------------


def test_steps_are_the_definition():
    q, k, v = normal(1, 4, 5, 8), normal(1, 2, 7, 8, seed=1), normal(1, 2, 7, 3, seed=2)
    steps = regard.steps(q, k, v, mask="causal", softcap=3.0)
    dots = q @ np.repeat(k, 2, 1).swapaxes(-1, -2)
    assert np.allclose(steps.similarities, dots, atol=1e-5)
    visible = np.arange(7) <= np.arange(5)[:, None] + 2
    scores = np.where(visible, 3 * np.tanh(dots / 8**0.5 / 3), -np.inf)
    assert np.allclose(steps.scores, scores, atol=1e-5) and np.array_equal(np.isinf(steps.scores), np.isinf(scores))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert np.allclose(steps.weights, weights, atol=1e-6)
    assert np.allclose(steps.out, regard.attention(q, k, v, mask="causal", softcap=3.0), atol=1e-6)
    big = np.broadcast_to(np.float32(1), (1, 1, 1 << 14, 8))
    with pytest.raises(ValueError, match="pairs: 268435456"):
        regard.steps(big, big, big)


def turned(x, positions, pairs, base=10000.0, scaling=1.0):
    """Rotary embedding by its definition, in f64."""
    dim = x.shape[-1]
    angles = np.asarray(positions, np.float64)[..., None] / scaling * base ** (-np.arange(0, dim, 2) / dim)
    first, second = (slice(0, dim // 2), slice(dim // 2, dim)) if pairs == "halves" else (slice(0, dim, 2), slice(1, dim, 2))
    cos, sin, out = np.cos(angles), np.sin(angles), np.empty(x.shape)
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@pytest.mark.parametrize("pairs", ["halves", "interleaved"])
def test_rope_turns_rows_by_their_positions(pairs):
    x = normal(2, 3, 70, 16)
    for layout in layouts(x).values():
        assert np.allclose(regard.rope(layout, 5, pairs=pairs), turned(x, np.arange(5, 75), pairs), atol=1e-4)
    positions = np.random.default_rng(1).integers(-500, 500, (2, 70))
    assert np.allclose(regard.rope(x, positions, pairs=pairs), turned(x, positions[:, None], pairs), atol=1e-3)
    found = regard.rope(x, pairs=pairs, base=500.0, scaling=4.0, dim=8)
    assert np.allclose(found[..., :8], turned(x[..., :8], np.arange(70), pairs, 500.0, 4.0), atol=1e-4)
    assert np.array_equal(found[..., 8:], x[..., 8:])
    assert np.allclose(regard.rope(found, pairs=pairs, base=500.0, scaling=4.0, dim=8, inverse=True), x, atol=1e-5)
    frequencies = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    assert np.allclose(regard.rope(x, pairs=pairs, frequencies=frequencies), turned(x, np.arange(70), pairs), atol=1e-4)
    with pytest.raises(ValueError, match="pairs: expected halves or interleaved"):
        regard.rope(x, pairs="thirds")
    with pytest.raises(ValueError, match="features: rope rotates 32, the tensor has 16"):
        regard.rope(x, dim=32)


def test_alibi_slopes_are_the_published_ones():
    assert np.allclose(regard.alibi_slopes(8), 2.0 ** -np.arange(1, 9))
    assert regard.alibi_slopes(12).shape == (12,)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, BF16])
def test_parts_over_different_keys_merge_into_the_whole(dtype):
    q, k, v = normal(2, 4, 5, 16, dtype=dtype), normal(2, 2, 30, 16, dtype=dtype, seed=1), normal(2, 2, 30, 8, dtype=dtype, seed=2)
    cuts = [slice(0, 7), slice(7, 7), slice(7, 30)]
    parts = [regard.attention(layouts(q)["by position"], k[:, :, cut], v[:, :, cut], return_aux=True) for cut in cuts]
    out, lse = regard.merge([out for out, _ in parts], [aux.lse for _, aux in parts])
    expected, aux = regard.attention(q, k, v, return_aux=True)
    close = {np.float32: 1e-6, np.float64: 1e-14, np.float16: 2e-3, BF16: 3e-2}[dtype]
    assert out.dtype == dtype and np.abs((out - expected).astype(np.float64)).max() < close
    assert lse.shape == (2, 4, 5) and np.abs(lse - aux.lse).max() < 1e-5
    assert out.transpose(0, 2, 1, 3).flags.c_contiguous
    for wrong in (([], []), ([expected], []), ([expected, expected[:1]], [aux.lse, aux.lse[:1]])):
        with pytest.raises(ValueError):
            regard.merge(*wrong)


def test_the_check_of_this_machine_reports_what_it_ran():
    told = []
    report = regard.check(lambda done, of: told.append((done, of)), part="f64-dot-b2-h2x1-n5x7-")
    assert report.is_green and report.failures == [] and report.rows > 20
    assert told[-1] == (report.rows, report.rows) and len(told) > 1
    assert report.isas == regard.isas() and report.groups["similarity dot"].rows > 20
    assert all(0 <= group.out <= 1 and group.grads <= 1 for group in report.groups.values())
    assert "0 failures" in str(report)

    def stop(done, of):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regard.check(stop, part="f64-dot-b2-h2x1-n5x7-")
    assert regard.check(part="no such row").rows == 0


def test_a_forked_child_computes_on_one_thread_instead_of_waiting_forever():
    q = np.random.default_rng(0).normal(size=(1, 8, 512, 32)).astype(np.float32)
    expected = regard.attention(q, q, q)
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        found = pool.apply_async(regard.attention, (q, q, q)).get(timeout=60)
        turned = pool.apply_async(regard.rope, (q,)).get(timeout=60)
    assert np.array_equal(found, expected)
    assert np.array_equal(turned, regard.rope(q))


def test_an_output_that_the_way_back_reads_cannot_be_written_to():
    q = np.ones((1, 1, 4, 8), np.float32)
    out, _ = regard.attention(q, q, q, return_aux=True)
    with pytest.raises(ValueError, match="read-only"):
        out *= 3
    regard.attention(q, q, q)[...] = 0
