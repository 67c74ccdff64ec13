"""A plugin of pytest for the tests of flash-attention (the copy in huggingface/kernels-community): `regard.flash_attn` is their package."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import regard.flash_attn

# Imported by the tests for the normalization of a dropped matrix of weights, which Regard does not return.
interface = types.ModuleType("flash_attn2.flash_attn_interface")
interface._get_block_size_n = lambda device, head_dim, is_dropout, is_causal: 64
package = types.ModuleType("flash_attn2")
vars(package).update({name: getattr(regard.flash_attn, name) for name in regard.flash_attn.__all__})
padding = types.ModuleType("flash_attn2.bert_padding")
vars(padding).update({name: getattr(regard.flash_attn, name) for name in regard.flash_attn._PADDING})
sys.modules |= {"flash_attn2": package, "flash_attn2.bert_padding": padding, "flash_attn2.flash_attn_interface": interface}


@pytest.fixture(scope="session")
def device():
    """The tests skip "cpu", where their own kernels lack most functions. A `torch.device` is not equal to this text."""
    return torch.device("cpu")
