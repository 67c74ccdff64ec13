"""Attention for PyTorch: `torch.ops.regard.attention_fwd` and `attention_bwd`, and the function that calls them.

Tensors are read where they lie, whatever their strides; gradients reach q, k, v and every option that is a tensor, in memory linear in
the length. The operators work under `torch.compile`, `torch.export` and with fake and meta tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, List, Literal, NamedTuple, Optional, Tuple, overload

import torch
from torch import Tensor

from . import _arrays, _regard
from ._call import Call, Options, describe, spelled_out

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Aux", "attention"]


class Aux(NamedTuple):
    """What a call has found beside its output."""

    lse: Tensor
    """`ln(sum of e^score)` of each row, `[batch, heads, q_len]`; `-inf` for one that sees nothing. `[total, heads]` where packed."""
    states: Tensor
    """What the way back needs where scores are in the thousands."""
    entropy: Optional[Tensor]
    """The entropy of each row's weights, if it was asked for; differentiable."""
    max_score: Optional[Tensor]
    """The largest score of each row, if the entropy was asked for."""


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: Literal[True], **options: Unpack[Options]) -> Tuple[Tensor, Aux]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: bool, **options: Unpack[Options]) -> Any: ...


@spelled_out
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_aux: bool = False, **options: Unpack[Options]) -> Any:
    """`regard.attention` for PyTorch's tensors on the CPU, with gradients: f32, f64, bf16, f16. The options are the same.

    Without a `seed`, what dropout drops follows from PyTorch's own generator. Threads are as many as PyTorch uses, unless given. Under
    `torch.autocast` tensors are cast as PyTorch's own attention casts them.
    """
    if options.get("dropout") and options.get("seed") is None:
        options["seed"] = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64)
    if torch.is_autocast_enabled("cpu"):
        q, k, v, options["bias"] = autocast(q, k, v, options.get("bias"))
        similarity = options.get("similarity")
        if isinstance(similarity, tuple):
            options["similarity"] = tuple(autocast(*similarity))
    if q.device.type not in ("cpu", "meta") or not q.device == k.device == v.device:
        raise TypeError(f"expected tensors of the CPU, found q of {q.device}, k of {k.device}, v of {v.device}; move them with .cpu()")
    q = _arrays.rows(q)
    call = describe(q, **options)
    learned, held = [[x if isinstance(x, Tensor) else torch.as_tensor(x) for x in xs] for xs in (call.learned, call.held)]
    out, lse, states, entropy, max_score = _attend(q, _arrays.rows(k), _arrays.rows(v), learned, held, call.text)
    if not return_aux:
        return out
    watched = bool(options.get("entropy"))
    return out, Aux(lse, states, entropy if watched else None, max_score if watched else None)


def _attend(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    if torch._C._are_functorch_transforms_active():
        return _Transformed.apply(options, len(learned), q, k, v, *learned, *held)
    return torch.ops.regard.attention_fwd.default(q, k, v, learned, held, options)


def autocast(*tensors: Any) -> List[Any]:
    """Tensors in the type of the autocast around a call, if there is one; as in PyTorch, f64 stays as it is, and so does what is none."""
    if not torch.is_autocast_enabled("cpu"):
        return list(tensors)
    dtype = torch.get_autocast_dtype("cpu")
    return [x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


# The operators are registered by hand: `torch.library.custom_op` takes lists of tensors apart for each call, which takes longer than a
# small attention does.
_library = torch.library.Library("regard", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_CALL = "Tensor q, Tensor k, Tensor v, Tensor[] learned, Tensor[] held, str options"
_library.define(f"attention_fwd({_CALL}) -> (Tensor out, Tensor lse, Tensor states, Tensor entropy, Tensor max_score)", tags=_TAGS)
_library.define(
    f"attention_bwd({_CALL}, Tensor[] output, Tensor d_out, Tensor? d_lse, Tensor? d_entropy, bool bias) -> Tensor[]", tags=_TAGS
)


@torch.library.impl(_library, "attention_fwd", "CPU")
def _forward(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    """Attention: out, lse, states, and, if they were asked for, entropies and largest scores; else nothing in their place."""
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
    """Dense, in the memory order that the engine gives to a result with the rows of x."""
    if x.ndim == 4 and x.stride(1) < x.stride(2):
        batch, heads, length, _ = x.shape
        return x.new_empty((batch, length, heads, dim)).transpose(1, 2)
    return x.new_empty((*x.shape[:-1], dim))


@torch.library.impl(_library, "attention_bwd", "CPU")
def _backward(q, k, v, learned, held, options, output, d_out, d_lse, d_entropy, bias) -> List[Tensor]:
    """The gradients by q, k, v and each of `learned`; nothing in the place of a bias that does not learn. `output` is that of
    `attention_fwd` without the largest scores."""
    call = Call(options, learned, held)
    known = [_arrays.rows(output[0]), *[_arrays.dense(x) for x in output[1:]]]  # `memory` tells where they lie and does not keep them
    out, lse, states, entropy = [_arrays.memory(x) for x in known]
    loss = [_arrays.rows(d_out), *[None if x is None else _arrays.dense(x) for x in (d_lse, d_entropy)]]
    found, _, _ = _regard.backward(
        call.on(torch.get_num_threads()).native(q, k, v),
        (out, lse, states, entropy if call.asks("entropy") else None),
        (*[None if x is None else _arrays.memory(x) for x in loss], None, bias, False),
    )
    # The engine sums the gradients of tensors that rows share in the numbers it computes with.
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
    """There and back. Its tensors are q, k, v, then those that learn, then those that do not."""

    @staticmethod
    def forward(ctx: Any, options: str, learned: int, *tensors: Tensor) -> Tuple[Tensor, ...]:
        found = _Transformed.forward(options, learned, *tensors)
        _Transformed.setup_context(ctx, (options, learned, *tensors), found)
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
            grads = _Last.apply(len(grads), *grads, q, k, v, *learned, d_out)
        return (None, None, *[x if needed else None for x, needed in zip(grads, wanted)], *[None] * len(held))

    @staticmethod
    def jvp(*_: Any) -> Any:
        raise NotImplementedError("forward mode: attention of regard has gradients in reverse mode alone")

    @staticmethod
    def vmap(*_: Any) -> Any:
        raise NotImplementedError("vmap: attention of regard takes all items at once; give what is mapped over as axis 0, the batch")


class _Transformed(_Attention):
    """The same in the form that `torch.func` needs, which takes longer to call."""

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


class _Last(torch.autograd.Function):
    """Gradients that cannot be differentiated once more, by the tensors that they depend on."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> Tuple[Tensor, ...]:
        return tuple([x.view_as(x) for x in tensors[:count]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[Any, ...], output: Tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("second derivatives: attention of regard is differentiable once; do without create_graph=True")


@torch.library.impl(_library, "attention_fwd", "Autograd")
def _differentiable(q: Tensor, k: Tensor, v: Tensor, learned: List[Tensor], held: List[Tensor], options: str) -> Tuple[Tensor, ...]:
    # PyTorch refuses forward mode where it finds no rule for it, but has to be asked.
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    if forward_mode or torch.is_grad_enabled() and any([x.requires_grad for x in (q, k, v, *learned)]):
        return _Attention.apply(options, len(learned), q, k, v, *learned, *held)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.regard.attention_fwd.default(q, k, v, learned, held, options)
