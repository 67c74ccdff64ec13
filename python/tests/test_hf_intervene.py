"""`regard.hf.intervene` against dense attention with the same changes: architectures, gradients, generation, heads, frozen patterns."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import pytest
import torch
from hf_table import ARCHITECTURES, alike, ids, model, run
from test_lens import given
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

import regard.hf
import regard.lens
from regard._sites import ModelCalls

RULES: list[dict] = []
SITES: dict = {}


def dense(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, position_bias=None, **_):
    """Attention by its formula, with the scores changed by RULES; positions are those of a call without cache."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    kind, layer = SITES[module]
    own = [rule for rule in RULES if rule.get("kind") in (None, kind) and layer in rule.get("layers", [layer])]
    for rule in own:
        at = [slice(None) if rule.get(name) is None else slice(*rule[name]) for name in ("rows", "keys")]
        for item in rule.get("items", range(scores.shape[0])):
            for head in rule.get("heads", range(scores.shape[1])):
                if "output" not in rule:
                    bias = -math.inf if rule.get("drop") else rule["add"] if "add" in rule else math.log(rule["times"])
                    change = torch.zeros_like(scores)
                    change[item, head, at[0], at[1]] = bias
                    scores = scores + change
    top = scores if s_aux is None else torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.nan_to_num(top.softmax(-1))[..., : key.shape[2]]
    out = weights.to(value.dtype) @ value
    for rule in own:
        if "output" in rule:
            chosen = torch.zeros(*out.shape[:3], 1, dtype=torch.bool)
            rows = slice(None) if rule.get("rows") is None else slice(*rule["rows"])
            for head in rule.get("heads", range(out.shape[1])):
                chosen[:, head, rows] = True
            out = torch.where(chosen, torch.as_tensor(rule["output"], dtype=out.dtype), out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("dense", dense)
AttentionMaskInterface.register("dense", masking_utils.eager_mask)


@contextlib.contextmanager
def by_formula(name: str, rules: list[dict]):
    """The model computes with dense attention and these rules."""
    made = model(name)
    made.set_attn_implementation("dense")
    calls = ModelCalls(made)
    SITES.clear()
    for module in made.modules():
        if type(module).__name__.endswith("Attention") and not any(type(child).__name__.endswith("Attention") for child in module.children()):
            SITES[module] = tuple(calls.site(module, 0)[:2])
    RULES[:] = rules
    try:
        yield made
    finally:
        RULES.clear()


def logits(made: torch.nn.Module, inputs: dict) -> torch.Tensor:
    return made(**inputs).logits


EDGES = [
    {"layers": [0], "heads": [1, 2], "rows": (4, 12), "keys": (1, 4), "drop": True},
    {"layers": [1], "keys": (2, 6), "times": 2.5},
    {"layers": [1], "heads": [0], "rows": (3, None), "add": -0.75, "keys": (0, 2)},
    {"layers": [0], "items": [1], "heads": [3], "keys": (0, 3), "times": 0.25},
]
HEADS = [{"layers": [1], "heads": [2], "output": 0.0}, {"layers": [0], "heads": [0, 3], "rows": (2, 9), "output": 0.5}]
NAMES = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "qwen3", "bert", "t5", "bart", "deepseek_v3"]


@pytest.mark.parametrize("name", NAMES)
def test_rules_change_a_model_as_they_change_dense_attention(name):
    inputs = given(name)
    plain = run(name, "eager", lambda made: logits(made, inputs))
    with by_formula(name, []) as made:
        alike(logits(made, inputs), plain, "dense is eager", within=1e-5)
    rules = [dict(rule, kind="self") for rule in EDGES + HEADS] if ARCHITECTURES[name].kind == "translator" else EDGES + HEADS
    if ARCHITECTURES[name].kind == "translator":
        rules += [{"kind": "cross", "layers": [1], "heads": [1], "rows": (2, 7), "keys": (3, 8), "drop": True}]
        rules += [{"kind": "encoder", "layers": [0], "keys": (0, 2), "times": 3.0}]

    def loss_of(found: torch.Tensor, made: torch.nn.Module) -> list[torch.Tensor]:
        weights = [one for one in made.parameters() if one.ndim == 2][:12]
        noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
        return [grad for grad in torch.autograd.grad((found * noise).sum(), weights, allow_unused=True) if grad is not None]

    with by_formula(name, rules) as made:
        wanted = logits(made, inputs)
        grads = loss_of(wanted, made)
    with regard.hf.intervene(model(name), rules):
        found = logits(model(name), inputs)
        alike(found, wanted, name, within=1e-5)
        for ours, theirs in zip(loss_of(found, model(name)), grads):
            alike(ours, theirs, name, scale=1e-2)
    assert float((wanted - plain).abs().max()) > 1e-2  # the rules matter


