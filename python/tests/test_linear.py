"""`regard.LinearAttention` and `regard.LshAttention` against their definitions in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import regard

SHAPES = [(2, 4, 2, 9, 9), (1, 2, 1, 3, 20), (1, 1, 1, 150, 150), (2, 2, 2, 20, 7)]


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tensors(batch, heads, kv_heads, q_len, k_len, dim=8, v_dim=5, dtype=np.float64):
    return normal(batch, heads, q_len, dim, dtype=dtype), normal(batch, kv_heads, k_len, dim, dtype=dtype, seed=1), normal(
        batch, kv_heads, k_len, v_dim, dtype=dtype, seed=2
    )


MAPS = {"elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))), "relu": lambda x: np.maximum(x, 0)}


def linear(q, k, v, phi, causal):
    """The definition."""
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    weights = phi(q) @ phi(k).swapaxes(-1, -2)
    if causal:
        q_len, k_len = weights.shape[-2:]
        weights = weights * (np.arange(k_len) <= np.arange(q_len)[:, None] + k_len - q_len)
    total = weights.sum(-1, keepdims=True)
    return weights @ v / np.where(total == 0, 1, total)


def slope(f, x, direction, step=1e-6):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("map", MAPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_attention_is_its_definition(shape, map, causal):
    q, k, v = tensors(*shape)
    found = regard.LinearAttention(map, causal=causal)(q, k, v)
    assert np.abs(found - linear(q, k, v, MAPS[map], causal)).max() < 1e-12


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("map", ["elu", "relu", "random 12"])
def test_gradients_of_linear_attention_are_slopes(map, causal):
    q, k, v = tensors(1, 4, 2, 70, 75)
    attention = regard.LinearAttention(map, causal=causal, seed=3)
    out, aux = attention(q, k, v, return_aux=True)
    d_out = normal(*out.shape, seed=4)
    grads = aux.backward(d_out)
    for i, grad in enumerate(grads):
        direction = normal(*grad.shape, seed=5 + i)

        def loss(x, i=i):
            return (attention(*(x if j == i else t for j, t in enumerate((q, k, v)))) * d_out).sum()

        expected = slope(loss, (q, k, v)[i], direction)
        assert abs((grad * direction).sum() - expected) < 1e-5 * (1 + abs(expected)), "qkv"[i]


def test_random_features_estimate_the_softmax():
    q, k, v = (x * 0.5 for x in tensors(1, 1, 1, 20, 30))
    exact = regard.attention(q, k, v)
    errors = [np.abs(regard.LinearAttention(f"random {n}", seed=1)(q, k, v) - exact).mean() for n in (16, 4096)]
    assert errors[1] < errors[0] / 4 and errors[1] < 0.02
    one, two = (regard.LinearAttention("random 16", seed=seed)(q, k, v) for seed in (1, 2))
    assert not np.array_equal(one, two) and np.array_equal(one, regard.LinearAttention("random 16", seed=1)(q, k, v))


@pytest.mark.parametrize("map", ["elu", "relu", "random 12"])
@pytest.mark.parametrize("dtype, name", [(np.float32, "f32"), (np.float64, "f64"), (ml_dtypes.bfloat16, ml_dtypes.bfloat16)])
def test_a_state_goes_on_where_the_positions_ended(map, dtype, name):
    q, k, v = tensors(2, 4, 2, 30, 30, dtype=dtype)
    attention = regard.LinearAttention(map, causal=True, seed=3)
    expected = attention(q, k, v).astype(np.float64)
    close = {"f32": 1e-5, "f64": 1e-12}.get(name if isinstance(name, str) else "", 5e-2)
    state = attention.state(2, 2, 8, 5, dtype=name)
    state.absorb(k[:, :, :10], v[:, :, :10])
    found = [state.step(q[:, :, 10:25], k[:, :, 10:25], v[:, :, 10:25])]
    other = state.fork()
    for i in range(25, 30):
        now = slice(i, i + 1)
        found.append(state.step(q[:, :, now], k[:, :, now], v[:, :, now]))
        assert np.array_equal(other.step(q[:, :, now], k[:, :, now], v[:, :, now]), found[-1])
    assert found[0].dtype == dtype
    assert np.abs(np.concatenate(found, axis=2).astype(np.float64) - expected[:, :, 10:]).max() < close


def test_packed_items_have_the_bits_of_separate_calls():
    q, k, v = normal(12, 4, 8), normal(17, 2, 8, seed=1), normal(17, 2, 5, seed=2)
    q_ends, k_ends = [0, 5, 5, 12], [0, 9, 10, 17]
    attention = regard.LinearAttention(causal=True)
    out, aux = attention(q, k, v, q_offsets=q_ends, k_offsets=k_ends, return_aux=True)
    grads = aux.backward(out)
    for i in range(3):
        rows, keys = slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])
        alone, back = attention(*(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])), return_aux=True)
        assert np.array_equal(out[rows].swapaxes(0, 1), alone[0])
        assert np.array_equal(grads.k[keys].swapaxes(0, 1), back.backward(alone).k[0])


def test_any_number_of_threads_gives_the_same_bits():
    x = normal(2, 4, 300, 16, dtype=np.float32)
    for attention in (regard.LinearAttention(causal=True), regard.LshAttention(2, 16)):
        found = [attention(x, x, x, threads=n, return_aux=True) for n in (1, 2, 7)]
        assert all(np.array_equal(out, found[0][0]) for out, _ in found)
        assert all(np.array_equal(aux.backward(x).k, found[0][1].backward(x).k) for _, aux in found)


def test_the_output_has_the_memory_order_of_q():
    x = np.ascontiguousarray(normal(2, 4, 30, 16).swapaxes(1, 2)).swapaxes(1, 2)
    for attention in (regard.LinearAttention(), regard.LshAttention(2, 16)):
        assert attention(x, x, x).swapaxes(1, 2).flags.c_contiguous


# -- hashing ---------------------------------------------------------------------------------------------------------------------------


def met(aux, shape):
    """Which pairs met, `[batch, heads, q_len, k_len]`."""
    return np.array([aux.is_visible(*at) for at in np.ndindex(*shape)]).reshape(shape)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("q_len", [60, 25])
def test_lsh_attention_is_attention_over_the_keys_that_rows_met(q_len, causal):
    q, k, v = tensors(2, 4, 2, q_len, 60)
    attention = regard.LshAttention(rounds=2, bucket_size=8, causal=causal, seed=5)
    out, aux = attention(q, k, v, return_aux=True)
    visible = met(aux, (2, 4, q_len, 60))
    assert 0.2 < visible.mean() < 0.95
    if causal:
        assert not (visible & (np.arange(60) > np.arange(q_len)[:, None] + 60 - q_len)).any()
    expected, exact = regard.attention(q, k, v, mask=visible, return_aux=True)
    assert np.abs(out - expected).max() < 1e-12 and np.allclose(aux.lse, exact.lse, atol=1e-12)
    d_out, d_lse = normal(*out.shape, seed=4), normal(*aux.lse.shape, seed=5)
    for found, right in zip(aux.backward(d_out, d_lse=d_lse), exact.backward(d_out, d_lse=d_lse)):
        assert np.abs(found - right).max() < 1e-11


def test_recall_says_what_hashing_lost():
    q, k, v = tensors(1, 2, 2, 120, 120)
    out, aux = regard.LshAttention(rounds=1, bucket_size=8, seed=1)(q, k, v, return_aux=True)
    scores = q @ k.swapaxes(-1, -2) * 8**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    kept = (weights * met(aux, weights.shape)).sum(-1)
    recall = aux.recall(top=4, rows=120)
    assert recall.rows == 240 and abs(recall.mass.mean - kept.mean()) < 1e-9 and abs(recall.mass.worst - kept.min()) < 1e-9
    assert recall.top.worst <= recall.top.mean <= 1 and recall.mass.mean < 0.9
    whole, all_met = regard.LshAttention(rounds=1, bucket_size=1000)(q, k, v, return_aux=True)
    assert all_met.recall().mass.worst > 1 - 1e-9 and np.abs(whole - regard.attention(q, k, v)).max() < 1e-12
    assert np.abs(regard.LshAttention(1, 1000, scale=0.1)(q, k, v) - regard.attention(q, k, v, scale=0.1)).max() < 1e-12


def test_seeds_hash_differently():
    x = normal(1, 1, 100, 8)
    outs = [regard.LshAttention(1, 8, seed=seed)(x, x, x) for seed in (1, 1, 2)]
    assert np.array_equal(outs[0], outs[1]) and not np.array_equal(outs[0], outs[2])


# -- both ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_types_come_back_as_they_came(dtype):
    q, k, v = tensors(1, 2, 2, 40, 40, dtype=dtype)
    wide = [x.astype(np.float64) for x in (q, k, v)]
    for attention in (regard.LinearAttention(causal=True), regard.LshAttention(2, 8)):
        out, aux = attention(q, k, v, return_aux=True)
        assert out.dtype == dtype and aux.backward(out).v.dtype == dtype
    assert np.abs(regard.LinearAttention(causal=True)(q, k, v).astype(np.float64) - linear(*wide, MAPS["elu"], True)).max() < 0.05


def test_tensors_of_torch_stay_tensors():
    torch = pytest.importorskip("torch")
    arrays = tensors(1, 4, 2, 30, 30, dtype=np.float32)
    q, k, v = map(torch.from_numpy, arrays)
    for attention in (regard.LinearAttention(causal=True), regard.LshAttention(2, 8)):
        out, aux = attention(q, k, v, return_aux=True)
        expected, of_arrays = attention(*arrays, return_aux=True)
        assert torch.is_tensor(out) and np.array_equal(out.numpy(), expected)
        assert np.array_equal(aux.backward(out).k.numpy(), of_arrays.backward(expected).k)
        half = attention(*(x.bfloat16() for x in (q, k, v)))
        assert half.dtype == torch.bfloat16 and (half.float() - out).abs().max() < 0.2
    state = regard.LinearAttention(causal=True).state(1, 2, 8, 5, dtype=torch.float32)
    assert torch.is_tensor(state.step(q, k, v))


def test_autograd_follows():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in tensors(1, 2, 1, 9, 9))
    for attention in (regard.LinearAttention(causal=True), regard.LinearAttention("relu"), regard.LshAttention(2, 4, seed=1)):
        assert torch.autograd.gradcheck(attention, (q, k, v))
        out, aux = attention(q, k, v, return_aux=True)
        found = torch.autograd.grad((out * out).sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(found, aux.backward(2 * out.detach())))
        half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
        attention(*half).sum().backward()
        assert all(x.grad.dtype == torch.bfloat16 for x in half)
    changed = q.detach().clone().requires_grad_()
    out = regard.LinearAttention()(moved := changed * 1, k, v)
    moved += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with pytest.raises(TypeError, match="q: requires a gradient, but LinearState.step has no backward pass"):
        regard.LinearAttention(causal=True).state(1, 1, 8, 5, dtype="f64").step(q, k, v)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda x: regard.LinearAttention("gelu")(x, x, x), "map: expected elu, relu or random FEATURES, found \"gelu\""),
        (lambda x: regard.LinearAttention("random 0")(x, x, x), "random features: 0"),
        (lambda x: regard.LinearAttention()(x, x[..., :4], x), "features: q has 8, k has 4"),
        (lambda x: regard.LinearAttention()(x, x, x, mask="causal"), "mask"),
        (lambda x: regard.LinearAttention()(x, x, x, return_aux=True)[1].backward(x[:, :, :3]), "length"),
        (lambda x: regard.LinearAttention().state(1, 1, 8, 8), "causal=True"),
        (lambda x: regard.LinearAttention(causal=True).state(1, 2, 0, 8), "features: k has 0"),
        (lambda x: regard.LinearAttention(causal=True).state(1, 3, 8, 8, dtype="f64").step(x, x, x), "heads: the state has 3, k has 2"),
        (lambda x: regard.LinearAttention(causal=True).state(1, 2, 8, 8).step(x, x, x), "q: expected f32, found f64"),
        (lambda x: regard.LshAttention(rounds=0)(x, x, x), "lsh rounds: 0"),
        (lambda x: regard.LshAttention(rounds=1000)(x, x, x), "lsh rounds: 1000 is out of range"),
        (lambda x: regard.LshAttention(bucket_size=0)(x, x, x), "lsh bucket_size: 0"),
        (lambda x: regard.LshAttention()(x, x, x, return_aux=True)[1].recall(top=0), "top: 0"),
        (lambda x: regard.LshAttention()(x, x, x, return_aux=True)[1].backward(x, d_lse=[1.0]), "lse: 1 entries"),
    ],
)
def test_errors_say_what_is_wrong(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(normal(1, 2, 9, 8))


def test_places_that_are_not_there_are_refused():
    x = normal(1, 2, 9, 8)
    _, aux = regard.LshAttention()(x, x, x, return_aux=True)
    places = {(1, 0, 0, 0): "item 1: there are 1", (0, 2, 0, 0): "head 2", (0, 0, 9, 0): "row 9", (0, 0, 0, 9): "key 9"}
    for place, message in places.items():
        with pytest.raises(IndexError, match=message):
            aux.is_visible(*place)
