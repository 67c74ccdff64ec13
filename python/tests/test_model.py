"""`regard.Model`: the package regard-models, with real models."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import regard
from support import small_classifier

ROOT = Path(__file__).resolve().parents[2]
STORIES = ROOT / "fixtures/stories260K"
CHINESE = ["好久不见。", "我喜欢在早上喝咖啡。", "你", "他昨天在图书馆读了一本关于中国历史的书。", "谢谢。"]


@pytest.fixture(scope="module")
def translator():
    return regard.Model("zh-en")


@pytest.fixture(scope="module")
def storyteller():
    return regard.Model(STORIES)


@pytest.fixture(scope="module")
def encoder():
    try:
        return regard.Model("minilm")
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def classes(tmp_path_factory, encoder):
    return small_classifier(tmp_path_factory.mktemp("classes"))


def test_a_sentence_is_translated_as_by_the_command(translator):
    greedy, beam = translator.translate(["好久不见。"])[0], translator.translate(["好久不见。"], num_beams=5)[0]
    assert greedy.text.strip() == beam.text.strip() == "Long time, no see."
    assert greedy.finish_reason == "end_token" and greedy.tokens and -10 < greedy.score < 0


@pytest.mark.parametrize("beams", [None, 3])
def test_a_translation_is_the_same_bits_alone_and_among_others(translator, beams):
    together = translator.translate(CHINESE * 3, num_beams=beams)
    assert together == [one for _ in range(3) for text in CHINESE for one in translator.translate([text], num_beams=beams)]
    assert together == regard.Model("zh-en", threads=1).translate(CHINESE * 3, num_beams=beams)


def test_vectors_are_the_same_bits_alone_and_among_others(encoder):
    texts = ["A cat sleeps on the sofa.", "The kitten is asleep.", "Shares fell by two percent on Monday, " * 12, "a"]
    vectors = encoder.embed(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (4, 384)
    assert np.allclose((vectors**2).sum(1), 1, atol=1e-5)
    assert np.array_equal(vectors, np.concatenate([encoder.embed([text]) for text in texts]))
    assert np.array_equal(vectors[::-1], encoder.embed(texts[::-1]))
    assert vectors[0] @ vectors[1] > 0.5 > vectors[0] @ vectors[2]
    assert encoder.embed([]).shape == (0, 0)


def test_classes_are_those_of_transformers(classes):
    import torch
    import transformers

    model, texts = regard.Model(classes), ["A good film.", "I would rather sleep, to be honest.", "Never again"]
    found = model.classify(texts)
    reference = transformers.BertForSequenceClassification.from_pretrained(classes).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(classes / "tokenizer.json"))
    tokenizer.backend_tokenizer.no_padding()
    for text, one in zip(texts, found):
        with torch.no_grad():
            logits = reference(torch.tensor([tokenizer.backend_tokenizer.encode(text).ids])).logits[0]
        assert np.allclose(one.probabilities, logits.softmax(-1).numpy(), atol=1e-4)
        assert one.class_id == int(logits.argmax()) and one.label == ("no", "maybe", "yes")[one.class_id]
    assert found == [model.classify([text])[0] for text in texts]


def test_a_text_is_generated_and_streamed(storyteller):
    whole = storyteller.generate(["Once upon a time"], max_tokens=40)[0]
    assert len(whole.tokens) == 40 and whole.finish_reason == "max_tokens"
    parts = list(storyteller.stream("Once upon a time", max_tokens=40))
    assert len(parts) > 5 and "".join(parts) == whole.text
    sampled = [storyteller.generate(["Once"], max_tokens=20, temperature=3.0, seed=seed)[0].text for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    stopped = storyteller.generate(["Once upon a time"], max_tokens=40, stop=["."])[0]
    assert "." not in stopped.text and stopped.finish_reason == "stop_string"


def test_an_answer_to_a_conversation_fits_a_regular_expression():
    try:
        model = regard.Model("smollm2")
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    prompt = model.chat([("system", "Answer with a number."), ("user", "How many legs has a cat?")])
    assert "How many legs has a cat?" in prompt and prompt.count("assistant") == 1
    assert model.generate([prompt], max_tokens=6, regex="(Four|Five)[.]")[0].text in ("Four.", "Five.")


def test_a_stream_that_is_dropped_ends(storyteller):
    stream = storyteller.stream("Once upon a time", max_tokens=400)
    first = next(stream)
    del stream
    assert first and next(storyteller.stream("Once upon a time", max_tokens=1)) is not None


def test_other_tasks_run_while_text_is_generated(storyteller):
    async def both():
        parts, ticks = [], 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        other = asyncio.create_task(tick())
        async for part in storyteller.astream("Once upon a time", max_tokens=40):
            parts.append(part)
        other.cancel()
        return parts, ticks

    parts, ticks = asyncio.run(both())
    assert "".join(parts) == storyteller.generate(["Once upon a time"], max_tokens=40)[0].text
    assert ticks > len(parts)


def test_the_interpreter_runs_while_a_model_computes(translator):
    counts, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counts[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    while counts[0] == 0:
        pass
    before = counts[0]
    native = translator._native.translate(CHINESE * 40, json.dumps({"max_tokens": 64}))
    after = counts[0]
    done.set()
    thread.join()
    assert len(native) == 200 and after > before + 1000


def test_a_model_works_in_a_child_after_a_fork(translator):
    before = translator.translate(CHINESE)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(send, pickle.dumps([tuple(one) for one in translator.translate(CHINESE)]))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as file:
        assert pickle.load(file) == before
    assert os.waitpid(child, 0)[1] == 0


def test_attention_of_a_text_and_its_statistics(encoder):
    look = encoder.look("the cat sat on the mat because the cat was tired")
    queries, keys = look.tokens()
    assert queries == keys and "cat" in keys
    assert len(look.sites) == 72 and look.sites[0] == ("encoder", 0, 0)
    found = {(one.kind, one.layer, one.head): one for one in look.statistics(top_k=3, sink=2, span=1)}
    position = np.arange(len(keys))
    far = np.abs(position[:, None] - position[None])
    for site in look.sites[::17]:
        kind, layer, head = site
        weights = look.weights(layer, head, kind).astype(np.float64)
        assert weights.shape == (len(queries), len(keys)) and np.allclose(weights.sum(1), 1, atol=1e-5)
        one = found[site]
        logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
        expected = [
            -(weights * logs).sum(1).mean(), (weights * far).sum(1).mean(), weights[:, :2].sum(1).mean(),
            np.sort(weights, 1)[:, -3:].sum(1).mean(), (weights * (far <= 1)).sum(1).mean(),
        ]
        assert np.allclose(one[3:], expected, rtol=1e-5), one


def test_statistics_of_a_translator_have_all_three_kinds_and_can_be_selected(translator):
    one = translator.statistics(["好久不见。"])[0]
    kinds = {head.kind for head in one}
    assert "cross" in kinds and len(kinds) == 3
    assert all(0 <= head.entropy and 0 <= head.sink_mass <= head.top_k_mass + 1e-6 <= 1.001 for head in one)
    few = translator.statistics(["好久不见。"], kinds=["cross"], layers=[0], heads=[1])[0]
    assert few == [head for head in one if head[:3] == ("cross", 0, 1)] and len(few) == 1


def test_a_trace_is_written_for_the_microscope(translator, tmp_path):
    translator.look("好久不见。", "Long time, no see.").save(tmp_path / "run.safetensors")
    assert (tmp_path / "run.safetensors").stat().st_size > 1000


def test_a_fingerprint_is_of_what_results_depend_on(tmp_path):
    folder, other = tmp_path / "one", tmp_path / "two"
    shutil.copytree(STORIES, folder)
    shutil.copytree(STORIES, other)
    (other / "README.md").write_text("about it")
    (other / "notes.bak").write_text("")
    own = regard.Model(folder).fingerprint
    assert len(own) == 64 and own == regard.Model(other, threads=1).fingerprint
    assert own != regard.Model("zh-en").fingerprint
    config = next(folder.glob("config.json"))
    config.write_text(config.read_text() + "\n")
    assert regard.Model(folder).fingerprint != own


def test_what_a_model_cannot_do_is_an_error_with_a_remedy(translator, encoder, storyteller, tmp_path):
    with pytest.raises(FileNotFoundError, match="known models: zh-en"):
        regard.Model("no-such-model")
    with pytest.raises(ValueError, match="threads: 0 is out of range"):
        regard.Model("zh-en", threads=0)
    with pytest.raises(ValueError, match="embed.*translator|translator.*embed"):
        translator.embed(["x"])
    with pytest.raises(ValueError, match="text 1: .*shorten it"):
        encoder.embed(["short", "long " * 1000])
    with pytest.raises(TypeError, match="put it into a list"):
        translator.translate("好久不见。")
    with pytest.raises(ValueError, match="unknown field `beams`"):
        storyteller.generate(["Once"], beams=3)
    with pytest.raises(ValueError, match="temperature"):
        storyteller.generate(["Once"], temperature=-1.0)
    with pytest.raises(ValueError, match="language"):
        regard.Model("zh-en", target_language="fr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="config.json"):
        regard.Model(tmp_path / "empty")


def test_without_the_package_the_error_says_how_to_get_it():
    code = "import sys; sys.modules['_regard_models'] = None; import regard; print(regard.__version__); regard.Model"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(regard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == regard.__version__ and done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == (
        "ImportError: regard.Model needs the package regard-models; to install it: pip install 'regard[models]'"
    )
