"""Trace, HTML page and notebook view of recorded attention."""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import regard

from . import _arrays, _regard, masks
from ._record import SMALL, Call, Record, cell_starts
from ._spans import Span, SpanOptions
from .lens import Capture, axes_of

CELLS = 128
"""Cells per side of an attention map that a page computes from q and k."""


# ---- traces ----


class Layer(NamedTuple):
    """One attention layer of a trace: metadata, arrays, and the axes of rows and columns, which are cells if it is pooled."""

    about: dict[str, Any]
    arrays: list[np.ndarray]
    rows: dict[str, Any]
    cols: dict[str, Any]
    starts: tuple[list[int], list[int]]
    """Position at which each row and each column begins, and the end of the last one."""
    pooled: bool = False


class Ranges(NamedTuple):
    """Ranges of rows and keys of a record, without padding."""

    rows: tuple[int, int]
    keys: tuple[int, int]


def trace_of(seen: Capture, item: int, only_exact: bool) -> Any:
    """Trace of one batch item. If a layer has no exact weights and they cannot be recomputed: raise with `only_exact`, else use the pooled
    map."""
    return _native(seen, [_layer(seen, record, item, only_exact) for record in _of(seen, item)])


def _of(seen: Capture, item: int) -> list[Record]:
    records = seen.records
    if not records:
        raise ValueError("nothing recorded; run the model inside the context")
    if not 0 <= item < seen.batch:
        raise IndexError(f"item {item}: out of range, the batch has {seen.batch} items")
    return records


def _of_item(seen: Capture, record: Record, array: np.ndarray, item: int) -> np.ndarray:
    """Part of an array `[batch, ..]` that belongs to a batch item."""
    return array[seen.index(record.shape[0], item)]


def _native(seen: Capture, layers: list[Layer]) -> Any:
    axes: dict[str, Any] = {}
    about, arrays = [], []
    for layer in layers:
        names = [_axis(axes, side) for side in (layer.rows, layer.cols)]
        about.append({**layer.about, "rows": names[0], "cols": names[1]})
        arrays += layer.arrays
    text = json.dumps({"title": seen.title, "axes": axes, "layers": about, "interventions": seen._run.interventions})
    return _regard.Trace(text, [_arrays.memory(x) for x in arrays])


def _axis(axes: dict[str, Any], side: dict[str, Any]) -> str:
    """Unique name of an axis: its title, with a number if several axes have the same title."""
    title, name, n = side["title"], side["title"], 1
    while name in axes and axes[name] != side:
        n += 1
        name = f"{title} {n}"
    axes[name] = side
    return name


def _layer(seen: Capture, record: Record, item: int, only_exact: bool) -> Layer:
    places = _places(seen, record, item)
    if record.has_inputs:
        inputs = _inputs(record, seen.index(record.shape[0], item), places)
        if inputs is not None:
            options, arrays, places = inputs
            return Layer({**_about(record), **options}, arrays, *_sides(seen, record, item, places))
    if _has_weights(record):
        return _weights(seen, record, item)
    if only_exact:
        raise ValueError(_why_not(record))
    return _pooled(seen, record, item)


def _about(record: Record) -> dict[str, Any]:
    return {"layer": record.layer, "kind": record.kind}


def _has_weights(record: Record) -> bool:
    return record.exact or (record.has_inputs and max(record.q_len, record.k_len) <= SMALL)


def _weights(seen: Capture, record: Record, item: int) -> Layer:
    """Layer from all weights."""
    places = _places(seen, record, item)
    weights = _of_item(seen, record, record.tile(places.rows, places.keys), item)
    return Layer(_about(record), [_f32(weights)], *_sides(seen, record, item, places))


def _why_not(record: Record) -> str:
    where = f"{record.kind} layer {record.layer} with {record.q_len} rows and {record.k_len} keys"
    if not record.has_inputs:
        return f"{where}: neither q and k nor all weights are recorded; use capture(.., keep=True)"
    return (
        f"{where}: the trace format does not support its scores (a bias of pairs, sinks, or a mask without a text), and more than {SMALL} rows or "
        f"keys are too many to write its weights; capture a shorter input, or use row() and tile()"
    )


