"""Regard as a backend of ONNX, for models made of its attention operators.

    import onnx, regard.onnx
    model = regard.onnx.prepare(onnx.load("attention.onnx"))
    y, = model.run([q, k, v])

Operators: `Attention` (opset 23, 24 and 25) and `LinearAttention` (27), computed by the engine; `RotaryEmbedding` (23) and `TensorScatter` (24),
in NumPy. A model with any other operator, and a combination of inputs that an operator's specification forbids, is an error before
any computation.

Half types are computed in f32, so `softmax_precision` is a lower bound: only DOUBLE changes the computation, which is then f64.
The output `qk_matmul_output` is a `q_len x k_len` matrix: for debugging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

import regard
from regard import masks

__all__ = ["RegardBackend", "RegardModel", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]

Array = np.ndarray


@dataclass(frozen=True)
class _Node:
    """A node of a graph. An optional input or output that is left out has the name ""."""

    op: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    opset: int

    @classmethod
    def of(cls, node: onnx.NodeProto, opset: int) -> _Node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in _OPERATORS:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise NotImplementedError(f"{name}: not an operator of regard.onnx, which has {', '.join(_OPERATORS)}")
        attributes = {}
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                raise NotImplementedError(f"{node.op_type}: {attribute.name} refers to an attribute of a function; inline the function")
            value = onnx.helper.get_attribute_value(attribute)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        return cls(node.op_type, list(node.input), list(node.output), attributes, opset)

    def run(self, values: dict[str, Any]) -> None:
        """Compute the outputs from the inputs, both in `values`."""
        found = _OPERATORS[self.op](self, *[values[name] if name else None for name in self.inputs])
        values.update((name, x) for name, x in zip(self.outputs, found) if name)

    def wants(self, output: int) -> bool:
        """Whether an optional output is requested."""
        return len(self.outputs) > output and bool(self.outputs[output])

    def error(self, why: str) -> ValueError:
        return ValueError(f"{self.op}: {why}")


class RegardModel(BackendRep):
    """A model that is ready to run."""

    def __init__(self, model: onnx.ModelProto):
        graph = model.graph
        if graph.sparse_initializer:
            raise NotImplementedError(f"{graph.sparse_initializer[0].values.name}: a sparse initializer; store it as a dense one")
        opset = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
        self._nodes = [_Node.of(node, opset) for node in graph.node]
        self._constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
        self._inputs = [one.name for one in graph.input if one.name not in self._constants]
        self._outputs = [one.name for one in graph.output]

    def run(self, inputs: Sequence[Any], **unknown: Any) -> tuple[Array, ...]:
        """Outputs of the graph for its inputs, in their order."""
        _no_options(unknown)
        if len(inputs) != len(self._inputs):
            raise ValueError(f"inputs: found {len(inputs)}, the model has {len(self._inputs)} ({', '.join(self._inputs)})")
        values = {**self._constants, **{name: np.asarray(x) for name, x in zip(self._inputs, inputs)}}
        for node in self._nodes:
            node.run(values)
        return tuple(values[name] for name in self._outputs)


class RegardBackend(Backend):
    """The interface `onnx.backend.base.Backend`."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **unknown: Any) -> RegardModel:
        """Check a model and all of its operators."""
        _no_options(unknown)
        if not cls.supports_device(device):
            raise ValueError(f"device: {device!r}; use 'CPU'")
        super().prepare(model, device)
        return RegardModel(model)

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **unknown: Any) -> bool:
        """Whether all operators of a model are supported."""
        known = all(node.domain in ("", "ai.onnx") and node.op_type in _OPERATORS for node in model.graph.node)
        return known and cls.supports_device(device)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **unknown: Any) -> tuple[Array, ...]:
        """Outputs of a model for its inputs, in their order."""
        return cls.prepare(model, device, **unknown).run(inputs)

    @classmethod
    def run_node(  # type: ignore[override]
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, *, opset_version: Optional[int] = None,
        **unknown: Any,
    ) -> tuple[Array, ...]:
        """Outputs of one node for its inputs that are not left out."""
        _no_options(unknown)
        opset = onnx.defs.onnx_opset_version() if opset_version is None else opset_version
        super().run_node(node, inputs, device, outputs_info, opset_version=opset)  # type: ignore[arg-type]
        one = _Node.of(node, opset)
        names = [name for name in one.inputs if name]
        if len(inputs) != len(names):
            raise one.error(f"found {len(inputs)} inputs, the node has {len(names)}")
        values = dict(zip(names, map(np.asarray, inputs)))
        one.run(values)
        return tuple(values[name] for name in one.outputs if name)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Only "CPU"."""
        return device.partition(":")[0] == "CPU"


prepare = RegardBackend.prepare
run_model = RegardBackend.run_model
run_node = RegardBackend.run_node
is_compatible = RegardBackend.is_compatible
supports_device = RegardBackend.supports_device


def _no_options(unknown: dict[str, Any]) -> None:
    if unknown:
        raise TypeError(f"{next(iter(unknown))}: not an option of regard.onnx, which has none")


def _heads(node: _Node, name: str, x: Array, heads: Optional[int]) -> Array:
    """`[batch, length, heads * dim]` as `[batch, heads, length, dim]`, without a copy."""
    if not heads:
        raise node.error(f"{name} has 3 axes; set the attributes q_num_heads and kv_num_heads (num_heads of RotaryEmbedding)")
    if x.shape[2] % heads:
        raise node.error(f"{name} has {x.shape[2]} features, which {heads} heads do not divide")
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _packed(x: Array) -> Array:
    """`[batch, heads, length, dim]` as `[batch, length, heads * dim]`."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])


