"""Value-weighted attention: the weights `a_ij ||v_j W_O||`, the norm of what a key adds to a row (Kobayashi et al. 2020).

The norm is one number for each head and key. Divided by their sum over a row, weighted weights are again a softmax: that of the scores plus the
logarithm of the norm. So a bias turns a call into one whose weights are these, and everything that reads weights reads them.
"""

from __future__ import annotations

import torch

import regard.torch

from ._record import Call

_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "out_lin", "o", "proj", "wo", "output.dense")
"""Output projections in Transformers, within the attention module or, as in BERT, beside it."""


def output_projection(model: torch.nn.Module, name: str, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """W_O of the attention module `name`, `[heads * v_dim, d_model]`, and its bias: the projection of its output with `width` inputs."""
    places = [model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])]
    found = {}
    for place in places:
        for own in _NAMES:
            module = dict(place.named_modules()).get(own)
            weight = getattr(module, "weight", None)
            if module is None or weight is None or weight.ndim != 2:
                continue
            # Conv1D of GPT-2 has its inputs first.
            weight = weight if hasattr(module, "nf") else weight.mT
            if weight.shape[0] == width:
                return weight.detach(), None if module.bias is None else module.bias.detach()
            found[own] = list(weight.shape)
    there = "; ".join(f"{own} has {shape}" for own, shape in found.items()) or f"there is none of {', '.join(_NAMES)}"
    raise ValueError(f"{name}: no output projection with {width} inputs, which the norms of values need: {there}")


def value_norms(value: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`||v_j W_O||` of each query head and key, `[batch, heads, keys]` in float64.

    With `W_O = R^T Q^T` of a QR decomposition, the norm is that of `v_j R^T`: `v_dim` numbers instead of `d_model`.
    """
    by_head = weight.double().unflatten(0, (heads, -1))
    triangle = torch.linalg.qr(by_head.mT, mode="r").R
    shared = value.detach().double().repeat_interleave(heads // value.shape[1], 1)
    return (shared @ triangle.mT).norm(dim=-1)


def weighted(call: Call, value: torch.Tensor, weight: torch.Tensor) -> Call:
    """The call whose weights are the value-weighted ones of another. Learned sinks are left out: they add nothing to a row."""
    options = {name: given for name, given in call.options.items() if name != "sinks"}
    number = torch.promote_types(call.q.dtype, torch.float32)
    # A bias has the type of q.
    q, k = call.q.to(number), call.k.to(number)
    bias = value_norms(value, weight, q.shape[1]).log()[:, :, None]
    own = options.get("bias")
    options["bias"] = (bias if own is None else bias + own.detach()).to(number)
    _, aux = regard.torch.attention(q, k, k[..., :1], **options, return_aux=True)
    return Call(q, k, aux.lse, options)
