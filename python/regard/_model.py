"""Models: inference of Transformers on the CPU, without PyTorch. The native half is the package `regard-models`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, AsyncIterator, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ._regard import VERSION

_REMEDY = "pip install 'regard[models]'"

try:
    import _regard_models as _native
except ModuleNotFoundError as _missing:
    raise ImportError(f"regard.Model needs the package regard-models; to install it: {_REMEDY}") from _missing

if _native.VERSION != VERSION:
    raise ImportError(f"regard is {VERSION}, regard-models is {_native.VERSION}; they must be equal: {_REMEDY} --upgrade")


class Generation(NamedTuple):
    """A text that a model has generated."""

    text: str
    tokens: List[int]
    """With the end token."""
    score: float
    """Sum of the log-probabilities of the tokens."""
    finish_reason: str
    """`end_token`, `max_tokens`, `context`, `stop_string` or `interrupted`."""


class Classification(NamedTuple):
    """The class of a text."""

    label: str
    class_id: int
    probabilities: List[float]
    """Of all classes, in the order of the model."""


class HeadStatistics(NamedTuple):
    """Attention statistics of a head: means over its queries."""

    kind: str
    """`encoder`, `decoder` or `cross`."""
    layer: int
    head: int
    entropy: float
    """In nats: 0 if one key has all the weight, `ln n` if n keys share it equally."""
    distance: float
    """Of `|key - query|` in tokens, weighted by attention."""
    sink_mass: float
    """The weight of the first `sink` keys."""
    top_k_mass: float
    """The weight of the `top_k` keys with the largest weights."""
    span_mass: float
    """The weight of the keys at most `span` tokens from the query."""


class Model:
    """A model, open for inference.

        model = regard.Model("minilm")
        vectors = model.embed(["A cat sleeps.", "A dog barks."])     # float32 [2, 384], of length 1

    `name`: a known name (`regard models list`; `zh-en` is part of the package), a folder of Hugging Face or of Regard, a `.gguf` or
    `.safetensors` file, or `ORG/NAME` of the Hub if it was downloaded before. `threads`: all of the machine if None.
    `source_language` and `target_language`: of a model that translates between many (`en`, `zh_Hans`).

    Results of a text do not depend on the other texts of a call, nor on the number of threads: the same bits. The interpreter lock is
    released during all computation; a model may be used by several threads at once, and after a `fork`.

    The methods that this model has depend on its task: `translate`, `embed`, `generate` and `stream`, `classify`; all have `look` and
    `statistics`. Others raise a ValueError that names the task.
    """

    def __init__(
        self,
        name: Union[str, os.PathLike[str]],
        *,
        threads: Optional[int] = None,
        source_language: Optional[str] = None,
        target_language: Optional[str] = None,
    ) -> None:
        self._native = _native.Model(name, threads, (source_language, target_language))

    def __repr__(self) -> str:
        return f"<regard.Model {self.title!r}: {self.task}, {self.threads} threads>"

    @property
    def task(self) -> str:
        """`translate`, `embed`, `generate`, `classify` or `classify an image`."""
        return self._native.task

    @property
    def title(self) -> str:
        """What the files call the model."""
        return self._native.title

    @property
    def notes(self) -> List[str]:
        """What of its files is followed in part only, or was left out."""
        return self._native.notes

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what results depend on: weights, vocabulary and configuration, the version of Regard, the instruction set.

        Two models with the same fingerprint give the same bits. It reads the files once.
        """
        return self._native.fingerprint()

    def count_tokens(self, texts: Sequence[str]) -> List[int]:
        """Number of tokens of each text, special tokens included."""
        return self._native.count_tokens(_texts(texts))

    def translate(
        self, texts: Sequence[str], *, num_beams: Optional[int] = None, length_penalty: Optional[float] = None, max_tokens: int = 128
    ) -> List[Generation]:
        """Translates each text, by greedy search unless `num_beams` is given."""
        request = _request(num_beams=num_beams, length_penalty=length_penalty, max_tokens=max_tokens)
        return [Generation(*one) for one in _all(self._native.translate(_texts(texts), request))]

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """A vector of length 1 for each text, by the pooling of the model: float32 `[texts, features]`."""
        errors, features, numbers = self._native.embed(_texts(texts))
        _all([(None, error) for error in errors])
        return np.frombuffer(numbers, np.float32).reshape(len(errors), features)

    def classify(self, texts: Sequence[str]) -> List[Classification]:
        """The most probable class of each text."""
        return [Classification(label, class_id, probabilities) for class_id, label, probabilities in _all(self._native.classify(_texts(texts)))]

    def generate(self, prompts: Sequence[str], *, max_tokens: int = 128, **options: Any) -> List[Generation]:
        """Continues each prompt, by greedy search unless an option says otherwise.

        Beam search: `num_beams`, `length_penalty`. Sampling: `temperature`, `top_k`, `top_p`, `min_p`, `seed`. Further `stop` (strings that
        end the text), `repetition_penalty`, `json_schema` (text) and `regex`, which the text must match.
        """
        return [Generation(*one) for one in _all(self._native.generate(_texts(prompts), _request(max_tokens=max_tokens, **options)))]

    def stream(self, prompt: str, *, max_tokens: int = 128, **options: Any) -> Iterator[str]:
        """The continuation of a prompt in parts, as it is generated; options as those of `generate`. To stop earlier, drop the iterator."""
        return self._native.stream(prompt, _request(max_tokens=max_tokens, **options))

    async def astream(self, prompt: str, *, max_tokens: int = 128, **options: Any) -> AsyncIterator[str]:
        """`stream` as an asynchronous generator: other tasks of the event loop run while a token is computed."""
        parts, loop = self.stream(prompt, max_tokens=max_tokens, **options), asyncio.get_running_loop()
        while (part := await loop.run_in_executor(None, next, parts, None)) is not None:
            yield part

    def chat(self, messages: Sequence[Tuple[str, str]]) -> str:
        """The prompt for the answer to a conversation, by the model's chat template: pairs of role (`system`, `user`, `assistant`) and text."""
        return self._native.chat(list(messages))

    def look(self, text: str, target: Optional[str] = None) -> Attention:
        """The attention of every head in a text; of a translator in a text and `target`, its own translation if None."""
        return Attention(self._native.look(text, target))

    def statistics(
        self,
        texts: Sequence[str],
        *,
        kinds: Optional[Sequence[str]] = None,
        layers: Optional[Sequence[int]] = None,
        heads: Optional[Sequence[int]] = None,
        top_k: int = 8,
        sink: int = 1,
        span: int = 8,
    ) -> List[List[HeadStatistics]]:
        """Attention statistics of each text, a `HeadStatistics` for each head; of a translator, of each text and its translation."""
        question = json.dumps(_question(kinds, layers, heads, top_k, sink, span))
        return [_statistics(one) for one in _all(self._native.attention_statistics(_texts(texts), question))]


