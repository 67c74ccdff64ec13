"""auto-round-lib's attention (BestLA): on tensors, and for decoding on keys and values that it has packed before."""


def forms(case):
    kinds = [rule["rule"] for rule in case["rules"]]
    refuse(
        case, ("bias", "softcap", "sinks", "dropout", "additive", "top", "unknown"), ("f32", "bf16"),
        this_mask=kinds not in ([], ["causal"]) or (kinds and 1 < case["queries"] != case["keys"]),
        # 50 times slower than others where it was tried.
        a_fast_kernel_for_f32_prefills=case["dtype"] == "f32" and case["queries"] > 1,
        this_cache_or_layout=case["cached"] == "shared" or case["layout"] != "bhsd",
    )
    torch.manual_seed(1)
    torch.set_num_threads(case["threads"])
    dtype = torch.float32 if case["dtype"] == "f32" else torch.bfloat16
    batch, heads, kv, keys, dim = (case[name] for name in ("batch", "heads", "kv_heads", "keys", "dim"))
    q = torch.randn(batch, heads, case["queries"], dim, dtype=dtype)
    k, v = (torch.randn(batch, kv, keys, d, dtype=dtype) for d in (dim, case["v_dim"]))
    found = {"sdpa": lambda: ark.sdpa(q, k, v, is_causal=bool(kinds) and case["queries"] > 1)}
    if case["dtype"] == "bf16" and case["queries"] == 1:
        packed = ark.ark_cpu_packed_kv_alloc(batch, kv, keys, dim, dtype=torch.bfloat16)
        ark.ark_cpu_update_packed_kv(*packed, k, v, 0, keys)
        wide = q.float()
        found["packed before"] = lambda: ark.ark_cpu_bestla_sdpa_packed(wide, *packed, keys, keys, kv)
    return found


def start():
    global torch, ark
    import importlib.metadata

    import torch
    import auto_round_kernel as ark

    torch.set_flush_denormal(True)  # as ours
    torch.set_grad_enabled(False)
    return f"auto-round-lib {importlib.metadata.version('auto-round-lib')}", forms, lambda out: out.float().numpy()


serve(start)
