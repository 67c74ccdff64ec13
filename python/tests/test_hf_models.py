"""Each architecture: `attn_implementation="regard"` against eager, there and back, with padding, and its weights."""

from __future__ import annotations

import pytest
import torch
from hf_table import ARCHITECTURES, alike, ids, model, run

import regard.hf

LENGTHS = (13, 8)


def inputs(name: str, padding: str) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """What the model is given, and which rows of its answer are real; None: all."""
    of = ARCHITECTURES[name]
    given, real = (of.inputs(len(LENGTHS)) if of.inputs else {}), None
    if of.kind in ("decoder", "encoder", "translator"):
        place, longest = torch.arange(max(LENGTHS))[None], max(LENGTHS)
        shorter = torch.tensor(LENGTHS)[:, None]
        given["input_ids"] = ids(len(LENGTHS), longest)
        if padding != "none":
            real = place < shorter if padding == "right" else place >= longest - shorter
            given["input_ids"] = given["input_ids"] * real
            given["attention_mask"] = real.long()
        if of.kind == "decoder" and padding == "left":
            given["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0)
    if of.kind in ("translator", "sound"):
        given["decoder_input_ids"], real = ids(len(LENGTHS), 9, seed=1), None
        if padding == "right":
            given["decoder_attention_mask"] = (torch.arange(9)[None] < torch.tensor([[9], [6]])).long()
    return given, real


def answer(found) -> torch.Tensor:
    return found.logits if "logits" in found else found.last_hidden_state


CASES = [
    pytest.param(name, padding, id=f"{name}-{padding}")
    for name, of in ARCHITECTURES.items()
    for padding in ("none", "right", "left")
    if padding == "none" or (of.kind in ("decoder", "encoder", "translator")) or (padding == "right" and of.kind == "sound")
]


@pytest.mark.parametrize("name, padding", CASES)
def test_answers_and_gradients_are_those_of_eager(name, padding):
    given, real = inputs(name, padding)

    def there_and_back(m):
        m.zero_grad()
        found = answer(m(**given))
        found = found if real is None else found[real]
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
        return found.detach(), {name: weight.grad for name, weight in m.named_parameters() if weight.grad is not None}

    (out, grads), (eager_out, eager_grads) = (run(name, by, there_and_back) for by in ("regard", "eager"))
    alike(out, eager_out)
    assert grads.keys() == eager_grads.keys() and len(grads) > 10
    # The gradient of a key's bias is 0 but for rounding, so the largest one of the model has a say.
    largest = max(float(grad.abs().max()) for grad in eager_grads.values())
    for weight, grad in grads.items():
        alike(grad, eager_grads[weight], of=weight, scale=1e-2 * largest)


@pytest.mark.parametrize("name, padding", CASES)
def test_weights_are_those_of_eager(name, padding):
    given, real = inputs(name, padding)

    @torch.no_grad()
    def look(m):
        return {key: value for key, value in m(**given, output_attentions=True).items() if key.endswith("attentions")}

    found, eager = run(name, "regard", look), run(name, "eager", look)
    assert found.keys() == eager.keys()
    assert any(eager.values())
    for key, layers in eager.items():
        assert len(found[key]) == len(layers)
        for weights, wanted in zip(found[key], layers):
            assert weights.shape == wanted.shape and weights.dtype == wanted.dtype
            hidden = wanted.new_ones(wanted.shape[0], wanted.shape[2], dtype=torch.bool) if real is None else real
            alike(weights.transpose(1, 2)[hidden], wanted.transpose(1, 2)[hidden])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_and_heads_can_be_chosen(name):
    given, _ = inputs(name, "none")

    @torch.no_grad()
    def look(m, **options):
        with regard.hf.attentions(**options):
            found = m(**given, output_attentions=True)
        return {key: value for key, value in found.items() if key.endswith("attentions")}

    whole = run(name, "regard", look)
    some = run(name, "regard", lambda m: look(m, layers=[1], heads=[3, 0]))
    for key, layers in whole.items():
        assert len(some[key]) == len(layers) // 2
        for weights, wanted in zip(some[key], layers[1:]):
            assert torch.equal(weights, wanted[:, [3, 0]])
    assert any(whole.values())
    assert not any(run(name, "regard", lambda m: look(m, layers=[])).values())


def test_none_of_the_architectures_refuses_a_backend_of_others():
    for name in ARCHITECTURES:
        run(name, "regard", lambda m: None)
        assert model(name)._can_set_attn_implementation()