def _attention(
    node: _Node,
    q: Array,
    k: Array,
    v: Array,
    mask: Optional[Array] = None,
    past_k: Optional[Array] = None,
    past_v: Optional[Array] = None,
    lengths: Optional[Array] = None,
) -> tuple[Optional[Array], ...]:
    _check_attention(node, (q, k, v), past_k, past_v, lengths)
    heads = [node.attributes.get(name) for name in ("q_num_heads", "kv_num_heads")]
    was_packed, number = q.ndim == 3, q.dtype
    if was_packed:
        q, k, v = _heads(node, "Q", q, heads[0]), _heads(node, "K", k, heads[1]), _heads(node, "V", v, heads[1])
    past = 0
    if past_k is not None and past_v is not None:
        past = past_k.shape[2]
        k, v = np.concatenate((past_k, k), 2), np.concatenate((past_v, v), 2)
    present = k, v

    options = _score_options(node, q, k, mask, past, lengths)
    q, k, v = _of_one_type(node, q, k, v, options)
    if node.wants(3) and node.attributes.get("qk_matmul_output_mode", 0) == 3:
        out, aux = regard.attention(q, k, v, return_aux=True, **options)
        weights = regard.AttentionView(q, k, aux, **options).tile((0, q.shape[2]), (0, k.shape[2]))
        scores: Optional[Array] = weights.reshape(*q.shape[:3], k.shape[2])
    else:
        out = regard.attention(q, k, v, **options)
        scores = _scores(node, q, k, v, options) if node.wants(3) else None
    out = out.astype(number, copy=False)
    return _packed(out) if was_packed else out, *present, None if scores is None else scores.astype(number, copy=False)


