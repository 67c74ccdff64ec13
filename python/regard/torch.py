"""Attention for PyTorch: the operators `torch.ops.regard.attention_fwd` and `attention_bwd`, and the function that calls them.

Strided tensors are read zero-copy. Gradients with respect to q, k, v and every tensor option, in O(length) memory. The operators support
`torch.compile`, `torch.export`, and fake and meta tensors.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, List, Literal, NamedTuple, Optional, Tuple, overload

import torch
from torch import Tensor

from . import _arrays, _regard
from ._call import Call, Options, describe, described, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Aux", "attention"]


class Aux(NamedTuple):
    """Results of a call besides the output."""

    lse: Tensor
    """Log-sum-exp of the scores of each query, `[batch, heads, q_len]`; `-inf` if no key is visible. `[total, heads]` if packed."""
    states: Tensor
    """Softmax state that the backward pass needs for large scores (thousands)."""
    entropy: Optional[Tensor]
    """Entropy of the weights of each query, with `entropy=True`; differentiable."""
    max_score: Optional[Tensor]
    """Largest score of each query, with `entropy=True`."""


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Literal[True], **options: Unpack[Options]) -> Tuple[Tensor, Aux]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: bool, **options: Unpack[Options]) -> Any: ...


@spelled_out
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: bool = False, **options: Unpack[Options]) -> Any:
    """`regard.attention` for PyTorch CPU tensors, with gradients: f32, f64, bf16, f16. Same options.

    Without a `seed`, dropout uses PyTorch's default generator. `threads` defaults to `torch.get_num_threads()`. Under `torch.autocast`,
    tensors are cast as in `torch.nn.functional.scaled_dot_product_attention`.
    """
    if not return_aux and _runs_directly(q, k, v):
        call = described(q, options)
        if call.is_plain:
            return _attend_directly(call.on(torch.get_num_threads()).text, q, k, v)
    if options.get("dropout") and options.get("seed") is None:
        options["seed"] = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)
    if torch.is_autocast_enabled("cpu"):
        q, k, v, options["bias"] = autocast(q, k, v, options.get("bias"))
        similarity = options.get("similarity")
        if isinstance(similarity, tuple):
            options["similarity"] = tuple(autocast(*similarity))
    if q.device.type not in ("cpu", "meta") or not q.device == k.device == v.device:
        raise TypeError(f"expected CPU tensors, found q on {q.device}, k on {k.device}, v on {v.device}; move them with .cpu()")
    q, k, v = _arrays.rows(q), _arrays.rows(k), _arrays.rows(v)
    call = describe(q, **options)
    learned, held = [[x if isinstance(x, Tensor) else torch.as_tensor(x) for x in xs] for xs in (call.learned, call.held)]
    out, lse, states, entropy, max_score = _attend(q, k, v, learned, held, call.text)
    if not return_aux:
        return out
    watched = bool(options.get("entropy"))
    return out, Aux(lse, states, entropy if watched else None, max_score if watched else None)


def _runs_directly(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing needs the operator: no gradient, no compiler, no autocast, no transform or mode that watches operators. The operator
    costs as much as a small attention, and a loop over the tensors would double the time of this."""
    return (
        not torch.compiler.is_compiling()
        and (type(q) is type(k) is type(v) is Tensor and q.ndim == k.ndim == v.ndim == 4 and q.is_cpu and k.is_cpu and v.is_cpu)
        and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and torch.autograd.forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._autograd._profiler_enabled()
    )


def _load_native() -> bool:
    """Give the engine PyTorch's stable C interface: it then computes on PyTorch's threads (from PyTorch 2.10 on) and reads tensors itself
    (from 2.14 on). Returns whether it does the latter."""
    library = ctypes.CDLL(torch._C.__file__)

    def address(name: str) -> int:
        function = getattr(library, name, None)
        return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0

    tensors, threads = _regard.torch_functions()
    return _regard.load_torch([address(name) for name in tensors], [address(name) for name in threads])


_reads_tensors = _load_native()


