"""`regard.AttentionView` against weights that NumPy holds whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import regard
from regard import masks

BATCH, HEADS, Q, K, DIM = 2, 4, 23, 31, 8
AT, KEY = np.arange(Q)[:, None] + K - Q, np.arange(K)[None]


def normal(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def weights_of(q, k, visible, sinks=None, scale=DIM**-0.5):
    """All weights, `[batch * heads, q_len, k_len]`, and what sinks take, in f64."""
    q, k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), q.shape[1] // k.shape[1], axis=1)
    scores = np.where(visible, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    powers = np.exp(scores)
    sink = np.zeros(scores.shape[:-1]) if sinks is None else np.broadcast_to(np.exp(sinks)[:, None], scores.shape[:-1])
    total = powers.sum(-1) + sink
    total = np.where(total == 0, 1, total)
    return (powers / total[..., None]).reshape(-1, *scores.shape[2:]), (sink / total).reshape(-1, scores.shape[2])


CASES = {
    "full": ({}, np.ones((Q, K), bool)),
    "causal window": ({"mask": "causal & window 9"}, (KEY <= AT) & (AT - KEY < 9)),
    "lengths": ({"mask": masks.lengths([31, 6])}, np.broadcast_to(KEY < np.array([31, 6])[:, None, None, None], (BATCH, 1, Q, K))),
    "sinks": ({"sinks": np.array([0.5, -1.0, 2.0, 0.0])}, np.ones((Q, K), bool)),
    "hidden rows": ({"mask": (KEY + 5 * AT) % 7 < (AT % 3)}, (KEY + 5 * AT) % 7 < (AT % 3)),
}


@pytest.fixture(params=[(name, dtype, known) for name in CASES for dtype, known in (("f4", "aux"), ("f4", "lse"), ("f8", "aux"))], ids=str)
def looked(request):
    """A view, its weights, and what sinks take."""
    name, dtype, known = request.param
    options, visible = CASES[name]
    q, k = normal(BATCH, HEADS, Q, DIM, dtype=dtype), normal(BATCH, 2, K, DIM, dtype=dtype, seed=1)
    _, aux = regard.attention(q, k, k, return_aux=True, **options)
    view = regard.AttentionView(q, k, aux if known == "aux" else aux.lse, **options)
    return view, *weights_of(q, k, visible, options.get("sinks"))


def close(found, expected):
    return found.shape == expected.shape and np.abs(found - expected).max(initial=0) < 2e-5


def test_rows_and_tiles_are_the_weights(looked):
    view, weights, _ = looked
    assert close(view.row(7), weights[:, 7]) and close(view.row(-1), weights[:, -1])
    assert close(view.tile((3, 11), (5, 30)), weights[:, 3:11, 5:30])
    assert close(view.tile((0, 10**6), (0, 10**6)), weights)
    assert close(view.head(1, 2).row(4), weights[6:7, 4]) and close(view.head(1, 2).tile((0, 4), (2, 9)), weights[6:7, :4, 2:9])


def entropies(weights, sink):
    whole = np.concatenate([weights, sink[..., None]], axis=-1)
    return -(whole * np.log(np.where(whole > 0, whole, 1))).sum(-1)


def test_statistics_are_those_of_the_weights(looked):
    view, weights, sink = looked
    assert close(view.entropy(), entropies(weights, sink))
    assert close(view.col_sum(), weights.sum(1))
    mass = weights.sum(-1)
    distance = (weights * abs(AT - KEY)).sum(-1) / np.where(mass == 0, 1, mass)
    found = view.mean_distance()
    assert found.shape == distance.shape and np.abs(found - distance).max() < 2e-4
    assert close(view.sink_mass(), sink)
    assert close(view.mass("window 4"), (weights * (abs(AT - KEY) < 4)).sum(-1))
    assert close(view.mass(masks.prefix(3) | masks.global_([20])), (weights * ((KEY < 3) | (KEY == 20) | (AT == 20))).sum(-1))
    spans = view.span_mass((0, 5), (3, 500), (7, 7))
    assert close(spans, np.stack([weights[..., 0:5].sum(-1), weights[..., 3:].sum(-1), np.zeros(weights.shape[:2])], -1))
    half = np.random.default_rng(5).random((Q, K)) < 0.5
    assert close(view.mass(half), (weights * half).sum(-1))


def test_the_largest_weights_come_first(looked):
    view, weights, _ = looked
    keys, largest = view.top_k(5)
    assert keys.shape == largest.shape == (BATCH * HEADS, Q, 5) and keys.dtype == np.int64
    expected = -np.sort(-weights, axis=-1)[..., :5]
    seen = (weights > 0).sum(-1, keepdims=True) > np.arange(5)
    assert close(largest * seen, expected * seen) and (keys[~seen] == -1).all() and not largest[~seen].any()
    found = np.take_along_axis(weights, np.maximum(keys, 0), axis=-1)
    assert np.abs((found - largest) * seen).max() < 2e-5


@pytest.mark.parametrize("pool", ["mean", "max", "sum"])
def test_maps_are_pooled_in_equal_cells(looked, pool):
    view, weights, _ = looked
    for rows, cols in ((5, 4), (Q, K), (1, 1), (1000, 7)):
        found = view.pooled(rows, cols, pool)
        down, across = (np.arange(n) * min(cells, n) // n for n, cells in ((Q, rows), (K, cols)))
        cells = [[weights[:, down == i][:, :, across == j] for j in range(across[-1] + 1)] for i in range(down[-1] + 1)]
        expected = np.stack([np.stack([getattr(np, pool)(cell, axis=(1, 2)) for cell in line], -1) for line in cells], 1)
        assert close(found, expected)


def test_a_view_narrows_to_rows(looked):
    view, weights, sink = looked
    some = view.rows(4, 20)
    assert close(some.entropy(), entropies(weights, sink)[:, 4:20]) and close(some.col_sum(), weights[:, 4:20].sum(1))
    assert close(view.every(5).entropy(), entropies(weights, sink)[:, ::5])
    one = view.head(0, 3).rows(4, 20).every(3)
    assert close(one.entropy(), entropies(weights, sink)[3:4, 4:20:3]) and close(one.sink_mass(), sink[3:4, 4:20:3])
    assert close(view.rows(4, 10**6).mass("full"), weights.sum(-1)[:, 4:])


def test_many_answers_come_from_one_walk(looked):
    view, weights, sink = looked
    found = view.measure(entropy=True, col_sum=True, top_k=2, pooled=(3, 3, "max"), sink_mass=True, mass=["window 4", masks.prefix(3)])
    assert sorted(found) == ["col_sum", "entropy", "mass 0", "mass 1", "pooled", "sink_mass", "top_keys", "top_weights"]
    assert close(found["mass 1"], (weights * (KEY < 3)).sum(-1)) and close(found["entropy"], entropies(weights, sink))
    assert close(view.measure(col_sum=True, keys=(5, 12))["col_sum"], weights[:, :, 5:12].sum(1))
    with pytest.raises(ValueError, match="entropies"):
        view.measure(entropies=True)


def test_scores_in_the_thousands_are_seen_through_aux():
    q, k = normal(1, 1, 5, DIM) * 300, normal(1, 1, 9, DIM, seed=1) * 300
    _, aux = regard.attention(q, k, k, return_aux=True)
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * DIM**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    assert np.abs(regard.AttentionView(q, k, aux).tile((0, 5), (0, 9)) - weights[0]).max() < 0.05
    assert np.abs(regard.AttentionView(q, k, aux).mass("full") - 1).max() < 1e-5


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_types_are_looked_at(dtype):
    q, k = normal(BATCH, HEADS, Q, DIM, dtype=dtype), normal(BATCH, 2, K, DIM, dtype=dtype, seed=1)
    _, aux = regard.attention(q, k, k, return_aux=True)
    expected, _ = weights_of(q, k, np.ones((Q, K), bool))
    assert np.abs(regard.AttentionView(q, k, aux).tile((0, Q), (0, K)) - expected).max() < 1e-3


def test_tensors_of_torch_are_looked_at():
    torch = pytest.importorskip("torch")
    import regard.torch

    q, k = torch.randn(BATCH, HEADS, Q, DIM, requires_grad=True), torch.randn(BATCH, 2, K, DIM)
    _, aux = regard.torch.attention(q, k, k, mask="causal", return_aux=True)
    expected, _ = weights_of(q.detach().numpy(), k.numpy(), KEY <= AT)
    for known in (aux, aux.lse, aux.lse.detach().numpy()):
        view = regard.AttentionView(q, k, known, mask="causal")
        assert isinstance(view.row(0), np.ndarray) and close(view.tile((0, Q), (0, K)), expected)
    half = q.detach().bfloat16()
    _, aux = regard.torch.attention(half, half, half, return_aux=True)
    assert np.abs(regard.AttentionView(half, half, aux).mass("full") - 1).max() < 1e-3


def test_what_a_normalizer_has_chosen_is_seen():
    q, k = normal(1, 2, Q, DIM), normal(1, 2, K, DIM, seed=1)
    out, aux = regard.attention(q, k, np.broadcast_to(np.eye(K, dtype=np.float32), (1, 2, K, K)), normalizer="top-3", return_aux=True)
    view = regard.AttentionView(q, k, aux, normalizer="top-3")
    assert close(view.tile((0, Q), (0, K)), out[0]) and ((out > 0).sum(-1) == 3).all()
    with pytest.raises(ValueError, match="selected keys"):
        regard.AttentionView(q, k, aux.lse, normalizer="top-3").entropy()


def test_packed_items_are_looked_at_one_by_one():
    q, k = normal(12, 2, DIM), normal(15, 2, DIM, seed=1)
    options = {"mask": "causal", "q_offsets": [0, 5, 12], "k_offsets": np.array([0, 7, 15])}
    _, aux = regard.attention(q, k, k, return_aux=True, **options)
    view = regard.AttentionView(q, k, aux, **options)
    second = [x.swapaxes(0, 1)[None] for x in (q[5:], k[7:])]
    expected, _ = weights_of(*second, np.arange(8)[None] <= np.arange(7)[:, None] + 1)
    one = view.head(1, 1)
    assert close(one.row(-1), expected[1:2, -1]) and close(one.tile((0, 99), (0, 99)), expected[1:2])
    assert close(one.entropy(), entropies(expected, np.zeros((2, 7)))[1:2]) and close(one.col_sum(), expected[1:2].sum(1))
    assert close(view.head(0, 0).pooled(99, 99, "sum")[:, -1].sum(-1), np.ones(1))
    for ask in (view.entropy, view.col_sum, lambda: view.row(0), lambda: view.tile((0, 2), (0, 2)), lambda: view.top_k(2)):
        with pytest.raises(ValueError, match=r"packed: .*choose one with head\(batch, head\)"):
            ask()


@pytest.mark.parametrize(
    "ask, error, message",
    [
        (lambda view: view.row(Q), IndexError, "row 23: out of range, there are 23 queries"),
        (lambda view: view.head(2, 0).entropy(), ValueError, "batch: 2 is out of range; give a value below 2"),
        (lambda view: view.head(0, 4).entropy(), ValueError, "head: 4 is out of range; give a value below 4"),
        (lambda view: view.head(0, -1), ValueError, "head: -1"),
        (lambda view: view.rows(-3, 5), ValueError, "rows: -3"),
        (lambda view: view.every(0).entropy(), ValueError, "step: 0"),
        (lambda view: view.top_k(0), ValueError, "top_k: 0"),
        (lambda view: view.pooled(0, 4), ValueError, "rows: 0"),
        (lambda view: view.pooled(4, 4, "median"), ValueError, "median"),
        (lambda view: view.tile((0, 1.5), (0, 4)), TypeError, "rows: expected an integer, found 1.5"),
        (lambda view: view.mass(np.ones((3, 3), bool)), ValueError, "queries: the mask has 3, the scores have 23"),
    ],
)
def test_errors_say_what_is_wrong(ask, error, message):
    q, k = normal(BATCH, HEADS, Q, DIM), normal(BATCH, 2, K, DIM, seed=1)
    _, aux = regard.attention(q, k, k, return_aux=True)
    with pytest.raises(error, match=message):
        ask(regard.AttentionView(q, k, aux))
    with pytest.raises(ValueError, match="lse: 10 entries; give 184"):
        regard.AttentionView(q, k, np.zeros(10)).entropy()
