"""Recording and inspection of the attention of Hugging Face models.

    import regard.lens
    with regard.lens.capture(model, tokens=tokenizer) as seen:
        model(**inputs)                 # or model.generate(..)
    seen.report("run.html")             # self-contained HTML page
    seen[10].entropy                    # [batch, heads, rows]
    seen[10].top_k.keys                 # [batch, heads, rows, 8]
    seen[10].row(-1)                    # [batch, heads, keys]: weights of the last token

Inside the context, the model uses Regard's attention. Statistics of each call are computed directly after it, and only they are stored:
O(length) memory.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from . import _callbacks
from ._record import STATS, Call, Record, TopK, CaptureOptions
from ._residual import QkAttribution, contributions, qk_attribution
from ._sites import ModelCalls, Site, side_of, slides, switched
from ._spans import SpanOptions, SpanRecord
from ._values import output_projection, weighted

__all__ = ["STATS", "Capture", "QkAttribution", "Record", "SpanMass", "TopK", "capture", "contributions", "mass", "qk_attribution"]


@contextlib.contextmanager
def capture(
    model: torch.nn.Module,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    stats: Iterable[str] = ("entropy", "top_k"),
    top_k: int = 8,
    rows: Iterable[int] = (-1,),
    map: int = 64,
    tokens: Any = None,
    keep: bool = False,
    value_weighted: bool = False,
) -> Iterator[Capture]:
    """Record the attention of a model during forward passes and generation inside the context.

    Options:
      layers  layer indices; default all. Encoder and decoder each have a layer 0
      heads   head indices; default all
      stats   statistics of each query: `entropy`, `mean_distance`, `first_mass` (weight of the first key), `largest` (weight), `max_score`,
              `sink_mass`, `top_k`; and of each key: `col_sum`. Means per head are always recorded: `Record.means`
      top_k   number of largest weights per query
      rows    rows whose weights are recorded completely; -1 is the last one
      map     cells per side of the pooled attention map; a layer with at most `map` rows and keys is recorded exactly
      tokens  labels of the positions: strings, or a tokenizer that decodes the input ids
      keep    store q and k, for any row or tile afterwards, and for traces
      value_weighted  record `a_ij ||v_j W_O||`, divided by its sum over the row, in place of the weights `a_ij` (Kobayashi et al. 2020): what
              the value of a key adds to a row, not how much of it is taken
    """
    chosen, selected = _indices("layers", layers), _indices("heads", heads)
    capture_options = _options(selected, stats, top_k, rows, map, keep)
    recorder = _Recorder(model, capture_options, frozenset(chosen) if chosen is not None else None, value_weighted=value_weighted)
    with _recorded(recorder) as callback:
        yield Capture(callback.runs, type(model).__name__, tokens, callback.translates)


@contextlib.contextmanager
def mass(
    model: torch.nn.Module,
    spans: Mapping[str, Any],
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    rows: str = "last",
) -> Iterator[SpanMass]:
    """Record how much attention each head pays to parts of a text, during forward passes and generation inside the context.

        with regard.lens.mass(model, {"instruction": (0, 40), "context": (40, 9000)}) as mass:
            model.generate(**inputs)
        mass.values                     # [layer, head, step, span]
        mass["context"]                 # [layer, head, step]

    Needs O(length) time and memory for each step, besides the model.

    Options:
      spans   name and positions of each: `(start, stop)`; `(start, None)` up to the last key; `(-n, None)` the last n positions up to the row
      layers  layer indices; default all
      heads   head indices; default all
      rows    `last`: the last row of each forward pass, which chooses the next token; padding on the right is left out. `all`: every row
    """
    chosen = _indices("layers", layers)
    options = SpanOptions.of(spans, _indices("heads", heads), rows)
    with _recorded(_Recorder(model, options, frozenset(chosen) if chosen is not None else None, SpanRecord)) as callback:
        yield SpanMass(callback.runs, list(options.spans))


@contextlib.contextmanager
def _recorded(callback: _Recorder) -> Iterator[_Recorder]:
    """Switch the model to Regard, and pass its attention calls to a callback."""
    with switched(callback.model):
        with callback.registered():
            yield callback
    callback.check()


def _indices(name: str, numbers: Iterable[int] | None) -> tuple[int, ...] | None:
    """Indices of layers or heads; None for all."""
    found = None if numbers is None else tuple(numbers)
    if any(number < 0 for number in found or ()):
        raise ValueError(f"{name}: {min(found or ())} is invalid; use indices >= 0")
    return found


def _options(heads: tuple[int, ...] | None, stats: Any, top_k: int, rows: Any, map: int, keep: bool) -> CaptureOptions:
    stats = (stats,) if isinstance(stats, str) else tuple(stats)
    for name in stats:
        if name not in STATS:
            raise ValueError(f"stats: unknown statistic {name!r}; use {', '.join(STATS)}")
    for name, number in (("top_k", top_k), ("map", map)):
        if number < 1:
            raise ValueError(f"{name}: expected 1 or more, found {number}")
    return CaptureOptions(frozenset(stats), top_k, frozenset(rows), map, heads, keep)


class _Run:
    """One forward pass, or one generation with all its decoding steps."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, int], Any] = {}
        self.begun: set[Site] = set()
        self.words: dict[tuple[str, int], tuple[int, list[str]]] = {}
        """Decoded labels of an axis and a batch item: number of parts decoded so far, and labels."""
        self.begin: dict[str, int] = {}
        """First input position of each axis; earlier positions are from a KV cache."""
        self.ids: dict[str, list[np.ndarray]] = {}
        """Input ids of each axis, `[batch, len]` per forward pass."""
        self.real: dict[str, list[np.ndarray]] = {}
        """Which of them are not padding."""
        self.interventions: list[str] = []
        """Rules of `regard.hf.intervene` under which the model ran."""