def _attend_directly(options: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Output of a call whose options have no arrays, in the memory order of q."""
    if _reads_tensors and (found := _regard.attend_torch(options, q, k, v)) is not None:
        return found
    tensors = [x if x.stride(3) == 1 or x.shape[3] <= 1 else x.contiguous() for x in (q, k, v)]
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else _arrays.like_rows(q, v.shape[3])
    tensors.append(out)
    _regard.attend(options, *[(x.data_ptr(), _arrays.dtype_of(x), x.shape, x.stride()) for x in tensors])
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        return _FunctorchAttention.apply(options, len(learned), q, k, v, *learned, *held)
    return torch.ops.regard.attention_fwd.default(q, k, v, learned, held, options)


def autocast(*tensors: Any) -> List[Any]:
    """Cast tensors to the autocast dtype if autocast is on. As in PyTorch, f64 tensors and other objects are unchanged."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


# Registered without `torch.library.custom_op`, which flattens lists of tensors in each call: that costs more than a small attention.
_library = torch.library.Library("regard", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_CALL = "Tensor q, Tensor k, Tensor v, Tensor[] learned, Tensor[] held, str options"
_library.define(f"attention_fwd({_CALL}) -> (Tensor out, Tensor lse, Tensor states, Tensor entropy, Tensor max_score)", tags=_TAGS)
_library.define(
    f"attention_bwd({_CALL}, Tensor[] output, Tensor d_out, Tensor? d_lse, Tensor? d_entropy, bool bias) -> Tensor[]", tags=_TAGS
)


@torch.library.impl(_library, "attention_fwd", "CPU")
def _forward(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    """Forward pass: out, lse, states, entropy and max_score; the last two are empty without the option `entropy`."""
    kept = _regard.forward(Call(options, learned, held).on(torch.get_num_threads()).native(q, k, v))
    found = (kept.out, kept.lse, kept.states, kept.entropy, kept.max_score)
    return tuple([q.new_empty(0) if x is None else _arrays.torch_of(x) for x in found])


@torch.library.register_fake("regard::attention_fwd", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    number = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse, entropy, max_score = [q.new_empty(q.shape[:-1], dtype=number) for _ in range(3)]
    if not Call(options, learned, held).asks("entropy"):
        entropy, max_score = q.new_empty(0), q.new_empty(0)
    return _like(q, v.shape[-1]), lse, q.new_empty((*q.shape[:-1], 2), dtype=number), entropy, max_score


def _like(x: Tensor, dim: int) -> Tensor:
    """Empty dense tensor in the memory order of the engine's results."""
    return _arrays.like_rows(x, dim) if x.ndim == 4 else x.new_empty((*x.shape[:-1], dim))


@torch.library.impl(_library, "attention_bwd", "CPU")
def _backward(q, k, v, learned, held, options, output, d_out, d_lse, d_entropy, bias) -> List[Tensor]:
    """Backward pass: gradients with respect to q, k, v and each of `learned`; empty for a bias without gradient. `output` is that of
    `attention_fwd` without `max_score`."""
    call = Call(options, learned, held)
    known = [_arrays.rows(output[0]), *[_arrays.dense(x) for x in output[1:]]]  # `memory` does not keep the tensors alive
    out, lse, states, entropy = [_arrays.memory(x) for x in known]
    loss = [_arrays.rows(d_out), *[None if x is None else _arrays.dense(x) for x in (d_lse, d_entropy)]]
    found, _, _ = _regard.backward(
        call.on(torch.get_num_threads()).native(q, k, v),
        (out, lse, states, entropy if call.asks("entropy") else None),
        (*[None if x is None else _arrays.memory(x) for x in loss], None, bias, False),
    )
    # Gradients of tensors that rows share are accumulated in the compute type.
    return [q.new_empty(0) if x is None else _arrays.torch_of(x).to(of.dtype) for x, of in zip(found, [q, k, v, *learned])]


@torch.library.register_fake("regard::attention_bwd", lib=_library)
def _(q, k, v, learned, held, options, output, d_out, d_lse, d_entropy, bias) -> List[Tensor]:
    names = Call(options, learned, held).names
    return [_like(x, x.shape[-1]) for x in (q, k, v)] + [
        q.new_empty(0) if name == "bias" and not bias else _like(x, x.shape[-1]) if x.ndim == 4 else x.new_empty(x.shape)
        for name, x in zip(names, learned)
    ]


@torch.library.register_vmap("regard::attention_bwd", lib=_library)
def _(*_: Any) -> Any:
    return _Attention.vmap()


class _Attention(torch.autograd.Function):
    """Autograd function. Tensors: q, k, v, then those with gradients, then those without."""

    @staticmethod
    def forward(ctx: Any, options: str, learned: int, *tensors: Tensor) -> Tuple[Tensor, ...]:
        found = _FunctorchAttention.forward(options, learned, *tensors)
        _FunctorchAttention.setup_context(ctx, (options, learned, *tensors), found)
        return found

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any, _states: Any, d_entropy: Any, _max_score: Any) -> Tuple[Any, ...]:
        out, lse, states, entropy, q, k, v, *rest = ctx.saved_tensors
        learned, held = rest[: ctx.learned], rest[ctx.learned :]
        call = Call(ctx.options, learned, held)
        wanted = ctx.needs_input_grad[2:]
        bias = any([name == "bias" and needed for name, needed in zip(call.names, wanted[3:])])
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_entropy = d_entropy if call.asks("entropy") else None
        with torch.no_grad():
            grads = torch.ops.regard.attention_bwd.default(
                q, k, v, learned, held, ctx.options, [out, lse, states, entropy], d_out, d_lse, d_entropy, bias
            )
        if torch.is_grad_enabled():
            grads = _OnceDifferentiable.apply(len(grads), *grads, q, k, v, *learned, d_out)
        return (None, None, *[x if needed else None for x, needed in zip(grads, wanted)], *[None] * len(held))

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise NotImplementedError("forward-mode differentiation is not supported; use reverse mode")

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise NotImplementedError("vmap is not supported; use the batch axis")


class _FunctorchAttention(_Attention):
    """The same with `setup_context`, which `torch.func` requires; slower to call."""

    @staticmethod
    def forward(options: str, learned: int, *tensors: Tensor) -> Tuple[Tensor, ...]:  # type: ignore[override]  # the form without ctx
        q, k, v, *rest = tensors
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.regard.attention_fwd.default(q, k, v, rest[:learned], rest[learned:], options)

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
        ctx.options, ctx.learned, *tensors = inputs
        out, lse, states, entropy, max_score = output
        ctx.mark_non_differentiable(states, max_score)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, states, entropy, *tensors)


class _OnceDifferentiable(torch.autograd.Function):
    """Identity of the gradients that raises when differentiated again."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("second derivatives are not supported; remove create_graph=True")


@torch.library.impl(_library, "attention_fwd", "Autograd")
def _differentiable(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    # In forward mode, _Attention.apply raises through its jvp.
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if forward_mode or torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, *learned)]):
        return _Attention.apply(options, len(learned), q, k, v, *learned, *held)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.regard.attention_fwd.default(q, k, v, learned, held, options)
