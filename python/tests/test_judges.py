"""`python/tests/judges` on suites written here: what is recorded of tests that fail, hang, crash, or do not apply."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent / "judges"))
import run

SUITE = """
import os, time
import pytest

@pytest.fixture
def untidy():
    yield
    raise OSError("cannot clean up")

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3
def test_fails_after_the_test(untidy): pass
def test_is_skipped(): pytest.skip("no such machine")
def test_of_something_missing_elsewhere(): raise NotImplementedError("somewhere")
def test_hangs(): time.sleep(60)
def test_crashes(): os._exit(77)
def test_passes_after_the_crash(): pass
"""


def pieces(monkeypatch, folder: Path, lines: Path, suite="flash-attn", names=()) -> dict:
    """One piece of a suite in a folder, and the result of all pieces so far."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    arguments = argparse.Namespace(suite=suite, names=list(names), sample=0, seed=0, seconds=2, minutes=10.0)
    lines.touch()
    return run.result(arguments, lines, folder, run.pytest(arguments, lines, folder))


@pytest.fixture
def suite(monkeypatch, tmp_path):
    """A suite of two files without a plugin, in the place of one of others."""
    folder = tmp_path / "suite"
    folder.mkdir()
    (folder / "test_all.py").write_text(SUITE)
    (folder / "test_missing.py").write_text("import a_package_that_is_not_here\n")
    monkeypatch.setitem(run.SUITES, "flash-attn", run.Suite("", "suite", ("torch",)))
    return tmp_path


def counts(found: dict) -> dict[str, int]:
    return {outcome: found[outcome] for outcome in run.OUTCOMES}


def test_every_test_has_one_outcome_and_a_crash_is_a_failure(monkeypatch, suite):
    lines = suite / "lines.jsonl"
    first = pieces(monkeypatch, suite, lines)
    expected = {"passed": 1, "failed": 4, "not applicable": 1, "too slow": 1, "not collected": 1}
    assert counts(first) == expected
    why = {name: reason for reasons in first["why"].values() for reason, tests in reasons.items() for name in tests}
    assert why["suite/test_all.py::test_crashes"] == "process ended with 77"
    assert why["suite/test_all.py::test_fails_after_the_test"] == "OSError: cannot clean up"
    assert why["suite/test_all.py::test_of_something_missing_elsewhere"] == "NotImplementedError: somewhere"
    assert why["suite/test_all.py::test_hangs"] == "takes longer than 2 s"
    assert "a_package_that_is_not_here" in why["suite/test_missing.py"]
    # The next piece goes on after the crash, and repeats nothing.
    second = pieces(monkeypatch, suite, lines)
    assert counts(second) == {**expected, "passed": 2}
    third = pieces(monkeypatch, suite, lines)
    assert counts(third) == counts(second)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len([one for one in found if one["outcome"] == "not collected"]) == 1
    # Once the file can be imported, its tests count.
    (suite / "suite/test_missing.py").write_text("def test_now(): pass\n")
    assert counts(pieces(monkeypatch, suite, lines)) == {**expected, "passed": 3, "not collected": 0}


def test_a_process_that_ends_before_any_test_is_a_failure(monkeypatch, suite):
    monkeypatch.setitem(run.SUITES, "flash-attn", run.Suite("a_plugin_that_is_not_here", "suite", ("torch",)))
    found = pieces(monkeypatch, suite, suite / "lines.jsonl")
    assert counts(found) == {"passed": 0, "failed": 1, "not applicable": 0, "too slow": 0, "not collected": 0}
    ((why, _),) = found["why"]["failed"].items()
    assert why.startswith("process ended with ")


MODELS = """
import unittest
from tests.test_modeling_common import ModelTesterMixin
import transformers_judge

class Model:
    _supports_attention_backend = True


class OneModelTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (Model,)

    def setUp(self):
        self.fresh = True

    def flash_attn_inference_equivalence(self, attn_implementation, padding_side):
        assert padding_side == "left", f"{attn_implementation} differs"

    def test_eager_matches_sdpa_inference_0(self):
        transformers_judge.calls += 1

    def test_eager_matches_sdpa_inference_1(self):
        # Fails because of its own leftovers if it is not run on a fresh instance.
        assert self.fresh, "not fresh"
        self.fresh = False
        raise ValueError("the model has no such layer\\nin detail: " + str(id(self)))

    def test_eager_matches_sdpa_inference_2(self):
        transformers_judge.calls += 1
        assert transformers_judge._comparing, "logits differ"

    def test_eager_matches_sdpa_inference_3(self):
        raise (KeyError if transformers_judge._comparing else ValueError)("one")


class OwnAttention:
    _supports_attention_backend = False


class OwnAttentionTest(unittest.TestCase):
    all_model_classes = (OwnAttention,)

    def test_eager_matches_sdpa_inference_4(self):
        raise KeyError("regard")
"""


def test_only_the_same_error_with_sdpa_does_not_apply(monkeypatch, tmp_path):
    tests = tmp_path / "tests"
    (tests / "models/one").mkdir(parents=True)
    for folder in (tests, tests / "models", tests / "models/one"):
        (folder / "__init__.py").touch()
    (tests / "test_modeling_common.py").write_text("class ModelTesterMixin: pass\n")
    (tests / "models/one/test_modeling_one.py").write_text(MODELS)
    found = pieces(monkeypatch, tmp_path, tmp_path / "lines.jsonl", "transformers", ["one"])
    names = {outcome: sorted(name.rpartition("::")[2] for tests in found["why"][outcome].values() for name in tests) for outcome in found["why"]}
    assert names["failed"] == [
        "test_eager_matches_sdpa_inference_2", "test_eager_matches_sdpa_inference_3", "test_regard_inference_equivalence_right_padding",
    ]  # fmt: skip
    # Without a call of Regard, also a test that passes does not apply.
    assert names["not applicable"] == [
        "test_eager_matches_sdpa_inference_1", "test_eager_matches_sdpa_inference_4", "test_regard_inference_equivalence_left_padding",
    ]  # fmt: skip
    assert found["passed"] == 1 and found["groups"].keys() == {"one"}


def test_the_page_has_the_suites_that_have_a_record():
    page = (ROOT / "docs/judges.md").read_text()
    records = {path.stem for path in (ROOT / "bench/record/judges").glob("*.json")}
    assert {name for name in run.SUITES if f"judges/{name}.json)" in page} == records


def test_suites_and_outcomes_of_the_tables_are_those_of_the_judges():
    sys.path.insert(0, str(ROOT / "bench"))
    import tables

    assert set(tables.SUITES_OF_OTHERS) == set(run.SUITES) and tuple(tables.OUTCOMES) == run.OUTCOMES