class _Recorder(ModelCalls):
    """Callback for attention calls; adds each call to its record."""

    def __init__(
        self, model: torch.nn.Module, options: Any, layers: frozenset[int] | None, record_type: Any = Record, value_weighted: bool = False
    ):
        super().__init__(model)
        self._options, self._layers, self._record_type, self._value_weighted = options, layers, record_type, value_weighted
        self._given: dict[str, tuple[Any, Any]] = {}
        self._named: set[tuple[int, str]] = set()
        self.runs: list[_Run] = []

    # ---- forward passes ----

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Register the callback and the hooks."""
        with self.hooked(), _callbacks.added(_callbacks.callbacks, self):
            yield

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self.depth == 0:
            self._given = {}
        super().enter(module, args, options)
        own = "text" if not self.translates else "target" if side_of(self.names[module]) == "decoder" else "source"
        first = args[0] if args else None
        for axis, ids, mask in (
            (own, options.get("input_ids", first), options.get("attention_mask")),
            ("target", options.get("decoder_input_ids"), options.get("decoder_attention_mask")),
        ):
            if torch.is_tensor(ids) and ids.ndim == 2 and not ids.is_floating_point():
                self._given.setdefault(axis, (ids, mask))

    # ---- calls of attention ----

    def __call__(self, module: torch.nn.Module, q: Any, k: Any, v: Any, options: dict[str, Any], aux: Any) -> None:
        if module not in self.names or self.depth == 0:
            return  # another model, or recomputation by gradient checkpointing
        site = self.next_site(module)
        held = {name: given.detach() if torch.is_tensor(given) else given for name, given in options.items()}
        call = Call(q.detach(), k.detach(), aux.lse.detach(), {**held, "threads": torch.get_num_threads()})
        run = self._run_of(site, call)
        real = self._name(run, site.kind, call)
        if self._layers is not None and site.layer not in self._layers:
            return
        for head in self._options.heads or ():
            if head >= q.shape[1]:
                raise ValueError(f"heads: no head {head} in {site.kind} layer {site.layer}, which has {q.shape[1]}")
        record = run.records.get(site[:2])
        if not run.records:
            run.interventions = [text for active in _callbacks.interventions if module in active.calls.names for text in active.texts]
        if record is None:
            first = 0 if site.kind == "cross" else call.start
            record = run.records[site[:2]] = self._record_type(*site, self._options, first)
        if self._value_weighted:
            call = weighted(call, v, output_projection(self.model, site.name, q.shape[1] * v.shape[-1])[0])
        record.add(call, real, slides(module))

    def _run_of(self, site: Site, call: Call) -> _Run:
        """Run of a call: a call at the start of a sequence that the current run already contains starts a new run."""
        run = self.runs[-1] if self.runs else None
        begins = site.kind != "cross" and call.start <= 0
        record = run.records.get(site[:2]) if run is not None else None
        other_batch = record is not None and record.shape[0] != call.q.shape[0]
        if run is None or (site in run.begun and (begins or other_batch)):
            run = _Run()
            self.runs.append(run)
        run.begun.add(site)
        return run

    def _name(self, run: _Run, kind: str, call: Call) -> np.ndarray | None:
        """Store the input ids of the rows' axis, once per forward pass. Returns which of them are not padding."""
        axis = axes_of(kind, self.translates)[0]
        ids, mask = self._given.get(axis, (None, None))
        q_len = call.q.shape[2]
        if ids is None or tuple(ids.shape) != (call.q.shape[0], q_len):
            return None
        real = None
        if torch.is_tensor(mask) and mask.ndim == 2 and mask.shape[1] >= q_len:
            real = mask[:, mask.shape[1] - q_len :].bool().numpy()
        if (self.forward, axis) not in self._named:
            self._named.add((self.forward, axis))
            run.begin.setdefault(axis, 0 if kind == "cross" else max(0, call.start))
            run.ids.setdefault(axis, []).append(ids.numpy().copy())
            run.real.setdefault(axis, []).append(np.ones(ids.shape, bool) if real is None else real.copy())
        return real

    def check(self) -> None:
        """Warn if nothing was recorded, or if a requested layer does not exist."""
        if self.forward and not self.runs:
            warnings.warn(f"{type(self.model).__name__}: no attention layer of the model called regard", stacklevel=6)
        missing = sorted((self._layers or frozenset()) - {site.layer for site in self.sites.values()})
        if self.runs and missing:
            there = max(site.layer for site in self.sites.values())
            warnings.warn(f"layers: no layer {missing[0]}; the last layer is {there}", stacklevel=6)


