"""PyTorch's scaled_dot_product_attention, asked by `regard bench` for one slice at a time.

Reads a case as one line of JSON and answers {"ready": repetitions} or {"error": why}; then, for each line `go`, runs
that many repetitions and answers {"seconds": of one}.
"""
import json
import math
import signal
import sys
import time
import warnings

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just stops
warnings.filterwarnings("ignore")


def answer(**what):
    print(json.dumps(what), flush=True)


try:
    import torch
    import torch.nn.functional as F
except Exception as why:
    answer(error=f"{type(why).__name__}: {why}")
    sys.exit()


def seen(rule, row, key):
    """Which keys [keys] each row [rows, 1] sees, as regard's mask of the same name."""
    kind, far = rule["rule"], row - key
    if kind == "causal":
        return far >= 0
    if kind == "window":
        return far.abs() < rule["keys"]
    if kind == "lengths":
        return key < torch.tensor(rule["lengths"]).view(-1, 1, 1, 1)
    if kind == "bits":
        return torch.rand(far.shape) < 0.5
    if kind == "blocks":
        return row // rule["size"] == key // rule["size"]
    if kind == "longformer":
        marked = torch.tensor(rule["global"])
        return (far.abs() < rule["window"]) | torch.isin(key, marked) | torch.isin(row, marked)
    if kind == "strided":
        return (far.abs() < rule["stride"]) | (far % rule["stride"] == 0)
    if kind == "fixed":
        block = rule["block"]
        return (row // block == key // block) | (key % block + rule["summary"] >= block)
    raise ValueError(f"no mask rule {kind}")


def options(case, dtype):
    """The arguments of the call that make mask and bias."""
    rules, queries, keys = case["rules"], case["queries"], case["keys"]
    if not rules and not case["bias"]:
        return {}
    if [rule["rule"] for rule in rules] == ["causal"] and queries == keys and not case["bias"]:
        return {"is_causal": True}
    key = torch.arange(keys)
    row = torch.arange(keys - queries, keys).view(-1, 1)
    mask = None
    for rule in rules:
        one = seen(rule, row, key)
        one = one.view((1,) * (4 - one.dim()) + one.shape)
        mask = one if mask is None else mask & one
    if not case["bias"]:
        return {"attn_mask": mask}
    if case["bias"] == "alibi":
        bias = -torch.tensor(case["slopes"], dtype=dtype).view(1, -1, 1, 1) * (row - key).abs()
    else:
        heads = case["heads"] if case["bias"] == "heads" else 1
        bias = torch.randn(1, heads, queries, keys, dtype=dtype)
    return {"attn_mask": bias if mask is None else bias.masked_fill(~mask, -math.inf)}


def prepare(case):
    """A function that makes one call."""
    if case["softcap"]:
        raise ValueError("its SDPA has no softcap")
    torch.manual_seed(1)
    torch.set_num_threads(case["threads"])
    dtype = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}[case["dtype"]]

    def tensor(heads, length, dim):
        if case["layout"] == "bshd":
            return torch.randn(case["batch"], length, heads, dim, dtype=dtype).transpose(1, 2)
        return torch.randn(case["batch"], heads, length, dim, dtype=dtype)

    q = tensor(case["heads"], case["queries"], case["dim"]) * case["spread"]
    k = tensor(case["kv_heads"], case["keys"], case["dim"])
    v = tensor(case["kv_heads"], case["keys"], case["v_dim"])
    more = options(case, dtype)
    if case["heads"] != case["kv_heads"]:
        more["enable_gqa"] = True
    if case["dropout"]:
        more["dropout_p"] = case["dropout"]
    if case["pass"] == "forward":
        return lambda: F.scaled_dot_product_attention(q, k, v, **more)
    learned = [q, k, v] + ([more["attn_mask"]] if case["bias"] in ("shared", "heads") else [])
    for tensor in learned:
        tensor.requires_grad_()
    forward = lambda: F.scaled_dot_product_attention(q, k, v, **more)
    out = forward()
    d_out = torch.randn_like(out)
    if case["pass"] == "both":
        return lambda: torch.autograd.grad(forward(), learned, d_out)
    return lambda: torch.autograd.grad(out, learned, d_out, retain_graph=True)


def timed(call, clock, repetitions):
    start = clock()
    for _ in range(repetitions):
        call()
    return (clock() - start) / repetitions


answer(ready=f"torch {torch.__version__}")
call, clock, repetitions = None, None, 1
inference = True
for line in sys.stdin:
    try:
        if line.strip() == "go":
            with torch.inference_mode(inference):
                answer(seconds=timed(call, clock, repetitions))
            continue
        call = None  # the last case's memory goes first
        case = json.loads(line)
        inference = case["pass"] == "forward"
        with torch.inference_mode(inference):
            call = prepare(case)
            clock = time.thread_time if case["clock"] == "cpu" else time.perf_counter
            timed(call, clock, 1)
            repetitions = max(1, math.ceil(case["slice"] / max(timed(call, clock, 1), 1e-7)))
        answer(ready=repetitions)
    except Exception as why:
        answer(error=(str(why) or type(why).__name__).splitlines()[0])
