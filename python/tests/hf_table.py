"""Small models of many architectures with random weights, and what to ask of them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Callable

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard.hf

regard.hf.register()

VOCABULARY = 96
SMALL = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
GROUPED = dict(SMALL, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)


@dataclass(frozen=True)
class Architecture:
    """How a model is made: the classes of Transformers and a small configuration."""

    config: str
    model: str
    options: dict[str, Any]
    kind: str = "decoder"  # decoder, encoder, translator (of text), image, sound
    packs: bool = True  # makes masks of positions that begin anew: gpt-oss does not, and the chunks of Llama 4 go by the place in the pack
    inputs: Callable[[int], dict[str, torch.Tensor]] | None = field(default=None)


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


ARCHITECTURES = {
    "gpt2": Architecture("GPT2Config", "GPT2LMHeadModel", dict(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2, pad_token_id=0)),
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM", dict(GROUPED)),
    "mistral": Architecture("MistralConfig", "MistralForCausalLM", dict(GROUPED, sliding_window=5)),
    "gemma2": Architecture("Gemma2Config", "Gemma2ForCausalLM", dict(
        GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=3.0)),
    "gemma3": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", dict(
        GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    "gpt_oss": Architecture("GptOssConfig", "GptOssForCausalLM", dict(
        GROUPED, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"]), packs=False),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM", dict(GROUPED, use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", dict(GROUPED, head_dim=8)),
    "phi": Architecture("PhiConfig", "PhiForCausalLM", dict(GROUPED)),
    "granite": Architecture("GraniteConfig", "GraniteForCausalLM", dict(GROUPED)),
    "llama4": Architecture("Llama4TextConfig", "Llama4ForCausalLM", dict(
        GROUPED, head_dim=8, intermediate_size_mlp=48, attention_chunk_size=5, num_local_experts=2, interleave_moe_layer_step=1,
        no_rope_layers=[1, 0]), packs=False),
    "deepseek_v3": Architecture("DeepseekV3Config", "DeepseekV3ForCausalLM", dict(
        GROUPED, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=2)),
    "bert": Architecture("BertConfig", "BertForMaskedLM", dict(SMALL), kind="encoder"),
    "distilbert": Architecture("DistilBertConfig", "DistilBertForMaskedLM", dict(
        vocab_size=VOCABULARY, dim=32, hidden_dim=48, n_layers=2, n_heads=4), kind="encoder"),
    "modernbert": Architecture("ModernBertConfig", "ModernBertForMaskedLM", dict(
        SMALL, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2), kind="encoder"),
    "t5": Architecture("T5Config", "T5ForConditionalGeneration", dict(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, decoder_start_token_id=0), kind="translator"),
    "bart": Architecture("BartConfig", "BartForConditionalGeneration", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None), kind="translator"),
    "whisper": Architecture("WhisperConfig", "WhisperForConditionalGeneration", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16, max_target_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None), kind="sound",
        inputs=lambda batch: dict(input_features=noise(batch, 8, 32))),
    "vit": Architecture("ViTConfig", "ViTForImageClassification", dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4), kind="image",
        inputs=lambda batch: dict(pixel_values=noise(batch, 3, 16, 16))),
    "siglip": Architecture("SiglipVisionConfig", "SiglipVisionModel", dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4), kind="image",
        inputs=lambda batch: dict(pixel_values=noise(batch, 3, 16, 16))),
}  # fmt: skip

DECODERS = [name for name, one in ARCHITECTURES.items() if one.kind == "decoder"]


@cache
def model(name: str) -> torch.nn.Module:
    """The model of this name, in evaluation mode."""
    return build(ARCHITECTURES[name])


def build(of: Architecture) -> torch.nn.Module:
    """A model in evaluation mode whose weights make scores that differ clearly between keys."""
    config = getattr(transformers, of.config)(**of.options)
    torch.manual_seed(0)
    made = getattr(transformers, of.model)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in made.parameters():
            spread = 1.2 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.1
            weight.add_(torch.randn_like(weight) * spread)
    return made


def run(name: str, by: str, call: Callable[[torch.nn.Module], Any]) -> Any:
    """What `call` has to say of the model with this `attn_implementation`."""
    made = model(name)
    made.set_attn_implementation(by)
    assert made.config._attn_implementation == by
    return call(made)


class DenseTensors(TorchDispatchMode):
    """The operators that made a tensor `[.., n, n]` while it is active."""

    def __init__(self, n: int):
        super().__init__()
        self.n, self.operators = n, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(out) if torch.is_tensor(one) and one.shape[-2:] == (self.n, self.n)]
        self.operators += [function.overloadpacket.__name__] * len(made)
        return out


def alike(found: torch.Tensor, wanted: torch.Tensor, of: str = "", scale: float = 0.0, within: float = 1e-4) -> None:
    """Equal to `within` of the largest number, or of `scale` if that is larger."""
    assert found.shape == wanted.shape, of
    assert torch.isfinite(found).all(), of
    allowed = within * max(float(wanted.abs().max()), scale)
    assert float((found - wanted).abs().max()) <= allowed, (of, float((found - wanted).abs().max()), allowed)


def minilm() -> Path:
    """Where `regard models get minilm` puts its weights."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
    return Path(os.environ.get("REGARD_CACHE") or cache) / "minilm"