class Attention:
    """The attention of one text: `Model.look`. Weights are recomputed from queries and keys when they are asked for."""

    def __init__(self, native: _native.Trace) -> None:
        self._native = native

    @property
    def sites(self) -> List[Tuple[str, int, int]]:
        """Kind (`encoder`, `decoder`, `cross`), layer and head of every head."""
        return self._native.sites()

    def tokens(self, layer: int = 0, kind: Optional[str] = None) -> Tuple[List[str], List[str]]:
        """The tokens of the queries and of the keys."""
        return self._native.tokens(self._kind(kind), layer)

    def weights(self, layer: int, head: int, kind: Optional[str] = None) -> np.ndarray:
        """The attention weights of a head: float32 `[queries, keys]`. `kind`: the first of the model if None."""
        queries, keys, numbers = self._native.weights(self._kind(kind), layer, head)
        return np.frombuffer(numbers, np.float32).reshape(queries, keys)

    def statistics(self, *, top_k: int = 8, sink: int = 1, span: int = 8) -> List[HeadStatistics]:
        """Statistics of every head."""
        return _statistics(self._native.statistics(json.dumps(_question(None, None, None, top_k, sink, span))))

    def save(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes a trace file, which `regard look` draws."""
        self._native.save(path)

    def _kind(self, kind: Optional[str]) -> str:
        return self.sites[0][0] if kind is None else kind


def _texts(texts: Sequence[str]) -> List[str]:
    if isinstance(texts, str):
        raise TypeError("texts: expected a list of strings, found one string; put it into a list")
    return list(texts)


def _request(**options: Any) -> str:
    return json.dumps({name: value for name, value in options.items() if value is not None})


def _question(kinds: Any, layers: Any, heads: Any, top_k: int, sink: int, span: int) -> dict[str, Any]:
    def numbers(values: Any) -> Any:
        return None if values is None else [int(value) for value in values]

    return {
        "kinds": None if kinds is None else list(kinds), "layers": numbers(layers), "heads": numbers(heads),
        "top_k": top_k, "sink": sink, "span": span,
    }


def _statistics(heads: List[_native.Head]) -> List[HeadStatistics]:
    return [HeadStatistics(kind, layer, head, *numbers) for kind, layer, head, numbers in heads]


def _all(rows: Sequence[Tuple[Any, Optional[str]]]) -> List[Any]:
    """The answers of rows; the first one without an answer is an error."""
    for i, (_, error) in enumerate(rows):
        if error is not None:
            raise ValueError(f"text {i}: {error}")
    return [answer for answer, _ in rows]
