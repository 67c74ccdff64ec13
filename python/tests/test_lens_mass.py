"""`regard.lens.mass` against sums of eager weights: forward passes, generation, padding, and the published scores made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hf_table import ARCHITECTURES, ids, model
from test_lens import eager, given

import regard.lens

SPANS = {"first": (0, 1), "early": (0, 5), "rest": (5, None), "beyond": (11, 400), "recent": (-3, None), "none": (4, 4)}


def sums(weights: np.ndarray, rows: list[int], spans: dict = SPANS) -> np.ndarray:
    """Of weights `[heads, rows, keys]`, whose last row stands at the last key: `[heads, rows, spans]`."""
    found = []
    for row in rows:
        at = row + weights.shape[2] - weights.shape[1]
        ends = [(max(0, at + 1 + a), at + 1) if a < 0 else (a, b) for a, b in spans.values()]
        found.append(np.stack([weights[:, row, a:b].sum(-1) for a, b in ends], -1))
    return np.stack(found, 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "qwen3", "bert", "deepseek_v3"])
def test_mass_of_a_forward_pass_is_that_of_eager(name):
    inputs = given(name)
    weights = eager(name, **inputs)
    for rows, picked in (("last", [12]), ("all", list(range(13)))):
        with torch.no_grad(), regard.lens.mass(model(name), SPANS, rows=rows) as mass:
            model(name)(**inputs)
        assert mass.values.shape == (2, 4, len(picked), len(SPANS)) and mass.positions == picked and mass.layers == [0, 1]
        for item in (0, 1):
            wanted = np.stack([sums(weights["self", layer][item], picked) for layer in (0, 1)])
            np.testing.assert_allclose(mass.of(item=item), wanted, rtol=1e-5, atol=1e-5)
        assert (mass["early"] == mass.values[..., 1]).all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gemma3", "qwen2"])
def test_mass_of_each_generated_token_is_that_of_eager(name):
    made = model(name)
    prompt = ids(1, 9)
    with torch.no_grad(), regard.lens.mass(made, SPANS, heads=[3, 1]) as mass:
        text = made.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    weights = eager(name, input_ids=text)
    steps = list(range(8, 16))
    assert mass.values.shape == (2, 2, 8, len(SPANS)) and mass.positions == steps and mass.run_count == 1
    whole = dict(SPANS, rest=(5, 10**6))
    for layer in (0, 1):
        # Rows of the whole text: later keys are masked.
        wanted = np.concatenate([sums(weights["self", layer][0][[3, 1], : row + 1, : row + 1], [row], whole) for row in steps], 1)
        np.testing.assert_allclose(mass.values[layer], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_the_last_row_of_an_item_is_its_last_token(padding):
    inputs = given("llama", padding)
    weights = eager("llama", **inputs)
    with torch.no_grad(), regard.lens.mass(model("llama"), {"early": (0, 7)}, layers=[1]) as mass:
        model("llama")(**inputs)
    last = 7 if padding == "right" else 12
    np.testing.assert_allclose(mass.of(item=1)[0, :, 0, 0], weights["self", 1][1][:, last, :7].sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(mass.of(item=0)[0, :, 0, 0], weights["self", 1][0][:, 12, :7].sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_translators_have_a_mass_for_each_kind(name):
    inputs = given(name)
    weights = eager(name, **inputs)
    spans = {"begin": (0, 4), "rest": (4, None)}
    with torch.no_grad(), regard.lens.mass(model(name), spans) as mass:
        model(name)(**inputs)
    for kind in ("self", "cross", "encoder"):
        wanted = np.stack([sums(weights[kind, layer][0], [-1 + weights[kind, layer].shape[2]], {"begin": (0, 4), "rest": (4, 99)}) for layer in (0, 1)])
        np.testing.assert_allclose(mass.of(kind), wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cross-attention does not have"), torch.no_grad():
        with regard.lens.mass(model(name), {"recent": (-2, None)}):
            model(name)(**inputs)


def test_each_forward_pass_is_a_run():
    made = model("gpt2")
    with torch.no_grad(), regard.lens.mass(made, {"first": (0, 1)}) as mass:
        assert "0 runs" in repr(mass)
        with pytest.raises(ValueError, match="nothing recorded"):
            mass.values
        made(ids(1, 5))
        made(ids(1, 7))
    assert mass.run_count == 2 and mass.run(0).positions == [4] and mass.positions == [6]
    with pytest.raises(IndexError, match="run 2: out of range, there are 2 runs"):
        mass.run(2)
    with pytest.raises(KeyError, match="no such span; there are: first"):
        mass["last"]
    with pytest.raises(IndexError, match="item 1: out of range, the batch has 1"):
        mass.of(item=1)
    with pytest.raises(KeyError, match="cross: not recorded; there are: self"):
        mass.of("cross")


@pytest.mark.parametrize(
    "spans, error, message",
    [
        ({}, TypeError, "spans: expected a dict"),
        ([(0, 4)], TypeError, "spans: expected a dict"),
        ({"a": 4}, TypeError, r"spans\['a'\]: expected \(start, stop\)"),
        ({"a": (0, 4, 5)}, TypeError, r"spans\['a'\]: expected \(start, stop\)"),
        ({"a": (0.5, 4)}, TypeError, r"spans\['a'\]: expected \(start, stop\)"),
        ({"a": (5, 4)}, ValueError, r"spans\['a'\]: 5 to 4; use \(start, stop\)"),
        ({"a": (-5, -1)}, ValueError, r"spans\['a'\]: -5 to -1; use"),
    ],
)
def test_invalid_spans_are_refused(spans, error, message):
    with pytest.raises(error, match=message), regard.lens.mass(model("gpt2"), spans):
        pass
    with pytest.raises(ValueError, match="rows: 'first'; use 'last'"), regard.lens.mass(model("gpt2"), {"a": (0, 1)}, rows="first"):
        pass


# ---- the scores of the page, from weights ----


def test_the_lookback_ratio_is_that_of_its_definition():
    """Chuang et al. 2024, equation 3: means of the weights on the context and on what has been generated."""
    made, prompt = model("llama"), ids(1, 9)
    with torch.no_grad(), regard.lens.mass(made, {"context": (0, 9), "new": (9, None)}) as mass:
        text = made.generate(prompt, max_new_tokens=7, min_new_tokens=7, do_sample=False)
    count = np.arange(1, 7)
    context, new = mass["context"][..., 1:] / 9, mass["new"][..., 1:] / count
    ratio = context / (context + new)
    weights = eager("llama", input_ids=text)
    for layer in (0, 1):
        for step in range(1, 7):
            row = weights["self", layer][0][:, 8 + step, : 9 + step]
            on_context, on_new = row[:, :9].mean(-1), row[:, 9:].mean(-1)
            np.testing.assert_allclose(ratio[layer][:, step - 1], on_context / (on_context + on_new), rtol=1e-4)


def test_the_attention_tracker_score_is_that_of_its_definition():
    """Hung et al. 2024: the mass of the last token of the prompt on the instruction, in the mean over some heads."""
    made, prompt = model("llama"), ids(1, 13)
    with torch.no_grad(), regard.lens.mass(made, {"instruction": (1, 6)}) as mass:
        made.generate(prompt, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    important = [(0, 1), (1, 3)]
    score = np.mean([mass["instruction"][layer, head, 0] for layer, head in important])
    weights = eager("llama", input_ids=prompt)
    wanted = np.mean([weights["self", layer][0][head, -1, 1:6].sum() for layer, head in important])
    assert abs(score - wanted) < 1e-5


def test_streaming_heads_are_those_whose_mass_is_on_sinks_and_recent_tokens():
    """Planted: head 0 attends to the first and the last tokens alone, head 1 to all alike."""
    made = model("llama")
    attention = made.model.layers[0].self_attn
    q, k = attention.q_proj.weight, attention.k_proj.weight
    saved = q.detach().clone(), k.detach().clone()
    try:
        with torch.no_grad():
            q.zero_()  # all weights alike
            with regard.lens.mass(made, {"sink": (0, 2), "recent": (-4, None)}, rows="all") as mass:
                made(ids(1, 40))
    finally:
        with torch.no_grad():
            q.copy_(saved[0])
    near = (mass["sink"] + mass["recent"])[0, :, 20:]
    wanted = 6 / np.arange(21, 41)
    np.testing.assert_allclose(near, np.broadcast_to(wanted, near.shape), rtol=1e-5)