def _pooled(seen: Capture, record: Record, item: int) -> Layer:
    """Layer from the pooled map."""
    rows, cols = ([int(start) + shift for start in starts] for starts, shift in zip(record.cells, (_first(record), 0)))
    down, across = (_grouped(seen, axis, item, starts) for axis, starts in zip(axes_of(record.kind, seen._translates), (rows, cols)))
    return Layer(_about(record), [_f32(_of_item(seen, record, record.map, item))], down, across, starts=(rows, cols), pooled=True)


def _grouped(seen: Capture, axis: str, item: int, starts: list[int]) -> dict[str, Any]:
    """Axis of cells; a label is the first position and the number of further positions."""
    words = seen.labels(axis, item)
    labels = []
    for begin, end in zip(starts, starts[1:]):
        name = words[begin] if begin < len(words) else str(begin)
        labels.append(name if end - begin == 1 else f"{name} +{end - begin - 1}")
    sizes = {end - begin for begin, end in zip(starts, starts[1:])}
    if sizes <= {1}:
        return {"title": axis, "labels": labels}
    return {"title": f"groups of {'up to ' if len(sizes) > 1 else ''}{max(sizes)} {axis}", "labels": labels}


def _first(record: Record) -> int:
    """Position of the first row."""
    return 0 if record.kind == "cross" else record.first


def _sides(seen: Capture, record: Record, item: int, places: Ranges) -> tuple[dict[str, Any], dict[str, Any], tuple[list[int], list[int]]]:
    """Axes of rows and columns, and the positions of these."""
    first = _first(record)
    found, starts = [], []
    for axis, (begin, end), shift in zip(axes_of(record.kind, seen._translates), places, (first, 0)):
        words = seen.labels(axis, item)
        names = [words[i] if i < len(words) else str(i) for i in range(begin + shift, end + shift)]
        found.append({"title": axis, "labels": names})
        starts.append(list(range(begin + shift, end + shift + 1)))
    return found[0], found[1], (starts[0], starts[1])


def _places(seen: Capture, record: Record, item: int) -> Ranges:
    """Rows and keys without leading and trailing padding."""
    found = []
    for axis, n, first in zip(axes_of(record.kind, seen._translates), (record.q_len, record.k_len), (_first(record), 0)):
        real = seen.real(axis, item)
        at = np.flatnonzero(real[first:]) if real is not None and len(real) == first + n else np.empty(0)
        found.append((int(at[0]), int(at[-1]) + 1) if len(at) else (0, n))
    return Ranges(*found)


def _f32(x: Any) -> np.ndarray:
    x = x.float().numpy() if _arrays.is_torch(x) else x
    return np.ascontiguousarray(x, dtype=np.float32)


# ---- q and k of a trace ----


