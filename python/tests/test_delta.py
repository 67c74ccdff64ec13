"""`regard.DeltaRule` against its recurrence, the functions of Transformers, and inside models."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import regard
import regard.hf

VARIANTS = [(g, beta) for g in (None, "head", "feature") for beta in (False, True)]


def tensors(heads=(2, 2, 4), length=70, dim=8, v_dim=5, g="head", beta=True, dtype=np.float64):
    """q, k, v, and the options."""
    random = np.random.default_rng(3)
    q, k = (random.standard_normal((2, n, length, dim)) for n in heads[:2])
    k /= np.linalg.norm(k, axis=-1, keepdims=True) + 0.1
    v = random.standard_normal((2, heads[2], length, v_dim))
    number = np.float64 if dtype == np.float64 else np.float32
    shape = (2, heads[2], length, dim)[: 4 if g == "feature" else 3]
    decay = (-np.exp(random.standard_normal(shape))).astype(number)
    betas = (1 / (1 + np.exp(random.standard_normal((2, heads[2], length))))).astype(number)
    state = random.standard_normal((2, heads[2], dim, v_dim)).astype(number)
    options = {"g": decay if g else None, "beta": betas if beta else None, "state": state}
    return [x.astype(dtype) for x in (q, k, v)], options


def recurrence(q, k, v, g=None, beta=None, state=None):
    """The definition."""
    heads = max(q.shape[1], v.shape[1])
    q, k, v, state = (np.repeat(x, heads // x.shape[1], axis=1).astype(np.float64) for x in (q, k, v, state))
    outs = []
    for t in range(v.shape[2]):
        if g is not None:
            decay = np.exp(np.repeat(g, heads // g.shape[1], axis=1)[:, :, t])
            state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        u = v[:, :, t]
        if beta is not None:
            u = (u - np.einsum("bhd,bhde->bhe", k[:, :, t], state)) * np.repeat(beta, heads // beta.shape[1], axis=1)[:, :, t, None]
        state = state + k[:, :, t, :, None] * u[:, :, None]
        outs.append(np.einsum("bhd,bhde->bhe", q[:, :, t], state) * q.shape[-1] ** -0.5)
    return np.stack(outs, axis=2), state


def far(found, exact):
    found, exact = (np.asarray(x.detach() if torch.is_tensor(x) else x, dtype=np.float64) for x in (found, exact))
    return np.abs(found - exact).max() / np.abs(exact).max()


@pytest.mark.parametrize("heads", [(2, 2, 4), (4, 2, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("g, beta", VARIANTS)
def test_the_delta_rule_is_its_recurrence(g, beta, heads):
    (q, k, v), options = tensors(heads, g=g, beta=beta)
    out, aux = regard.DeltaRule()(q, k, v, **options, return_aux=True)
    expected, _ = recurrence(q, k, v, **options)
    assert far(out, expected) < 1e-13
    if heads[0] <= heads[2]:
        assert far(aux.state, recurrence(q, k, v, **options)[1]) < 1e-13
    d_out, d_state = np.ones_like(out), np.ones_like(aux.state)
    grads = aux.backward(d_out, d_state=d_state)
    given = {"q": q, "k": k, "v": v, **options}
    for name, x in given.items():
        if x is None:
            assert getattr(grads, name) is None
            continue
        direction = np.random.default_rng(5).standard_normal(x.shape)

        def loss(step, name=name, x=x, direction=direction):
            moved = {**given, name: x + step * direction}
            out, aux = regard.DeltaRule()(**moved, return_aux=True)
            return out.sum() + aux.state.sum()

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        assert getattr(grads, name).shape == x.shape
        assert abs((getattr(grads, name) * direction).sum() - slope) < 1e-6 * (1 + abs(slope)), name


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("with_axis", [(), ("g",), ("beta",), ("g", "beta")], ids=str)
def test_gradients_have_the_shapes_of_their_tensors(with_axis, library):
    """`g` and `beta` with an axis of one feature, and without it."""
    (q, k, v), options = tensors()
    expected = regard.DeltaRule()(q, k, v, **options, return_aux=True)[1].backward(v)
    options.update({name: options[name][..., None] for name in with_axis})
    given = {"q": q, "k": k, "v": v, **options}
    if library == "torch":
        given = {name: torch.from_numpy(x) for name, x in given.items()}
    grads = regard.DeltaRule()(**given, return_aux=True)[1].backward(given["v"])
    for name, x in given.items():
        found = getattr(grads, name)
        assert found.shape == x.shape, name
        assert np.array_equal(np.asarray(found).reshape(getattr(expected, name).shape), getattr(expected, name)), name


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_values_and_gradients_are_those_of_transformers(name, length):
    arrays, options = tensors((4, 4, 4), length, dim=16, v_dim=24)
    theirs = [torch.from_numpy(x).transpose(1, 2) for x in (*arrays, options["g"], options["beta"])]
    theirs.append(torch.from_numpy(options["state"]))
    exact = [x.detach().clone().requires_grad_() for x in theirs]
    single = [x.detach().float().requires_grad_() for x in theirs]
    ours = [x.detach().float().requires_grad_() for x in theirs]

    def run(function, tensors):
        *given, state = tensors
        out, state = function(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum() + state.sin().sum()
        return out, state, *torch.autograd.grad(loss, tensors)

    # Their function computes in f32 whatever it gets: the exact values are ours in f64, which the recurrence has checked.
    found, expected = run(regard.hf._delta_rule, ours), run(getattr(qwen3_next, name), single)
    right = run(regard.hf._delta_rule, exact)
    for i, (a, b, c) in enumerate(zip(found, expected, right)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert far(a, c) < 1e-5, i
        assert far(b, c) < 1e-4, i


def test_autograd_follows():
    (q, k, v), options = tensors((1, 1, 2), 5, dim=3, v_dim=2)
    names = [*options]
    given = [torch.from_numpy(x).requires_grad_() for x in (q, k, v, *options.values())]

    def call(*given):
        out, aux = regard.DeltaRule(qk_l2norm=True)(*given[:3], **dict(zip(names, given[3:])), return_aux=True)
        return out, aux.state

    assert torch.autograd.gradcheck(call, given)
    out, aux = regard.DeltaRule()(*given[:3], **dict(zip(names, given[3:])), return_aux=True)
    found = torch.autograd.grad(aux.state.sum(), given)
    back = aux.backward(torch.zeros_like(out), d_state=torch.ones_like(aux.state))
    assert all(torch.equal(a, b) for a, b in zip(found, back))
    assert found[0].abs().max() == 0


@pytest.mark.parametrize("g, beta", VARIANTS)
def test_a_state_goes_on_where_the_positions_ended(g, beta):
    (q, k, v), options = tensors(length=90, g=g, beta=beta, dtype=np.float32)
    options.pop("state")
    rule = regard.DeltaRule(qk_l2norm=True)
    whole, aux = rule(q, k, v, **options, return_aux=True)
    state = rule.state(2, 4, 8, 5)

    def step(state, first, end):
        now = {name: x if x is None else x[:, :, first:end] for name, x in options.items()}
        return state.step(q[:, :, first:end], k[:, :, first:end], v[:, :, first:end], **now)

    found, other = [step(state, 0, 70)], state.fork()
    for i in range(70, 90):
        found.append(step(state, i, i + 1))
        assert np.array_equal(step(other, i, i + 1), found[-1])
    assert far(np.concatenate(found, axis=2), whole) < 1e-5
    assert far(state.numpy(), aux.state) < 1e-5 and state.dtype == "f32"


def test_packed_sequences_have_the_bits_of_separate_calls():
    (q, k, v), options = tensors(length=150, dtype=np.float32)
    given = {"q": q, "k": k, "v": v, **options}
    given.pop("state")
    packed = {name: np.ascontiguousarray(x[0].swapaxes(0, 1)) for name, x in given.items()}
    offsets = [0, 1, 1, 80, 150]
    out, aux = regard.DeltaRule()(**packed, offsets=offsets, return_aux=True)
    grads = aux.backward(out)
    for i in range(4):
        rows = slice(*offsets[i : i + 2])
        alone, own = regard.DeltaRule()(**{name: x[:1, :, rows] for name, x in given.items()}, return_aux=True)
        assert np.array_equal(out[rows].swapaxes(0, 1), alone[0]) and np.array_equal(aux.state[i], own.state[0])
        assert np.array_equal(grads.k[rows].swapaxes(0, 1), own.backward(alone).k[0])


def test_any_number_of_threads_and_any_batch_give_the_same_bits():
    (q, k, v), options = tensors(length=150, dtype=np.float32)
    found = [regard.DeltaRule()(q, k, v, **options, threads=n, return_aux=True) for n in (1, 2, 7)]
    assert all(np.array_equal(out, found[0][0]) for out, _ in found)
    assert all(np.array_equal(aux.backward(out).g, found[0][1].backward(out).g) for out, aux in found)
    one = regard.DeltaRule()(q[1:], k[1:], v[1:], **{name: x[1:] for name, x in options.items()})
    assert np.array_equal(one[0], found[0][0][1])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_types_come_back_as_they_came(dtype):
    (q, k, v), options = tensors(dtype=dtype)
    out, aux = regard.DeltaRule()(q, k, v, **options, return_aux=True)
    grads = aux.backward(out)
    assert out.dtype == dtype and grads.q.dtype == dtype and grads.g.dtype == np.float32 and aux.state.dtype == np.float32
    expected, _ = recurrence(*(x.astype(np.float64) for x in (q, k, v)), **options)
    assert far(out.astype(np.float64), expected) < 1e-2


SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=8, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
# Of each module of Transformers that has the functions of the delta rule: configuration, model, options.
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", SMALL),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {name: x for name, x in SMALL.items() if name != "head_dim"}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", dict(
        EXPERTS, hc_count=2, hc_lowrank=8, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=128,
        indexer_compress_ratio=2)),
}  # fmt: skip


def test_every_module_of_transformers_with_the_delta_rule_is_tested():
    files = (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")
    assert {file.parent.name for file in files if "def torch_chunk_gated_delta_rule(" in file.read_text()} == MODELS.keys()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    config, name, options = MODELS[request.param]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


def test_models_compute_the_same_with_it(model):
    ids = torch.randint(3, 97, (2, 70), generator=torch.Generator().manual_seed(1))
    module = sys.modules[type(model).__module__]
    calls = []

    def run():
        model.zero_grad()
        logits = model(ids).logits
        logits.sin().sum().backward()
        return logits.detach(), {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}

    original = module.torch_chunk_gated_delta_rule
    logits, grads = run()
    with regard.hf.delta_rule(model):
        inner = module.torch_chunk_gated_delta_rule
        module.torch_chunk_gated_delta_rule = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
        found, found_grads = run()
    assert len(calls) == 3 and module.torch_chunk_gated_delta_rule is original
    assert (found - logits).abs().max() < 1e-4 and grads.keys() == found_grads.keys()
    for name, grad in grads.items():
        assert (found_grads[name] - grad).abs().max() <= 1e-4 * (1 + grad.abs().max()), name


def test_models_generate_the_same_with_it(model):
    ids = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    with regard.hf.delta_rule(model):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)


def test_packed_sequences_of_transformers_stay_apart():
    arrays, options = tensors((2, 2, 2), 60, dtype=np.float32)
    given = [torch.from_numpy(x)[:1].transpose(1, 2) for x in (*arrays, options["g"], options["beta"])]
    out, state = regard.hf._delta_rule(*given, cu_seqlens=torch.tensor([0, 25, 60], dtype=torch.int32), output_final_state=True)
    for i, rows in enumerate((slice(0, 25), slice(25, 60))):
        alone, own = regard.hf._delta_rule(*(x[:, rows] for x in given), output_final_state=True)
        assert torch.equal(out[:, rows], alone) and torch.equal(state[i], own[0])


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match="Linear has no layer that computes the gated delta rule"):
        regard.hf.delta_rule(torch.nn.Linear(2, 2)).__enter__()


X = np.zeros((1, 2, 9, 8), np.float32)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda rule: rule(X, X[..., :4], X), "features: q has 8, k has 4"),
        (lambda rule: rule(X, X[:, :, :5], X), "length: v has 9, k has 5"),
        (lambda rule: rule(X, np.zeros((1, 3, 9, 8), np.float32), X), "heads of k: 3 entries; give 2"),
        (lambda rule: rule(X, X, X, g=X[..., :3]), "features of g: 3 entries; give 1 "),
        (lambda rule: rule(X, X, X, g=X[:, :1, :, 0]), "heads: v has 2, g has 1"),
        (lambda rule: rule(X, X, X, beta=X), "features: the call has 1, beta has 8"),
        (lambda rule: rule(X, X, X, state=X), "features of k: the call has 8, the initial state has 9"),
        (lambda rule: rule(X, X, X, threads=0), "threads: 0"),
        (lambda rule: rule(X, X, X.astype(np.float64)), "v: expected f32, found f64"),
        (lambda rule: rule(X, X, X, return_aux=True)[1].backward(X[:, :, :3]), "length: the call has 9"),
        (lambda rule: rule(X[..., :0], X[..., :0], X), "features: k has 0"),
        (lambda rule: regard.DeltaRule(scale=float("nan")), "scale: nan is invalid"),
        (lambda rule: rule.state(1, 3, 8, 8).step(X, X, X), "heads: the state has 3, the call has 2"),
        (lambda rule: rule.state(1, 2, 0, 8), "features: k has 0"),
    ],
)
def test_errors_say_what_is_wrong(wrong, message):
    with pytest.raises((ValueError, TypeError), match=message):
        wrong(regard.DeltaRule())


def test_a_step_of_a_state_has_no_gradient():
    x = torch.zeros(1, 1, 1, 4, requires_grad=True)
    with pytest.raises(TypeError, match="q: requires a gradient, but DeltaState.step has no backward pass"):
        regard.DeltaRule().state(1, 1, 4, 4).step(x, x, x)
