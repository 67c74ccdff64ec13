"""Interventions in the attention of a Hugging Face model while it runs: what `regard.hf.intervene` applies to each call.

Rules name layers, heads and positions of the sequence; a call has only some of the positions, with indices of its own. Changes of scores
are an option of the engine; outputs of heads are replaced after the call; a frozen pattern is a second call with the stored q and k.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch

import regard.torch

from . import _arrays, _call
from ._sites import ModelCalls, Site, slides

SCORES = ("drop", "times", "add")
ACTIONS = (*SCORES, "output", "pattern")
PLACES = ("kind", "layers", "items", "heads", "rows", "keys")

Positions = Optional[tuple[int, Optional[int]]]


class Rule(NamedTuple):
    """One rule; None is all."""

    kind: Optional[str]
    layers: Optional[frozenset[int]]
    items: Optional[list[int]]
    heads: Optional[list[int]]
    rows: Positions
    keys: Positions
    action: str
    value: Any

    @classmethod
    def of(cls, given: Any) -> Rule:
        if not isinstance(given, dict):
            raise TypeError(f"rules: expected dicts, found {type(given).__name__}; for example {{'layers': [3], 'heads': [1], 'drop': True}}")
        unknown = [name for name in given if name not in PLACES + ACTIONS]
        if unknown:
            raise ValueError(f"rules: unknown key {unknown[0]!r}; use {', '.join(PLACES)}, and one of {', '.join(ACTIONS)}")
        actions = [name for name in ACTIONS if given.get(name) is not None and given[name] is not False]
        if len(actions) != 1:
            raise ValueError(f"rules: expected one of {', '.join(ACTIONS)}, found {', '.join(actions) or 'none'}")
        (action,) = actions
        value = _call.bias_of(given) if action in SCORES else given[action]
        if action not in SCORES and given.get("keys") is not None:
            raise ValueError(f"rules: {action!r} has no keys; leave 'keys' out")
        layers = _indices("layers", given.get("layers"))
        return cls(
            given.get("kind"), None if layers is None else frozenset(layers), _indices("items", given.get("items")),
            _indices("heads", given.get("heads")), _positions("rows", given.get("rows")), _positions("keys", given.get("keys")), action, value,
        )  # fmt: skip

    def concerns(self, site: Site) -> bool:
        return self.kind in (None, site.kind) and (self.layers is None or site.layer in self.layers)


def _text(given: dict[str, Any]) -> str:
    """A rule in words: `layers 1, heads 2 3, rows 20.., keys 0..10: drop`."""
    places = []
    for name in (name for name in PLACES if given.get(name) is not None):
        of = given[name]
        if name in ("rows", "keys"):
            of = f"{of[0]}..{'' if of[1] is None else of[1]}"
        elif isinstance(of, Iterable) and not isinstance(of, str):
            of = " ".join(str(one) for one in of)
        places.append(f"{name} {of}")
    action = next(name for name in ACTIONS if given.get(name) is not None and given[name] is not False)
    value = given[action]
    told = "" if action == "drop" else f" {value}" if isinstance(value, (int, float)) else f" of {type(value).__name__}"
    return f"{', '.join(places) or 'everywhere'}: {action}{told}"


def _indices(name: str, given: Any) -> Optional[list[int]]:
    if given is None:
        return None
    return sorted({_arrays.count(f"rules, {name}", one) for one in (given if isinstance(given, Iterable) else [given])})


def _positions(name: str, given: Any) -> Positions:
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"rules, {name}: expected (start, stop), found {given!r}")
    start, stop = _arrays.count(f"rules, {name}", given[0]), None if given[1] is None else _arrays.count(f"rules, {name}", given[1])
    if stop is not None and stop < start:
        raise ValueError(f"rules, {name}: {start} to {stop}; use (start, stop) with start <= stop")
    return start, stop


class Place(NamedTuple):
    """A call in the sequence: position of its first row and of its first key."""

    site: Site
    row: int
    key: int


class Interventions:
    """The rules of one `intervene`, applied to the calls of its model."""

    def __init__(self, model: torch.nn.Module, rules: Iterable[Any]):
        self.calls = ModelCalls(model)
        given = list(rules)
        self.rules = [Rule.of(rule) for rule in given]
        self.texts = [_text(rule) for rule in given]
        """The rules as a reader of a report needs them."""
        self._row = 0
        self._seen: dict[tuple[str, int], int] = {}
        self.used: set[int] = set()

    def plan(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, options: dict[str, Any], first_key: int) -> Change | None:
        """What changes in a call of a module; None for a call of another model, or if no rule concerns its layer."""
        if module not in self.calls.names:
            return None
        # Outside of a forward pass: recomputation by gradient checkpointing.
        site = self.calls.next_site(module) if self.calls.depth else self.calls.site(module, 0)
        place = self._place(site, query, key, options, first_key, slides(module))
        rules = [(i, rule) for i, rule in enumerate(self.rules) if rule.concerns(site)]
        self.used.update(i for i, _ in rules)
        for _, rule in rules:
            for name, indices, size in (("heads", rule.heads, query.shape[1]), ("items", rule.items, query.shape[0])):
                if indices and indices[-1] >= size:
                    raise ValueError(f"rules, {name}: {indices[-1]} is out of range in {site.kind} layer {site.layer}, which has {size}")
        return Change([rule for _, rule in rules], place) if rules else None

    def _place(self, site: Site, query: Any, key: Any, options: dict[str, Any], first_key: int, slides: bool) -> Place:
        """Where a call stands: cross-attention has the rows of the decoder, whose self-attention runs before it."""
        if site.kind == "cross":
            return Place(site, self._row, 0)
        align = options.get("align", "end")
        row = first_key + (key.shape[2] - query.shape[2] if align == "end" else int(align))
        if site.kind == "self":
            self._row = row
        return Place(site, row, first_key)


class Change(NamedTuple):
    """The rules that concern one call."""

    rules: list[Rule]
    place: Place

    def options(self, query: torch.Tensor, key: torch.Tensor) -> list[dict[str, Any]]:
        """Interventions for the engine, in the indices of the call."""
        found = []
        for rule in self.rules:
            if rule.action not in SCORES:
                continue
            rows = _clip(rule.rows, self.place.row, query.shape[2])
            keys = _clip(rule.keys, self.place.key, key.shape[2])
            if rows[0] < rows[1] and keys[0] < keys[1]:
                action = {"drop": True} if rule.value is None else {"add": rule.value}
                found.append({"items": rule.items, "heads": rule.heads, "rows": rows, "keys": keys, **action})
        return found

    def frozen(self, value: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> list[tuple[Rule, torch.Tensor, Any]]:
        """Outputs of the calls with a stored pattern, and q, k and options of these."""
        found = []
        for rule in self.rules:
            if rule.action != "pattern":
                continue
            q, k, options = _stored(rule.value, self.place, query, key)
            found.append((rule, regard.torch.attention(q, k, value, **options), (q, k, options)))
        return found

    def output(self, out: torch.Tensor, frozen: list[tuple[Rule, torch.Tensor, Any]]) -> torch.Tensor:
        """The output `[batch, heads, q_len, v_dim]` after all replacements, in the order of the rules."""
        patterns = iter(frozen)
        for rule in self.rules:
            if rule.action in SCORES:
                continue
            chosen = self._chosen(rule, out)
            other = next(patterns)[1] if rule.action == "pattern" else self._replacement(rule.value, out)
            out = torch.where(chosen, other.to(out.dtype), out)
        return out

    def _chosen(self, rule: Rule, out: torch.Tensor) -> torch.Tensor:
        """Which batch items, heads and rows a rule replaces."""
        chosen = torch.zeros(*out.shape[:3], 1, dtype=torch.bool)
        start, stop = _clip(rule.rows, self.place.row, out.shape[2])
        items = torch.arange(out.shape[0]) if rule.items is None else torch.tensor(rule.items)
        heads = torch.arange(out.shape[1]) if rule.heads is None else torch.tensor(rule.heads)
        chosen[items[:, None], heads[None], start:stop] = True
        return chosen

    def _replacement(self, value: Any, out: torch.Tensor) -> torch.Tensor:
        """An output for heads: a number, a tensor that broadcasts to `[batch, heads, rows, v_dim]`, or means of all heads."""
        if isinstance(value, HeadMeans):
            value = value.of(self.place.site)[:, None]
        found = torch.as_tensor(value, dtype=out.dtype)
        try:
            return found.expand(out.shape)
        except RuntimeError:
            raise ValueError(
                f"rules, output: {list(found.shape)} does not fit {list(out.shape)} [batch, heads, rows, v_dim] in {self.place.site.kind} "
                f"layer {self.place.site.layer}; give a number, [heads, 1, v_dim] or [v_dim]"
            ) from None


def _clip(positions: Positions, first: int, size: int) -> tuple[int, int]:
    """Positions as indices of a call."""
    start, stop = positions or (0, None)
    start = min(max(0, start - first), size)
    return start, max(start, size if stop is None else min(max(0, stop - first), size))


def _stored(seen: Any, place: Place, query: torch.Tensor, key: torch.Tensor) -> tuple[Any, Any, dict[str, Any]]:
    """q, k and options of the call of another run that stands at the same place."""
    record = seen[place.site.kind, place.site.layer]
    if not record.has_inputs:
        raise ValueError("rules, pattern: q and k are not stored; record the run with capture(.., keep=True)")
    first, q_len = place.row - record.first, query.shape[2]
    for at, _, call in record.calls(first, first + q_len):
        if at == first and call.q.shape == query.shape and call.k.shape == key.shape:
            options = {name: given for name, given in call.options.items() if name != "threads"}
            return call.q.to(query.dtype), call.k.to(key.dtype), options
    raise ValueError(
        f"rules, pattern: {place.site.kind} layer {place.site.layer} has {q_len} rows from position {place.row} on and {key.shape[2]} keys; "
        f"the stored run has {record.q_len} rows from {record.first} on and {record.k_len} keys in other steps; both must run alike"
    )


class HeadMeans:
    """Means of the outputs of heads over the rows of all calls in a `head_means` context."""

    def __init__(self, model: torch.nn.Module):
        self.calls = ModelCalls(model)
        self._sums: dict[tuple[str, int], tuple[torch.Tensor, int]] = {}

    def add(self, module: torch.nn.Module, out: torch.Tensor) -> None:
        """Add the output `[batch, heads, rows, v_dim]` of a call."""
        if module not in self.calls.names or not self.calls.depth:
            return
        site = self.calls.next_site(module)
        total, count = self._sums.get(site[:2], (0, 0))
        self._sums[site[:2]] = (total + out.detach().double().sum((0, 2)), count + out.shape[0] * out.shape[2])

    def of(self, site: Any) -> torch.Tensor:
        """Means of a layer, `[heads, v_dim]`; `site` is `(kind, layer)`."""
        if tuple(site[:2]) not in self._sums:
            there = ", ".join(f"{kind} {layer}" for kind, layer in self._sums) or "none"
            raise KeyError(f"{site[0]} layer {site[1]}: no means; there are: {there}")
        total, count = self._sums[tuple(site[:2])]
        return total / count

    def __getitem__(self, layer: int | tuple[str, int]) -> torch.Tensor:
        return self.of(layer if isinstance(layer, tuple) else ("self", layer))
