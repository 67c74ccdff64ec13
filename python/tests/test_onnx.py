"""Regard as a backend of ONNX, judged by the backend tests of ONNX."""

import re
import unittest
import warnings

import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16
from onnx import TensorProto, helper
from onnx.backend.test import BackendTest

import regard
import regard.onnx

# The tests of onnx 1.23.2, which python/environment pins: fewer would look like success.
COUNTS = {"attention": 93, "linear_attention": 14, "rotary_embedding": 8, "tensorscatter": 3}
INCLUDED = rf"^test_({'|'.join(COUNTS)})(_|$)"


def _collected():
    """Tests of ONNX on the CPU, by name. `BackendTest` marks all others as skipped; they are left out, because the gate forbids skips."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the data for other operators
        tests = BackendTest(regard.onnx.RegardBackend, __name__).include(INCLUDED).exclude("expanded")
        cases = vars(tests.test_cases["OnnxBackendNodeModelTest"])
    return {name: test for name, test in cases.items() if re.match(INCLUDED, name) and name.endswith("_cpu") and "expanded" not in name}


ONNX = _collected()
TestOnnxBackend = type("TestOnnxBackend", (unittest.TestCase,), dict(ONNX))


@pytest.mark.parametrize("operator", COUNTS)
def test_all_tests_of_onnx_are_collected(operator):
    assert sum(re.match(rf"test_{operator}(_|$)", name) is not None for name in ONNX) == COUNTS[operator]


def model_of(nodes, inputs, outputs, initializers=()):
    """A model of opset 25; `inputs` are arrays by name."""
    types = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in inputs.items()]
    found = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["any"]) for name in outputs]
    graph = helper.make_graph(nodes, "graph", types, found, initializer=list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10)


def normal(*sizes, dtype=np.float32):
    return np.random.default_rng(sum(sizes)).normal(size=sizes).astype(dtype)


def attention(attributes=None, inputs=None, outputs=("Y",), opset=25):
    """Runs one Attention node over inputs by their names in the specification."""
    inputs = {"Q": normal(2, 4, 3, 8), "K": normal(2, 2, 5, 8), "V": normal(2, 2, 5, 6), **(inputs or {})}
    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    given = [name if name in inputs else "" for name in names[: 1 + max(names.index(name) for name in inputs)]]
    node = helper.make_node("Attention", given, list(outputs), **(attributes or {}))
    return regard.onnx.run_node(node, [inputs[name] for name in names if name in inputs], opset_version=opset)


def test_a_graph_of_several_operators_agrees_with_the_reference_of_onnx():
    """A decoding step: rotate, write into a cache, attend; cosines and sines are initializers."""
    angles = np.outer(np.arange(16), 100.0 ** -np.linspace(0, 1, 4)).astype(np.float32)
    inputs = {
        "q": normal(2, 4, 3, 8), "k": normal(2, 2, 3, 8), "v": normal(2, 2, 3, 8),
        "k_cache": normal(2, 2, 12, 8), "v_cache": normal(2, 2, 12, 8),
        "at": np.array([2, 7]), "positions": np.array([[2, 3, 4], [7, 8, 9]]), "lengths": np.array([5, 10]),
    }  # fmt: skip
    caches = ["q_rotated", "keys", "values", "", "", "", "lengths"]
    nodes = [
        helper.make_node("RotaryEmbedding", ["q", "cos", "sin", "positions"], ["q_rotated"]),
        helper.make_node("RotaryEmbedding", ["k", "cos", "sin", "positions"], ["k_rotated"]),
        helper.make_node("TensorScatter", ["k_cache", "k_rotated", "at"], ["keys"]),
        helper.make_node("TensorScatter", ["v_cache", "v", "at"], ["values"]),
        helper.make_node("Attention", caches, ["y"], is_causal=1, left_window_size=4, softcap=5.0),
    ]
    tables = [onnx.numpy_helper.from_array(x, name) for name, x in (("cos", np.cos(angles)), ("sin", np.sin(angles)))]
    model = model_of(nodes, inputs, ["y", "keys"], initializers=tables)
    expected = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    found = regard.onnx.prepare(model).run(list(inputs.values()))
    assert len(found) == 2 and all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected))
    assert all(np.array_equal(a, b) for a, b in zip(found, regard.onnx.run_model(model, list(inputs.values()))))


@pytest.mark.parametrize("precision", [TensorProto.FLOAT, TensorProto.DOUBLE])
def test_the_precision_of_the_softmax_is_a_lower_bound(precision):
    q, k, v = (normal(1, 1, 64, 16), normal(1, 1, 256, 16) * 4, normal(1, 1, 256, 16))
    (found,) = attention({"softmax_precision": precision}, {"Q": q, "K": k, "V": v})
    exact = regard.steps(*(x.astype(np.float64) for x in (q, k, v))).out
    worst = np.abs(found - exact).max()
    assert found.dtype == np.float32
    assert worst <= (2**-24 * np.abs(exact).max() if precision == TensorProto.DOUBLE else 1e-5)


@pytest.mark.parametrize("types", [("f2", "f2", "f4"), ("f4", "f4", "f8"), (bfloat16, bfloat16, "f2")])
def test_tensors_of_different_types_give_the_type_of_q(types):
    q, k, v = (x.astype(t) for x, t in zip((normal(1, 2, 3, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8)), types))
    (found,) = attention(None, {"Q": q, "K": k, "V": v})
    exact = regard.steps(*(x.astype(np.float64) for x in (q, k, v))).out
    assert found.dtype == q.dtype
    assert np.allclose(found.astype(np.float64), exact, rtol=2**-7 if q.dtype == bfloat16 else 2**-10, atol=1e-6)


@pytest.mark.parametrize("mode", range(4))
def test_scores_of_every_mode_are_those_of_the_specification(mode):
    """Modes 0 and 1 have the scores of hidden pairs too. In mode 0 the reference implementation of onnx 1.23 applies the softcap."""
    inputs = {"Q": normal(2, 4, 3, 8), "K": normal(2, 2, 5, 8), "V": normal(2, 2, 5, 6), "attn_mask": normal(4, 3, 5) > 0}
    visible = inputs["attn_mask"] & np.tri(3, 5, dtype=bool)
    products = np.einsum("bhqd,bhkd->bhqk", inputs["Q"].astype(np.float64), np.repeat(inputs["K"], 2, axis=1)) / 8**0.5
    scores = 1.5 * np.tanh(products / 1.5)
    weights = np.where(visible, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    expected = (products, scores, np.where(visible, scores, -np.inf), weights)[mode]
    out, found = attention({"qk_matmul_output_mode": mode, "is_causal": 1, "softcap": 1.5}, inputs, ("Y", "", "", "S"))
    assert found.dtype == np.float32 and np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.allclose(out, weights @ np.repeat(inputs["V"], 2, axis=1), rtol=1e-5, atol=1e-6)


def test_what_a_node_cannot_mean_is_an_error():
    q, k, v = normal(2, 4, 3, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 6)
    past = {"past_key": normal(2, 2, 7, 8), "past_value": normal(2, 2, 7, 6)}
    lengths = {"nonpad_kv_seqlen": np.array([5, 4])}
    for why, arguments in {
        "past_key and past_value: give both": (None, {"past_key": past["past_key"]}),
        "leave out past and present": (None, {**past, **lengths}),
        "numbers from 0 to 5": (None, {"nonpad_kv_seqlen": np.array([5, 6])}),
        "use bool": (None, {"attn_mask": np.ones((3, 5), np.int64)}),
        "does not broadcast to": (None, {"attn_mask": np.ones((3, 2, 5), bool)}),
        "leave it out for 4 axes": ({"q_num_heads": 2}, None),
        "set the attributes q_num_heads": (None, {"Q": q[:, 0], "K": k[:, 0], "V": v[:, 0]}),
        "all must have 3, or all 4": (None, {"Q": q[:, 0]}),
        "use 0, 1, 2 or 3": ({"qk_matmul_output_mode": 4}, None),
        "softmax_precision is 7": ({"softmax_precision": 7}, None),
        "use -1": ({"left_window_size": -2}, None),
        "softcap": ({"softcap": -1.0}, None),
    }.items():
        with pytest.raises(ValueError, match=why):
            attention(*arguments)
    with pytest.raises(ValueError, match="leave out past and present"):
        attention(None, lengths, ("Y", "present_key"))
    with pytest.raises(ValueError, match="does not broadcast"):
        attention(None, {"attn_mask": np.ones((3, 4), bool)}, opset=23)  # padded from opset 24 on


def test_what_other_operators_cannot_mean_is_an_error():
    cache, update = normal(2, 2, 8, 4), normal(2, 2, 3, 4)
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    x, beta = normal(1, 3, 8), normal(1, 3, 2)
    for why, operator, inputs, attributes in (
        ("positions 6 to 9 of a cache of 8", "TensorScatter", [cache, update, np.array([6, 7])], {}),
        ("does not fit", "TensorScatter", [cache, normal(2, 2, 9, 4)], {}),
        ("which is the batch", "TensorScatter", [cache, update], {"axis": 0}),
        ("needs decay", "LinearAttention", [x, x, x], {**heads, "update_rule": "gated"}),
        ("has no beta", "LinearAttention", [x, x, x, None, None, beta], {**heads, "update_rule": "linear"}),
        ("heads must divide", "LinearAttention", [x, x, x], {"q_num_heads": 4, "kv_num_heads": 8, "update_rule": "linear"}),
        ("update_rule is 'other'", "LinearAttention", [x, x, x], {**heads, "update_rule": "other"}),
        ("of 0 to 4", "RotaryEmbedding", [update, normal(5, 2), normal(5, 2), np.array([[0, 1, 2], [3, 4, 5]])], {}),
        ("even number", "RotaryEmbedding", [update, normal(2, 3, 2), normal(2, 3, 2)], {"rotary_embedding_dim": 6}),
    ):
        names = ["" if x is None else str(i) for i, x in enumerate(inputs)]
        node = helper.make_node(operator, names, ["Y", "S"] if operator == "LinearAttention" else ["Y"], **attributes)
        with pytest.raises(ValueError, match=why):
            regard.onnx.run_node(node, [x for x in inputs if x is not None])


def recurrence(scale, q, k, v, state, decay=None, beta=None):
    """`LinearAttention` by its specification, in f64: heads before positions, as many heads of q as of k."""
    q, k, v, state = (x.astype(np.float64) for x in (q, k, v, state))
    outs = []
    for t in range(q.shape[2]):
        key, value = k[:, :, t], v[:, :, t]
        if decay is not None:
            state = state * np.exp(decay[:, :, t].astype(np.float64))[..., None]
        if beta is not None:
            value = beta[:, :, t] * (value - np.einsum("bhkv,bhk->bhv", state, key))
        state = state + key[..., None] * value[..., None, :]
        outs.append(scale * np.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return np.stack(outs, 2), state


@pytest.mark.parametrize("decay", ["head", "feature"])
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
def test_long_linear_attention_is_its_recurrence(rule, decay):
    """The tests of ONNX have a few positions; 200 are several chunks of the engine."""
    heads, kv_heads, dim, v_dim, length = 4, 2, 16, 12, 200
    q, k, v = normal(2, length, heads * dim), normal(2, length, kv_heads * dim), normal(2, length, kv_heads * v_dim)
    k = (k / np.linalg.norm(k.reshape(2, length, kv_heads, dim), axis=-1).repeat(dim, -1)).astype(np.float32)
    state = normal(2, kv_heads, dim, v_dim)
    g = -np.exp(normal(2, length, kv_heads * (1 if decay == "head" else dim))) if "gated" in rule else None
    beta = 1 / (1 + np.exp(-normal(2, length, 1))) if "delta" in rule else None
    inputs = [q, k, v, state, g, beta]
    names = ["" if x is None else name for name, x in zip(("q", "k", "v", "past", "decay", "beta"), inputs)]
    node = helper.make_node("LinearAttention", names, ["y", "present"], q_num_heads=heads, kv_num_heads=kv_heads, update_rule=rule, scale=0.3)
    found = regard.onnx.run_node(node, [x for x in inputs if x is not None])

    def by_head(x, count):
        x = x.reshape(2, length, count, -1).transpose(0, 2, 1, 3)
        return x.repeat(heads // count, 1)

    exact, final = recurrence(
        0.3, by_head(q, heads), by_head(k, kv_heads), by_head(v, kv_heads), state.repeat(2, 1),
        None if g is None else by_head(g, kv_heads), None if beta is None else by_head(beta, 1),
    )  # fmt: skip
    expected = exact.transpose(0, 2, 1, 3).reshape(2, length, -1), final[:, ::2]
    for one, other in zip(found, expected):
        assert one.dtype == np.float32 and np.abs(one - other).max() < 1e-5 * np.abs(other).max()


def test_empty_tensors_give_empty_tensors():
    """A batch of 0 and a text of 0 positions, with 3 and 4 axes."""
    packed = {"q_num_heads": 4, "kv_num_heads": 2}
    for batch, length in ((0, 3), (2, 0)):
        (found,) = attention(packed, {"Q": normal(batch, length, 32), "K": normal(batch, 5, 16), "V": normal(batch, 5, 12)})
        assert found.shape == (batch, length, 24)
        (found,) = attention(None, {"Q": normal(batch, 4, length, 8), "K": normal(batch, 2, 5, 8), "V": normal(batch, 2, 5, 6)})
        assert found.shape == (batch, 4, length, 6)
        x, beta = normal(batch, length, 8), normal(batch, length, 2)
        node = helper.make_node("LinearAttention", ["q", "k", "v", "", "g", "b"], ["y", "s"], q_num_heads=2, kv_num_heads=2)
        found, state = regard.onnx.run_node(node, [x, x, x, beta, beta])
        assert found.shape == (batch, length, 8) and np.array_equal(state, np.zeros((batch, 2, 4, 4)))
        node = helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"], num_heads=2)
        (found,) = regard.onnx.run_node(node, [x, normal(batch, length, 2), normal(batch, length, 2)])
        assert found.shape == (batch, length, 8)


def test_other_operators_and_devices_are_rejected_before_anything_runs():
    x = normal(2, 3)
    relu = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": x}, ["y"])
    assert not regard.onnx.is_compatible(relu)
    with pytest.raises(NotImplementedError, match="Relu: not an operator of regard.onnx, which has Attention"):
        regard.onnx.prepare(relu)
    rotary = model_of([helper.make_node("RotaryEmbedding", ["x", "c", "s"], ["y"])], {"x": x, "c": x, "s": x}, ["y"])
    assert regard.onnx.is_compatible(rotary) and not regard.onnx.is_compatible(rotary, "CUDA") and not regard.onnx.supports_device("CUDA:0")
    for arguments, error in ((("CUDA",), ValueError), ((), TypeError)):
        with pytest.raises(error, match="CUDA|precision"):
            regard.onnx.prepare(rotary, *arguments, **({} if arguments else {"precision": "high"}))
    with pytest.raises(ValueError, match=r"found 1, the model has 3 \(x, c, s\)"):
        regard.onnx.prepare(rotary).run([x])
