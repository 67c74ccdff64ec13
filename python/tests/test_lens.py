"""`regard.lens` against what eager attention says of itself: numbers, rows, generation, and what is written down."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hf_table import ARCHITECTURES, ids, minilm, model

import regard
import regard.hf
import regard.lens
from regard import _callbacks

ROOT = Path(__file__).parents[2]
WORDS = [f"w{i}" for i in range(64)]


def given(name: str, padding: str = "none") -> dict[str, torch.Tensor]:
    """Two items; with padding the second one is shorter."""
    found = {"input_ids": ids(2, 13)}
    if padding != "none":
        place = torch.arange(13)[None]
        found["attention_mask"] = torch.cat([place >= 0, place < 8 if padding == "right" else place >= 5]).long()
    if ARCHITECTURES[name].kind == "translator":
        found["decoder_input_ids"] = ids(2, 9, seed=1)
    return found


@torch.no_grad()
def eager(name: str, **inputs: torch.Tensor) -> dict[tuple[str, int], np.ndarray]:
    """The weights of each layer, `[batch, heads, rows, keys]`."""
    of = model(name)
    of.set_attn_implementation("eager")
    found = of(**inputs, output_attentions=True)
    kinds = {"attentions": "self", "encoder_attentions": "encoder", "decoder_attentions": "self", "cross_attentions": "cross"}
    return {(kinds[key], i): x.numpy() for key in kinds for i, x in enumerate(found.get(key) or ())}


@torch.no_grad()
def look(name: str, inputs: dict[str, torch.Tensor], **options) -> regard.lens.Capture:
    with regard.lens.capture(model(name), **options) as seen:
        model(name)(**inputs)
    return seen


def near(found: np.ndarray, options_of_capture: np.ndarray) -> None:
    assert found.shape == options_of_capture.shape
    np.testing.assert_allclose(found, options_of_capture, rtol=1e-5, atol=1e-5)


def check_statistics(record: regard.lens.Record, weights: np.ndarray) -> None:
    """Everything that a record tells, from the weights alone."""
    q_len, k_len = weights.shape[2:]
    assert (record.q_len, record.k_len) == (q_len, k_len)
    with np.errstate(divide="ignore", invalid="ignore"):
        near(record.entropy, -np.where(weights > 0, weights * np.log(weights), 0).sum(-1))
    place = np.arange(k_len)[None] - (np.arange(q_len)[:, None] + k_len - q_len)
    if record.kind != "cross":  # whose rows stand nowhere among the keys
        near(record.mean_distance, (weights * np.abs(place)).sum(-1))
    near(record.first_mass, weights[..., 0])
    near(record.largest, weights.max(-1))
    near(record.col_sum, weights.sum(2))
    near(record.sink_mass, np.zeros(weights.shape[:3]))
    found = record.top_k
    near(found.weights, -np.sort(-weights, -1)[..., :5])
    near(np.take_along_axis(weights, found.keys.clip(0).astype(int), -1) * (found.keys >= 0), found.weights)
    for row in (0, -1):
        near(record.row(row), weights[:, :, row])
    assert record.exact
    near(record.map, weights)
    near(record.weights(), weights)
    near(record.tile((2, 5), (1, 4)), weights[:, :, 2:5, 1:4])


CASES = [("gpt2", "none"), ("llama", "none"), ("llama", "left"), ("mistral", "none"), ("gemma2", "none"), ("bert", "right"), ("t5", "right"),
         ("bart", "none")]  # fmt: skip


@pytest.mark.parametrize("name, padding", CASES)
def test_statistics_are_those_of_eager(name, padding):
    inputs = given(name, padding)
    options_of_capture = eager(name, **inputs)
    seen = look(name, inputs, stats=regard.lens.STATS, top_k=5, rows=(0, -1))
    assert {(record.kind, record.layer) for record in seen} == options_of_capture.keys()
    for (kind, layer), weights in options_of_capture.items():
        if padding == "left":  # a row before the text sees nothing here, and everything in eager
            weights[1, :, :5] = 0
            for stat in ("entropy", "mean_distance"):
                assert not getattr(seen[kind, layer], stat)[1, :, :5].any()
        check_statistics(seen[kind, layer], weights)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "t5"])
def test_largest_scores_and_sinks_are_those_of_the_engine(name):
    seen = look(name, given(name), stats=("max_score", "sink_mass"), keep=True)
    for record in seen:
        ((_, _, call),) = record.calls()
        values = torch.zeros(*call.k.shape[:3], 1)
        aux = regard.torch.attention(call.q, call.k, values, **call.options, entropy=True, return_aux=True)[1]
        near(record.max_score, aux.max_score.numpy())
        near(record.sink_mass, 1 - record.weights().sum(-1))
        assert record.sink_mass.any() == (name == "gpt_oss")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_seen_as_eager_sees_it(name):
    inputs = {**(given(name) if not ARCHITECTURES[name].inputs else ARCHITECTURES[name].inputs(2))}
    if ARCHITECTURES[name].kind == "sound":
        inputs["decoder_input_ids"] = ids(2, 9, seed=1)
    options_of_capture, seen = eager(name, **inputs), look(name, inputs, keep=True)
    found = {("self" if record.kind in ("vision", "audio") else record.kind, record.layer): record for record in seen}
    assert found.keys() == options_of_capture.keys()
    for site, weights in options_of_capture.items():
        near(found[site].map, weights)
        near(found[site].weights(), weights)


def test_a_map_of_few_cells_holds_the_largest_weights():
    inputs = {"input_ids": ids(1, 100)}
    weights, record = eager("llama", **inputs)["self", 1], look("llama", inputs, map=16)[1]
    assert not record.exact and record.map.shape == (1, 4, 16, 16)
    down, across = record.cells
    options_of_capture = [[weights[0, 3, a:b, c:d].max() for c, d in zip(across, across[1:])] for a, b in zip(down, down[1:])]
    near(record.map[0, 3], np.array(options_of_capture))


def test_means_leave_padding_out():
    inputs = given("bert", "right")
    weights, record = eager("bert", **inputs)["self", 0], look("bert", inputs)[0]
    for item, rows in ((0, 13), (1, 8)):
        own = weights[item, :, :rows]
        near(record.means["first"][item], own[..., 0].mean(-1))
        near(record.means["largest"][item], own.max(-1).mean(-1))
        near(record.means["entropy"][item], -(own * np.log(own.clip(1e-30))).sum(-1).mean(-1))


def test_layers_and_heads_can_be_chosen():
    inputs = given("llama")
    weights = eager("llama", **inputs)["self", 1]
    seen = look("llama", inputs, layers=iter([1]), heads=iter([3, 0]), stats=("entropy", "max_score"), keep=True)
    whole = look("llama", inputs, stats=("entropy", "max_score"))
    assert [record.layer for record in seen] == [1] and seen[1].heads == (3, 0)
    near(seen[1].row(4), weights[:, [3, 0], 4])
    for stat in ("entropy", "max_score"):
        assert np.array_equal(getattr(seen[1], stat), getattr(whole[1], stat)[:, [3, 0]])
    with pytest.raises(KeyError, match="self layer 0: not recorded; there are: self 1 to 1"):
        seen[0]


# ---- generation ----


@torch.no_grad()
def generate(name: str, by: str, prompt: dict[str, torch.Tensor], steps: int, **options):
    of = model(name)
    of.set_attn_implementation(by)
    return of.generate(**prompt, max_new_tokens=steps, do_sample=False, eos_token_id=None, **options)


def eager_rows(name: str, prompt: dict[str, torch.Tensor], steps: int) -> dict[tuple[str, int], list[np.ndarray]]:
    """For each layer, its calls one after another, each `[batch, heads, rows, keys]`; a cache that forgets gives fewer keys."""
    found = generate(name, "eager", prompt, steps, output_attentions=True, return_dict_in_generate=True)
    kinds = {"attentions": "self", "decoder_attentions": "self", "cross_attentions": "cross"}
    return {
        (kind, layer): [step[layer].numpy() for step in found[key]]
        for key, kind in kinds.items()
        if found.get(key)
        for layer in range(len(found[key][0]))
    }


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name, padding", [("llama", "none"), ("gpt2", "left"), ("mistral", "none"), ("gemma3", "none"), ("t5", "none")])
def test_a_generation_is_one_record_of_each_layer(name, padding, keep):
    prompt = {key: x for key, x in given(name, padding).items() if key != "decoder_input_ids"}
    options_of_capture = eager_rows(name, prompt, 6)
    model(name).set_attn_implementation("regard")
    with regard.lens.capture(model(name), stats=regard.lens.STATS, top_k=3, rows=(0, -1, -2), map=64, keep=keep) as seen:
        generate(name, "regard", prompt, 6)
    assert seen.run_count == 1
    for (kind, layer), calls in options_of_capture.items():
        record = seen[kind, layer]
        assert record.q_len == sum(call.shape[2] for call in calls)
        at = 0
        for call in calls:
            first = 0 if kind == "cross" else at + call.shape[2] - call.shape[3]  # of what a cache remembers
            for i in range(call.shape[2]):
                if padding == "left" and at + i < 5:
                    continue  # sees nothing here
                row = np.zeros((*call.shape[:2], record.k_len), call.dtype)
                row[..., first : first + call.shape[3]] = call[:, :, i]
                near(record.row(at + i), row)
                near(record.largest[:, :, at + i], row.max(-1))
                near(np.take_along_axis(row, record.top_k.keys[:, :, at + i].clip(0), -1)[..., 0], row.max(-1))
            at += call.shape[2]
        near(record.col_sum, record.weights().sum(2))
        assert record.whole_rows == [0, record.q_len - 2, record.q_len - 1]
    if name == "t5":
        assert seen["encoder", 1].q_len == 13


def test_a_map_grows_with_a_generation_and_stays_small():
    prompt = {"input_ids": ids(1, 10)}
    with regard.lens.capture(model("llama"), map=8, keep=True) as seen:
        generate("llama", "regard", prompt, 40)
    record = seen[1]
    assert record.q_len == 49 and max(record.map.shape[2:]) <= 16
    down, across = record.cells
    weights = record.weights()[0]
    options_of_capture = [[weights[:, a:b, c:d].max((1, 2)) for c, d in zip(across, across[1:])] for a, b in zip(down, down[1:])]
    near(record.map[0], np.array(options_of_capture).transpose(2, 0, 1))


def test_a_cache_with_room_for_more_changes_nothing():
    prompt = {"input_ids": ids(2, 13)}
    found = []
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        with regard.lens.capture(model("llama"), keep=True, rows=(3, -1)) as seen:
            generate("llama", "regard", prompt, 6, **options)
        found.append(seen[1])
    assert (found[0].q_len, found[0].k_len) == (found[1].q_len, found[1].k_len) == (18, 18)
    near(found[1].weights(), found[0].weights())
    near(found[1].entropy, found[0].entropy)


def test_each_forward_pass_is_a_run():
    m, inputs = model("t5"), [given("t5"), {**given("t5"), "decoder_input_ids": ids(2, 5, seed=7)}]
    with torch.no_grad(), regard.lens.capture(m) as seen:
        for one in inputs:
            m(**one)
    assert seen.run_count == 2
    assert [seen.run(i)["cross", 0].q_len for i in (0, 1, -1)] == [9, 5, 5] and seen["cross", 0].q_len == 5
    with pytest.raises(IndexError, match="run 2: out of range, there are 2"):
        seen.run(2)


def test_a_module_that_is_several_layers_is_seen_as_several():
    config = transformers.AlbertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, embedding_size=16
    )
    m = transformers.AlbertModel(config).eval()
    with torch.no_grad(), regard.lens.capture(m) as seen:
        m(ids(1, 9))
        m(ids(1, 7))
    assert seen.run_count == 2 and [record.layer for record in seen] == [0, 1, 2]
    m.set_attn_implementation("eager")
    options_of_capture = m(ids(1, 7), output_attentions=True).attentions
    for layer in range(3):
        near(seen[layer].map, options_of_capture[layer].detach().numpy())


# ---- the model stays what it was ----


@pytest.mark.parametrize("name", ["gpt2", "t5", "whisper"])
def test_what_was_there_comes_back(name):
    m = model(name)
    m.set_attn_implementation("eager")

    def state():
        return [(host.config._attn_implementation, len(host._forward_pre_hooks), len(host._forward_hooks))
                for host in m.modules() if isinstance(host, transformers.PreTrainedModel)]  # fmt: skip

    before = state()
    with pytest.raises(RuntimeError, match="in the middle"):
        with regard.lens.capture(m):
            assert m.config._attn_implementation == "regard" and _callbacks.callbacks
            raise RuntimeError("in the middle")
    assert state() == before and not _callbacks.callbacks
    with regard.lens.capture(m):
        pass
    assert state() == before and not _callbacks.callbacks


def test_a_failed_forward_pass_does_not_disturb_the_next():
    m = model("llama")
    with torch.no_grad(), regard.lens.capture(m) as seen:
        with pytest.raises(IndexError):
            m(torch.tensor([[10**6]]))
        m(ids(1, 6))
    assert seen.run_count == 1 and seen[1].q_len == 6


def test_gradients_are_those_without_a_lens():
    m, x = model("llama"), ids(2, 13)
    m.set_attn_implementation("regard")

    def step():
        m.zero_grad()
        m(x, labels=x).loss.backward()
        return {name: weight.grad.clone() for name, weight in m.named_parameters() if weight.grad is not None}

    plain = step()
    with regard.lens.capture(m, stats=("entropy",)) as seen:
        watched = step()
    m.zero_grad()
    assert all(torch.equal(watched[name], grad) for name, grad in plain.items()) and len(seen) == 2


def test_what_runs_in_another_thread_is_seen():
    """As generation that streams does."""
    with regard.lens.capture(model("llama")) as seen:
        thread = threading.Thread(target=generate, args=("llama", "regard", {"input_ids": ids(1, 6)}, 3))
        thread.start()
        thread.join()
    assert seen[1].q_len == 8


def test_a_model_inside_another_module_is_seen():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = model("gpt2")

        def forward(self, x):
            return self.inside(x).logits.sum()

    with torch.no_grad(), regard.lens.capture(wrapped := Wrapped(), tokens=WORDS) as seen:
        wrapped(ids(1, 6))
    assert [record.name for record in seen] == ["inside.transformer.h.0.attn", "inside.transformer.h.1.attn"]
    assert seen.to_bertviz()["tokens"] == WORDS[:6]


def test_other_models_are_not_seen():
    with torch.no_grad(), regard.lens.capture(model("llama")) as seen:
        model("gpt2").set_attn_implementation("regard")
        model("gpt2")(ids(1, 5))
        model("llama")(ids(1, 6))
    assert [record.q_len for record in seen] == [6, 6]


# ---- what is refused ----


def test_what_cannot_be_is_refused_by_name():
    m = model("llama")
    for options, why in (
        (dict(stats=("entropie",)), "unknown statistic 'entropie'; use entropy"),
        (dict(layers=[-1]), "layers: -1 is invalid"),
        (dict(heads=[-2]), "heads: -2 is invalid"),
        (dict(map=0), "map: expected 1 or more, found 0"),
        (dict(top_k=0), "top_k: expected 1 or more, found 0"),
    ):
        with pytest.raises(ValueError, match=why):
            with regard.lens.capture(m, **options):
                pass
    with pytest.raises(TypeError, match="expected a PreTrainedModel, or a module that contains one, found Linear"):
        with regard.lens.capture(torch.nn.Linear(2, 2)):
            pass
    with pytest.raises(ValueError, match="heads: no head 4 in self layer 0, which has 4"):
        look("llama", given("llama"), heads=[4])
    bloom = transformers.BloomModel(transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="BloomModel does not support attention backends"):
        with regard.lens.capture(bloom):
            pass


def test_what_was_not_kept_is_not_told():
    record = look("llama", {"input_ids": ids(1, 100)}, map=10)[0]
    with pytest.raises(AttributeError, match="col_sum: not recorded; use capture"):
        record.col_sum
    with pytest.raises(ValueError, match="row 3: not recorded in self layer 0"):
        record.row(3)
    with pytest.raises(IndexError, match="row 100: out of range, there are 100"):
        record.row(100)
    with pytest.warns(UserWarning, match="no layer 7; the last layer is 1"):
        look("llama", given("llama"), layers=[0, 7])


# ---- pages and files ----


def data_of(page: Path) -> dict:
    text = page.read_text()
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


class Tokenizer:
    def convert_ids_to_tokens(self, numbers):
        return [f"<{number}>" for number in numbers]


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_report_tells_of_every_head_with_its_words(name, tmp_path):
    inputs = given(name, "right")
    seen = look(name, inputs, tokens=Tokenizer(), stats=("entropy", "top_k", "col_sum"))
    for item, length in ((0, 13), (1, 8)):
        seen.report(tmp_path / "run.html", item=item)
        told = data_of(tmp_path / "run.html")
        assert len(told["sites"]) == 4 * len(seen)
        source = told["axes"]["source" if name == "t5" else "text"]["labels"]
        assert source == [f"<{number}>" for number in inputs["input_ids"][item, :length].tolist()]
        for site in told["sites"]:
            means = seen[site["kind"], site["layer"]].means
            assert site["stats"]["entropy"] == pytest.approx(means["entropy"][item, site["head"]])
        text = (tmp_path / "run.html").read_text()
        assert text.count("&lt;") > 20 and 'src="' not in text and "url(" not in text
        assert "Along the text" in text and "<svg" in text
    with pytest.raises(IndexError, match="item 2: out of range, the batch has 2"):
        seen.report(tmp_path / "run.html", item=2)
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_report_of_a_long_text_holds_its_map_in_few_cells(tmp_path):
    with regard.lens.capture(model("llama"), tokens=WORDS, map=20) as seen:
        generate("llama", "regard", {"input_ids": ids(1, 130)}, 4)
    seen.report(tmp_path / "run.html")
    told = data_of(tmp_path / "run.html")
    (axis,) = told["axes"].values()
    assert axis["title"] == "groups of up to 7 text" and axis["labels"][0] == "w0 +6" and axis["labels"][-1] == "132"
    assert len(axis["labels"]) == 23
    assert "query 132 attends to" in (tmp_path / "run.html").read_text()


def command(*arguments: str) -> list[dict]:
    """What the command line says, line by line."""
    built = [path for kind in ("debug", "release") if (path := ROOT / "target" / kind / "regard").exists()]
    tool = max(built, key=lambda path: path.stat().st_mtime) if built else shutil.which("regard")
    if tool is None:
        pytest.skip("the command `regard` is not here: cargo build -p regard-cli")
    said = subprocess.run([tool, *arguments], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    return [json.loads(line) for line in said.stdout.splitlines()]


TRACES = [("llama", "none", True), ("llama", "left", True), ("gpt2", "right", True), ("mistral", "none", True), ("bert", "right", True),
          ("gemma2", "none", True), ("t5", "right", True), ("t5", "none", False), ("gpt_oss", "none", False), ("bert", "right", False)]  # fmt: skip


@pytest.mark.parametrize("name, padding, keep", TRACES)
def test_a_trace_is_read_by_the_command_line(name, padding, keep, tmp_path):
    seen = look(name, given(name, padding), tokens=Tokenizer(), keep=keep)
    path = tmp_path / "run.safetensors"
    for item in (0, 1):
        seen.to_trace(path, item=item)
        told = command("stats", str(path), "--format", "json")
        assert len(told) == 4 * len(seen)
        for head in told:
            means = seen[head["kind"], head["layer"]].means
            if name != "gpt_oss":  # weights alone do not tell of the sink's
                assert head["entropy"] == pytest.approx(means["entropy"][item, head["head"]], rel=1e-4, abs=1e-4)
            assert head["largest"] == pytest.approx(means["largest"][item, head["head"]], rel=1e-4)
    written = tensors(path)
    inputs = keep and name not in ("t5", "gpt_oss")
    assert any(tensor.endswith(".q") for tensor in written) == inputs and any(tensor.endswith(".weights") for tensor in written) != inputs


def tensors(path: Path) -> list[str]:
    with path.open("rb") as file:
        return list(json.loads(file.read(int.from_bytes(file.read(8), "little"))))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "name, padding", [("llama", "none"), ("llama", "left"), ("llama", "one token"), ("mistral", "none"), ("gemma2", "none")]
)
def test_a_trace_of_a_generation_holds_its_steps(name, padding, static, tmp_path):
    prompt = {"input_ids": ids(2, 1)} if padding == "one token" else given(name, padding)
    cache = {"cache_implementation": "static", "disable_compile": True} if static else {}
    with regard.lens.capture(model(name), keep=True, heads=[1, 3], tokens=Tokenizer()) as seen:
        generate(name, "regard", prompt, 6, **cache)
    seen.to_trace(tmp_path / "run.safetensors", item=1)
    assert "self.0.q" in tensors(tmp_path / "run.safetensors")
    first = 5 if padding == "left" else 0
    for head in command("look", str(tmp_path / "run.safetensors"), "--format", "json"):
        weights = np.nan_to_num(np.array(head["weights"], dtype=float))
        near(weights, seen[head["layer"]].weights()[1, head["head"], first:, first:])
        assert head["rows"] == seen.labels("text", 1)[first:]


def test_beams_share_what_their_encoder_saw(tmp_path):
    prompt = {key: x for key, x in given("t5").items() if key != "decoder_input_ids"}
    with regard.lens.capture(model("t5"), tokens=Tokenizer()) as seen:
        generate("t5", "regard", prompt, 4, num_beams=3)
    assert (seen["encoder", 0].shape[0], seen["cross", 0].shape[0], seen.batch) == (2, 6, 6)
    for item, source in ((2, 0), (3, 1)):
        seen.report(tmp_path / "run.html", item=item)
        labels = data_of(tmp_path / "run.html")["axes"]["source"]["labels"]
        assert labels == [f"<{number}>" for number in prompt["input_ids"][source].tolist()]


def test_a_trace_that_cannot_be_written_says_why(tmp_path):
    with pytest.raises(ValueError, match="neither q and k nor all weights are recorded; use capture.*keep=True"):
        look("llama", {"input_ids": ids(1, 100)}, map=10).to_trace(tmp_path / "run.safetensors")
    long = {"input_ids": ids(1, 600), "decoder_input_ids": ids(1, 4)}
    with pytest.raises(ValueError, match="trace format does not support its scores.* more than 512 rows or keys"):
        look("t5", long, keep=True).to_trace(tmp_path / "run.safetensors")
    look("llama", {"input_ids": ids(1, 600)}, keep=True).to_trace(tmp_path / "run.safetensors")
    with pytest.raises(ValueError, match="nothing recorded"):
        with regard.lens.capture(model("llama")) as seen:
            seen.to_trace(tmp_path / "none.safetensors")
    assert os.listdir(tmp_path) == ["run.safetensors"]


def test_a_notebook_shows_every_head():
    seen = look("t5", given("t5"))
    assert seen._repr_html_().count("<image") == 4 * len(seen) + 1  # and the legend
    assert repr(seen) == "<T5ForConditionalGeneration: layers: 2 encoder, 2 self, 2 cross>"
    with regard.lens.capture(model("t5")) as nothing:
        assert "nothing recorded" in nothing._repr_html_() and len(nothing) == 0


def test_other_viewers_get_what_they_take():
    inputs = given("bert")
    options_of_capture, seen = eager("bert", **inputs), look("bert", inputs, tokens=WORDS)
    found = seen.to_bertviz(item=1)
    assert found["tokens"] == WORDS[:13] and len(found["attention"]) == 2
    for layer, weights in enumerate(found["attention"]):
        near(weights.numpy(), options_of_capture["self", layer][1:])
    patterns = seen.to_circuitsvis(1)
    assert patterns["tokens"] == WORDS[:13]
    near(patterns["attention"], options_of_capture["self", 1][0])
    both = look("t5", given("t5")).to_bertviz()
    assert [both[name][1].shape[2:] for name in ("encoder_attention", "decoder_attention", "cross_attention")] == [
        (13, 13),
        (9, 9),
        (9, 13),
    ]
    assert (len(both["encoder_tokens"]), len(both["decoder_tokens"])) == (13, 9)
    with pytest.raises(ValueError, match="weights: self layer 0 has 600 rows and 600 keys, more than 512"):
        look("llama", {"input_ids": ids(1, 600)}, keep=True).to_bertviz()


def test_bertviz_and_circuitsvis_take_it():
    bertviz, circuitsvis = pytest.importorskip("bertviz"), pytest.importorskip("circuitsvis")
    seen = look("bert", given("bert"), tokens=WORDS)
    assert "w12" in bertviz.head_view(**seen.to_bertviz(), html_action="return").data
    assert "w12" in str(circuitsvis.attention.attention_patterns(**seen.to_circuitsvis()))
    assert "Encoder" in bertviz.model_view(**look("t5", given("t5")).to_bertviz(), html_action="return").data


def test_memory_of_a_capture_is_that_of_a_forward_pass():
    sys.path.insert(0, str(Path(__file__).parent))
    from memory_of_capture import HEADS, LAYERS, measure

    tokens = 2048
    plain, capture = (measure(how, tokens) for how in ("plain", "capture"))
    assert capture["peak"] <= 1.2 * plain["peak"]
    assert capture["peak"] - capture["before"] < LAYERS * HEADS * tokens**2 * 4 / 2**20  # which all weights would take, in MB


MINILM = minilm()


@pytest.mark.skipif(not MINILM.exists(), reason="MiniLM's weights are not here: regard models get minilm")
def test_minilm_has_heads_that_look_at_their_neighbours(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MINILM)
    m = transformers.AutoModel.from_pretrained(MINILM).eval()
    inputs = tokenizer(["the cat sat on the mat because it was warm", "a short one"], return_tensors="pt", padding=True)
    with torch.no_grad(), regard.lens.capture(m, tokens=tokenizer, stats=("entropy", "mean_distance")) as seen:
        m(**inputs)
    m.set_attn_implementation("eager")
    with torch.no_grad():
        options_of_capture = m(**inputs, output_attentions=True).attentions
    for layer, weights in enumerate(options_of_capture):
        near(seen[layer].map, weights.numpy())
    assert min(float(record.means["distance"][0].min()) for record in seen) == pytest.approx(1, abs=0.2)
    assert all(float(record.means["entropy"].max()) <= math.log(12) for record in seen)
    seen.report(tmp_path / "run.html")
    assert data_of(tmp_path / "run.html")["axes"]["text"]["labels"][:4] == ["[CLS]", "the", "cat", "sat"]
