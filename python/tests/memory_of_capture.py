"""The peak memory of a forward pass, plain and within `regard.lens.capture`, each in a process of its own.

usage: memory_of_capture.py [TOKENS [HOW ..]]      HOW: plain, capture, all (what output_attentions holds); plain and capture unless given

`capture` keeps the entropies and the 8 largest weights of every row of every head of every layer.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys

LAYERS, HEADS, HIDDEN = 6, 8, 512


def run(how: str, tokens: int) -> dict[str, float]:
    """In this process: one forward pass; the peak of its memory and what was there before it, in MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import regard.hf
    import regard.lens

    regard.hf.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=HIDDEN, intermediate_size=1408, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=1 << 20,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager" if how == "all" else "regard").eval()
    ids = torch.randint(0, 1000, (1, tokens))
    with torch.no_grad():
        model(ids[:, :64])  # so that what is made once is there
        before = peak()
        if how == "capture":
            with regard.lens.capture(model, stats=("entropy", "top_k"), top_k=8) as seen:
                model(ids)
            assert seen[LAYERS - 1].top_k.keys.shape == (1, HEADS, tokens, 8)
            assert seen[LAYERS - 1].entropy.shape == (1, HEADS, tokens)
        else:
            model(ids, output_attentions=how == "all")
    return {"before": before, "peak": peak()}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(how: str, tokens: int) -> dict[str, float]:
    """The same in another process."""
    found = subprocess.run([sys.executable, __file__, "--here", how, str(tokens)], capture_output=True, text=True)
    if found.returncode:
        raise RuntimeError(f"{how} with {tokens} tokens: {found.stderr.strip()[-2000:]}")
    return json.loads(found.stdout.splitlines()[-1])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(run(sys.argv[2], int(sys.argv[3]))))
        sys.exit()
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 8192
    found = {how: measure(how, tokens) for how in sys.argv[2:] or ("plain", "capture")}
    for how, of in found.items():
        print(f"{how:>8}  {tokens} tokens  peak {of['peak']:7.0f} MB, {of['peak'] - of['before']:7.0f} MB of it by this forward pass")
    if {"plain", "capture"} <= found.keys():
        print(f"capture / plain: {found['capture']['peak'] / found['plain']['peak']:.3f}")
