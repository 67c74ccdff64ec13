"""A plugin of pytest for vLLM's tests of its CPU attention: their three functions on `regard.KvCache`, without vLLM."""

from __future__ import annotations

import enum
import sys
import types

import torch

import regard


def _module(name, **members):
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module


class CpuArchEnum(enum.Enum):
    X86, ARM, RISCV = range(3)


def cpu_attn_get_scheduler_metadata(**_):
    """How vLLM distributes work: Regard plans each call by itself."""


def cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"):
    """Writes rows into the slots of caches `[blocks, heads, block, dim]`, as bytes of PyTorch's `float8_e4m3fn` if in fp8."""
    if kv_cache_dtype not in ("auto", "fp8_e4m3"):
        raise NotImplementedError(f"kv_cache_dtype {kv_cache_dtype}: a cache of Regard in 8 bits is int8 or fp8_e4m3")
    if kv_cache_dtype == "fp8_e4m3":
        rows = ((key, k_scale), (value, v_scale))
        key, value = ((x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8) for x, scale in rows)
    at = slot_mapping // key_cache.shape[2], slot_mapping % key_cache.shape[2]
    key_cache.transpose(1, 2)[at], value_cache.transpose(1, 2)[at] = key, value


def cpu_attention_with_kv_cache(
    query, key_cache, value_cache, output, query_start_loc, seq_lens, scale, causal, alibi_slopes, sliding_window, block_table, softcap,
    scheduler_metadata, s_aux, dynamic_causal=None, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
):  # fmt: skip
    """Attention of packed queries over the pages of a `regard.KvCache`, filled from the blocks of each sequence in their order."""
    _, heads, block, dim = key_cache.shape
    fp8 = kv_cache_dtype == "fp8_e4m3"
    options = {"scale": scale * k_scale if fp8 else scale, "softcap": softcap or None, "alibi": alibi_slopes, "sinks": s_aux}
    window = None if sliding_window < 0 else sliding_window - 1
    cache = regard.KvCache(heads, dim, dim, query.dtype, budget=1 << 34, quantization="fp8_e4m3" if fp8 else None)
    sequences = []
    for table, length in zip(block_table, seq_lens.tolist()):
        pages = table[: -(-length // block)].long()
        sequences.append(cache.start())
        rows = [x[pages].transpose(0, 1).flatten(1, 2)[:, :length].contiguous() for x in (key_cache, value_cache)]
        # Numbers of fp8, which the cache stores as they are.
        cache.append(sequences[-1], *[x.view(torch.float8_e4m3fn).to(query.dtype) if fp8 else x for x in rows])
    causals = [causal] * len(sequences) if dynamic_causal is None else dynamic_causal.tolist()
    for one in set(causals):
        chosen = [i for i, other in enumerate(causals) if other == one]
        rows = [torch.arange(query_start_loc[i], query_start_loc[i + 1]) for i in chosen]
        offsets = torch.tensor([0, *[len(x) for x in rows]]).cumsum(0)
        mask = regard.masks.band(window, 0 if one else window)
        found = cache.attention(query[torch.cat(rows)], [sequences[i] for i in chosen], mask=mask, q_offsets=offsets, **options)
        output[torch.cat(rows)] = found * v_scale if fp8 else found


def set_random_seed(seed):
    torch.manual_seed(seed)


_platform = types.SimpleNamespace(is_cpu=lambda: True, get_cpu_architecture=lambda: CpuArchEnum.X86)
for package in ("vllm", "vllm.utils", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
    _module(package)
_module("vllm.platforms", CpuArchEnum=CpuArchEnum, current_platform=_platform)
_module("vllm.utils.torch_utils", set_random_seed=set_random_seed)
_module("vllm.v1.attention.backends.cpu_attn", _get_attn_isa=lambda *_: "vec")
_module(
    "vllm._custom_ops", cpu_attention_with_kv_cache=cpu_attention_with_kv_cache,
    cpu_attn_get_scheduler_metadata=cpu_attn_get_scheduler_metadata, cpu_attn_reshape_and_cache=cpu_attn_reshape_and_cache,
)  # fmt: skip
