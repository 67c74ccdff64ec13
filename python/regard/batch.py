"""Models over tables of texts: picklable callables for Ray Data, Spark, Dask, pandas, polars and `regard.jobs`.

    translate = regard.batch.Translate("zh-en", column="text")
    table = translate(pyarrow.table({"text": ["你好", "谢谢"]}))         # a column more: translation, and error

A callable takes a `pyarrow.Table` or `RecordBatch`, a dict of arrays, or a `DataFrame` of pandas or polars, and returns the same type with
columns added. It holds settings only; the model is opened at the first call, once for a process. A row without an answer has null and
the reason in the column `error`. The answer for a row does not depend on the other rows: the same bits, however rows are divided.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ._model import HeadStatistics, Model, _question, _request

try:
    import pyarrow as pa
except ModuleNotFoundError as _missing:
    raise ImportError("regard.batch needs pyarrow; to install it: pip install 'regard[models]'") from _missing

__all__ = ["AttentionStats", "Classify", "Embed", "Task", "Translate"]

_CALL_ROWS = 1024
"""Rows of one native call: long calls cannot be interrupted."""
_models: Dict[Tuple[Any, ...], Model] = {}
_lock = threading.Lock()

Rows = Sequence[Tuple[Any, Optional[str]]]
"""An answer, or the reason why there is none."""


def _model(name: str, threads: Optional[int], languages: Tuple[Optional[str], Optional[str]] = (None, None)) -> Model:
    key = (name, threads, languages)
    with _lock:
        if key not in _models:
            _models[key] = Model(name, threads=threads, source_language=languages[0], target_language=languages[1])
        return _models[key]


@dataclass(frozen=True)
class Task:
    """What all callables have.

    `model`: as for `regard.Model`; each process opens it by this name. `column`: the column of texts. `threads`: of each process; engines start
    a process for each core. `error`: the column of reasons.
    """

    model: str
    column: str = "text"
    threads: Optional[int] = 1
    error: str = "error"

    def __call__(self, batch: Any) -> Any:
        """Adds the columns of the task to a batch."""
        texts = _texts(batch, self.column)
        rows = [row for i in range(0, len(texts), _CALL_ROWS) for row in _answers(self._answer, texts[i : i + _CALL_ROWS])]
        answers, errors = [answer for answer, _ in rows], [error for _, error in rows]
        columns = self._columns(answers)
        columns[self.error] = pa.array(errors, pa.string())
        return _extended(batch, columns)

    def arrow(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `DataFrame.mapInArrow` of Spark, with the schema of `schema`."""
        return (self(batch) for batch in batches)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """The schema of a table with this schema after the call."""
        for field in [*((name, column.type) for name, column in self._columns([]).items()), (self.error, pa.string())]:
            schema = schema.append(pa.field(*field))
        return schema

    def open(self) -> Model:
        """The model, opened once for a process."""
        return _model(self.model, self.threads)

    def fingerprint(self) -> str:
        """`regard.Model.fingerprint` of the model."""
        return self.open().fingerprint

    def settings(self) -> Dict[str, Any]:
        """All that results depend on but the model, for a manifest. Threads are not part of it."""
        settings = {"task": type(self).__name__, **dataclasses.asdict(self)}
        return json.loads(json.dumps({name: value for name, value in settings.items() if name != "threads"}))

    def _answer(self, texts: List[str]) -> Rows:
        raise NotImplementedError

    def _columns(self, answers: List[Any]) -> Dict[str, pa.Array]:
        raise NotImplementedError


@dataclass(frozen=True)
class Translate(Task):
    """Translates: a column of texts, and with `score` one of the sums of log-probabilities."""

    into: str = "translation"
    score: Optional[str] = None
    num_beams: Optional[int] = None
    length_penalty: Optional[float] = None
    max_tokens: int = 128
    source_language: Optional[str] = None
    target_language: Optional[str] = None

    def open(self) -> Model:
        return _model(self.model, self.threads, (self.source_language, self.target_language))

    def _answer(self, texts: List[str]) -> Rows:
        request = _request(num_beams=self.num_beams, length_penalty=self.length_penalty, max_tokens=self.max_tokens)
        return self.open()._native.translate(texts, request)

    def _columns(self, answers: List[Any]) -> Dict[str, pa.Array]:
        columns = {self.into: pa.array([answer and answer[0] for answer in answers], pa.string())}
        if self.score is not None:
            columns[self.score] = pa.array([answer and answer[2] for answer in answers], pa.float64())
        return columns


@dataclass(frozen=True)
class Embed(Task):
    """Embeds: a column of lists of numbers, vectors of length 1. `dtype`: `float32`, or `float16` for half the bytes."""

    into: str = "embedding"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16"):
            raise ValueError(f"dtype: expected float32 or float16, found {self.dtype!r}")

    def _answer(self, texts: List[str]) -> Rows:
        errors, features, numbers = self.open()._native.embed(texts)
        vectors = np.frombuffer(numbers, np.float32).reshape(len(errors), features)
        return [(None if error else vector, error) for vector, error in zip(vectors, errors)]

    def _columns(self, answers: List[Any]) -> Dict[str, pa.Array]:
        there = [answer is not None for answer in answers]
        lengths = [len(answer) if answer is not None else 0 for answer in answers]
        flat = [answer for answer in answers if answer is not None]
        values = pa.array(np.concatenate(flat).astype(self.dtype) if flat else np.zeros(0, self.dtype))
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
        return {self.into: pa.ListArray.from_arrays(offsets, values, mask=pa.array([not one for one in there], pa.bool_()))}


