"""The backend `regard` in traces of the real nnsight: weights that are asked for are those of eager, without them a trace is fused."""

from __future__ import annotations

import pytest
import torch
from hf_table import DenseTensors, alike, ids, model, run

nnsight = pytest.importorskip("nnsight", reason="nnsight is not here: pip install nnsight")

import regard.hf
import regard.lens

N = 101
"""Positions: no other axis of the models is that long, so that only weights and masks have two such axes."""
LAYERS = {"gpt2": ("transformer", "h", "attn", "c_proj"), "llama": ("model", "layers", "self_attn", "o_proj")}


@pytest.fixture(params=LAYERS)
def traced(request):
    """A model with the backend, in nnsight, and its layers."""
    stack, layers, attention, projection = LAYERS[request.param]
    made = model(request.param)
    made.set_attn_implementation("regard")
    wrapped = nnsight.NNsight(made)
    attentions = [getattr(layer, attention) for layer in getattr(getattr(wrapped, stack), layers)]
    return request.param, wrapped, attentions, projection


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    alike(found, wanted, within=1e-5)


@torch.no_grad()
def test_a_trace_without_weights_makes_no_n_by_n_tensor(traced):
    name, wrapped, attentions, _ = traced
    with DenseTensors(N) as dense:
        wanted = run(name, "eager", lambda made: made(ids(2, N)).logits)
    assert dense.operators.count("_softmax") == 2
    model(name).set_attn_implementation("regard")
    with DenseTensors(N) as dense:
        with wrapped.trace(input_ids=ids(2, N)):
            weights = attentions[1].output[1].save()
            logits = wrapped.output.logits.save()
    assert weights is None and not dense.operators
    near(logits, wanted)


@torch.no_grad()
def test_weights_that_are_asked_for_are_those_of_eager_and_no_others_are_made(traced):
    name, wrapped, attentions, _ = traced
    wanted = run(name, "eager", lambda made: made(ids(2, N), output_attentions=True).attentions)
    model(name).set_attn_implementation("regard")
    with regard.hf.attentions(layers=[1]):
        with wrapped.trace(input_ids=ids(2, N), output_attentions=True):
            other = attentions[0].output[1].save()
            weights = attentions[1].output[1].save()
            collected = wrapped.output.attentions.save()
    assert other is None and len(collected) == 1
    near(weights, wanted[1])
    assert torch.equal(collected[0], weights)


@torch.no_grad()
def test_rules_and_captures_hold_in_a_trace(traced):
    name, wrapped, attentions, projection = traced
    dim = 8
    with wrapped.trace(input_ids=ids(1, 13)):
        getattr(attentions[1], projection).input[..., 2 * dim : 3 * dim] = 0
        wanted = wrapped.output.logits.save()
    rules = [{"layers": [1], "heads": [2], "output": 0.0}]
    with regard.hf.intervene(wrapped._module, rules), regard.lens.capture(wrapped._module) as captured:
        with wrapped.trace(input_ids=ids(1, 13)):
            found = wrapped.output.logits.save()
    near(found, wanted)
    assert len(captured) == 2 and captured[1].entropy.shape == (1, 4, 13)
    assert float((found - model(name)(ids(1, 13)).logits).abs().max()) > 1e-2
