"""What heads move, not where they look: value-weighted attention, contributions and scores by component, against dense formulas in f64."""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import Any, Callable, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hf_table import GROUPED, Architecture, build, model
from test_lens import given
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import regard.lens
from regard._values import output_projection

CALLS: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]] = []


def noted(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **_):
    """Dense attention that keeps its scores before softcap, its weights and its values."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    plain = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = plain if softcap is None else softcap * torch.tanh(plain / softcap)
    scores = scores if position_bias is None else scores + position_bias
    scores = scores if attention_mask is None else scores + attention_mask[..., : key.shape[2]]
    top = scores if s_aux is None else torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.nan_to_num(top.softmax(-1))[..., : key.shape[2]]
    CALLS.append((module, plain, weights, value))
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("noted", noted)
AttentionMaskInterface.register("noted", masking_utils.eager_mask)

# The output projection beside or in each attention module, as its architecture names it: inputs first.
PROJECTIONS = {
    "llama": lambda of, name: of.get_submodule(f"{name}.o_proj").weight.T,
    "qwen3": lambda of, name: of.get_submodule(f"{name}.o_proj").weight.T,
    "gemma2": lambda of, name: of.get_submodule(f"{name}.o_proj").weight.T,
    "gpt_oss": lambda of, name: of.get_submodule(f"{name}.o_proj").weight.T,
    "deepseek_v3": lambda of, name: of.get_submodule(f"{name}.o_proj").weight.T,
    "phi": lambda of, name: of.get_submodule(f"{name}.dense").weight.T,
    "gpt2": lambda of, name: of.get_submodule(f"{name}.c_proj").weight,
    "bert": lambda of, name: of.get_submodule(f"{name.removesuffix('.self')}.output.dense").weight.T,
    "bart": lambda of, name: of.get_submodule(f"{name}.out_proj").weight.T,
    "t5": lambda of, name: of.get_submodule(f"{name}.o").weight.T,
}


@torch.no_grad()
def dense(name: str, inputs: dict) -> dict[str, tuple[torch.Tensor, ...]]:
    """Of each attention module its scores, weights, values and W_O `[heads, v_dim, d_model]`, in f64."""
    of = model(name)
    of.set_attn_implementation("noted")
    CALLS.clear()
    of(**inputs)
    names = {module: own for own, module in of.named_modules()}
    found = {}
    for module, scores, weights, value in CALLS:
        projection = PROJECTIONS[name](of, names[module]).unflatten(0, (weights.shape[1], -1))
        found[names[module]] = tuple(x.double() for x in (scores, weights, value, projection))
    return found


@pytest.mark.parametrize("name", PROJECTIONS)
def test_weights_are_those_of_values_as_they_are_added(name):
    inputs = given(name)
    expected = dense(name, inputs)
    with torch.no_grad(), regard.lens.capture(model(name), keep=True, value_weighted=True) as seen:
        model(name)(**inputs)
    assert {record.name for record in seen} == set(expected)
    for record in seen:
        _, weights, value, projection = expected[record.name]
        # ||v_j W_O|| by its definition, one vector of d_model numbers for each head and key.
        norms = torch.einsum("bhjd,hdm->bhjm", value, projection).norm(dim=-1)
        wanted = weights * norms[:, :, None]
        wanted = (wanted / wanted.sum(-1, keepdim=True)).numpy()
        np.testing.assert_allclose(record.tile((0, record.q_len), (0, record.k_len)), wanted, atol=2e-5)
        entropy = -np.where(wanted > 0, wanted * np.log(np.maximum(wanted, 1e-300)), 0).sum(-1)
        np.testing.assert_allclose(record.entropy, entropy, atol=2e-4)


def test_weights_of_a_generation_are_those_of_its_whole_text():
    of = model("llama")
    prompt = given("llama")["input_ids"][:1]
    with torch.no_grad(), regard.lens.capture(of, keep=True, value_weighted=True) as seen:
        text = of.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with torch.no_grad(), regard.lens.capture(of, keep=True, value_weighted=True) as whole:
        of(text)
    for step, at_once in zip(seen, whole):
        np.testing.assert_allclose(step.row(-1), at_once.row(step.q_len - 1)[..., : step.k_len], atol=1e-5)


def test_a_model_without_a_known_projection_is_refused():
    of = model("llama")
    layer = of.model.layers[0].self_attn
    layer.output_of_mine = layer.o_proj
    del layer.o_proj
    try:
        layer.forward, before = (lambda *a, **b: None), layer.forward
        with pytest.raises(ValueError, match="no output projection with 32 inputs"):
            output_projection(of, "model.layers.0.self_attn", 32)
    finally:
        layer.forward = before
        layer.o_proj = layer.output_of_mine
        del layer.output_of_mine


# ---- contributions ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3", "phi"])
@pytest.mark.parametrize("row", [-1, 5])
def test_contributions_are_those_of_their_definition(name, row):
    inputs = {key: x[:1] for key, x in given(name).items()}
    expected = dense(name, inputs)
    of = model(name)
    streams: list[torch.Tensor] = []
    names = {own: module for own, module in of.named_modules()}

    def stream(module, args, options):
        streams.append((args[0] if args else options["hidden_states"])[0].double())

    blocks = [names[own.rpartition(".")[0]] for own in expected]
    hooks = [block.register_forward_pre_hook(stream, with_kwargs=True) for block in blocks]
    with torch.no_grad():
        of(**inputs)
    for hook in hooks:
        hook.remove()
    n = inputs["input_ids"].shape[1]
    share = np.eye(n)[row]
    layers = []
    for (own, (_, weights, value, projection)), x in reversed(list(zip(expected.items(), streams))):
        parts = torch.einsum("hij,hjd,hdm->ijm", weights[0], value[0], projection)
        parts[range(n), range(n)] += x
        bias = output_bias(of, name, own)
        y = parts.sum(1) + (0 if bias is None else bias.double())
        near = (y.abs().sum(-1)[:, None] - (y[:, None] - parts).abs().sum(-1)).clamp(min=0).detach().numpy()
        share = share @ (near / near.sum(-1, keepdims=True))
        layers.append(share)
    found = regard.lens.contributions(of, inputs, row)
    np.testing.assert_allclose(found, np.stack(layers[::-1]), atol=1e-5)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-9)


def output_bias(of, name, own):
    place = {"gpt2": f"{own}.c_proj", "bert": f"{own.removesuffix('.self')}.output.dense", "phi": f"{own}.dense"}.get(name, f"{own}.o_proj")
    return of.get_submodule(place).bias


def test_contributions_in_blocks_of_rows_are_the_same(monkeypatch):
    inputs = {key: x[:1] for key, x in given("llama").items()}
    whole = regard.lens.contributions(model("llama"), inputs)
    monkeypatch.setattr("regard._residual.BLOCK", 1)
    np.testing.assert_allclose(regard.lens.contributions(model("llama"), inputs), whole, rtol=1e-5, atol=1e-8)


# ---- scores by component ----


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3", "gemma2", "phi"])
@pytest.mark.parametrize("layer, head, row", [(1, 2, -1), (1, 3, 6), (0, 1, 9)])
def test_components_add_up_to_the_scores(name, layer, head, row):
    inputs = given(name)
    scores, weights, *_ = list(dense(name, inputs).values())[layer]
    scores, weights = (x[1, head, row].numpy() for x in (scores, weights))
    why = regard.lens.qk_attribution(model(name), inputs, layer, head, row, item=1)
    per_layer = 1 if name == "bert" else 2
    assert len(why.names) == 2 + per_layer * layer
    expected = np.where(weights > 0, scores, math.nan)
    np.testing.assert_allclose(why.scores, expected, atol=1e-5 * np.abs(scores).max())
    np.testing.assert_allclose(why.keys.sum(0), expected, atol=1e-5 * np.abs(scores).max())
    assert np.abs(np.nan_to_num(why.keys[:-1])).max() > 0.05 * np.abs(scores).max()
    key = int(np.nanargmax(why.scores))
    pair = why.pair(key)
    assert pair.shape == (len(why.names),) * 2
    np.testing.assert_allclose(pair.sum(), scores[key], rtol=1e-4, atol=1e-5 * np.abs(scores).max())
    np.testing.assert_allclose(pair.sum(0), why.keys[:, key], atol=2e-5 * max(1.0, np.abs(why.keys[:, key]).max()))


class Removal(NamedTuple):
    """Of an architecture its blocks, and its norm before attention with the statistics of x, as functions of y."""

    blocks: Callable[[Any], Any]
    attention: str
    norm: str
    next: str | None
    """The module that takes the residual stream after attention; None if the MLP is parallel to attention."""
    linear: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def rms(x: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer_norm(x: torch.Tensor, y: torch.Tensor, eps: float) -> torch.Tensor:
    return (y - y.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + eps)


def llama_norm(norm: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return rms(x, y, norm.variance_epsilon) * norm.weight


def torch_norm(norm: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, y, norm.eps) * norm.weight + norm.bias


def layers_of(of):
    return of.model.layers


LLAMA = Removal(layers_of, "self_attn", "input_layernorm", "post_attention_layernorm", llama_norm)
REMOVALS = {
    "llama": LLAMA,
    "gpt2": Removal(lambda of: of.transformer.h, "attn", "ln_1", "ln_2", torch_norm),
    "phi": LLAMA._replace(next=None, linear=torch_norm),
    "gemma2": LLAMA._replace(next="pre_feedforward_layernorm", linear=lambda norm, x, y: rms(x, y, norm.eps) * (1 + norm.weight)),
    "granite": LLAMA,
    "nemotron": LLAMA._replace(linear=lambda norm, x, y: layer_norm(x, y, norm.eps) * (norm.weight + 1) + norm.bias),
    "cohere": LLAMA._replace(next=None, linear=lambda norm, x, y: layer_norm(x, y, norm.variance_epsilon) * norm.weight),
    "olmo": LLAMA._replace(linear=lambda norm, x, y: layer_norm(x, y, 1e-5)),
}
MADE = {
    "granite": Architecture("GraniteConfig", "GraniteForCausalLM", dict(GROUPED, residual_multiplier=0.3)),
    "nemotron": Architecture("NemotronConfig", "NemotronForCausalLM", dict(GROUPED)),
    "cohere": Architecture("CohereConfig", "CohereForCausalLM", dict(GROUPED)),
    "olmo": Architecture("OlmoConfig", "OlmoForCausalLM", dict(GROUPED)),
}


@cache
def made(name: str) -> torch.nn.Module:
    return build(MADE[name]) if name in MADE else model(name)


@pytest.mark.parametrize("name", REMOVALS)
def test_a_component_is_what_its_removal_takes_from_a_score(name):
    """Without it in the residual stream at the keys, and with the statistics of the norm as they are, scores fall by its part."""
    of, inputs, about = made(name), given("llama"), REMOVALS[name]
    why = regard.lens.qk_attribution(of, inputs, 1, 0, row=-1)
    assert why.names == ["embedding", "attention 0", "rest 0", "bias"]
    entered: dict[torch.nn.Module, tuple] = {}
    left: dict[torch.nn.Module, torch.Tensor] = {}
    first, second = about.blocks(of)
    hooks = []
    for module in (*first.modules(), *second.modules()):
        hooks.append(module.register_forward_pre_hook(lambda one, args, options: entered.update({one: (args, options)}), with_kwargs=True))
        hooks.append(module.register_forward_hook(lambda one, _, out: left.update({one: out[0] if isinstance(out, tuple) else out})))
    of.set_attn_implementation("noted")
    with torch.no_grad():
        of(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()

    def stream(module):
        args, options = entered[module]
        return args[0] if args else options["hidden_states"]

    before, x = stream(first), stream(second)
    added = x - before - left[first.mlp] if about.next is None else stream(first.get_submodule(about.next)) - before
    norm, attention = second.get_submodule(about.norm), second.get_submodule(about.attention)
    args, options = entered[attention]
    options = {key: value for key, value in options.items() if key != "hidden_states"}

    @torch.no_grad()
    def scores(changed):
        CALLS.clear()
        attention(about.linear(norm, x, changed), *args[1:], **options)
        ((_, plain, *_),) = CALLS
        return plain[0, 0, -1, :-1].numpy()

    # The row itself keeps its query, so that only keys differ.
    without = x - added
    without[:, -1] = x[:, -1]
    lost = scores(x) - scores(without)
    found = why.keys[why.names.index("attention 0")][:-1]
    visible = np.isfinite(found)
    assert visible.sum() >= 4 and np.abs(lost[visible]).max() > 1e-2 * np.nanmax(np.abs(why.scores))
    np.testing.assert_allclose(found[visible], lost[visible], atol=2e-5 * np.nanmax(np.abs(why.scores)))


def test_layers_without_attention_are_parts_of_a_component():
    config = transformers.Qwen3NextConfig(
        **{**GROUPED, "num_hidden_layers": 3}, head_dim=8, layer_types=["full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    of = transformers.Qwen3NextForCausalLM(config).eval()
    why = regard.lens.qk_attribution(of, given("llama"), 2, 0)
    assert why.names == ["embedding", "attention 0", "rest 0 to 1", "bias"]
    np.testing.assert_allclose(why.keys.sum(0), why.scores, atol=1e-5 * np.nanmax(np.abs(why.scores)))
    with pytest.raises(ValueError, match="self layer 1: its attention did not call regard"):
        regard.lens.contributions(of, given("llama"))


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_contributions_are_refused_where_attention_is_not_added_as_it_is(name):
    with pytest.raises(ValueError, match=r"layers.1.self_attn: what it adds to the residual stream is not the sum of a_ij v_j W_O"):
        regard.lens.contributions(made(name), given("llama"))


class CubicNorm(torch.nn.LayerNorm):
    """Not linear in its input if its statistics are fixed."""

    def forward(self, x):
        return super().forward(x) ** 3


def test_a_norm_that_is_not_linear_is_refused():
    of = copy.deepcopy(model("phi"))
    of.model.layers[1].input_layernorm.__class__ = CubicNorm
    with pytest.raises(ValueError, match="CubicNorm: this norm is not supported"):
        regard.lens.qk_attribution(of, given("llama"), 1, 0)


def test_directions_of_ones_own_are_components():
    of, inputs = model("llama"), given("llama")
    why = regard.lens.qk_attribution(of, inputs, 1, 2)
    with torch.no_grad():
        embedding = of.get_input_embeddings()(inputs["input_ids"])[0]
    own = regard.lens.qk_attribution(of, inputs, 1, 2, components={"embedding": embedding, "one": torch.ones(32), "none": torch.zeros(32)})
    assert own.names == ["embedding", "one", "none", "bias"]
    np.testing.assert_allclose(own.keys[0], why.keys[0], atol=1e-6)
    np.testing.assert_allclose(own.keys[2], 0, atol=1e-7)
    np.testing.assert_allclose(own.keys.sum(0), why.scores, atol=1e-5 * np.abs(why.scores).max())
    best = own.top_k(3)
    assert [abs(value) for *_, value in best] == sorted((abs(value) for *_, value in best), reverse=True)
    key, component, value = best[0]
    assert own.keys[own.names.index(component), key] == pytest.approx(value) and abs(value) == np.nanmax(np.abs(own.keys))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(layer=2, head=0), ValueError, "no self layer 2; there are 0 to 1"),
        (dict(layer=0, head=4), ValueError, "head: 4 is out of range, there are 4"),
        (dict(layer=0, head=0, row=13), IndexError, "row 13: out of range, there are 13 rows"),
        (dict(layer=0, head=0, item=2), ValueError, "item: 2 is out of range, there are 2"),
        (dict(layer=0, head=0, kind="encoder"), ValueError, "no encoder attention called regard"),
        (dict(layer=0, head=0, kind="cross"), ValueError, "keys of cross-attention are of another residual stream"),
        (dict(layer=0, head=0, components={"odd": torch.ones(7)}), ValueError, r"components\['odd'\]: \[7\] does not fit \[13, 32\]"),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        regard.lens.qk_attribution(model("llama"), given("llama"), **call)


def test_a_hidden_key_has_no_parts():
    why = regard.lens.qk_attribution(model("llama"), given("llama"), 1, 0, row=3)
    assert np.isnan(why.scores[4:]).all() and np.isfinite(why.scores[:4]).all()
    with pytest.raises(ValueError, match="key 5: the mask hides it from row 3"):
        why.pair(5)
    with pytest.raises(IndexError, match="key 13: out of range, there are 13 keys"):
        why.pair(13)
