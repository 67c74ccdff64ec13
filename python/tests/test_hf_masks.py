"""Masks of Transformers as rules and ranges: the same pairs as its own dense mask, and never as much memory."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import masking_utils as made

import regard.hf
import regard.torch

BATCH, ROWS, KEYS = 2, 9, 14
OFFSETS = [(0, 0), (5, 0), (11, 6), (3, 0)]  # of rows and of keys: no cache, a cache, one that slides, a cache with an empty end


def every_third(b, h, q, k):
    return (k <= q) & ((q - k) % 3 == 0)


def image_tokens(b, h, q, k):
    return torch.where(b == 0, (q // 4) == (k // 4), k < 3)


DOCUMENTS = torch.tensor([[0] * 6 + [1] * 11 + [2] * 9, [0] * 13 + [1] * 13])
GROUPS = torch.tensor([[-1] * 4 + [0] * 5 + [-1] * 2 + [1] * 6 + [-1] * 9, [-1] * 26])

FUNCTIONS = {
    "causal": made.causal_mask_function,
    "all": made.bidirectional_mask_function,
    "window": made.sliding_window_causal_mask_function(4),
    "window both ways": made.sliding_window_bidirectional_mask_function(3),
    "chunks": made.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64)),
    "chunks behind padding": made.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "documents": made.and_masks(made.causal_mask_function, made.packed_sequence_mask_function(DOCUMENTS)),
    "groups": made.or_masks(made.causal_mask_function, made.blockwise_overlay(GROUPS)),
    "window or groups": made.or_masks(made.sliding_window_causal_mask_function(4), made.blockwise_overlay(GROUPS)),
    "padding inside": made.and_masks(made.causal_mask_function, made.padding_mask_function(torch.arange(26)[None].expand(2, -1) > 2)),
    "a stranger": every_third,
    "a stranger too": made.or_masks(made.causal_mask_function, image_tokens),
}
STRANGERS = {"a stranger", "a stranger too"}
PADDINGS = {
    "none": None,
    "no padding": torch.ones(BATCH, 26),
    "left": torch.arange(26)[None] >= torch.tensor([[0], [4]]),
    "right": torch.arange(20)[None] < torch.tensor([[20], [8]]),
    "holes": torch.arange(26)[None] % torch.tensor([[5], [7]]) != 0,
    "one item is all padding": torch.ones(BATCH, 26) * torch.tensor([[1], [0]]),
}


def pairs(seen: regard.hf.AttentionMask) -> torch.Tensor:
    """Who sees whom, as attention has it: over equal scores and one-hot values, a weight that is not 0."""
    batch, _, rows, keys = seen.shape
    zeros = torch.zeros(batch, 1, rows, 4), torch.zeros(batch, 1, keys, 4)
    return regard.torch.attention(*zeros, torch.eye(keys).expand(batch, 1, keys, keys), mask=seen.mask, align=seen.align) > 0


def both(function, rows: int, keys: int, q_offset: int, kv_offset: int, padding, **options):
    call = dict(
        batch_size=BATCH, q_length=rows, kv_length=keys, q_offset=q_offset, kv_offset=kv_offset, mask_function=function,
        attention_mask=padding, **options,
    )  # fmt: skip
    return regard.hf.mask(**call), made.sdpa_mask(**call, allow_is_causal_skip=False)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_mask_has_the_pairs_of_the_dense_one(name, padding):
    bools = None if PADDINGS[padding] is None else PADDINGS[padding].bool()
    for q_offset, kv_offset in OFFSETS:
        seen, dense = both(FUNCTIONS[name], ROWS, KEYS, q_offset, kv_offset, bools, use_vmap=name in STRANGERS)
        assert torch.equal(pairs(seen), dense), (q_offset, kv_offset)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_single_row_without_a_mask_sees_all(name):
    for position in (0, 2, 5, 11):
        seen, dense = both(FUNCTIONS[name], 1, position + 1, position, 0, torch.ones(BATCH, position + 1).bool())
        assert bool(dense.all()) if seen is None else torch.equal(pairs(seen), dense)


def test_a_step_of_decoding_without_padding_makes_nothing():
    padding = torch.ones(BATCH, 12).bool()
    for attention_mask in (None, padding):
        for name in ("causal", "all"):
            assert both(FUNCTIONS[name], 1, 12, 11, 0, attention_mask)[0] is None
        assert both(FUNCTIONS["window"], 1, 4, 11, 8, attention_mask)[0] is None
        assert both(FUNCTIONS["window"], 1, 12, 11, 0, attention_mask)[0] is not None


def test_none_is_said_of_several_rows_only_where_it_means_everything():
    skip = dict(allow_is_bidirectional_skip=True)
    assert both(FUNCTIONS["all"], ROWS, KEYS, 0, 0, None, **skip)[0] is None
    assert both(FUNCTIONS["all"], ROWS, KEYS, 0, 0, None)[0] is not None
    assert both(FUNCTIONS["causal"], ROWS, ROWS, 0, 0, None)[0] is not None
    assert both(FUNCTIONS["window both ways"], ROWS, KEYS, 0, 0, None, **skip)[0] is not None


def test_a_tensor_as_offset_is_read():
    seen, _ = both(FUNCTIONS["causal"], ROWS, KEYS, torch.tensor(3), 0, None)
    assert seen.align == 3


def test_a_mask_made_ahead_is_handed_on():
    seen, _ = both(FUNCTIONS["causal"], ROWS, ROWS, 0, 0, None)
    assert both_with(seen) is seen and seen.contiguous() is seen and seen.ndim == 4


def both_with(seen):
    return regard.hf.mask(batch_size=BATCH, q_length=ROWS, kv_length=ROWS, attention_mask=seen)


def test_own_functions_are_known_and_others_are_looked_at(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("looked at pair by pair")

    monkeypatch.setattr(made, "sdpa_mask", never)
    for name, function in FUNCTIONS.items():
        call = dict(batch_size=BATCH, q_length=ROWS, kv_length=KEYS, q_offset=5, mask_function=function)
        if name in STRANGERS:
            with pytest.raises(AssertionError, match="pair by pair"):
                regard.hf.mask(**call)
        else:
            assert regard.hf.mask(**call) is not None


@pytest.mark.parametrize("strip", [1, 40, 100, 1 << 22])
def test_strips_of_any_height_give_the_same_ranges(monkeypatch, strip):
    monkeypatch.setattr(regard.hf, "STRIP", strip)
    for vmap in (True, False):
        seen, dense = both(FUNCTIONS["a stranger too"], ROWS, KEYS, 5, 0, PADDINGS["left"], use_vmap=vmap)
        assert torch.equal(pairs(seen), dense)


def test_masks_hold_a_few_numbers_for_each_row_and_key():
    n = 2048
    documents = (torch.arange(n) // 300)[None].expand(BATCH, -1)
    long = dict(FUNCTIONS, documents=made.and_masks(made.causal_mask_function, made.packed_sequence_mask_function(documents)))
    groups = torch.where(documents % 2 == 0, -1, documents)
    long["groups"] = made.or_masks(made.causal_mask_function, made.blockwise_overlay(groups))
    long["window or groups"] = made.or_masks(made.sliding_window_causal_mask_function(4), made.blockwise_overlay(groups))
    long["padding inside"] = made.and_masks(made.causal_mask_function, made.padding_mask_function(documents > 0))
    long["a stranger"] = lambda b, h, q, k: (k <= q) & ((k < 100) | (q - k < 30))
    paddings = [None, (torch.arange(n) > 7)[None].expand(BATCH, -1), (torch.arange(n) % 100 > 7)[None].expand(BATCH, -1)]
    held = []
    for name, function in long.items():
        for padding in paddings:
            seen = regard.hf.mask(
                batch_size=BATCH, q_length=n, kv_length=n, mask_function=function, attention_mask=padding, use_vmap=name in STRANGERS
            )
            held.append(sum(math.prod(array.shape) for _, array in seen.mask.arrays))
    assert max(held) > n  # what is counted are the numbers of masks indeed
    assert max(held) <= 64 * BATCH * n < BATCH * n * n / 16


def test_a_mask_function_that_is_not_known_is_named_once():
    regard.hf._warn_of.cache_clear()
    arguments = dict(batch_size=1, q_length=8, kv_length=8, mask_function=FUNCTIONS["a stranger too"])
    with pytest.warns(UserWarning, match="image_tokens") as told:
        assert "image_tokens" in regard.hf.mask(**arguments).how
        regard.hf.mask(**arguments)
    assert len(told) == 1
    assert regard.hf.mask(batch_size=1, q_length=8, kv_length=8).how == "rules"