def test_the_architectures_are_eight_or_more():
    assert len({model(name).config.model_type for name in NAMES}) >= 8


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gemma3", "gpt_oss", "bart", "t5"])
def test_positions_are_those_of_the_sequence_in_every_step(name):
    """Generation with a cache gives the logits of one forward pass over all that was generated."""
    made, translates = model(name), ARCHITECTURES[name].kind == "translator"
    rules = [
        {"kind": "self", "layers": [1], "heads": [1], "rows": (6, None), "keys": (4, 8), "times": 4.0},
        {"kind": "self", "layers": [0], "rows": (9, 12), "keys": (8, 9), "drop": True},
        {"kind": "cross", "layers": [1], "rows": (2, 5), "keys": (0, 3), "drop": True},
        {"kind": "self", "layers": [1], "heads": [0], "rows": (8, 11), "output": 0.0},
    ]
    if not translates:
        rules.pop(2)
    with torch.no_grad(), regard.hf.intervene(made, rules):
        found = made.generate(ids(1, 9), max_new_tokens=8, min_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True)
        text = found.sequences
        whole = made(input_ids=ids(1, 9), decoder_input_ids=text) if translates else made(input_ids=text)
    steps = torch.stack(found.logits, 1)
    count = steps.shape[1]
    alike(steps, whole.logits[:, -1 - count : -1], name)


def test_layers_without_a_rule_have_the_same_bits():
    made, inputs = model("llama"), given("llama")
    with torch.no_grad():
        plain = run("llama", "regard", lambda made: made(**inputs, output_hidden_states=True).hidden_states)
        with regard.hf.intervene(made, [{"layers": [1], "heads": [0], "keys": (0, 3), "drop": True}]):
            found = made(**inputs, output_hidden_states=True).hidden_states
        with regard.hf.intervene(made, []):
            alike(found[0], plain[0])
            nothing = made(**inputs, output_hidden_states=True).hidden_states
    assert torch.equal(found[1], plain[1]) and not torch.equal(found[2], plain[2])
    assert all(torch.equal(a, b) for a, b in zip(nothing, plain))


@pytest.fixture
def llama_f64():
    """The Llama in f64: the largest rounding left is that of the softmax of eager, in f32."""
    yield model("llama").double()
    model("llama").float()


@torch.no_grad()
def test_one_patched_edge_is_that_of_a_dense_computation(llama_f64):
    """Path patching: an edge of layer 0 is cut, and layer 1 keeps the pattern that it had."""
    made, inputs = llama_f64, {"input_ids": ids(1, 13)}
    edge = {"layers": [0], "heads": [2], "rows": (10, 11), "keys": (4, 5), "drop": True}
    with regard.lens.capture(made, keep=True) as clean:
        made(**inputs)
    with regard.hf.intervene(made, [edge, {"layers": [1], "pattern": clean}]):
        found = logits(made, inputs)
    frozen = run("llama", "eager", lambda made: made(**inputs, output_attentions=True).attentions[1])
    with by_formula("llama", [edge]):
        own = AttentionInterface()["dense"]

        def patched(module, query, key, value, mask, **options):
            if SITES[module][1] == 0:
                return own(module, query, key, value, mask, **options)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
            return (frozen.to(value.dtype) @ value).transpose(1, 2).contiguous(), None

        AttentionInterface.register("dense", patched)
        try:
            wanted = logits(made, inputs)
        finally:
            AttentionInterface.register("dense", own)
    assert wanted.dtype == torch.float64
    alike(found, wanted, within=1e-5)
    with regard.hf.intervene(made, [edge]):
        assert float((logits(made, inputs) - wanted).abs().max()) > 1e-4  # without the frozen pattern


def test_a_pattern_of_the_same_run_changes_nothing_and_one_of_another_does():
    made = model("llama")
    one, other = ({"input_ids": ids(1, 13, seed)} for seed in (0, 1))
    with torch.no_grad():
        with regard.lens.capture(made, keep=True) as seen:
            plain = logits(made, one)
        with regard.hf.intervene(made, [{"pattern": seen}]):
            assert torch.equal(logits(made, one), plain)
            changed = logits(made, other)
            with pytest.raises(ValueError, match=r"pattern: self layer 0 has 7 rows from position 0 on and 7 keys; the stored run has 13 rows"):
                logits(made, {"input_ids": ids(1, 7)})
        assert float((changed - run("llama", "regard", lambda made: logits(made, other))).abs().max()) > 1e-3
        with regard.lens.capture(made) as bare:
            made(**one)
        with pytest.raises(ValueError, match="record the run with capture"), regard.hf.intervene(made, [{"pattern": bare}]):
            made(**one)