def axes_of(kind: str, translates: bool) -> tuple[str, str]:
    """Axes of the queries and keys of a kind."""
    if kind in ("vision", "audio"):
        return kind, kind
    if not translates:
        return ("text", "text") if kind == "self" else ("text", "source")
    return {"encoder": ("source", "source"), "cross": ("target", "source")}.get(kind, ("target", "target"))


class SpanMass:
    """Attention mass on spans, recorded by `mass`, in the last run: a forward pass, or a generation with all its steps.

    values              [layer, head, step, span] of the first batch item
    mass["context"]     [layer, head, step]
    mass.of("cross")    of another kind of attention, or batch item
    mass.run(0)         an earlier run
    """

    def __init__(self, runs: list[_Run], names: list[str], which: int = -1):
        self._runs, self._which = runs, which
        self.names = names
        """Names of the spans, in their order."""

    def run(self, which: int) -> SpanMass:
        """Mass in run `which`, counted from 0; -1 is the last."""
        return SpanMass(self._runs, self.names, _checked(which, self._runs))

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return len(self._runs)

    def _records(self, kind: str | None) -> list[SpanRecord]:
        if not self._runs:
            raise ValueError("nothing recorded; run the model inside the context")
        records = list(self._runs[self._which].records.values())
        kinds = list(dict.fromkeys(record.kind for record in records))
        kind = ("self" if "self" in kinds else kinds[0]) if kind is None else kind
        if kind not in kinds:
            raise KeyError(f"{kind}: not recorded; there are: {', '.join(kinds)}")
        return sorted((record for record in records if record.kind == kind), key=lambda record: record.layer)

    def of(self, kind: str | None = None, item: int = 0) -> np.ndarray:
        """Mass of one kind of attention (`self`, `cross`, `encoder`, ..) and batch item, `[layer, head, step, span]`."""
        records = self._records(kind)
        sizes = {record.values.shape[1:] for record in records}
        if len(sizes) > 1:
            raise ValueError(f"layers: different numbers of heads or rows, {sorted(sizes)}; record some of them with layers=(..)")
        batch = records[0].shape[0]
        if not -batch <= item < batch:
            raise IndexError(f"item {item}: out of range, the batch has {batch}")
        return np.stack([record.values[item] for record in records])

    @property
    def values(self) -> np.ndarray:
        """Mass in the first batch item, `[layer, head, step, span]`: self-attention of a decoder, or what else there is."""
        return self.of()

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.names:
            raise KeyError(f"{name}: no such span; there are: {', '.join(self.names)}")
        return self.values[..., self.names.index(name)]

    @property
    def layers(self) -> list[int]:
        """Layers of `values`, in their order."""
        return [record.layer for record in self._records(None)]

    @property
    def positions(self) -> list[int]:
        """Position of the row of each step."""
        return self._records(None)[0].positions

    def __repr__(self) -> str:
        return f"<mass on {', '.join(self.names)}: {len(self._runs)} runs>"


