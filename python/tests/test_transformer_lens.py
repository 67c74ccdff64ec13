"""`regard.transformer_lens.fused` with the real TransformerLens: a pattern that is asked for is made, one that is not asked for is not."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_table import VOCABULARY, DenseTensors, alike, ids, model

pytest.importorskip("transformer_lens", reason="TransformerLens is not here: pip install transformer-lens")
from tokenizers import Tokenizer, models
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import regard.hf
import regard.transformer_lens

N = 101
"""Positions: no other axis of the models is that long, so that only patterns and masks have two such axes."""
PATTERN = "blocks.1.attn.hook_pattern"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A vocabulary of numbers; a bridge loads it again by its path."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="1", eos_token="2", pad_token="0", unk_token="0").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=["gpt2", "llama", "mistral", "qwen3", "gemma2"])
def bridge(request, tokenizer):
    """A bridge replaces modules of its model, so it gets a copy."""
    own = copy.deepcopy(model(request.param))
    return TransformerBridge.boot_transformers(request.param, hf_model=own, tokenizer=tokenizer)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    alike(found, wanted, within=1e-5)


def test_a_pattern_that_is_asked_for_is_that_of_eager_and_no_other_is_made(bridge):
    names = [PATTERN, "blocks.1.attn.hook_q", "blocks.0.attn.hook_k", "blocks.0.attn.hook_v", "blocks.0.attn.hook_z", "blocks.0.hook_out"]
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(ids(2, N), names_filter=names)
        with regard.transformer_lens.fused(bridge), DenseTensors(N) as dense:
            found, seen = bridge.run_with_cache(ids(2, N), names_filter=names)
    assert seen[PATTERN].shape == (2, 4, N, N)
    assert dense.operators.count("_softmax") == 1  # of two layers
    assert set(seen) == set(cache) >= set(names)
    for name in cache:
        near(seen[name], cache[name])
    near(found, logits)


def test_without_a_pattern_no_n_by_n_tensor_is_made(bridge):
    with torch.no_grad():
        with DenseTensors(N) as dense:
            logits = bridge(ids(2, N))
        assert dense.operators.count("_softmax") == 2
        with regard.transformer_lens.fused(bridge), DenseTensors(N) as dense:
            found, _ = bridge.run_with_cache(ids(2, N), names_filter="blocks.1.hook_out")
    assert not dense.operators
    near(found, logits)


def test_without_a_filter_every_pattern_is_there(bridge):
    with torch.no_grad():
        _, cache = bridge.run_with_cache(ids(1, 13))
        with regard.transformer_lens.fused(bridge):
            _, seen = bridge.run_with_cache(ids(1, 13))
    assert set(seen) == set(cache) and PATTERN in cache
    for name in cache:
        near(seen[name], cache[name])


def test_a_hook_on_a_pattern_changes_the_output_as_it_does_with_eager(bridge):
    def edit(pattern, hook):
        pattern = pattern.clone()
        pattern[:, 2] = 0
        pattern[:, 1, 5:] = pattern[:, 1, 5:].flip(-1).tril()
        return pattern

    def ablate(z, hook):
        z = z.clone()
        z[..., 1, :] = 0
        return z

    hooks = [(PATTERN, edit), ("blocks.0.attn.hook_z", ablate)]
    with torch.no_grad():
        plain, wanted = bridge(ids(2, 13)), bridge.run_with_hooks(ids(2, 13), fwd_hooks=hooks)
        with regard.transformer_lens.fused(bridge):
            near(bridge.run_with_hooks(ids(2, 13), fwd_hooks=hooks), wanted)
            near(bridge(ids(2, 13)), plain)
    assert float((wanted - plain).abs().max()) > 1e-2


def test_padding_and_gradients_are_those_of_eager(bridge):
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :5] = 0
    names = {"blocks.0.attn.hook_z": [], PATTERN: []}

    def gradients(of):
        """Of logits that are not padding, by the weights of the first layer."""
        logits = of(ids(2, 13), attention_mask=mask)[mask.bool()]
        loss = (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum()
        weights = [one for name, one in of.original_model.named_parameters() if ".0." in name and one.ndim == 2]
        grads = torch.autograd.grad(loss, weights, allow_unused=True)
        return logits, [grad for grad in grads if grad is not None]

    for hooked in ([], [PATTERN]):
        with bridge.hooks(fwd_hooks=[(name, lambda value, hook: names[name].append(value.detach())) for name in hooked]):
            logits, grads = gradients(bridge)
            with regard.transformer_lens.fused(bridge):
                found, found_grads = gradients(bridge)
        near(found, logits)
        assert len(grads) == len(found_grads) > 4
        for one, other in zip(found_grads, grads):
            alike(one, other, scale=1e-2)
    eager, dense = names[PATTERN]
    near(dense[:, :, 5:], eager[:, :, 5:])


def test_generation_and_interventions_run_fused(bridge):
    with torch.no_grad():
        wanted = bridge.generate(ids(1, 9), max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False, return_type="tokens")
        with regard.transformer_lens.fused(bridge):
            found = bridge.generate(ids(1, 9), max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False, return_type="tokens")
            with regard.hf.intervene(bridge.original_model, [{"layers": [1], "heads": [2], "output": 0.0}]):
                ablated = bridge(ids(1, 9))

        def zero(z, hook):
            z = z.clone()
            z[..., 2, :] = 0
            return z

        near(ablated, bridge.run_with_hooks(ids(1, 9), fwd_hooks=[("blocks.1.attn.hook_z", zero)]))
    assert torch.equal(found, wanted)


def test_processed_weights_stay_processed(tokenizer):
    for name in ("gpt2", "llama"):
        bridge = TransformerBridge.boot_transformers(name, hf_model=copy.deepcopy(model(name)), tokenizer=tokenizer)
        bridge.enable_compatibility_mode()
        with torch.no_grad():
            wanted = bridge(ids(2, N))
            with regard.transformer_lens.fused(bridge), DenseTensors(N) as dense:
                near(bridge(ids(2, N)), wanted)
        assert not dense.operators


def test_a_bridge_is_as_before_after_the_context(bridge):
    with torch.no_grad():
        before = bridge(ids(1, 13))
        with pytest.raises(RuntimeError, match="inside"), regard.transformer_lens.fused(bridge):
            bridge(ids(1, 13))
            raise RuntimeError("inside")
        assert torch.equal(bridge(ids(1, 13)), before)
    assert bridge.original_model.config._attn_implementation == "eager"


def test_contexts_can_be_nested(bridge):
    with torch.no_grad():
        before = bridge(ids(1, N))
        with regard.transformer_lens.fused(bridge):
            with regard.transformer_lens.fused(bridge), DenseTensors(N) as dense:
                near(bridge(ids(1, N)), before)
            assert not dense.operators
            with DenseTensors(N) as dense:
                near(bridge(ids(1, N)), before)
            assert not dense.operators
            _, seen = bridge.run_with_cache(ids(1, 13), names_filter=PATTERN)
            assert seen[PATTERN].shape == (1, 4, 13, 13)
        assert torch.equal(bridge(ids(1, N)), before)
