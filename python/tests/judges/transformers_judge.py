"""A plugin of pytest for the common tests of Transformers: their comparison of "sdpa" with eager attention runs with "regard" in its place,
and the one for FlashAttention, which takes any name, with "regard".

A test that fails runs once more, on an instance of its own, with PyTorch's attention: if it fails there with the same error, it says nothing
about Regard and is `not applicable`. So is a test in which no layer calls Regard.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import unittest

import pytest
import transformers
from transformers import PreTrainedModel
from transformers.testing_utils import is_flaky

import regard.hf

calls = 0
"""Calls of Regard by layers of models."""


def _counted(attention):
    @functools.wraps(attention)
    def call(*args, **kwargs):
        global calls
        calls += 1
        return attention(*args, **kwargs)

    return call


regard.hf.attention = _counted(regard.hf.attention)
regard.hf.register()


@contextlib.contextmanager
def _instead_of_sdpa():
    """Models that are loaded for "sdpa" get "regard"."""
    # The class method itself: as an attribute it would be bound to this class, and stay so for its subclasses when it is put back.
    load = vars(PreTrainedModel)["from_pretrained"]

    @classmethod
    def loaded(cls, *args, **kwargs):
        if kwargs.get("attn_implementation") == "sdpa":
            kwargs["attn_implementation"] = "regard"
        return load.__func__(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = loaded
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load


def pytest_configure(config):
    """Their tests are imported here, before those of models are collected, so that these inherit two tests more."""
    root = config.rootpath
    sys.path.insert(0, str(root))
    from tests.test_modeling_common import ModelTesterMixin

    for side in ("left", "right"):
        setattr(ModelTesterMixin, f"test_regard_inference_equivalence_{side}_padding", _equivalence(side))


def _equivalence(side):
    # As those for FlashAttention: inputs are random, and in bf16 a token on the edge between two experts of a mixture takes either.
    @is_flaky()
    def test(self):
        # The second run is the comparison of a failed test, see `_judged`.
        self.flash_attn_inference_equivalence(attn_implementation="sdpa" if _comparing else "regard", padding_side=side)

    return test


_comparing = False


def pytest_collection_modifyitems(config, items):
    """Only the tests of inference with an attention implementation."""
    items[:] = [item for item in items if "test_eager_matches_sdpa_inference" in item.name or "test_regard_inference" in item.name]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    item.obj = _judged(item.obj, item.name)


def _judged(test, name):
    @functools.wraps(test)
    def run(*args, **kwargs):
        global _comparing, calls
        calls = 0
        if not any(one._supports_attention_backend for one in test.__self__.all_model_classes):
            raise unittest.SkipTest("models whose layers do not call registered attention functions")
        try:
            with _instead_of_sdpa():
                test(*args, **kwargs)
        except unittest.SkipTest:
            raise
        except Exception as error:
            _comparing = True
            try:
                other = _error_of(type(test.__self__)(name), name, *args, **kwargs)
            finally:
                _comparing = False
            if _signature(other) == _signature(error):
                raise unittest.SkipTest(f"fails with sdpa as well: {type(error).__name__}: {error}") from None
            raise
        if not calls:
            raise unittest.SkipTest("no layer of the model calls a registered attention function")

    return run


def _error_of(case, name, *args, **kwargs):
    """The exception of a test of a `TestCase`, or None."""
    try:
        case.setUp()
        try:
            getattr(case, name)(*args, **kwargs)
        finally:
            case.tearDown()
    except Exception as error:
        return error
    finally:
        case.doCleanups()
    return None


def _signature(error):
    """Type and first line of an exception: what two failures must have in common to be one."""
    return type(error), next(iter(str(error).splitlines()), "")


def pytest_report_header(config):
    return f"transformers {transformers.__version__}, regard {regard.__version__}"
