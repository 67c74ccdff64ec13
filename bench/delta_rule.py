"""The gated delta rule beside `torch_chunk_gated_delta_rule` of Transformers, on the same tensors, in turns.

    PYTHONPATH=python OMP_NUM_THREADS=2 target/python/bin/python bench/delta_rule.py [LENGTH] [ROUNDS] [HEADS] [DIM]

Prints, for the forward pass, forward and backward, and one token of decoding, the median time of each, the median and the range of the
ratios of neighbors in time, and what of the output and the gradients differs most, relative to its largest number. f32, batch 1,
both with the threads of PyTorch.
"""

import statistics
import sys
import time

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

import regard.hf


def tensors(length, heads, dim):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim, generator=random) for _ in range(3))
    g = -torch.rand(1, length, heads, generator=random)
    beta = torch.rand(1, length, heads, generator=random)
    return q, k, v, g, beta


def forward(function, given):
    with torch.no_grad():
        return function(*given, use_qk_l2norm_in_kernel=True)[0]


def both(function, given):
    given = [x.detach().requires_grad_() for x in given]
    out, _ = function(*given, use_qk_l2norm_in_kernel=True)
    return out.detach(), *torch.autograd.grad(out.sum(), given)


def decode(function, given):
    state = torch.ones(1, given[2].shape[2], given[1].shape[-1], given[2].shape[-1])
    with torch.no_grad():
        return function(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)


def in_turns(name, task, theirs, given, rounds):
    ways, found, results = (regard.hf._delta_rule, theirs), ([], []), []
    for i in range(rounds + 1):
        for times, way in zip(found, ways):
            start = time.perf_counter()
            result = task(way, given)
            times.append(time.perf_counter() - start)
            if i == 0:
                times.clear()  # the first call of each allocates
                results.append(result if isinstance(result, tuple) else (result,))
    far = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results))
    ratios = sorted(b / a for a, b in zip(*found))
    ours, other = (statistics.median(times) * 1e3 for times in found)
    middle = statistics.median(ratios)
    ratio = f"{middle:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(f"{name:24} regard {ours:9.3f} ms  torch {other:9.3f} ms  {ratio}  differ {far:.1e}", flush=True)


def main(length="4096", rounds="7", heads="16", dim="128"):
    given = tensors(int(length), int(heads), int(dim))
    print(f"n {length}, heads {heads}, d {dim}, f32, {torch.get_num_threads()} threads")
    chunks, recurrent = qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule
    in_turns("forward", forward, chunks, given, int(rounds))
    in_turns("forward and backward", both, chunks, given, int(rounds))
    in_turns("decode, one token", decode, recurrent, [x[:, :1] for x in given], 20 * int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
