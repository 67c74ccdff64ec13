"""Caches and generation: the same answers as eager, token by token, in pieces, and in packed sequences."""

from __future__ import annotations

import pytest
import torch
from hf_table import ARCHITECTURES, DECODERS, alike, ids, run
from transformers import DynamicCache, StaticCache

SPEAKERS = [name for name, of in ARCHITECTURES.items() if of.kind in ("decoder", "translator", "sound")]
CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),  # drops what a sliding window has left behind
    "growing": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=24),  # has an empty end
}
PIECES = {"steps": [8] + [1] * 9, "pieces": [7, 6, 1, 4], "steps from nothing": [1] * 7, "whole": [17]}
PADDED = 3


def in_pieces(m, cache: str, pieces: list[int], padded: bool) -> torch.Tensor:
    """Logits of the tokens that come in pieces; the second item begins with padding."""
    tokens = ids(2, sum(pieces))
    real = torch.ones_like(tokens)
    if padded:
        real[1, :PADDED] = 0
    places = (real.cumsum(-1) - 1).clamp(min=0)
    past, at, found = CACHES[cache](m.config), 0, []
    with torch.no_grad():
        for n in pieces:
            piece = slice(at, at + n)
            given = dict(input_ids=tokens[:, piece], position_ids=places[:, piece], past_key_values=past, use_cache=True)
            found.append(m(**given, attention_mask=real[:, : at + n]).logits)
            at += n
    return torch.cat(found, 1)[:, PADDED if padded else 0 :]


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_that_come_in_pieces_are_answered_as_by_eager(name, cache, pieces):
    for padded in (False, True):
        found, eager = (run(name, by, lambda m: in_pieces(m, cache, PIECES[pieces], padded)) for by in ("regard", "eager"))
        alike(found, eager)


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_do_not_matter(name):
    whole, steps = (run(name, "regard", lambda m: in_pieces(m, "dynamic", PIECES[pieces], True)) for pieces in ("whole", "steps"))
    alike(steps, whole)


def prompt(name: str) -> dict[str, torch.Tensor]:
    of = ARCHITECTURES[name]
    if of.kind == "sound":
        return of.inputs(2)
    real = torch.ones(2, 8, dtype=torch.int64)
    real[1, :PADDED] = 0
    return dict(input_ids=ids(2, 8) * real, attention_mask=real)


WAYS = {
    "greedy": dict(),
    "without a cache": dict(use_cache=False),
    "static cache": dict(cache_implementation="static"),
    "beams": dict(num_beams=3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPEAKERS)
def test_generation_says_what_eager_says(name, way):
    def say(m):
        # Random weights like to say one word for ever, which would tell little.
        options = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12, no_repeat_ngram_size=1, pad_token_id=0)
        return m.generate(**prompt(name), **options, **WAYS[way], output_logits=True, return_dict_in_generate=True)

    found, eager = run(name, "regard", say), run(name, "eager", say)
    assert torch.equal(found.sequences, eager.sequences)
    assert len(found.logits) == len(eager.logits) == 12
    for step, wanted in zip(found.logits, eager.logits):
        alike(step, wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_generation_returns_the_weights_of_each_step(name):
    def say(m):
        options = dict(do_sample=False, max_new_tokens=4, min_new_tokens=4, output_attentions=True, return_dict_in_generate=True)
        found = m.generate(**prompt(name), **options)
        return found.attentions if "attentions" in found else found.decoder_attentions + found.cross_attentions

    found, eager = run(name, "regard", say), run(name, "eager", say)
    assert len(found) == len(eager) >= 4
    for steps, wanted in zip(found, eager):
        assert len(steps) == len(wanted) == 2
        for weights, layer in zip(steps, wanted):
            alike(weights[:, :, -1], layer[:, :, -1])


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_guessed_tokens_are_judged_as_by_eager(name):
    tokens = ids(1, 5).repeat(1, 3)

    def say(m):
        options = dict(do_sample=False, max_new_tokens=15, min_new_tokens=15, pad_token_id=0, prompt_lookup_num_tokens=3)
        return m.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), **options)

    assert torch.equal(run(name, "regard", say), run(name, "eager", say))


LENGTHS = (6, 11, 1, 5)
PACK = ids(1, sum(LENGTHS))
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]


@torch.no_grad()
def alone(m) -> torch.Tensor:
    return torch.cat([m(input_ids=part, use_cache=False).logits for part in PACK.split(LENGTHS, 1)], 1)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_sequences_do_not_see_each_other(name):
    @torch.no_grad()
    def packed(m):
        return m(input_ids=PACK, position_ids=PLACES, use_cache=False).logits

    found = run(name, "regard", packed)
    alike(found, run(name, "eager", packed))
    if ARCHITECTURES[name].packs:
        alike(found, run(name, "eager", alone))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_sequences_may_come_as_lengths(name):
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packing = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=11, max_length_k=11)
    document = torch.repeat_interleave(torch.tensor(LENGTHS))
    for given in (dict(position_ids=PLACES), dict()):  # rotations tell how far apart tokens are, wherever they begin
        with torch.no_grad():
            found = run(name, "regard", lambda m: m(input_ids=PACK, use_cache=False, output_attentions=True, **given, **packing))
        alike(found.logits, run(name, "eager", alone))
        for weights in found.attentions:
            assert not weights[..., document[:, None] != document].any()
