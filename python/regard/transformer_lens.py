"""Fused attention for a bridge of TransformerLens, layer by layer.

    from transformer_lens.model_bridge import TransformerBridge
    import regard.transformer_lens

    bridge = TransformerBridge.boot_transformers("gpt2")
    with regard.transformer_lens.fused(bridge):
        logits, cache = bridge.run_with_cache(ids, names_filter=["blocks.5.attn.hook_pattern", "ln_final.hook_normalized"])

A layer with a hook on its pattern, or on anything else that only the computation of TransformerLens passes on, runs as before: layer 5
makes its n x n tensor, which hooks may read and change. The other layers run in Regard's kernel, in O(n) memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import AttentionBridge, JointQKVAttentionBridge, PositionEmbeddingsAttentionBridge

import regard.hf
import regard.torch

from ._record import Call, HeadView
from ._sites import switched

__all__ = ["fused"]

FUSED_HOOKS = {"hook_in", "hook_out", "hook_hidden_states"}
"""Hooks of an attention bridge that fire around the fused call as well. So do those of the projections q, k, v and o, which are modules of
their own."""


@contextlib.contextmanager
def fused(bridge: Any) -> Iterator[None]:
    """Run the attention of a `TransformerBridge` fused inside the context, except in layers with hooks on scores or patterns.

    Results are those of the bridge up to rounding. Layers of the types of Llama (separate projections) and of GPT-2 (a joint one) are
    fused; other types compute as before. `regard.hf.intervene(bridge.original_model, ..)` acts on the fused layers.
    """
    layers = [module for module in bridge.original_model.modules() if isinstance(module, AttentionBridge)]
    replaced = [(layer, "_reconstruct_attention" if type(layer) is JointQKVAttentionBridge else "forward") for layer in layers]
    # Those of an outer context.
    before = [layer.__dict__.get(name) for layer, name in replaced]
    try:
        for layer, name in replaced:
            # A bridge passes assignments of attributes on to the module of Transformers.
            layer.__dict__[name] = functools.partial(_separate if name == "forward" else _joint, layer, getattr(layer, name))
        with switched(bridge.original_model):
            yield
    finally:
        for (layer, name), method in zip(replaced, before):
            if method is None:
                layer.__dict__.pop(name, None)
            else:
                layer.__dict__[name] = method


def _needs_pattern(layer: AttentionBridge) -> bool:
    """Whether a hook or a setting asks for what the fused call does not pass on."""
    settings = ("use_split_qkv_input", "use_attn_in", "use_attn_result")
    hooks = [hook for name, hook in layer.named_children() if isinstance(hook, HookPoint) and name not in FUSED_HOOKS]
    return any(getattr(layer.config, name, False) for name in settings) or any(hook.fwd_hooks or hook.bwd_hooks for hook in hooks)


def _separate(layer: AttentionBridge, own: Any, *args: Any, **options: Any) -> Any:
    """The forward pass of a layer with separate projections: that of its Transformers module, whose projections have the hooks."""
    if type(layer) is not PositionEmbeddingsAttentionBridge or _needs_pattern(layer):
        return own(*args, **_with_dense_mask(options))
    with regard.hf.attentions(layers=[]):  # `run_with_cache` always sets output_attentions
        return AttentionBridge.forward(layer, *args, **options)


def _joint(layer: Any, own: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """Attention of a layer with a joint projection, after it: the bridge has its own q, k and v, not those of the Transformers module."""
    if _needs_pattern(layer):
        return own(q, k, v, **_with_dense_mask(options))
    heads = layer.config.n_heads
    kv_heads = getattr(layer.config, "n_key_value_heads", None) or heads
    q, k, v, *_, dim = layer._reshape_qkv_to_heads(q, k, v, heads, kv_heads)
    k, v = layer._update_kv_cache(k, v, **options)
    scaling = dim**-0.5
    if getattr(layer.config, "scale_attn_by_inverse_layer_idx", False):
        scaling /= layer._layer_idx + 1
    module = layer.original_component
    dropout = module.attn_dropout.p if layer.training and hasattr(module, "attn_dropout") else 0.0
    with regard.hf.attentions(layers=[]):
        out, _ = regard.hf.attention(module, q, k, v, options.get("attention_mask"), scaling=scaling, dropout=dropout)
    return layer._apply_output_projection(out.flatten(2)), None


def _with_dense_mask(options: dict[str, Any]) -> dict[str, Any]:
    """Options with a mask of booleans in place of one of rules: zero queries give every visible key the same weight."""
    mask = options.get("attention_mask")
    if not isinstance(mask, regard.hf.AttentionMask):
        return options
    batch, _, rows, keys = mask.shape
    q, k = torch.zeros(batch, 1, rows, 1), torch.zeros(batch, 1, keys, 1)
    scores: dict[str, Any] = {"mask": mask.mask, "align": mask.align}
    _, aux = regard.torch.attention(q, k, k, **scores, return_aux=True)
    weights = HeadView(Call(q, k, aux.lse, scores), None).tile((0, rows), (0, keys))
    return {**options, "attention_mask": torch.from_numpy(weights > 0)}
