"""`regard.batch`: callables over tables, in each type of table, however rows are divided."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import regard

pa = pytest.importorskip("pyarrow")
from regard import batch  # noqa: E402  (needs pyarrow)
from support import small_classifier  # noqa: E402

CHINESE = ["好久不见。", "我喜欢在早上喝咖啡。", None, "你", "好" * 20_000, "他昨天在图书馆读了一本关于中国历史的书。", "", "谢谢。"]
ENGLISH = ["A cat sleeps.", None, "long " * 1000, "The kitten is asleep on the old sofa.", "Shares fell."]


def encoder_is_there():
    try:
        regard.Model("minilm")
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["translate", "beams", "embed", "half", "statistics", "classify"])
def task(request, tmp_path_factory):
    if request.param in ("embed", "half"):
        encoder_is_there()
    if request.param == "classify":
        return batch.Classify(request.getfixturevalue("classes"), column="text"), ENGLISH
    return {
        "translate": (batch.Translate("zh-en", score="score"), CHINESE),
        "beams": (batch.Translate("zh-en", num_beams=3), CHINESE),
        "embed": (batch.Embed("minilm"), ENGLISH),
        "half": (batch.Embed("minilm", dtype="float16"), ENGLISH),
        "statistics": (batch.AttentionStats("zh-en"), CHINESE),
    }[request.param]


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    encoder_is_there()
    return small_classifier(tmp_path_factory.mktemp("classes"))


def table_of(texts):
    return pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})


def test_answers_are_the_same_bits_however_rows_are_divided(task):
    call, texts = task
    table = table_of(texts * 3)
    whole = call(table)
    assert whole.schema.equals(call.schema(table.schema)) and whole.select(["id", "text"]).equals(table)
    ones = pa.concat_tables([call(table.slice(i, 1)) for i in range(len(table))])
    assert ones.equals(whole)
    rng = np.random.default_rng(0)
    order = rng.permutation(len(table))
    cuts = [0, *sorted(rng.choice(len(table), 3, replace=False)), len(table)]
    mixed = table.take(order)
    parts = pa.concat_tables([call(mixed.slice(a, b - a)) for a, b in zip(cuts, cuts[1:])])
    assert parts.take(np.argsort(order)).equals(whole)


def test_a_row_without_an_answer_has_null_and_a_reason(task):
    call, texts = task
    result = call(table_of(texts))
    errors = result.column("error").to_pylist()
    failed = [i for i, error in enumerate(errors) if error is not None]
    # Null, longer than the model holds, and where there is nothing to look at.
    expected = [2, 4, 6] if isinstance(call, batch.AttentionStats) else [2, 4] if texts is CHINESE else [1, 2]
    assert failed == expected
    assert errors[failed[0]] == "the text is null" and "shorten it" in errors[failed[1]]
    for name in set(result.column_names) - {"id", "text", "error"}:
        assert [i for i, value in enumerate(result.column(name).to_pylist()) if value is None] == failed


def test_a_call_that_fails_as_a_whole_is_divided():
    asked = []

    def call(texts):
        asked.append(len(texts))
        if "bad" in texts:
            raise ValueError("inf came out")
        return [(len(text), None) for text in texts]

    answers = batch._answers(call, ["a", None, "bb", "bad", "ccc", "d"])
    assert answers == [(1, None), (None, "the text is null"), (2, None), (None, "inf came out"), (3, None), (1, None)]
    assert max(asked) == 5 and len(asked) <= 6


def test_every_type_of_table_gets_the_same_columns():
    import pandas
    import polars

    call, texts = batch.Translate("zh-en", score="score"), ["好久不见。", "谢谢。", None]
    table = table_of(texts)
    expected = call(table)
    assert call(table.to_batches()[0]).equals(expected.to_batches()[0])
    assert list(call.arrow(iter(table.to_batches(2)))) == [one for one in map(call, table.to_batches(2))]
    assert pa.Table.from_batches(call.arrow(table.to_batches(2))).equals(expected)
    frame = pandas.DataFrame({"id": [0, 1, 2], "text": texts}, index=[7, 8, 9])
    found = call(frame)
    assert list(found.index) == [7, 8, 9] and found["translation"].tolist()[:2] == expected.column("translation").to_pylist()[:2]
    assert found["score"].tolist()[:2] == expected.column("score").to_pylist()[:2] and found["error"][9] == "the text is null"
    assert "translation" not in frame
    assert call(polars.from_arrow(table)).equals(polars.from_arrow(expected))
    arrays = call({"id": np.arange(3), "text": np.array(texts, object)})
    assert arrays["translation"].tolist() == expected.column("translation").to_pylist() and arrays["id"].tolist() == [0, 1, 2]


def test_vectors_are_lists_or_rows_of_an_array():
    encoder_is_there()
    texts = ["A cat sleeps.", "Shares fell."]
    vectors = regard.Model("minilm").embed(texts)
    for dtype in ("float32", "float16"):
        call = batch.Embed("minilm", dtype=dtype)
        assert np.array_equal(call({"text": texts})["embedding"], vectors.astype(dtype))
        column = call(table_of(texts)).column("embedding")
        assert column.type == pa.list_(pa.float16() if dtype == "float16" else pa.float32())
        assert np.array_equal(np.stack(column.to_pylist()).astype(dtype), vectors.astype(dtype))


def test_statistics_are_those_of_the_model_and_can_be_selected():
    text = "我喜欢在早上喝咖啡。"
    heads = regard.Model("zh-en").statistics([text], top_k=2, span=3)[0]
    call = batch.AttentionStats("zh-en", statistics=("entropy", "span_mass"), kinds=("cross",), top_k=2, span=3)
    found = call(table_of([text])).column("attention").to_pylist()[0]
    assert found == [
        {"kind": head.kind, "layer": head.layer, "head": head.head, "entropy": head.entropy, "span_mass": head.span_mass}
        for head in heads if head.kind == "cross"
    ]


def test_a_callable_is_small_when_pickled_and_opens_its_model_once():
    call = batch.Translate("zh-en", num_beams=2)
    call({"text": ["你"]})
    data = pickle.dumps(call)
    assert len(data) < 1000 and pickle.loads(data) == call
    assert pickle.loads(data).open() is call.open()
    assert call.settings() == batch.Translate("zh-en", num_beams=2, threads=2).settings() != batch.Translate("zh-en").settings()


def test_what_makes_no_sense_is_an_error():
    call = batch.Translate("zh-en")
    for wrong, message in [
        ({"texts": ["你"]}, "column: no 'text' in the table, which has 'texts'"),
        ({"text": ["你"], "translation": [""]}, "column 'translation' is in the table already"),
    ]:
        with pytest.raises(ValueError, match=message):
            call(wrong)
    with pytest.raises(TypeError, match="expected strings, found int64"):
        call({"text": [1, 2]})
    with pytest.raises(TypeError, match="batch: expected a pyarrow Table"):
        call(["你"])
    with pytest.raises(ValueError, match="dtype: expected float32 or float16, found 'int8'"):
        batch.Embed("minilm", dtype="int8")
    with pytest.raises(ValueError, match="statistics: expected some of entropy"):
        batch.AttentionStats("zh-en", statistics=("entropy", "mean"))
    with pytest.raises(FileNotFoundError):
        batch.Translate("no-such-model")({"text": ["你"]})
