"""PyTorch's scaled_dot_product_attention, asked by `regard bench` for one slice at a time.

Reads a case as one line of JSON and answers {"ready": MiB that a call takes} or {"error": why}; then, for each line
`go`, runs some repetitions and answers {"seconds": of one}.
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


def additive(dim, dtype):
    """Bahdanau's attention as modules are written: [queries, keys, hidden] is made and kept for the way back."""
    size = dim**-0.5
    w_q, w_k, w = (torch.randn(dim, n, dtype=dtype) * size for n in (dim, dim, 1))

    def attend(q, k, v, attn_mask=None):
        hidden = torch.tanh((q @ w_q).unsqueeze(-2) + (k @ w_k).unsqueeze(-3))
        scores = (hidden @ w).squeeze(-1)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        return torch.softmax(scores, -1) @ v

    return attend, [w_q, w_k, w]


def top(k):
    """The softmax over the k highest scores of each row, by hiding the others."""

    def attend(q, key, v, attn_mask=None):
        scores = (q @ key.mT) * q.shape[-1] ** -0.5
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        best = scores.topk(min(k, scores.shape[-1]), -1)
        kept = torch.full_like(scores, -math.inf).scatter(-1, best.indices, best.values)
        return torch.softmax(kept, -1) @ v

    return attend


def prepare(case):
    """A function that makes one call."""
    if case["softcap"]:
        raise ValueError("its SDPA has no softcap")
    if case["unknown"]:
        raise ValueError(f"it has no {case['unknown']}")
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
    attend, weights = F.scaled_dot_product_attention, []
    if case["additive"] or case["top"]:
        if set(more) - {"attn_mask"}:
            raise ValueError("not written for these options")
        attend = top(case["top"])
        if case["additive"]:
            attend, weights = additive(case["dim"], dtype)
    if case["pass"] == "forward":
        return lambda: attend(q, k, v, **more)
    learned = [q, k, v] + ([more["attn_mask"]] if case["bias"] in ("shared", "heads") else []) + weights
    for tensor in learned:
        tensor.requires_grad_()
    forward = lambda: attend(q, k, v, **more)
    out = forward()
    d_out = torch.randn_like(out)
    if case["pass"] == "both":
        return lambda: torch.autograd.grad(forward(), learned, d_out)
    return lambda: torch.autograd.grad(out, learned, d_out, retain_graph=True)


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def extra(call):
    """MiB that a call takes beyond what was there before, where Linux tells."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS:")
    except OSError:
        before = None
    call()
    return None if before is None else max(0.0, status("VmHWM:") - before)


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
            taken = extra(call)
            repetitions = max(1, math.ceil(case["slice"] / max(timed(call, clock, 1), 1e-7)))
        answer(ready=taken)
    except Exception as why:
        answer(error=(str(why) or type(why).__name__).splitlines()[0])