def test_mean_ablation_replaces_heads_by_their_means():
    made, inputs = model("llama"), given("llama")
    with torch.no_grad():
        with regard.hf.head_means(made) as means, by_hook(made) as outputs:
            made(**inputs)
            made(input_ids=ids(1, 5, seed=2))
        all_rows = torch.cat([out.flatten(0, 1) for out in outputs], 0).double()
        # Of what o_proj reads: [rows, heads * dim].
        alike(means[1].float(), all_rows.mean(0).unflatten(0, (4, -1)).float())
        rules = [{"layers": [1], "heads": [3], "output": means}]
        with by_formula("llama", [{"layers": [1], "heads": [3], "output": means[1][3].float()}]):
            wanted = logits(made, inputs)
        with regard.hf.intervene(made, rules):
            alike(logits(made, inputs), wanted)
        with pytest.raises(KeyError, match="cross layer 0: no means; there are: self 0, self 1"):
            means["cross", 0]


@contextlib.contextmanager
def by_hook(made):
    """What the output projection of layer 1 reads."""
    found = []
    handle = made.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    yield found
    handle.remove()


def test_a_capture_inside_sees_the_changed_weights():
    made, inputs = model("llama"), {"input_ids": ids(1, 13)}
    rule = {"layers": [0], "heads": [1], "rows": (5, 9), "keys": (0, 3)}
    with torch.no_grad():
        with regard.lens.capture(made) as plain:
            made(**inputs)
        with regard.hf.intervene(made, [dict(rule, drop=True)]), regard.lens.capture(made) as dropped:
            made(**inputs)
        with regard.hf.intervene(made, [dict(rule, times=3.0)]), regard.lens.capture(made) as scaled:
            made(**inputs)
    before = plain[0].weights()[0, 1, 5:9]
    cut = before.copy()
    cut[:, :3] = 0
    np.testing.assert_allclose(dropped[0].weights()[0, 1, 5:9], cut / cut.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    more = before.copy()
    more[:, :3] *= 3
    np.testing.assert_allclose(scaled[0].weights()[0, 1, 5:9], more / more.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)
    assert (dropped[0].weights()[0, 0] == plain[0].weights()[0, 0]).all()


@pytest.mark.parametrize(
    "rule, error, message",
    [
        ("drop", TypeError, "rules: expected dicts, found str"),
        ({"head": [1], "drop": True}, ValueError, "rules: unknown key 'head'; use kind, layers"),
        ({"heads": [1]}, ValueError, "rules: expected one of drop, times, add, output, pattern, found none"),
        ({"drop": True, "times": 2.0}, ValueError, "found drop, times"),
        ({"times": -1.0}, ValueError, "times: -1.0 is invalid; use a number >= 0"),
        ({"add": math.inf}, ValueError, "add: inf is invalid"),
        ({"rows": (5, 4), "drop": True}, ValueError, r"rules, rows: 5 to 4; use \(start, stop\)"),
        ({"keys": 4, "drop": True}, TypeError, r"rules, keys: expected \(start, stop\), found 4"),
        ({"keys": (0, 2), "output": 0.0}, ValueError, "'output' has no keys"),
        ({"layers": [-1], "drop": True}, ValueError, "rules, layers: -1"),
        ({"heads": [4], "drop": True}, ValueError, "rules, heads: 4 is out of range in self layer 0, which has 4"),
        ({"output": torch.zeros(7)}, ValueError, r"rules, output: \[7\] does not fit \[1, 4, 5, 8\]"),
    ],
)
def test_invalid_rules_are_refused(rule, error, message):
    made = model("llama")
    with pytest.raises(error, match=message), torch.no_grad(), regard.hf.intervene(made, [rule]):
        made(input_ids=ids(1, 5))
    assert not regard._callbacks.interventions


def test_a_rule_for_no_layer_warns():
    made = model("llama")
    with pytest.warns(UserWarning, match=r"rules\[1\]: layers \[7\], kind any: there is no such layer in LlamaForCausalLM"), torch.no_grad():
        with regard.hf.intervene(made, [{"layers": [0], "drop": True, "keys": (0, 0)}, {"layers": [7], "drop": True}]):
            made(input_ids=ids(1, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with regard.hf.intervene(made, [{"layers": [7], "drop": True}]):
            pass