def _check_attention(
    node: _Node, tensors: tuple[Array, ...], past_k: Optional[Array], past_v: Optional[Array], lengths: Optional[Array]
) -> None:
    """What the specification requires, and the engine does not check."""
    ndims = {x.ndim for x in tensors}
    if ndims not in ({3}, {4}):
        raise node.error(f"Q, K and V have {', '.join(str(x.ndim) for x in tensors)} axes; all must have 3, or all 4")
    if ndims == {4}:
        for name, x in (("q_num_heads", tensors[0]), ("kv_num_heads", tensors[1])):
            if node.attributes.get(name, x.shape[1]) != x.shape[1]:
                raise node.error(f"{name} is {node.attributes[name]}, the input has {x.shape[1]} heads; leave it out for 4 axes")
    if (past_k is None) != (past_v is None):
        raise node.error("past_key and past_value: give both or none")
    if lengths is not None:
        if past_k is not None or node.wants(1) or node.wants(2):
            raise node.error("nonpad_kv_seqlen is for a cache outside of the operator; leave out past and present keys and values")
        batch, k_len = tensors[1].shape[0], tensors[1].shape[-2]
        if lengths.shape != (batch,) or not all(0 <= n <= k_len for n in lengths.tolist()):
            raise node.error(f"nonpad_kv_seqlen: expected {batch} numbers from 0 to {k_len}, found {lengths.tolist()}")
    mode, precision = (node.attributes.get(name, 0) for name in ("qk_matmul_output_mode", "softmax_precision"))
    if mode not in (0, 1, 2, 3):
        raise node.error(f"qk_matmul_output_mode is {mode}; use 0, 1, 2 or 3")
    if precision not in (0, onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16):
        raise node.error(f"softmax_precision is {precision}; use 1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16)")


def _score_options(node: _Node, q: Array, k: Array, mask: Optional[Array], past: int, lengths: Optional[Array]) -> dict[str, Any]:
    """Options of `regard.attention`."""
    left, right = (_window(node, name) for name in ("left_window_size", "right_window_size"))
    right = 0 if node.attributes.get("is_causal", 0) else right
    rule = _visible(q.shape[2], left, right, lengths)
    options: dict[str, Any] = {"align": past, "scale": node.attributes.get("scale"), "softcap": node.attributes.get("softcap") or None}
    if mask is not None:
        mask = _broadcast(node, mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
        if mask.dtype == bool:
            rule = masks.bits(mask) if rule is None else rule & masks.bits(mask)
        else:
            options["bias"] = mask
    return {**options, "mask": rule}


def _window(node: _Node, name: str) -> Optional[int]:
    keys = node.attributes.get(name, -1)
    if keys < -1:
        raise node.error(f"{name} is {keys}; use -1 (unbounded) or a number of positions")
    return None if keys == -1 else keys


def _visible(q_len: int, left: Optional[int], right: Optional[int], lengths: Optional[Array]) -> Optional[masks.Mask]:
    """Keys from `left` before the position of a row to `right` after it. With `lengths`, only the first of them are keys, and the last
    row is at the last one, which differs between items: a range of keys for each row instead of a rule."""
    if lengths is None:
        return None if left is None and right is None else masks.band(left, right)
    ends = lengths[:, None]
    at = ends - q_len + np.arange(q_len)
    first = np.zeros_like(at) if left is None else (at - left).clip(0)
    last = ends if right is None else np.minimum(at + right + 1, ends)
    return masks.ranges(np.stack([first, np.maximum(first, last)], -1)[:, None, :, None])


def _broadcast(node: _Node, mask: Array, sizes: tuple[int, ...]) -> Array:
    """`attn_mask` with 4 axes. From opset 24 on it may have fewer keys than K: those without a mask are hidden."""
    if mask.dtype != bool and mask.dtype.kind in "iu":
        raise node.error(f"attn_mask has dtype {mask.dtype}; use bool (True = visible) or floats, which are added to the scores")
    k_len, missing = sizes[3], sizes[3] - mask.shape[-1] if mask.ndim else 0
    if missing > 0 and node.opset >= 24:
        hidden = False if mask.dtype == bool else -np.inf
        mask = np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)], constant_values=hidden)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if mask.ndim > 4 or any(n not in (1, size) for n, size in zip(mask.shape, sizes)):
        raise node.error(f"attn_mask {list(mask.shape)} does not broadcast to {list(sizes)}")
    return np.broadcast_to(mask, (*mask.shape[:3], k_len))


