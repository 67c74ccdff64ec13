"""What components of the residual stream do in attention: which of them make a score, and what positions contribute to an output.

A component is what one layer adds: the embedding, the attention of a layer, the rest of a layer (its feed-forward network). With the
statistics of the norms held fixed, queries and keys are linear in the residual stream, so that a score is exactly a sum over components.
"""

from __future__ import annotations

import contextlib
import functools
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


class _Layer(NamedTuple):
    """One layer of a forward pass: the residual stream before it, and its attention."""

    module: torch.nn.Module
    norm: Optional[torch.nn.Module]
    """Between the residual stream and the attention; None where the attention reads the stream itself."""
    name: str
    positional: tuple[Any, ...]
    arguments: dict[str, Any]
    """Of the attention module, without hidden states."""
    stream: torch.Tensor
    added: Optional[torch.Tensor]
    """What attention adds to the residual stream. None where a layer is not the sum of its input and what its modules add, as with norms
    after the sum."""
    normalized: list[torch.Tensor]
    """Inputs of the norms of a layer that is not such a sum: the residual stream after attention is one of them."""
    call: Call
    value: torch.Tensor


class _Pass(ModelCalls):
    """Records all layers of one kind in one forward pass without a KV cache."""

    def __init__(self, model: torch.nn.Module, kind: str):
        super().__init__(model)
        self.kind = kind
        self.layers: dict[int, _Layer] = {}
        self._calls: dict[torch.nn.Module, tuple[int, Call, torch.Tensor]] = {}
        self._inputs: dict[torch.nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._outputs: dict[torch.nn.Module, Any] = {}

    def __call__(self, module: torch.nn.Module, q: Any, k: Any, v: Any, options: dict[str, Any], aux: Any) -> None:
        if module not in self.names:
            return
        site = self.next_site(module)
        if site.kind == self.kind:
            self._calls[module] = (site.layer, Call(q, k, aux.lse, options), v)

    def run(self, inputs: Any) -> dict[int, _Layer]:
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
        if self._calls:
            name = self.names[next(iter(self._calls))]
            raise ValueError(f"{name}: the module that contains it is not called, so the residual stream is unknown; this architecture is not supported")
        if not self.layers:
            raise ValueError(f"kind: no {self.kind} attention called regard; a model of one stack has 'self', a translator 'encoder' and 'self'")
        return dict(sorted(self.layers.items()))

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._inputs[module] = args, options

    def _exit(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        self._outputs[module] = out[0] if isinstance(out, tuple) else out
        attentions = [child for child in module.children() if child in self._calls]
        for child in attentions:
            layer, call, value = self._calls.pop(child)
            self.layers[layer] = self._layer(module, child, call, value)
        if attentions:
            for inside in module.modules():  # frees what this layer has computed
                self._inputs.pop(inside, None)
                self._outputs.pop(inside, None)

    def _layer(self, block: torch.nn.Module, module: torch.nn.Module, call: Call, value: torch.Tensor) -> _Layer:
        args, options = self._inputs[module]
        hidden, stream = _hidden(self._inputs[module]), _hidden(self._inputs[block])
        norms = [child for child in block.children() if self._outputs.get(child) is hidden and _hidden(self._inputs[child]) is stream]
        if not norms and hidden is not stream:
            raise ValueError(f"{self.names[module]}: its input is neither the residual stream nor a norm of it; this architecture is not supported")
        arguments = {name: given for name, given in options.items() if name != "hidden_states"}
        added, normalized = self._added(block, module, stream), []
        if added is None:
            inside = set(module.modules())
            after = [one for one in block.modules() if "Norm" in type(one).__name__ and one in self._inputs and one not in inside]
            normalized = [x.view_as(stream) for x in (_hidden(self._inputs[one]) for one in after) if _is_like(x, stream)]
        name, norm = self.names[module], norms[0] if norms else None
        return _Layer(module, norm, name, args[1:], arguments, stream, added, normalized, call, value)

    def _added(self, block: torch.nn.Module, module: torch.nn.Module, stream: torch.Tensor) -> Optional[torch.Tensor]:
        """What attention adds to the residual stream: its output, behind modules of the block that take it (a norm in Gemma 2), times a factor
        (Granite). The output of the block must be the sum of the stream, this, and multiples of outputs of its other modules; else None."""
        added = self._outputs[module]
        others = [child for child in block.children() if child is not module and child in self._outputs]
        while following := [child for child in others if _hidden(self._inputs[child]) is added]:
            others = [child for child in others if child not in following]
            added = self._outputs[following[0]]
        out = self._outputs[block]
        if not (_is_like(added, stream) and _is_like(out, stream)):
            return None
        terms: list[Any] = [x for x in map(self._outputs.get, others) if _is_like(x, stream) and x is not added]
        own, *terms = [_sample(x) for x in (added, *terms)]
        change = _sample(out) - _sample(stream)
        rounding = 4 * torch.finfo(stream.dtype).eps * (_sample(out).norm() + _sample(stream).norm())
        if _fit(change - own, terms)[1] <= rounding:
            return added.view_as(stream)
        factors, error = _fit(change, [own, *terms])
        return added.view_as(stream) * float(factors[0]) if error <= rounding else None


def _is_like(x: Any, stream: torch.Tensor) -> bool:
    """Whether this has the numbers of a residual stream; some blocks join batch and positions."""
    return torch.is_tensor(x) and x.numel() == stream.numel() and x.shape[-1] == stream.shape[-1]


SAMPLE = 64
"""Positions at which the sum of a layer is verified."""


def _sample(x: torch.Tensor) -> torch.Tensor:
    """Numbers of some positions of `[batch, positions, d_model]`, as one vector in f64."""
    rows = x.flatten(0, -2)
    return rows[:: max(1, len(rows) // SAMPLE)].flatten().double()


def _fit(x: torch.Tensor, terms: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
    """Factors of the sum of terms that is nearest to x, and its distance."""
    if not terms:
        return x.new_empty(0), float(x.norm())
    columns = torch.stack(terms, 1)
    # gelsd: outputs can be linearly dependent, such as those of a module and of a dropout behind it.
    factors = torch.linalg.lstsq(columns, x[:, None], driver="gelsd").solution
    return factors[:, 0], float((x[:, None] - columns @ factors).norm())


def _hidden(given: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, options = given
    return args[0] if args else options.get("hidden_states")


@contextlib.contextmanager
def _linear_norms(layer: _Layer) -> Iterator[None]:
    """Holds the statistics of the norm before attention, and of norms of queries and keys, fixed: they become linear."""
    inside = [module for module in layer.module.modules() if "Norm" in type(module).__name__]
    hooks = [norm.register_forward_hook(_linear) for norm in ([layer.norm] if layer.norm is not None else []) + inside]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _linear(norm: torch.nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
    """The output of a norm as a linear function of its input: `factor * weight * x + bias`, or of x without its mean.

    Weight and bias are read from outputs, not from parameters: some norms multiply by `weight + 1`.
    """
    number = args[0].dtype
    x = args[0].to(torch.promote_types(number, torch.float32))
    near = functools.partial(_near, within=max(1e-3, 4 * torch.finfo(number).eps))
    with torch.no_grad():

        def norm_of(given: torch.Tensor) -> torch.Tensor:
            return norm.forward(given.to(number), *args[1:]).to(x.dtype)

        bias = norm_of(torch.zeros_like(x))
        exact = norm_of(x)
        # Of a norm that subtracts the mean, nothing changes with it.
        shifted = norm_of(x + x.std(-1, keepdim=True))
        centers = near(shifted - bias, exact - bias)
        probe = torch.full_like(x, 64.0)
        probe[..., 1::2] *= -1
        weight = (norm_of(probe) - bias) / (_centered(probe) if centers else probe)
    terms = (_centered(x) if centers else x) * weight
    with torch.no_grad():
        size = terms.square().sum(-1, keepdim=True)
        factor = torch.where(size == 0, 0, ((exact - bias) * terms).sum(-1, keepdim=True) / size)
        if not near(terms * factor, exact - bias):
            raise ValueError(f"{type(norm).__name__}: this norm is not supported; it is not a weight of each feature, times a statistic, and a bias")
    return (terms * factor + bias).to(out.dtype)


def _centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def _near(found: torch.Tensor, exact: torch.Tensor, within: float) -> bool:
    return bool((found - exact).norm() <= within * exact.norm())


class QkAttribution:
    """The scores of one row, as sums over components of the residual stream: see `regard.lens.qk_attribution`.

    names           components; the last one is `bias`, what no component makes
    keys            [components, keys]: what each component at a key adds to the score of this key
    scores          [keys]: their sums, the scores before softcap, biases and mask
    top_k(8)        the largest contributions of the row: key, component, contribution
    pair(key)       [components, components]: row component by key component; the sum is the score of this key

    Keys that the row does not see have NaN.
    """

    def __init__(self, names: list[str], components: torch.Tensor, linear: _Linear, visible: np.ndarray):
        self.names = [*names, "bias"]
        self._components, self._linear = components, linear
        total = _numpy(linear.k.detach() @ linear.q.detach())
        # The direction of the residual stream that each key reads for this row.
        directions = linear.gradient((linear.k @ linear.q.detach()).sum())
        by_component = _numpy((components * directions).sum(-1))
        keys = np.concatenate([by_component, (total - by_component.sum(0))[None]])
        self.keys, self.scores = np.where(visible, keys, np.nan), np.where(visible, total, np.nan)

    def top_k(self, k: int) -> list[tuple[int, str, float]]:
        """The k largest contributions by absolute value: key, component, contribution."""
        sizes = np.nan_to_num(np.abs(self.keys), nan=-1.0)
        best = np.argsort(-sizes, axis=None, kind="stable")[: min(k, int((sizes >= 0).sum()))]
        places = [np.unravel_index(int(i), sizes.shape) for i in best]
        return [(int(key), self.names[int(at)], float(self.keys[at, key])) for at, key in places]

    def pair(self, key: int) -> np.ndarray:
        """What each pair of a row component and a key component adds to the score of a key, `[components, components]`."""
        if not -len(self.scores) <= key < len(self.scores):
            raise IndexError(f"key {key}: out of range, there are {len(self.scores)} keys")
        key %= len(self.scores)
        if np.isnan(self.scores[key]):
            raise ValueError(f"key {key}: the mask hides it from row {self._linear.row}")
        linear = self._linear
        return _numpy(self._through(linear.q, linear.row) @ self._through(linear.k[key], key).mT)

    def _through(self, vector: torch.Tensor, position: int) -> torch.Tensor:
        """A query or key as a sum over the components of its position, `[components, dim]`."""
        jacobian = torch.stack([self._linear.gradient(number)[position] for number in vector])
        by_component = self._components[:, position] @ jacobian.mT
        return torch.cat([by_component, (vector.detach() - by_component.sum(0))[None]])


def _numpy(x: torch.Tensor) -> np.ndarray:
    """NumPy has no bf16."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).numpy()


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
    layer; a layer that is not a sum of its input, its attention and the rest, as with norms after the sum, is one component. `components`: directions of your own, `[d_model]` or
    `[positions, d_model]` each, such as features of a sparse autoencoder; what they leave of a score is its `bias`.
    Takes a forward pass, and memory for the residual stream of all earlier layers.
    """
    if kind == "cross":
        raise ValueError("kind: the keys of cross-attention are of another residual stream than its queries; use 'self' or 'encoder'")
    layers = _Pass(model, kind).run(inputs)
    if layer not in layers:
        raise ValueError(f"layer: no {kind} layer {layer}; there are {min(layers)} to {max(layers)}")
    one = layers[layer]
    batch, heads, q_len, _ = one.call.q.shape
    for name, given, size in (("head", head, heads), ("item", item, batch)):
        if not 0 <= given < size:
            raise ValueError(f"{name}: {given} is out of range, there are {size}")
    if not -q_len <= row < q_len:
        raise IndexError(f"row {row}: out of range, there are {q_len} rows")
    row %= q_len
    x = one.stream.detach().clone().requires_grad_()
    q, k = _queries_and_keys(model, one, x)
    scale = one.call.options.get("scale") or 1 / math.sqrt(q.shape[-1])
    linear = _Linear(q[item, head, row] * scale, k[item, head * k.shape[1] // heads], x, item, row)
    names, directions = _components(layers, layer, item) if components is None else _directions(components, one.stream[item])
    return QkAttribution(names, directions, linear, _visible(one.call, item, head, row))


def _queries_and_keys(model: torch.nn.Module, layer: _Layer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of a layer as functions of the residual stream, after rotary positions."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: torch.nn.Module, q: Any, k: Any, *_: Any) -> None:
        if module is layer.module:
            found.append((q, k))

    with switched(model), _callbacks.added(_callbacks.callbacks, keep), _linear_norms(layer), torch.enable_grad():
        layer.module(x if layer.norm is None else layer.norm(x), *layer.positional, **layer.arguments)
    within = max(1e-3, 16 * torch.finfo(x.dtype).eps)
    for name, linear, recorded in zip(("queries", "keys"), found[0], (layer.call.q, layer.call.k)):
        if not _near(linear.detach(), recorded, within):
            raise ValueError(f"{layer.name}: with its norms linear the {name} are others than in the model; a norm of it is not supported")
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


def _components(layers: dict[int, _Layer], layer: int, item: int) -> tuple[list[str], torch.Tensor]:
    """What was added to the residual stream before a layer: names, and `[components, positions, d_model]`."""
    numbers = [number for number in layers if number <= layer]
    first = numbers[0]
    names, found = ["embedding" if first == 0 else f"before layer {first}"], [layers[first].stream[item]]
    for number, after in zip(numbers, numbers[1:]):
        one = layers[number]
        change = layers[after].stream[item] - one.stream[item]
        # Layers between them have no attention that calls Regard, such as linear attention.
        span = str(number) if after == number + 1 else f"{number} to {after - 1}"
        if one.added is None:
            names, found = [*names, f"layer {span}"], [*found, change]
        else:
            names += [f"attention {number}", f"rest {span}"]
            found += [one.added[item], change - one.added[item]]
    return names, torch.stack(found)


def _directions(given: Mapping[str, torch.Tensor], stream: torch.Tensor) -> tuple[list[str], torch.Tensor]:
    found = []
    for name, one in given.items():
        try:
            found.append(torch.as_tensor(one, dtype=stream.dtype).detach().expand(stream.shape))
        except RuntimeError:
            shape = list(torch.as_tensor(one).shape)
            raise ValueError(f"components[{name!r}]: {shape} does not fit {list(stream.shape)} [positions, d_model]; give [d_model] or both") from None
    return list(given), torch.stack(found) if found else stream.new_empty((0, *stream.shape))


def contributions(model: torch.nn.Module, inputs: Any, row: int = -1, *, kind: str = "self", item: int = 0) -> np.ndarray:
    """What each position contributes to an output, through the attention of all layers: ALTI (Ferrando et al. 2022).

        regard.lens.contributions(model, ids)       # [layers, positions]: shares of the input of each layer in the last row

    In a layer, position j contributes `T_i(x_j) = sum over heads of a_ij v_j W_O`, and `x_i` itself where j = i, to `y_i`, the residual stream
    after attention. Its share is `max(0, ||y_i||_1 - ||y_i - T_i(x_j)||_1)`, divided by the sum over j; shares of layers are multiplied, as
    in attention rollout. Time is that of n x n vectors of `d_model` numbers for each layer; memory is linear in n. A model is an error
    if a norm (Gemma 2), a multiplier (Granite) or a gate stands between the values and the residual stream: there `y_i` is not this sum.
    """
    layers = _Pass(model, kind).run(inputs)
    missing = sorted(set(range(min(layers), max(layers))) - set(layers))
    if missing:
        raise ValueError(f"{kind} layer {missing[0]}: its attention did not call regard, so what it contributes is unknown")
    batch, _, n, _ = next(iter(layers.values())).call.q.shape
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


def _through_layer(model: torch.nn.Module, layer: _Layer, item: int, share: np.ndarray) -> np.ndarray:
    """Shares of the positions before a layer, from those after it."""
    heads, n = layer.call.q.shape[1], len(share)
    weight, bias = output_projection(model, layer.name, heads * layer.value.shape[-1])
    values = layer.value[item].repeat_interleave(heads // layer.value.shape[1], 0) @ weight.unflatten(0, (heads, -1))
    found = np.zeros(n)
    view = HeadView(layer.call, None)
    step = max(1, BLOCK // values[0].numel())
    for first in range(0, n, step):
        rows = np.arange(first, min(first + step, n))
        if not share[rows].any():
            continue
        weights = torch.from_numpy(view.tile((first, first + len(rows)), (0, n))[item]).to(values.dtype)
        terms = torch.einsum("hij,hjd->ijd", weights, values)
        stream = layer.stream[item, rows]
        terms[np.arange(len(rows)), rows] += stream
        sums = terms.sum(1, keepdim=True) + (0 if bias is None else bias)
        _check_sums(layer, item, rows, sums[:, 0])
        near = (sums.abs().sum(-1) - (sums - terms).abs().sum(-1)).clamp(min=0).double().numpy()
        # A row to which no position contributes keeps its share.
        near[near.sum(-1) == 0, :] = np.eye(n)[rows][near.sum(-1) == 0]
        found += share[rows] @ (near / near.sum(-1, keepdims=True))
    return found


def _check_sums(layer: _Layer, item: int, rows: np.ndarray, sums: torch.Tensor) -> None:
    """Whether these rows, sums over heads and keys, are the residual stream after attention."""
    stream = layer.stream[item, rows].double()
    expected = [x[item, rows].double() for x in layer.normalized] if layer.added is None else [stream + layer.added[item, rows].double()]
    eps = torch.finfo(sums.dtype).eps

    def agrees(exact: torch.Tensor) -> bool:
        rounding = 4 * eps * exact.norm() + max(1e-3, 4 * eps) * (exact - stream).norm()
        return bool((sums.double() - exact).norm() <= rounding)

    if not any(map(agrees, expected)):
        raise ValueError(
            f"{layer.name}: what it adds to the residual stream is not the sum of a_ij v_j W_O, because a norm, a multiplier, a gate or dropout "
            "stands between the values and the residual stream; contributions does not support this architecture"
        )