@dataclass(frozen=True)
class Classify(Task):
    """Classifies: a column of labels, and one of their probabilities."""

    into: str = "label"
    probability: str = "probability"

    def _answer(self, texts: List[str]) -> Rows:
        return self.open()._native.classify(texts)

    def _columns(self, answers: List[Any]) -> Dict[str, pa.Array]:
        return {
            self.into: pa.array([answer and answer[1] for answer in answers], pa.string()),
            self.probability: pa.array([answer and answer[2][answer[0]] for answer in answers], pa.float32()),
        }


@dataclass(frozen=True)
class AttentionStats(Task):
    """Attention statistics: a column of lists with a struct for each head, of `kind`, `layer`, `head` and the statistics.

    Statistics are means over the queries of a text: `entropy` in nats, `distance` in tokens, `sink_mass` (the weight of the first `sink`
    keys), `top_k_mass` (of the `top_k` largest weights), `span_mass` (of keys at most `span` tokens away). A translator's are of the text and
    its translation. `kinds`, `layers`, `heads`: only these.
    """

    into: str = "attention"
    statistics: Tuple[str, ...] = HeadStatistics._fields[3:]
    kinds: Optional[Tuple[str, ...]] = None
    layers: Optional[Tuple[int, ...]] = None
    heads: Optional[Tuple[int, ...]] = None
    top_k: int = 8
    sink: int = 1
    span: int = 8

    def __post_init__(self) -> None:
        known = HeadStatistics._fields[3:]
        for name in self.statistics:
            if name not in known:
                raise ValueError(f"statistics: expected some of {', '.join(known)}; found {name!r}")

    def _answer(self, texts: List[str]) -> Rows:
        question = _question(self.kinds, self.layers, self.heads, self.top_k, self.sink, self.span)
        return self.open()._native.attention_statistics(texts, json.dumps(question))

    def _columns(self, answers: List[Any]) -> Dict[str, pa.Array]:
        selected = [(name, HeadStatistics._fields.index(name) - 3) for name in self.statistics]
        numbers = [pa.field(name, pa.float32()) for name, _ in selected]
        head = pa.struct([pa.field("kind", pa.string()), pa.field("layer", pa.int32()), pa.field("head", pa.int32()), *numbers])

        def struct(kind: str, layer: int, head: int, values: List[float]) -> Dict[str, Any]:
            return {"kind": kind, "layer": layer, "head": head, **{name: values[i] for name, i in selected}}

        lists = [None if answer is None else [struct(*one) for one in answer] for answer in answers]
        return {self.into: pa.array(lists, pa.list_(head))}


def _answers(call: Callable[[List[str]], Rows], texts: Sequence[Optional[str]]) -> List[Tuple[Any, Optional[str]]]:
    """An answer or a reason for each text. A call that fails as a whole is divided, until the row that fails is alone."""
    there = [text for text in texts if text is not None]
    if len(there) < len(texts):
        answers = iter(_answers(call, there) if there else [])
        return [(None, "the text is null") if text is None else next(answers) for text in texts]
    try:
        return list(call(there))
    except ValueError as error:
        if len(there) <= 1:
            return [(None, str(error)) for _ in there]
        half = len(there) // 2
        return _answers(call, there[:half]) + _answers(call, there[half:])


def _is(batch: Any, module: str) -> bool:
    return type(batch).__module__.split(".")[0] == module


def _texts(batch: Any, column: str) -> List[Optional[str]]:
    if isinstance(batch, (pa.Table, pa.RecordBatch)):
        names, get = batch.schema.names, batch.column
    elif isinstance(batch, dict) or _is(batch, "pandas") or _is(batch, "polars"):
        names, get = list(batch.keys()) if isinstance(batch, dict) else list(batch.columns), batch.__getitem__
    else:
        known = "a pyarrow Table or RecordBatch, a dict of arrays, or a DataFrame of pandas or polars"
        raise TypeError(f"batch: expected {known}; found {type(batch).__name__}")
    if column not in names:
        raise ValueError(f"column: no {column!r} in the table, which has {', '.join(map(repr, names))}")
    values = get(column)
    if _is(values, "polars"):
        values = values.to_arrow()
    elif not isinstance(values, (pa.Array, pa.ChunkedArray)):
        values = pa.array(values, from_pandas=True)
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)):
        raise TypeError(f"column {column!r}: expected strings, found {values.type}")
    return values.to_pylist()


def _extended(batch: Any, columns: Dict[str, pa.Array]) -> Any:
    names = batch.schema.names if isinstance(batch, (pa.Table, pa.RecordBatch)) else list(batch.keys() if isinstance(batch, dict) else batch.columns)
    for name in columns:
        if name in names:
            raise ValueError(f"column {name!r} is in the table already; give the new one another name")
    if isinstance(batch, pa.Table):
        for name, column in columns.items():
            batch = batch.append_column(name, column)
        return batch
    if isinstance(batch, pa.RecordBatch):
        return pa.RecordBatch.from_arrays([*batch.columns, *columns.values()], names=[*names, *columns])
    if isinstance(batch, dict):
        return {**batch, **{name: _numpy(column) for name, column in columns.items()}}
    if _is(batch, "polars"):
        import polars

        return batch.with_columns(**{name: polars.from_arrow(column) for name, column in columns.items()})
    import pandas

    return batch.assign(**{name: pandas.Series(column.to_pandas().values, index=batch.index) for name, column in columns.items()})


def _numpy(column: pa.Array) -> np.ndarray:
    """Vectors of equal length are rows of one array."""
    if pa.types.is_list(column.type) and pa.types.is_floating(column.type.value_type) and column.null_count == 0 and len(column):
        return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return column.to_numpy(zero_copy_only=False)
