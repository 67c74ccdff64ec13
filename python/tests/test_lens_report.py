"""Reports with spans, and of two runs: the numbers of the page against eager attention."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_table import ids, model
from test_lens import WORDS, Tokenizer, data_of, eager, given, look

import regard.hf
import regard.lens

SPANS = {"instruction": (1, 5), "</script><img src=x>": (3, 9), "rest": (8, None)}


def decoded(text: str) -> np.ndarray:
    """Numbers from 0 to 1 as a page stores them; NaN where masked."""
    codes = np.frombuffer(base64.b64decode(text), "<u2").astype(float)
    return np.where(codes == 65535, np.nan, (codes / 65534) ** 2)


def masses(weights: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Mass of rows on spans of keys, `[rows, spans]`."""
    return np.stack([weights[:, start:stop].sum(1) for start, stop in spans], 1)


@pytest.mark.parametrize("name, padding, keep", [("llama", "left", True), ("llama", "right", False), ("gpt2", "none", False), ("t5", "none", False)])
def test_spans_of_a_report_have_the_masses_of_eager_attention(name, padding, keep, tmp_path):
    inputs = given(name, padding)
    seen = look(name, inputs, tokens=Tokenizer(), keep=keep)
    weights = eager(name, **inputs)
    for item in (0, 1):
        seen.report(tmp_path / "run.html", item=item, spans=SPANS)
        told = data_of(tmp_path / "run.html")
        assert "<img src=x" not in (tmp_path / "run.html").read_text()
        first, stop = (0, 13) if padding == "none" or item == 0 else (5, 13) if padding == "left" else (0, 8)
        for site in told["sites"]:
            whole = weights[site["kind"], site["layer"]][item, site["head"]]
            rows, keys = ((first, stop) if n == 13 else (0, n) for n in whole.shape)
            own = whole[rows[0] : rows[1], keys[0] : keys[1]]
            at = [tuple(min(max(0, (own.shape[1] if end is None else end - keys[0])), own.shape[1]) for end in span) for span in SPANS.values()]
            spans = [(0 if start is None else start, end) for start, end in at]
            assert [tuple(span["positions"]) for span in told["axes"][site["cols"]]["spans"]] == spans
            expected = masses(own, spans)
            np.testing.assert_allclose(site["spans"], np.stack([expected.mean(0), expected[-1]], 1), atol=1e-5)
            np.testing.assert_allclose(decoded(site["masses"]).reshape(expected.shape), expected, atol=1e-4)


def test_spans_of_a_report_of_cells_are_bands_without_numbers(tmp_path):
    with regard.lens.capture(model("llama"), tokens=WORDS, map=20) as seen, torch.no_grad():
        model("llama")(input_ids=ids(1, 130))
    seen.report(tmp_path / "run.html", spans={"head": (0, 14), "middle": (15, 70), "rest": (100, None)})
    told = data_of(tmp_path / "run.html")
    (axis,) = told["axes"].values()
    starts = [int(label.split(" +")[0].lstrip("w")) for label in axis["labels"]] + [130]
    for span, (start, stop) in zip(axis["spans"], ((0, 14), (15, 70), (100, 130))):
        first, end = span["positions"]
        assert starts[first] <= start < starts[first + 1] and starts[end - 1] < stop <= starts[end]
    assert all(site["spans"] == [] and site["masses"] == "" and site["labels"] == [] for site in told["sites"])