def _of_one_type(node: _Node, q: Array, k: Array, v: Array, options: dict[str, Any]) -> list[Array]:
    """Tensors and bias in one type, as the engine takes them: their own if it is one, else f32; f64 if one of them is, or the softmax."""
    bias = options.get("bias")
    names = {x.dtype.name for x in (q, k, v, *([] if bias is None else [bias]))}
    if node.attributes.get("softmax_precision") == onnx.TensorProto.DOUBLE:
        names.add("float64")
    number = q.dtype if len(names) == 1 else np.dtype("float64" if "float64" in names else "float32")
    if bias is not None:
        options["bias"] = bias.astype(number, copy=False)
    return [x.astype(number, copy=False) for x in (q, k, v)]


def _scores(node: _Node, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Array:
    """`qk_matmul_output` in mode 0 (scaled products), 1 (after the softcap) or 2 (with mask and bias)."""
    mode = node.attributes.get("qk_matmul_output_mode", 0)
    left_out = {0: ("softcap", "bias", "mask"), 1: ("bias", "mask"), 2: ()}[mode]
    return regard.steps(q, k, v, **{name: x for name, x in options.items() if name not in left_out}).scores


def _rotary_embedding(node: _Node, x: Array, cos: Array, sin: Array, positions: Optional[Array] = None) -> tuple[Array]:
    """Rotation by given cosines and sines. `regard.rope` computes its own from frequencies, so it cannot be used here."""
    if x.ndim not in (3, 4):
        raise node.error(f"X has {x.ndim} axes; it must have 3 or 4")
    heads = _heads(node, "X", x, node.attributes.get("num_heads")) if x.ndim == 3 else x
    batch, _, length, features = heads.shape
    dim = node.attributes.get("rotary_embedding_dim") or features
    if positions is not None:
        count = len(cos)
        if positions.shape != (batch, length) or positions.size and not 0 <= positions.min() <= positions.max() < count:
            raise node.error(f"position_ids: expected [{batch}, {length}] of 0 to {count - 1}, found {list(positions.shape)}")
        cos, sin = cos[positions], sin[positions]
    if dim % 2 or dim > features or not cos.shape == sin.shape == (batch, length, dim // 2):
        raise node.error(
            f"cos_cache and sin_cache: expected {[batch, length, dim // 2]} for an even number of at most {features} rotated features, "
            f"found {list(cos.shape)} and {list(sin.shape)} for {dim}"
        )
    cos, sin = (c.astype(np.float32)[:, None] for c in (cos, sin))
    pairs = (slice(0, dim, 2), slice(1, dim, 2)) if node.attributes.get("interleaved", 0) else (slice(0, dim // 2), slice(dim // 2, dim))
    a, b = (heads[..., half].astype(np.float32) for half in pairs)
    rotated = heads.copy()
    rotated[..., pairs[0]], rotated[..., pairs[1]] = a * cos - b * sin, a * sin + b * cos
    return (_packed(rotated) if x.ndim == 3 else rotated,)


def _tensor_scatter(node: _Node, past: Array, update: Array, first: Optional[Array] = None) -> tuple[Array]:
    """A copy of the cache with the update from position `first[b]` on."""
    mode, axis = node.attributes.get("mode", "linear"), node.attributes.get("axis", -2)
    axis += past.ndim if axis < 0 else 0
    if not 0 < axis < past.ndim:
        raise node.error(f"axis is {axis} of {past.ndim}; it must be an axis after the first one, which is the batch")
    size = past.shape[axis]
    count = update.shape[axis] if update.ndim == past.ndim else 0
    if update.shape != (*past.shape[:axis], count, *past.shape[axis + 1 :]) or count > size:
        raise node.error(f"update {list(update.shape)} does not fit into past_cache {list(past.shape)} along axis {axis}")
    batch = past.shape[0]
    first = np.zeros(batch, np.int64) if first is None else first
    if first.shape != (batch,):
        raise node.error(f"write_indices: expected [{batch}], found {list(first.shape)}")
    at = first[:, None] + np.arange(count)
    if mode == "circular":
        at %= size
    elif mode != "linear":
        raise node.error(f"mode is {mode!r}; use 'linear' or 'circular'")
    elif at.size and not 0 <= at.min() <= at.max() < size:
        raise node.error(f"write_indices: positions {at.min()} to {at.max()} of a cache of {size}; use mode 'circular' to wrap around")
    present = past.copy()
    np.moveaxis(present, axis, 1)[np.arange(batch)[:, None], at] = np.moveaxis(update, axis, 1)
    return (present,)


def _linear_attention(
    node: _Node,
    q: Array,
    k: Array,
    v: Array,
    state: Optional[Array] = None,
    decay: Optional[Array] = None,
    beta: Optional[Array] = None,
) -> tuple[Array, Array]:
    rule = node.attributes.get("update_rule", "gated_delta")
    if rule not in ("linear", "gated", "delta", "gated_delta"):
        raise node.error(f"update_rule is {rule!r}; use 'linear', 'gated', 'delta' or 'gated_delta'")
    for name, x, needed in (("decay", decay, "gated" in rule), ("beta", beta, "delta" in rule)):
        if (x is not None) != needed:
            raise node.error(f"update_rule {rule!r} {'needs' if needed else 'has no'} {name}")
    for name, x in (("query", q), ("key", k), ("value", v), ("decay", decay), ("beta", beta)):
        if x is not None and (x.ndim != 3 or x.shape[:2] != q.shape[:2]):
            raise node.error(f"{name}: expected {[*q.shape[:2], 'features']}, found {list(x.shape)}")
    number, kv_heads = q.dtype, node.attributes["kv_num_heads"]
    q, k, v = _heads(node, "query", q, node.attributes["q_num_heads"]), _heads(node, "key", k, kv_heads), _heads(node, "value", v, kv_heads)
    (batch, heads, _, dim), v_dim = q.shape, v.shape[3]
    if k.shape[3] != dim or heads % kv_heads:
        raise node.error(f"query has {heads} heads of {dim} features, key {kv_heads} of {k.shape[3]}: heads must divide, features be equal")
    if decay is not None:
        decay = _heads(node, "decay", decay, kv_heads)
        if decay.shape[3] not in (1, dim):
            raise node.error(f"decay has {decay.shape[3]} numbers for each head; use 1, or one for each of {dim} features")
    if beta is not None:
        if beta.shape[2] not in (1, kv_heads):
            raise node.error(f"beta has {beta.shape[2]} features; use 1, or one for each of {kv_heads} heads of keys")
        beta = _heads(node, "beta", beta, beta.shape[2])
        beta = np.broadcast_to(beta, (*k.shape[:3], 1))
    kept = number if state is None else state.dtype
    if state is not None and state.shape != (batch, kv_heads, dim, v_dim):
        raise node.error(f"past_state: expected {[batch, kv_heads, dim, v_dim]}, found {list(state.shape)}")
    tensors: list[Any] = [None if x is None else x.astype(np.float32) for x in (q, k, v, decay, beta, state)]
    q, k, v, decay, beta, state = tensors
    scale = node.attributes.get("scale", 0.0) or None
    out, aux = regard.DeltaRule(scale=scale)(q, k, v, g=decay, beta=beta, state=state, return_aux=True)
    return _packed(out.astype(number)), aux.state.astype(kept)


_OPERATORS: dict[str, Callable[..., tuple[Optional[Array], ...]]] = {
    "Attention": _attention,
    "LinearAttention": _linear_attention,
    "RotaryEmbedding": _rotary_embedding,
    "TensorScatter": _tensor_scatter,
}