def _inputs(record: Record, item: int, places: Ranges) -> tuple[dict[str, Any], list[np.ndarray], Ranges] | None:
    """q, k, lse and a bias of keys, if the trace format supports the scores: dot products, optionally with softcap, a bias of keys, a mask with
    a text, and the last query aligned with the last key; else None."""
    calls = list(record.calls())
    options = calls[0][2].options
    known = {"mask", "align", "scale", "softcap", "precision", "threads", "bias"}
    if any(given is not None for name, given in options.items() if name not in known):
        return None
    # That of the last step has all keys.
    bias = calls[-1][2].options.get("bias")
    if bias is not None and (bias.shape[2] != 1 or bias.shape[3] != record.k_len):
        return None
    rule = _rule(calls[0][2], item, record.k_len)
    if rule is None:
        return None
    text, keys = rule
    if len(calls) > 1 and text == "full" and record.kind != "cross":
        text = "causal"  # decoding steps: all earlier positions are visible
    begin, end = max(keys[0], places.keys[0]), min(keys[1], places.keys[1])
    rows = places.rows
    if text != "full":
        # In a trace the last query is aligned with the last key.
        first = _first(record)
        rows = (max(rows[0], begin - first), min(rows[1], end - first))
        end = first + rows[1]
    if begin >= end or rows[0] >= rows[1]:
        return None
    q = _f32(torch.cat([call.q[item] for _, _, call in calls], 1)[:, rows[0] : rows[1]])
    lse = _f32(torch.cat([call.lse[item] for _, _, call in calls], 1)[:, rows[0] : rows[1]])
    k = _f32(record.all_keys()[item][:, begin:end])
    more = [] if bias is None else [_f32(bias.expand(record.shape[0], q.shape[0], 1, -1)[item, :, 0, begin:end])]
    if record._options.heads is not None:
        heads, shared = list(record._options.heads), q.shape[0] // k.shape[0]
        q, lse, k, *more = (np.ascontiguousarray(x) for x in (q[heads], lse[heads], k[[head // shared for head in heads]], *(x[heads] for x in more)))
    given = {"mask": text, "scale": options.get("scale"), "softcap": options.get("softcap")}
    if len(calls) > 1 and not _same_scores(q, k, lse, {**given, "bias": more[0][None, :, None] if more else None}):
        return None  # the steps do not follow the mask of the prompt
    return {**given, "key_bias": bool(more)}, [q, k, lse, *more], Ranges(rows, (begin, end))


def _same_scores(q: np.ndarray, k: np.ndarray, lse: np.ndarray, options: dict[str, Any]) -> bool:
    found = regard.attention(q[None], k[None], k[None, ..., :1], **options, return_aux=True)[1].lse[0]
    near = np.isclose(found, lse, rtol=1e-3, atol=1e-3)
    return bool((near | (np.isneginf(found) & np.isneginf(lse))).all())


def _rule(call: Call, item: int, k_len: int) -> tuple[str, tuple[int, int]] | None:
    """Mask of one batch item as text, and the range of keys that are not padding; None if it is not a band with padding."""
    mask = call.options.get("mask")
    if mask is None:
        return "full", (0, k_len)
    mask = masks.parse(mask) if isinstance(mask, str) else mask
    if not isinstance(mask, masks.Mask):
        return None
    rules, begin, end = [], 0, k_len
    for part in mask._parts:
        if isinstance(part, str):
            rules += [rule.strip() for rule in part.split("&") if rule.strip()]
        elif part[0] in ("lengths", "spans"):
            of = part[1][item if len(part[1]) > 1 else 0]
            start, stop = (0, int(of)) if part[0] == "lengths" else (int(of[0]), int(of[1]))
            # Keys that later steps append are after the last key of the prompt.
            begin, end = max(begin, start), end if stop >= call.reach else min(end, stop)
        else:
            return None
    moves = all(rule.split()[0] in ("full", "causal", "window", "band") for rule in rules)
    if not moves or any(sign in rule for rule in rules for sign in "|()"):
        return None
    rules = [rule for rule in rules if rule != "full"]
    return " & ".join(rules) or "full", (begin, end)


# ---- pages ----

DATA = '<script type="application/json" id="data">'


def write(
    seen: Capture, path: str | os.PathLike, item: int, spans: Mapping[str, Any] | None = None, against: Capture | None = None
) -> None:
    """Write the HTML page of a trace with the recorded statistics and the top tokens."""
    records = _of(seen, item)
    named = _fixed(spans) if spans is not None else {}
    others = [] if against is None else _others(records, _of(against, item))
    if against is None:
        layers, after = [_layer(seen, record, item, only_exact=False) for record in records], None
    else:
        pairs = [_pair((seen, record), (against, other), item) for record, other in zip(records, others)]
        layers, after = [pair[0] for pair in pairs], _native(against, [pair[1] for pair in pairs])
    if named:
        layers = [_with_spans(layer, named) for layer in layers]
    page = _native(seen, layers).page(CELLS, after)
    head, rest = page.split(DATA, 1)
    data, tail = rest.split("</script>", 1)
    page_data = json.loads(data)
    heads = [(at, i) for at, record in enumerate(records) for i in range(record.shape[1])]
    means = [record.means for record in records]
    means_after = [record.means for record in others]
    for site, (at, i) in zip(page_data["sites"], heads):
        site["head"] = records[at].heads[i]
        runs = [(site, seen, records[at], means[at])]
        if against is not None:
            runs.append((site["after"], against, others[at], means_after[at]))
        for run, of, record, numbers in runs:
            run["stats"] = {name: _finite(_of_item(of, record, x, item)[i]) for name, x in numbers.items()}
            if layers[at].pooled:
                run.update(labels=[], spans=[], masses="")  # a maximum over a cell is not its mass
        if against is not None and layers[at].pooled:
            site["change"] = None
    data = json.dumps(page_data).replace("<", "\\u003c")
    more = "\n".join(_sections(seen, records, item))
    head = head.replace("</main>", f"{more}\n</main>", 1).replace("</style>", f"{STYLE}</style>", 1)
    _regard.write(os.fspath(path), f"{head}{DATA}{data}</script>{tail}")


def _fixed(spans: Mapping[str, Any]) -> dict[str, Span]:
    """Spans of a report: positions that do not depend on a row."""
    found = SpanOptions.of(spans, None, "all").spans
    for name, (start, _) in found.items():
        if start < 0:
            raise ValueError(f"spans[{name!r}]: {start} counts from the position of a row; a report needs positions from 0 on")
    return found


def _with_spans(layer: Layer, spans: dict[str, Span]) -> Layer:
    """A layer whose axes have the spans: positions of the axis, or cells that have one of these."""
    sides = []
    for side, starts in zip((layer.rows, layer.cols), layer.starts):
        found = []
        for name, (begin, end) in spans.items():
            first = int(np.searchsorted(starts[1:], begin, "right"))
            stop = len(starts) - 1 if end is None else int(np.searchsorted(starts[:-1], end, "left"))
            found.append((name, {"start": first, "end": max(first, stop)}))
        sides.append({**side, "spans": found})
    return layer._replace(rows=sides[0], cols=sides[1])


def _others(records: list[Record], others: list[Record]) -> list[Record]:
    """Records of another run, in the order of those of the first."""
    found = {(other.kind, other.layer): other for other in others}
    for record in records:
        other = found.get((record.kind, record.layer))
        if other is None or other.heads != record.heads:
            what = "not recorded there" if other is None else f"heads {list(other.heads)}, expected {list(record.heads)}"
            raise ValueError(f"against: {record.kind} layer {record.layer}: {what}; capture both runs with the same options")
    for kind, layer in found.keys() - {(record.kind, record.layer) for record in records}:
        raise ValueError(f"against: {kind} layer {layer}: recorded only there; capture both runs with the same options")
    return [found[record.kind, record.layer] for record in records]


def _pair(own: tuple[Capture, Record], other: tuple[Capture, Record], item: int) -> tuple[Layer, Layer]:
    """The same layer of two runs in one form, with the same rows and keys."""
    first, second = (_layer(*run, item, only_exact=False) for run in (own, other))
    if not (first.pooled or second.pooled) and first.starts == second.starts:
        return first, second
    if all(_has_weights(record) for _, record in (own, other)):
        return _weights(*own, item), _weights(*other, item)
    return _pooled(*own, item), _pooled(*other, item)


def _finite(x: float) -> float | None:
    return float(x) if math.isfinite(x) else None


STYLE = """
.lens { margin-top: 40px; padding-top: 20px; border-top: 1px solid var(--line); }
.lens table { border-collapse: collapse; font-size: 0.87rem; margin-bottom: 8px; }
.lens caption { text-align: start; padding: 10px 0 6px; font: 400 1rem var(--serif); }
.lens caption::first-letter { text-transform: uppercase; }
.lens th { font-weight: 400; color: var(--quiet); text-align: start; padding: 4px 14px 4px 0; vertical-align: baseline; }
.lens td { padding: 4px 14px 4px 0; vertical-align: baseline; border-top: 1px solid var(--line); white-space: nowrap; }
.lens tbody th { border-top: 1px solid var(--line); text-align: end; font-variant-numeric: tabular-nums; }
.lens .n { text-align: end; white-space: nowrap; font-variant-numeric: tabular-nums; }
.lens .words { white-space: normal; line-height: 1.9; }
.lens .word {
  display: inline-block; margin-inline-end: 10px; white-space: nowrap; padding-bottom: 1px;
  background: linear-gradient(var(--accent), var(--accent)) 0 100% / calc(100% * var(--part)) 2px no-repeat;
}
.lens .word bdi { max-width: 16em; display: inline-block; overflow: hidden; text-overflow: ellipsis; vertical-align: bottom; }
.lens .word small { color: var(--quiet); font-variant-numeric: tabular-nums; margin-inline-start: 4px; }
.lens details { margin: 10px 0; }
.lens summary { cursor: pointer; color: var(--quiet); font-size: 0.87rem; }
.lens svg { max-width: 100%; height: auto; display: block; margin-inline-start: -16px; }
.lens svg > rect:first-of-type { fill: none; }
.on-dark { display: none; }
:root[data-theme="dark"] .on-light { display: none; }
:root[data-theme="dark"] .on-dark { display: block; }
@media (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) .on-light { display: none; }
  :root:not([data-theme="light"]) .on-dark { display: block; }
}
"""


def _sections(seen: Capture, records: list[Record], item: int) -> list[str]:
    """Sections below the attention maps: statistics per layer, top tokens, and statistics along the text."""
    kinds = {kind: [record for record in records if record.kind == kind] for kind in dict.fromkeys(record.kind for record in records)}
    found = ['<section class="lens"><h2>Layer by layer</h2>', '<p class="lead">Means over the heads of a layer.</p>']
    for kind, own in kinds.items():
        found.append(_table(seen, own, item, kind if len(kinds) > 1 else ""))
    for kind, own in kinds.items():
        found += _head_by_head(seen, own, item, f"{kind}: " if len(kinds) > 1 else "")
    found.append("</section>")
    pictures = [picture for kind, own in kinds.items() for picture in _along(seen, own, item, f"{kind}: " if len(kinds) > 1 else "")]
    if pictures:
        found += ['<section class="lens"><h2>Along the text</h2>', *pictures, "</section>"]
    return found


COLUMNS = (
    ("entropy", 2, "Entropy of the attention weights of a query, in nats"),
    ("keys", 1, "Effective number of keys of a query: e to the entropy"),
    ("distance", 1, "Mean attention distance of a query, in tokens"),
    ("first", 3, "Attention weight of the first key"),
    ("largest", 3, "Largest attention weight of a query"),
    ("max_score", 1, "Largest score before the softmax"),
)
"""Statistics of a layer, number of digits, and description."""


def _table(seen: Capture, records: list[Record], item: int, caption: str) -> str:
    shown = _shown(seen, records, item)
    row = shown[-1] if shown else None
    heads = [f'<th scope="col" class="n" title="{why}">{name.replace("_", " ")}</th>' for name, _, why in COLUMNS]
    if row is not None:
        heads.append(f'<th scope="col">{_query(seen, records[0], row, item)} attends to</th>')
    looked = any({"col_sum", "top_k"} & record._options.stats for record in records)
    if looked:
        heads.append('<th scope="col">most attended keys, over all queries</th>')
    lines = []
    for record in records:
        means = record.means
        numbers = {name: _of_item(seen, record, means[name], item) for name, _, _ in COLUMNS}
        joined = {name: np.max(x) if name == "max_score" else np.mean(x) for name, x in numbers.items()}
        cells = [f'<td class="n">{_number(joined[name], digits)}</td>' for name, digits, _ in COLUMNS]
        words = seen.labels(axes_of(record.kind, seen._translates)[1], item)
        if row is not None:
            cells.append(f'<td class="words">{_words(_of_item(seen, record, record.row(row), item).mean(0), words, 5)}</td>')
        if looked:
            cells.append(f'<td class="words">{_words(_received(seen, record, item), words, 5)}</td>')
        lines.append(f'<tr><th scope="row">{record.layer}</th>{"".join(cells)}</tr>')
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    top = f'<thead><tr><th scope="col">layer</th>{"".join(heads)}</tr></thead>'
    return f'<div class="scroll"><table>{title}{top}<tbody>{"".join(lines)}</tbody></table></div>'


def _shown(seen: Capture, records: list[Record], item: int) -> list[int]:
    """Rows whose weights the page shows: the selected ones, or the last one; without padding."""
    begin, end = _places(seen, records[0], item).rows
    common = set(records[0].whole_rows).intersection(*(record.whole_rows for record in records))
    found = sorted(row for row in common if begin <= row < end)
    return found or ([end - 1] if all(record.exact or record.has_inputs for record in records) else [])


def _query(seen: Capture, record: Record, row: int, item: int) -> str:
    axis = axes_of(record.kind, seen._translates)[0]
    at = _first(record) + row
    words = seen.labels(axis, item)
    return f"query {row} {_name(words, at)}" if at < len(words) else f"query {row}"


def _received(seen: Capture, record: Record, item: int) -> np.ndarray:
    """Fraction of the attention that each key receives, mean over heads; from the top-k weights if nothing else is recorded."""
    begin, end = _places(seen, record, item).rows
    queries = max(1, end - begin)
    if record.exact:
        return _of_item(seen, record, record.tile((begin, end), (0, record.k_len)), item).sum(1).mean(0) / queries
    if "top_k" not in record._options.stats or ("col_sum" in record._options.stats and queries == record.q_len):
        return _of_item(seen, record, record.col_sum, item).mean(0) / record.q_len
    keys, weights = (_of_item(seen, record, x, item)[:, begin:end] for x in record.top_k)
    seen_keys = keys >= 0
    return np.bincount(keys[seen_keys], weights[seen_keys], record.k_len) / (queries * record.shape[1])


def _head_by_head(seen: Capture, records: list[Record], item: int, kind: str) -> list[str]:
    """For each shown row, the keys with the largest weights of each head."""
    found = []
    keys = seen.labels(axes_of(records[0].kind, seen._translates)[1], item)
    heads = list(dict.fromkeys(head for record in records for head in record.heads))
    top = "".join(f'<th scope="col">head {head}</th>' for head in heads)
    for row in _shown(seen, records, item)[-4:]:
        lines = []
        for record in records:
            weights = _of_item(seen, record, record.row(row), item)
            cells = "".join(f'<td class="words">{_words(weights[i], keys, 3)}</td>' for i in range(len(record.heads)))
            lines.append(f'<tr><th scope="row">{record.layer}</th>{cells}</tr>')
        caption = f"{html.escape(kind)}top keys of {_query(seen, records[0], row, item)}, by head"
        table = f'<table><thead><tr><th scope="col">layer</th>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
        found.append(f'<details><summary>{caption[0].upper() + caption[1:]}</summary><div class="scroll">{table}</div></details>')
    return found


def _words(weights: np.ndarray, words: list[str], most: int) -> str:
    """Keys with the largest weights; the underline is proportional to the weight."""
    largest = np.argsort(-weights, kind="stable")[:most]
    return "".join(
        f'<span class="word" style="--part:{min(1.0, float(weights[key])):.3f}" title="key {key}">'
        f"{_name(words, int(key))}<small>{_number(weights[key])}</small></span>"
        for key in largest
        if weights[key] > 0
    )


def _name(words: list[str], at: int) -> str:
    """Label of a position with visible white space, or its number."""
    if at >= len(words):
        return f"<bdi>{at}</bdi>"
    word = words[at].replace("\r\n", "\n").replace("\n", "\u23ce").replace("\t", "\u21e5")
    word = "\u2205" if word == "" else word if word.strip() else "\u2423" * len(word)
    return f'<bdi dir="auto">{html.escape(word.strip())}</bdi>'


def _number(x: float, digits: int = 3) -> str:
    x = float(x)
    if not math.isfinite(x):
        return "\u2013"
    return f"{x:.0e}" if 0 < abs(x) < 0.5 * 10.0**-digits else f"{x:,.{digits}f}"


# ---- pictures ----


class Strip(NamedTuple):
    """Heat map of layers (rows) and positions (columns)."""

    title: str
    unit: str
    axis: str
    places: tuple[int, int]
    lines: list[np.ndarray]


def _along(seen: Capture, records: list[Record], item: int, kind: str) -> list[str]:
    """Heat maps of the entropy of queries and of the attention that keys receive."""
    sides, places, stats = axes_of(records[0].kind, seen._translates), _places(seen, records[0], item), records[0]._options.stats
    found = []
    if "entropy" in stats and records[0].q_len > 1:
        lines = [_of_item(seen, record, record.entropy, item).mean(0) for record in records]
        found.append(Strip(f"{kind}entropy of each query, mean over heads", "nat", sides[0], places.rows, lines))
    if "col_sum" in stats:
        lines = [_received(seen, record, item) for record in records]
        found.append(Strip(f"{kind}fraction of the attention that each key receives", "fraction", sides[1], places.keys, lines))
    # Layers of different lengths have no common axis.
    return [_strip(seen, records, item, strip) for strip in found if len({len(line) for line in strip.lines}) == 1]


def _strip(seen: Capture, records: list[Record], item: int, strip: Strip) -> str:
    begin, end = strip.places
    cells = min(end - begin, 160)
    starts = cell_starts(end - begin, cells)[:-1]
    values = np.maximum.reduceat(np.stack(strip.lines)[:, begin:end].astype(np.float32), starts, axis=1)
    words = seen.labels(strip.axis, item)
    names = [words[i] if i < len(words) else str(i) for i in range(begin, end)]
    cols = {"title": strip.axis, "labels": names}
    rows = {"title": "layer", "labels": [str(record.layer) for record in records]}
    most = _rounded(float(np.nanmax(values, initial=0)))
    about = {"view": "heat", "title": strip.title, "unit": strip.unit, "width": 1120, "most": most}
    return _both(about, [{"rows": rows, "cols": cols}], [values])


def _rounded(most: float) -> float:
    """Upper limit of a color scale, rounded up to two digits."""
    if not most > 0:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(most)) - 1)
    return math.ceil(most / unit - 1e-9) * unit


def _both(about: dict[str, Any], maps: list[dict[str, Any]], values: list[np.ndarray]) -> str:
    """One image for light mode and one for dark mode."""
    light, dark = (_picture({**about, "dark": dark, "maps": maps}, values) for dark in (False, True))
    return f'<div class="scroll on-light">{light}</div><div class="scroll on-dark">{dark}</div>'


def _picture(about: dict[str, Any], values: list[np.ndarray]) -> str:
    held = [_f32(x) for x in values]
    return _regard.picture(json.dumps(about), [_arrays.memory(x) for x in held])


MOST_HEADS = 256
"""Maximum number of heads in the notebook view."""


def glance(seen: Capture) -> str:
    """Notebook view: thumbnails of the attention maps of all heads, for the first batch item."""
    if not seen.records:
        return f"<p>{html.escape(repr(seen))}</p>"
    maps, values = [], []
    for record in seen:
        layer = _pooled(seen, record, 0)
        for i, head in enumerate(record.heads):
            maps.append({"layer": record.layer, "head": head, "kind": record.kind, "rows": layer.rows, "cols": layer.cols})
            values.append(layer.arrays[0][i])
    left_out = len(maps) - MOST_HEADS
    about = {"view": "grid", "title": seen.title, "unit": "weight", "dark": False, "width": 900, "most": 1.0}
    note = f"<p>{left_out} more heads are in <code>seen.report(path)</code>.</p>" if left_out > 0 else ""
    return f"{_picture({**about, 'maps': maps[:MOST_HEADS]}, values[:MOST_HEADS])}{note}"