def _checked(which: int, runs: list[_Run]) -> int:
    """Index of a run."""
    if not -len(runs) <= which < len(runs):
        raise IndexError(f"run {which}: out of range, there are {len(runs)} runs")
    return which


class Capture:
    """Recorded attention of a `capture`: records of the layers in the last run.

    seen[10]                layer 10; of an encoder-decoder, self-attention of the decoder
    seen["cross", 3]        by kind and layer
    for record in seen: ..  all records, in execution order
    seen.run(0)             an earlier run: a forward pass, or a generation with all its steps
    """

    def __init__(self, runs: list[_Run], title: str, tokens: Any, translates: bool, which: int = -1):
        self._runs, self._tokens, self._translates, self._which = runs, tokens, translates, which
        self.title = title
        """Title of reports and traces; may be set."""

    def run(self, which: int) -> Capture:
        """Records of run `which`, counted from 0; -1 is the last."""
        return Capture(self._runs, self.title, self._tokens, self._translates, _checked(which, self._runs))

    @property
    def run_count(self) -> int:
        """Number of runs."""
        return len(self._runs)

    @property
    def _run(self) -> _Run:
        if not self._runs:
            raise ValueError("nothing recorded; run the model inside the context")
        return self._runs[self._which]

    @property
    def records(self) -> list[Record]:
        """All records, in execution order."""
        return list(self._run.records.values()) if self._runs else []

    @property
    def batch(self) -> int:
        """Batch size."""
        return max((record.shape[0] for record in self.records), default=0)

    def index(self, count: int, item: int) -> int:
        """Index of a batch item in an array of `count` items: an encoder runs once for all beams of a generation."""
        return item * count // self.batch

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, which: int | tuple[str, int]) -> Record:
        records = self._run.records
        kinds = list(dict.fromkeys(kind for kind, _ in records))
        if not isinstance(which, tuple):
            which = ("self" if "self" in kinds or not kinds else kinds[0], which)
        kind, layer = which
        layers = sorted(of for own, of in records if own == kind)
        if layer < 0 and layers:
            layer += max(layers) + 1
        if (kind, layer) not in records:
            there = ", ".join(f"{own} {min(of)} to {max(of)}" for own in kinds for of in [[n for k, n in records if k == own]])
            raise KeyError(f"{kind} layer {which[1]}: not recorded; there are: {there or 'none'}")
        return records[kind, layer]

    def __repr__(self) -> str:
        if not self._runs:
            return f"<{self.title}: nothing recorded>"
        runs = f", run {self._which % len(self._runs)} of {len(self._runs)}" if len(self._runs) > 1 else ""
        kinds = list(dict.fromkeys(record.kind for record in self))
        counts = ", ".join(f"{sum(record.kind == kind for record in self)} {kind}" for kind in kinds)
        return f"<{self.title}{runs}: layers: {counts}>"

    # ---- labels ----

    def labels(self, axis: str, item: int = 0) -> list[str]:
        """Labels of the positions of an axis, for one batch item: `text`, or `source` and `target` of an encoder-decoder. Empty without
        `tokens`; the last positions may have none."""
        given = self._tokens
        if isinstance(given, dict):
            given = given.get(axis)
        if given is None:
            return []
        if not hasattr(given, "convert_ids_to_tokens"):
            if axis == "target" and not isinstance(self._tokens, dict):
                return []
            words = list(given)
            words = list(words[item]) if words and not isinstance(words[0], str) else words
            return [str(word) for word in words]
        run = self._run
        parts = run.ids.get(axis, [])
        count, words = run.words.get((axis, item), (0, [str(i) for i in range(run.begin.get(axis, 0))]))
        for part in parts[count:]:
            words = words + [_readable(given, word) for word in given.convert_ids_to_tokens(part[self.index(len(part), item)].tolist())]
        run.words[axis, item] = (len(parts), words)
        return words

    def real(self, axis: str, item: int) -> np.ndarray | None:
        """Which positions of an axis are not padding; None if unknown."""
        parts = self._run.real.get(axis)
        if not parts:
            return None
        return np.concatenate([np.ones(self._run.begin[axis], bool), *(part[self.index(len(part), item)] for part in parts)])

    # ---- reports and files ----

    def report(
        self, path: str | os.PathLike, item: int = 0, spans: Mapping[str, Any] | None = None, against: Capture | None = None
    ) -> None:
        """Write a self-contained HTML page: attention maps, statistics and top tokens of every head, for one batch item.

        spans    names and positions, `{"instruction": (0, 40), "context": (40, None)}`: shown as bands beside the maps, with the mass on each
        against  the capture of another run over the same tokens, such as one after an intervention: each head before, after, and as a
                 difference
        """
        from . import _report

        _report.write(self, path, item, spans, against)

    def to_trace(self, path: str | os.PathLike, item: int = 0) -> None:
        """Write a trace of one batch item, for `regard look`, `regard stats`, `regard audit` and `regard diff`.

        A layer recorded with `keep=True` is written as q and k if the trace format can express its scores; other layers as weights, which
        must be available (`keep=True`, or an exact map) and small.
        """
        from . import _report

        _report.trace_of(self, item, only_exact=True).save(os.fspath(path))

    def _repr_html_(self) -> str:
        from . import _report

        return _report.glance(self)

    def to_bertviz(self, item: int = 0) -> dict[str, Any]:
        """Arguments of BertViz: `bertviz.head_view(**seen.to_bertviz())`, `bertviz.model_view(**seen.to_bertviz())`.

        Weights `[1, heads, rows, keys]` of each layer, and tokens. At most 512 rows and keys; needs `keep=True`, or a `map` of at least
        that size.
        """
        found: dict[str, Any] = {}
        names = {"self": "decoder_attention", "encoder": "encoder_attention", "cross": "cross_attention"}
        for record in self:
            if not self._translates and record.kind != "self":
                continue
            name = names[record.kind] if self._translates else "attention"
            own = self.index(record.shape[0], item)
            found.setdefault(name, []).append(torch.from_numpy(record.weights()[own : own + 1].astype(np.float32)))
        answer: dict[str, Any] = {name: tuple(layers) for name, layers in found.items()}
        for name, axis in (("encoder_tokens", "source"), ("decoder_tokens", "target")) if self._translates else (("tokens", "text"),):
            answer[name] = self._numbered(axis, item)
        return answer

    def to_circuitsvis(self, layer: int = 0, item: int = 0) -> dict[str, Any]:
        """Arguments of CircuitsVis for one layer: `circuitsvis.attention.attention_patterns(**seen.to_circuitsvis(10))`.

        Weights `[heads, rows, keys]`, and tokens. Same limits as `to_bertviz`.
        """
        record = self[layer]
        axis = axes_of(record.kind, self._translates)[0]
        return {"tokens": self._numbered(axis, item), "attention": record.weights()[self.index(record.shape[0], item)].astype(np.float32)}

    def _numbered(self, axis: str, item: int) -> list[str]:
        """Labels, or position numbers where there are none."""
        sizes = [
            n for record in self for own, n in zip(axes_of(record.kind, self._translates), (record.q_len, record.k_len)) if own == axis
        ]
        words, n = self.labels(axis, item), max(sizes, default=0)
        return words[:n] + [str(i) for i in range(len(words), n)]


def _readable(tokenizer: Any, token: str) -> str:
    """Readable form of a token: decodes the symbols that vocabularies use for spaces and bytes."""
    if "\u2581" in token:
        return token.replace("\u2581", " ")
    return tokenizer.convert_tokens_to_string([token]) if hasattr(tokenizer, "convert_tokens_to_string") else token