def test_a_report_labels_heads_of_a_text_with_tokens(tmp_path):
    """Weights of layer 0, head 0 are replaced by those of a previous-token head, by adding to its scores."""
    n = 12
    bias = [{"layers": [0], "heads": [0], "rows": (i, i + 1), "keys": (i - 1, i), "add": 30.0} for i in range(1, n)]
    with torch.no_grad(), regard.lens.capture(model("llama"), tokens=WORDS, keep=True) as seen, regard.hf.intervene(model("llama"), bias):
        model("llama")(input_ids=ids(1, n))
    seen.report(tmp_path / "run.html")
    told = data_of(tmp_path / "run.html")
    label = told["sites"][0]["labels"][0]
    assert label["name"] == "previous token" and label["score"] == pytest.approx(1, abs=1e-3)
    assert told["interventions"][0] == "layers 0, heads 0, rows 1..2, keys 0..1: add 30.0" and len(told["interventions"]) == n - 1


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Mean Jensen-Shannon divergence of the rows of two heads."""
    middle = (a + b) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(x > 0, x * np.log(x / middle), 0).sum(-1) for x in (a, b)]
    return float((terms[0] + terms[1]).mean() / 2)


@pytest.mark.parametrize("keep, padding", [(True, "none"), (False, "none"), (True, "left")])
def test_a_report_against_another_run_has_both_and_their_divergence(keep, padding, tmp_path):
    inputs, rules = given("llama", padding), [{"layers": [1], "heads": [2], "rows": (8, None), "keys": (0, 7), "times": 0.1}]
    options = {"tokens": Tokenizer(), "keep": keep}
    before = look("llama", inputs, **options)
    with regard.hf.intervene(model("llama"), rules):
        after = look("llama", inputs, **options)
    for item, first in ((0, 0), (1, 5 if padding == "left" else 0)):
        before.report(tmp_path / "both.html", item=item, spans=SPANS, against=after)
        told = data_of(tmp_path / "both.html")
        assert told["against"]["interventions"] == ["layers 1, heads 2, rows 8.., keys 0..7: times 0.1"]
        assert told["interventions"] == []
        for site in told["sites"]:
            pair = [seen[site["layer"]].tile((0, 13), (0, 13))[item, site["head"], first:, first:] for seen in (before, after)]
            assert site["change"] == pytest.approx(divergence(*pair), abs=1e-5)
            for run, weights, seen in zip((site, site["after"]), pair, (before, after)):
                np.testing.assert_allclose(np.nan_to_num(decoded(run["weights"])).reshape(weights.shape), weights, atol=1e-4)
                assert run["stats"]["entropy"] == pytest.approx(seen[site["layer"]].means["entropy"][item, site["head"]])
            if site["layer"] == 0:
                assert site["change"] == 0
        changed = max(told["sites"], key=lambda site: site["change"])
        assert (changed["layer"], changed["head"]) == (1, 2) or changed["layer"] > 1


def test_a_report_against_a_run_that_cannot_be_compared_says_why(tmp_path):
    seen = look("llama", given("llama"), tokens=Tokenizer(), keep=True)
    some = look("llama", given("llama"), tokens=Tokenizer(), keep=True, layers=[0])
    with pytest.raises(ValueError, match="against: self layer 1: not recorded there; capture both runs with the same options"):
        seen.report(tmp_path / "both.html", against=some)
    with pytest.raises(ValueError, match="against: self layer 1: recorded only there; capture both runs with the same options"):
        some.report(tmp_path / "both.html", against=seen)
    other = look("llama", {"input_ids": ids(2, 13, seed=5)}, tokens=Tokenizer(), keep=True)
    with pytest.raises(ValueError, match="the words are not the same; compare runs over the same text"):
        seen.report(tmp_path / "both.html", against=other)
    with pytest.raises(ValueError, match="'recent'.*: -4 counts from the position of a row; a report needs positions from 0 on"):
        seen.report(tmp_path / "both.html", spans={"recent": (-4, None)})
    assert not list(Path(tmp_path).iterdir())


def test_a_pooled_map_has_no_divergence(tmp_path):
    inputs = {"input_ids": ids(1, 130)}
    before = look("llama", inputs, tokens=WORDS, map=20)
    with regard.hf.intervene(model("llama"), [{"layers": [0], "heads": [1], "times": 0.5, "keys": (0, 9)}]):
        after = look("llama", inputs, tokens=WORDS, map=20)
    before.report(tmp_path / "both.html", against=after)
    assert all(site["change"] is None for site in data_of(tmp_path / "both.html")["sites"])
