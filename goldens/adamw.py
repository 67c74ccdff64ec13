# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "safetensors==0.8.0", "numpy==2.4.6"]
# ///
"""Writes goldens/adamw.safetensors: ten steps of `torch.optim.AdamW` as `regard-train` makes them.

Gradients are drawn in f32 and given; everything is computed from them by PyTorch in f64 and rounded to f32 once: clipping by
`clip_grad_norm_`, decay of matrices alone, `LinearLR` into `CosineAnnealingLR`, and the average of `swa_utils` with a decay that
rises with the step. Each step is checked against the formulas of the paper as it is made.

usage: goldens/adamw.py
"""
import json
import math
import pathlib

import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import get_ema_avg_fn

SHAPES = {"bias": (7,), "table": (5, 3), "weight": (4, 6)}
CONFIG = {
    "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "weight_decay": 0.1, "clip": 5.0, "average": 0.7,
    "rate": 0.02, "lowest": 0.001, "warmup": 4, "steps": 10,
}
# `clip_grad_norm_` adds 1e-6 to the norm that it divides by, and we do not: gradients that are cut are so long that no f32 tells.
SIZES = [0.1, 40.0, 0.2, 100.0, 0.05, 0.1, 60.0, 0.02, 0.1, 80.0]


def main():
    torch.manual_seed(2019)
    torch.set_num_threads(1)
    c = CONFIG
    start = {name: torch.randn(shape) * 0.5 for name, shape in SHAPES.items()}
    drawn = [{name: torch.randn(shape) * size for name, shape in SHAPES.items()} for size in SIZES]
    own = {name: torch.nn.Parameter(one.double()) for name, one in start.items()}
    decayed = [one for one in own.values() if one.dim() > 1]
    plain = [one for one in own.values() if one.dim() == 1]
    groups = [{"params": decayed, "weight_decay": c["weight_decay"]}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=c["rate"], betas=(c["beta1"], c["beta2"]), eps=c["epsilon"])
    rise = LinearLR(optimiser, start_factor=1 / c["warmup"], total_iters=c["warmup"] - 1)
    fall = CosineAnnealingLR(optimiser, T_max=c["steps"] - c["warmup"], eta_min=c["lowest"])
    schedule = SequentialLR(optimiser, [rise, fall], milestones=[c["warmup"] - 1])
    average = {name: one.detach().clone() for name, one in own.items()}
    second = {name: [one.double(), torch.zeros(()).double(), torch.zeros(()).double()] for name, one in start.items()}
    tensors = {f"start.{name}": one for name, one in start.items()}
    norms, rates = [], []
    for step, gradients in enumerate(drawn, 1):
        for name, one in own.items():
            one.grad = gradients[name].double()
        norms.append(torch.nn.utils.clip_grad_norm_(own.values(), c["clip"]).item())
        rates.append(schedule.get_last_lr()[0])
        clipped = {name: one.grad.clone() for name, one in own.items()}
        optimiser.step()
        schedule.step()
        share = get_ema_avg_fn(min(c["average"], (1 + step) / (10 + step)))
        for name, one in own.items():
            average[name] = share(average[name], one.detach(), step)
            state = optimiser.state[one]
            check(second[name], clipped[name], rates[-1], step, [one.detach(), state["exp_avg"], state["exp_avg_sq"]])
            kinds = {"value": one.detach(), "mean": state["exp_avg"], "square": state["exp_avg_sq"], "average": average[name]}
            tensors[f"{step}.gradient.{name}"] = gradients[name]
            tensors |= {f"{step}.{kind}.{name}": found.clone() for kind, found in kinds.items()}
    assert sum(norm > c["clip"] for norm in norms) == 4 and all(abs(norm - c["clip"]) > 1 for norm in norms), norms
    kept = {name: one.float().contiguous().clone() for name, one in tensors.items()}
    path = pathlib.Path(__file__).parent / "adamw.safetensors"
    save_file(kept, path, metadata={"config": json.dumps(c | {"norms": norms, "rates": rates})})
    print(f"{path.name} {path.stat().st_size} bytes; norms {norms}, rates {rates}")


def check(own, gradient, rate, step, theirs):
    """Algorithm 2 of Loshchilov and Hutter, 2019."""
    c = CONFIG
    value, mean, square = own
    mean = c["beta1"] * mean + (1 - c["beta1"]) * gradient
    square = c["beta2"] * square + (1 - c["beta2"]) * gradient**2
    decay = c["weight_decay"] if gradient.dim() > 1 else 0.0
    root = (square / (1 - c["beta2"] ** step)).sqrt() + c["epsilon"]
    value = value - rate * (mean / (1 - c["beta1"] ** step) / root + decay * value)
    own[:] = [value, mean, square]
    w, s = c["warmup"], c["steps"]
    plan = c["rate"] * step / w
    if step >= w:
        plan = c["lowest"] + (c["rate"] - c["lowest"]) * 0.5 * (1 + math.cos(math.pi * (step - w) / (s - w)))
    assert math.isclose(rate, plan, rel_tol=1e-12), (step, rate, plan)
    for a, b in zip(own, theirs):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15), (step, a, b)


if __name__ == "__main__":
    main()
