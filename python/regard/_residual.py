"""What components of the residual stream do in attention: which of them make a score, and what positions contribute to an output.

A component is what one layer adds: the embedding, the attention of a layer, the rest of a layer (its feed-forward network). With the
statistics of the norms held fixed, queries and keys are linear in the residual stream, so that a score is exactly a sum over components.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

import regard.torch

from . import _callbacks
from ._record import Call, HeadView
from ._sites import ModelCalls, switched
from ._values import output_projection

BLOCK = 1 << 24
"""Numbers in memory at a time while contributions are computed."""


class _Seen(NamedTuple):
    """One layer of a forward pass: the residual stream before it, and its attention."""

    module: torch.nn.Module
    norm: Optional[torch.nn.Module]
    """Between the residual stream and the attention; None where norms come after the sum."""
    name: str
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    """Of the attention module, without hidden states."""
    stream: torch.Tensor
    attended: torch.Tensor
    """The output of the module."""
    call: Call
    value: torch.Tensor


class _Pass(ModelCalls):
    """Records all layers of one kind in one forward pass without a KV cache."""

    def __init__(self, model: torch.nn.Module, kind: str):
        super().__init__(model)
        self.kind = kind
        self.layers: dict[int, _Seen] = {}
        self._calls: dict[torch.nn.Module, tuple[int, Call, torch.Tensor]] = {}
        self._inputs: dict[torch.nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._outputs: dict[torch.nn.Module, Any] = {}

    def __call__(self, module: torch.nn.Module, q: Any, k: Any, v: Any, options: dict[str, Any], aux: Any) -> None:
        if module not in self.names:
            return
        site = self.next_site(module)
        if site.kind == self.kind:
            self._calls[module] = (site.layer, Call(q, k, aux.lse, options), v)

    def run(self, inputs: Any) -> dict[int, _Seen]:
        """The layers of a forward pass over these inputs, by number."""
        given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in self.names]
        hooks += [module.register_forward_hook(self._exit) for module in self.names]
        try:
            with switched(self.model), self.hooked(), _callbacks.added(_callbacks.callbacks, self), torch.no_grad():
                self.model(**given, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        for module, (layer, call, value) in self._calls.items():
            self.layers[layer] = self._seen(module, call, value)
        if not self.layers:
            raise ValueError(f"kind: no {self.kind} attention called regard; a model of one stack has 'self', a translator 'encoder' and 'self'")
        return dict(sorted(self.layers.items()))

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._inputs[module] = args, options

    def _exit(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        self._outputs[module] = out[0] if isinstance(out, tuple) else out

    def _seen(self, module: torch.nn.Module, call: Call, value: torch.Tensor) -> _Seen:
        block = self.model.get_submodule(self.names[module].rpartition(".")[0])
        args, options = self._inputs[module]
        hidden = args[0] if args else options["hidden_states"]
        stream = _hidden(self._inputs[block])
        norms = [child for child in block.children() if self._outputs.get(child) is hidden and _hidden(self._inputs[child]) is stream]
        if not norms and hidden is not stream:
            raise ValueError(f"{self.names[module]}: its input is neither the residual stream nor a norm of it; this architecture is not supported")
        arguments = {name: given for name, given in options.items() if name != "hidden_states"}
        name, norm = self.names[module], norms[0] if norms else None
        return _Seen(module, norm, name, args[1:], arguments, stream, self._outputs[module], call, value)


def _hidden(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, options = given
    return args[0] if args else options.get("hidden_states")


@contextlib.contextmanager
def _linear_norms(seen: _Seen) -> Iterator[None]:
    """Holds the statistics of the norm before attention, and of norms of queries and keys, fixed: they become linear."""
    inside = [module for module in seen.module.modules() if type(module).__name__.endswith("Norm")]
    hooks = [norm.register_forward_hook(_linear) for norm in ([seen.norm] if seen.norm is not None else []) + inside]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _linear(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    x = args[0]
    if not isinstance(norm, torch.nn.LayerNorm):
        return x * torch.where(x == 0, 0, out / x).detach()  # RMSNorm: a factor for each number
    centered = x - x.mean(-1, keepdim=True)
    factor = (x.var(-1, unbiased=False, keepdim=True) + norm.eps).rsqrt().detach()
    out = centered * factor
    out = out if norm.weight is None else out * norm.weight
    return out if norm.bias is None else out + norm.bias


class QkAttribution:
    """The scores of one row, as sums over components of the residual stream: see `regard.lens.qk_attribution`.

    names           components; the last one is `bias`, what no component makes
    keys            [components, keys]: what each component at a key adds to the score of this key
    scores          [keys]: their sums, the scores before softcap, biases and mask
    top_k(8)        the largest contributions of the row: key, component, contribution
    pair(key)       [components, components]: row component by key component; the sum is the score of this key

    Keys that the row does not see have NaN.
    """

    def __init__(self, names: list[str], parts: torch.Tensor, linear: _Linear, visible: np.ndarray):
        self.names = [*names, "bias"]
        self._parts, self._linear = parts, linear
        total = (linear.k.detach() @ linear.q.detach()).numpy()
        # The direction of the residual stream that each key reads for this row.
        directions = linear.gradient((linear.k @ linear.q.detach()).sum())
        by_component = (parts * directions).sum(-1).numpy()
        keys = np.concatenate([by_component, (total - by_component.sum(0))[None]])
        self.keys, self.scores = np.where(visible, keys, np.nan), np.where(visible, total, np.nan)

    def top_k(self, k: int) -> list[tuple[int, str, float]]:
        """The k largest contributions by absolute value: key, component, contribution."""
        sizes = np.nan_to_num(np.abs(self.keys), nan=-1.0)
        best = np.argsort(-sizes, axis=None, kind="stable")[: min(k, int((sizes >= 0).sum()))]
        places = [np.unravel_index(int(i), sizes.shape) for i in best]
        return [(int(key), self.names[int(part)], float(self.keys[part, key])) for part, key in places]

    def pair(self, key: int) -> np.ndarray:
        """What each pair of a row component and a key component adds to the score of a key, `[components, components]`."""
        if not -len(self.scores) <= key < len(self.scores):
            raise IndexError(f"key {key}: out of range, there are {len(self.scores)} keys")
        key %= len(self.scores)
        if np.isnan(self.scores[key]):
            raise ValueError(f"key {key}: the mask hides it from row {self._linear.row}")
        linear = self._linear
        return (self._through(linear.q, linear.row) @ self._through(linear.k[key], key).mT).numpy()

    def _through(self, vector: torch.Tensor, position: int) -> torch.Tensor:
        """A query or key as a sum over the components of its position, `[components, dim]`."""
        jacobian = torch.stack([self._linear.gradient(number)[position] for number in vector])
        by_component = self._parts[:, position] @ jacobian.mT
        return torch.cat([by_component, (vector.detach() - by_component.sum(0))[None]])


class _Linear(NamedTuple):
    """A query, times the scale, and the keys of its head, linear in the residual stream `x [batch, positions, d_model]`."""

    q: torch.Tensor
    k: torch.Tensor
    x: torch.Tensor
    item: int
    row: int

    def gradient(self, number: torch.Tensor) -> torch.Tensor:
        """`[positions, d_model]`"""
        return torch.autograd.grad(number, self.x, retain_graph=True)[0][self.item]


def qk_attribution(
    model: torch.nn.Module,
    inputs: Any,
    layer: int,
    head: int,
    row: int = -1,
    *,
    kind: str = "self",
    item: int = 0,
    components: Mapping[str, torch.Tensor] | None = None,
) -> QkAttribution:
    """Why a head looks where it looks: the scores of a row, as sums over what earlier layers have written into the residual stream.

        why = regard.lens.qk_attribution(model, ids, layer=5, head=1)
        why.top_k(8)                    # (key, component, contribution)
        why.pair(17)                    # [row component, key component]

    `inputs`: input ids, or a dict of arguments of the model. Components are the embedding, and the attention and the rest of each earlier
    layer; in models with norms after the sum, each layer as a whole. `components`: directions of your own, `[d_model]` or
    `[positions, d_model]` each, such as features of a sparse autoencoder; what they leave of a score is its `bias`.
    Takes a forward pass, and memory for the residual stream of all earlier layers.
    """
    if kind == "cross":
        raise ValueError("kind: the keys of cross-attention are of another residual stream than its queries; use 'self' or 'encoder'")
    layers = _Pass(model, kind).run(inputs)
    if layer not in layers:
        raise ValueError(f"layer: no {kind} layer {layer}; there are {min(layers)} to {max(layers)}")
    seen = layers[layer]
    batch, heads, q_len, _ = seen.call.q.shape
    for name, given, size in (("head", head, heads), ("item", item, batch)):
        if not 0 <= given < size:
            raise ValueError(f"{name}: {given} is out of range, there are {size}")
    if not -q_len <= row < q_len:
        raise IndexError(f"row {row}: out of range, there are {q_len} rows")
    row %= q_len
    x = seen.stream.detach().clone().requires_grad_()
    q, k = _queries_and_keys(model, seen, x)
    scale = seen.call.options.get("scale") or 1 / math.sqrt(q.shape[-1])
    linear = _Linear(q[item, head, row] * scale, k[item, head * k.shape[1] // heads], x, item, row)
    names, parts = _parts(layers, layer, item) if components is None else _directions(components, seen.stream[item])
    return QkAttribution(names, parts, linear, _visible(seen.call, item, head, row))


def _queries_and_keys(model: torch.nn.Module, seen: _Seen, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a layer as functions of the residual stream, after rotary positions."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: torch.nn.Module, q: Any, k: Any, *_: Any) -> None:
        if module is seen.module:
            found.append((q, k))

    with switched(model), _callbacks.added(_callbacks.callbacks, keep), _linear_norms(seen), torch.enable_grad():
        seen.module(x if seen.norm is None else seen.norm(x), *seen.positional, **seen.arguments)
    return found[0]


def _visible(call: Call, item: int, head: int, row: int) -> np.ndarray:
    """Which keys a row sees: those with a weight if all scores are 0."""
    q = torch.zeros_like(call.q)
    options = {name: given for name, given in call.options.items() if name not in ("bias", "alibi", "relative")}
    bias = call.options.get("bias")
    if bias is not None:
        options["bias"] = torch.where(torch.isneginf(bias), bias, 0)
    _, aux = regard.torch.attention(q, call.k, call.k[..., :1], **options, return_aux=True)
    view = HeadView(Call(q, call.k, aux.lse, options), None)
    return view.tile((row, row + 1), (0, call.k.shape[2]))[item, head, 0] > 0


def _parts(layers: dict[int, _Seen], layer: int, item: int) -> tuple[list[str], torch.Tensor]:
    """What was added to the residual stream before a layer: names, and `[components, positions, d_model]`."""
    names, parts = ["embedding"], [layers[min(layers)].stream[item]]
    for number in range(min(layers), layer):
        seen = layers[number]
        change = layers[number + 1].stream[item] - seen.stream[item]
        if seen.norm is None:
            names, parts = [*names, f"layer {number}"], [*parts, change]
        else:
            names += [f"attention {number}", f"rest {number}"]
            parts += [seen.attended[item], change - seen.attended[item]]
    return names, torch.stack(parts)


def _directions(given: Mapping[str, torch.Tensor], stream: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    parts = []
    for name, one in given.items():
        try:
            parts.append(torch.as_tensor(one, dtype=stream.dtype).detach().expand(stream.shape))
        except RuntimeError:
            shape = list(torch.as_tensor(one).shape)
            raise ValueError(f"components[{name!r}]: {shape} does not fit {list(stream.shape)} [positions, d_model]; give [d_model] or both") from None
    return list(given), torch.stack(parts) if parts else stream.new_empty((0, *stream.shape))


def contributions(model: torch.nn.Module, inputs: Any, row: int = -1, *, kind: str = "self", item: int = 0) -> np.ndarray:
    """What each position contributes to an output, through the attention of all layers: ALTI (Ferrando et al. 2022).

        regard.lens.contributions(model, ids)       # [layers, positions]: shares of the input of each layer in the last row

    In a layer, position j contributes `T_i(x_j) = sum over heads of a_ij v_j W_O`, and `x_i` itself where j = i, to `y_i`, the residual stream
    after attention. Its share is `max(0, ||y_i||_1 - ||y_i - T_i(x_j)||_1)`, divided by the sum over j; shares of layers are multiplied, as
    in attention rollout. Time is that of n x n vectors of `d_model` numbers for each layer; memory is linear in n.
    """
    layers = _Pass(model, kind).run(inputs)
    seen = next(iter(layers.values()))
    batch, _, n, _ = seen.call.q.shape
    if not 0 <= item < batch:
        raise ValueError(f"item: {item} is out of range, there are {batch}")
    if not -n <= row < n:
        raise IndexError(f"row {row}: out of range, there are {n} rows")
    share = np.zeros(n)
    share[row % n] = 1.0
    found = []
    for one in reversed(layers.values()):
        share = _through_layer(model, one, item, share)
        found.append(share)
    return np.stack(found[::-1])


def _through_layer(model: torch.nn.Module, seen: _Seen, item: int, share: np.ndarray) -> np.ndarray:
    """Shares of the positions before a layer, from those after it."""
    heads, n = seen.call.q.shape[1], len(share)
    weight, bias = output_projection(model, seen.name, heads * seen.value.shape[-1])
    values = seen.value[item].repeat_interleave(heads // seen.value.shape[1], 0) @ weight.unflatten(0, (heads, -1))
    found = np.zeros(n)
    view = HeadView(seen.call, None)
    step = max(1, BLOCK // values[0].numel())
    for first in range(0, n, step):
        rows = np.arange(first, min(first + step, n))
        if not share[rows].any():
            continue
        weights = torch.from_numpy(view.tile((first, first + len(rows)), (0, n))[item]).to(values.dtype)
        parts = torch.einsum("hij,hjd->ijd", weights, values)
        parts[np.arange(len(rows)), rows] += seen.stream[item, first : first + len(rows)]
        own = parts.sum(1, keepdim=True) + (0 if bias is None else bias)
        near = (own.abs().sum(-1) - (own - parts).abs().sum(-1)).clamp(min=0).double().numpy()
        # A row to which no position contributes keeps its share.
        near[near.sum(-1) == 0, :] = np.eye(n)[rows][near.sum(-1) == 0]
        found += share[rows] @ (near / near.sum(-1, keepdims=True))
    return found
