# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.22.2", "safetensors==0.8.0", "numpy==2.4.6"]
# ///
"""Whole models by PyTorch and transformers, called by the benchmark for one sample at a time.

The protocol of `regard bench`'s child.py, without forms. First it answers {"ready": its name}. It then reads a case as one line of JSON,
builds and runs it once, and answers {"ready": MiB that a run takes, "check": what it computed} or {"error": why}. For each line
`go` it makes some runs and answers {"seconds": of one, "tokens": of one}. Every case has `case` and `threads`, and may have
`sample`, the minimum seconds of a sample. f32 throughout. Tokens come with the case, so that both sides run the same:

    train     source [pairs][n], target [pairs][m], labels [pairs][m], ids without padding; vocab, d_model, n_heads, d_ff,
              n_layers (of each side). A step of Adam. tokens: source and target. check: the loss before the first step.
    generate  ids [batch][n], new. GPT-2 small with random weights, greedy, prompt included in the time, never stops early.
              tokens: the new ones. check: the ids of the first row.
    encode    ids [sentences][any], batch, model (a folder with config.json and model.safetensors of a BERT). Sorted by length,
              padded, mean of the tokens, length 1. tokens: without padding. check: the start of the first sentence's vector.
"""
import json
import math
import os
import signal
import sys
import time
import warnings

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C just stops
warnings.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"


def answer(**what):
    print(json.dumps(what), flush=True)


try:
    import torch
    import torch.nn.functional as F
    import transformers
    from torch import nn

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
except Exception as why:
    answer(error=f"{type(why).__name__}: {why}")
    sys.exit()


class Attention(nn.Module):
    """Projections of the same input are one product."""

    def __init__(self, dim, heads, cross=False):
        super().__init__()
        self.heads, self.cross = heads, cross
        if cross:
            self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        else:
            self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, memory=None, causal=False):
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        parts = (self.q(x), *self.kv(memory).chunk(2, -1)) if self.cross else self.qkv(x).chunk(3, -1)
        seen = F.scaled_dot_product_attention(*map(split, parts), is_causal=causal)
        return self.out(seen.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, cross):
        super().__init__()
        self.attention, self.attention_norm = Attention(dim, heads), nn.LayerNorm(dim)
        self.cross = Attention(dim, heads, True) if cross else None
        self.cross_norm = nn.LayerNorm(dim) if cross else None
        self.up, self.down, self.feed_forward_norm = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, x, memory=None):
        x = x + self.attention(self.attention_norm(x), causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.down(F.relu(self.up(self.feed_forward_norm(x))))


def sinusoids(length, dim):
    angle = torch.arange(length).view(-1, 1) * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class Transformer(nn.Module):
    """Encoder and decoder, norms before each step; the model of goldens/transformer.safetensors."""

    def __init__(self, case):
        super().__init__()
        dim, sizes, layers = case["d_model"], (case["d_model"], case["n_heads"], case["d_ff"]), range(case["n_layers"])
        self.source, self.target = (nn.Embedding(case["vocab"], dim) for _ in range(2))
        for table in (self.source, self.target):
            nn.init.normal_(table.weight, std=dim**-0.5)
        self.encoder = nn.ModuleList(Block(*sizes, False) for _ in layers)
        self.decoder = nn.ModuleList(Block(*sizes, True) for _ in layers)
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, case["vocab"])
        self.scale = dim**0.5
        longest = max(len(case["source"][0]), len(case["target"][0]))
        self.positions = nn.Buffer(sinusoids(longest, dim))

    def forward(self, source, target):
        memory = self.source(source) * self.scale + self.positions[: source.shape[1]]
        for block in self.encoder:
            memory = block(memory)
        memory, x = self.encoder_norm(memory), self.target(target) * self.scale + self.positions[: target.shape[1]]
        for block in self.decoder:
            x = block(x, memory)
        return self.head(self.decoder_norm(x))


def train(case):
    model = Transformer(case)
    source, target, labels = (torch.tensor(case[name]) for name in ("source", "target", "labels"))
    adam = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def run():
        loss = F.cross_entropy(model(source, target).flatten(0, 1), labels.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        return loss.item()

    return run, source.numel() + target.numel()


def generate(case):
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).eval()
    ids, new = torch.tensor(case["ids"]), case["new"]
    how = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def run():
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return found[0, ids.shape[1] :].tolist()

    return run, len(ids) * new


def encode(case):
    options = {"attn_implementation": "sdpa", "add_pooling_layer": False, "dtype": torch.float32}
    model = transformers.BertModel.from_pretrained(case["model"], **options).eval()
    sentences, batch = case["ids"], case["batch"]

    def vectors(some):
        longest = max(map(len, some))
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in some])
        mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in some])
        hidden = model(ids, attention_mask=mask).last_hidden_state
        kept = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)

    def run():
        order = sorted(range(len(sentences)), key=lambda i: -len(sentences[i]))
        with torch.inference_mode():
            found = [vectors([sentences[i] for i in order[at : at + batch]]) for at in range(0, len(order), batch)]
            result = torch.empty(len(order), model.config.hidden_size)
            result[torch.tensor(order)] = torch.cat(found)
        return result[0, :8].tolist()

    return run, sum(map(len, sentences))


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def extra(run):
    """What a run computed, and the MiB it takes beyond what was there before, where Linux tells."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = status("VmRSS:")
    except OSError:
        before = None
    found = run()
    return found, None if before is None else max(0.0, status("VmHWM:") - before)


def timed(run, repetitions):
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - start) / repetitions


answer(ready=f"torch {torch.__version__}, transformers {transformers.__version__}")
run, tokens, repetitions = None, 0, 1
for line in sys.stdin:
    try:
        if line.strip() == "go":
            answer(seconds=timed(run, repetitions), tokens=tokens)
            continue
        run = None  # the last case's memory goes first
        case = json.loads(line)
        torch.manual_seed(1)
        torch.set_num_threads(case["threads"])
        make = {"train": train, "generate": generate, "encode": encode}.get(case["case"])
        if make is None:
            raise ValueError(f"no case {case['case']}; there are train, generate, encode")
        run, tokens = make(case)
        check, taken = extra(run)
        repetitions = math.ceil(case.get("sample", 0.0) / timed(run, 1)) or 1
        answer(ready=taken, check=check)
    except Exception as why:
        answer(error=(str(why) or type(why).__name__).splitlines()[0])
