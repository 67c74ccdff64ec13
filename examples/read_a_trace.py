#!/usr/bin/env python3
# /// script
# requires-python = ">=3.9"
# dependencies = ["numpy", "safetensors"]
# ///
"""How do I read a trace without Regard?

    cargo run --release --example look_inside_a_model trace.safetensors
    python examples/read_a_trace.py trace.safetensors [KIND LAYER HEAD]

A trace is a safetensors file: queries, keys and lse of each attention, and what they are, as JSON in its metadata
(docs/trace.md). This makes the weights of one head again by NumPy alone, and prints the strongest pairs with their words. Look at
what was written (left) and at the source that it was written from (right).

Try next: `decoder 1 0`, which has a causal mask; a trace of `regard.lens` (docs/python-lens.md).
"""

from __future__ import annotations

import json
import sys

import numpy as np
from safetensors import safe_open


def visible(mask: str, q_len: int, k_len: int) -> np.ndarray:
    """Who may see whom, `[q_len, k_len]`: the last query stands at the last key."""
    if mask == "full":
        return np.ones((q_len, k_len), bool)
    if mask == "causal":
        return np.tri(q_len, k_len, k_len - q_len, dtype=bool)
    sys.exit(f"mask {mask!r}: this page knows full and causal; `regard look` knows all")


def weights(q: np.ndarray, k: np.ndarray, lse: np.ndarray, layer: dict) -> np.ndarray:
    """`e^(score - lse)` of one head, `[q_len, k_len]`, from `q [q_len, features]` and `k [k_len, features]`."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T * (layer.get("scale") or q.shape[-1] ** -0.5)
    if layer.get("softcap"):
        scores = layer["softcap"] * np.tanh(scores / layer["softcap"])
    scores[~visible(layer.get("mask") or "full", *scores.shape)] = -np.inf
    return np.exp(scores - lse[:, None])


def main(path: str, kind: str = "cross", number: str = "0", head: str = "0") -> None:
    with safe_open(path, framework="np") as file:
        about = json.loads(file.metadata()["regard"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    found = [one for one in about["layers"] if one["kind"] == kind and one["layer"] == int(number)]
    if not found or not found[0].get("lse"):
        there = sorted(f"{one['kind']} {one['layer']}" for one in about["layers"] if one.get("lse"))
        sys.exit(f"{kind} {number}: no queries, keys and lse of that; there are {', '.join(there)}")
    layer, head = found[0], int(head)
    q, k, lse = (tensors[layer[name]] for name in ("q", "k", "lse"))
    if head >= len(q):
        sys.exit(f"head {head}: there are {len(q)} heads, from 0 on")
    served = len(q) // len(k)  # so many query heads share a key head
    found = weights(q[head], k[head // served], lse[head], layer)

    axes = (about["axes"][layer[side]] for side in ("rows", "cols"))
    rows, cols = (axis.get("labels") or [str(at) for at in range(axis["len"])] for axis in axes)
    if kind == "cross":
        rows = [*rows[1:], "(end)"]  # a row reads one token and chooses the next: it is named after what it chose
    print(f"{about['title']}: {kind}, layer {number}, head {head}, mask {layer.get('mask') or 'full'}")
    strongest = np.argsort(found, axis=None)[::-1][:8]
    for row, key in zip(*np.unravel_index(strongest, found.shape)):
        print(f"  {found[row, key]:.2f}  {rows[row].strip()} -> {cols[key].strip()}")
    off = np.abs(found.sum(axis=1) - 1).max()
    print(f"Rows sum to 1, to {off:.0e}.")
    assert off < 1e-5, "the weights that were made again are not those that lse belongs to"

    try:
        import regard
    except ImportError:
        print("The regard package is not here: by it this would be regard.AttentionView(q, k, lse).")
        return
    options = {name: layer[name] for name in ("mask", "scale", "softcap") if layer.get(name)}
    view = regard.AttentionView(q[None], k[None], lse[None], **options).head(0, head)
    same = view.tile((0, found.shape[0]), (0, found.shape[1]))
    apart = np.abs(same - found).max()
    print(f"regard.AttentionView has the same weights, to {apart:.0e}.")
    assert apart < 1e-5


if __name__ == "__main__":
    if len(sys.argv) not in (2, 5):
        sys.exit(__doc__)
    main(*sys.argv[1:])
