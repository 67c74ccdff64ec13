# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.22.2", "safetensors==0.8.0", "numpy==2.4.6"]
# ///
"""Writes goldens/*.safetensors: what PyTorch says that a module or model computes, and its gradients.

Parameters, inputs and upstream gradients are drawn in f32; everything else is computed from them in f64 and rounded to f32
once, at the end. `README.md` tells the layout of a file. The files beside this one:

    draw.py     random parameters under our names
    modules.py  the modules, each defined by PyTorch where PyTorch has it
    models.py   the models, the same
    plain.py    every one of them once more, by formula: the second opinion

usage: goldens/make.py [NAME...]
"""
import json
import math
import os
import pathlib
import sys
import warnings
import zlib

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch
from safetensors.torch import save_file
from transformers.utils import logging

logging.set_verbosity_error()

import models
import modules

FOLDER = pathlib.Path(__file__).parent
SEED = 2017
MOST_BYTES = 2_000_000


def total(outputs, upstream):
    """The number that is differentiated."""
    return sum(((upstream[name] * outputs[name]).sum() for name in upstream), torch.zeros((), dtype=torch.float64))


def gradients(run, parameters, inputs, upstream):
    """By name; what a variant does not use has none."""
    named = {f"parameters.{name}": leaf for name, leaf in parameters.items()}
    named |= {f"inputs.{name}": leaf for name, leaf in inputs.items() if leaf.is_floating_point()}
    for leaf in named.values():
        leaf.requires_grad_()
    outputs = run(parameters, inputs)
    value = total(outputs, upstream)
    if value.requires_grad:
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
    else:
        found = [None] * len(named)
    for leaf in named.values():
        leaf.requires_grad_(False)
    outputs = {name: output.detach() for name, output in outputs.items()}
    return outputs, {name: one for name, one in zip(named, found) if one is not None}


def check_differences(name, run, parameters, inputs, upstream, found):
    """The derivative along one random direction of all parameters and inputs, against a central difference."""
    step = 1e-6
    way = {key: torch.randn_like(one) for key, one in found.items()}

    def moved(kind, leaves, by):
        return {key: leaf + by * way.get(f"{kind}.{key}", 0) if leaf.is_floating_point() else leaf for key, leaf in leaves.items()}

    def value(by):
        return total(run(moved("parameters", parameters, by), moved("inputs", inputs, by)), upstream).item()

    slope = sum((found[key] * way[key]).sum().item() for key in found)
    seen = (value(step) - value(-step)) / (2 * step)
    assert math.isclose(slope, seen, rel_tol=1e-6, abs_tol=1e-6), f"{name}: slope {slope}, by differences {seen}"


def check_same(name, ours, theirs):
    assert ours.keys() == theirs.keys(), f"{name}: {sorted(ours.keys() ^ theirs.keys())}"
    for key in ours:
        far = (ours[key] - theirs[key]).abs().max().item()
        assert ours[key].shape == theirs[key].shape and far < 1e-9, f"{name}: {key} differs by {far}"


def write(golden):
    """One file. Each variant is run, differentiated, and held against differences and against the plain formula."""
    wide = lambda leaves: {key: leaf.double() if leaf.is_floating_point() else leaf for key, leaf in leaves.items()}
    parameters, inputs = wide(golden.parameters), wide(golden.inputs)
    tensors = {f"parameters.{key}": leaf for key, leaf in parameters.items()}
    tensors |= {f"inputs.{key}": leaf for key, leaf in inputs.items()}
    for variant, (run, plain) in golden.variants.items():
        prefix = f"{variant}." if variant else ""
        label = prefix + golden.name
        with torch.no_grad():
            outputs = run(parameters, inputs)
        upstream = golden.upstream(outputs)
        outputs, found = gradients(run, parameters, inputs, upstream)
        second = gradients(plain, parameters, inputs, upstream)
        check_same(label, outputs, second[0])
        check_same(label, found, second[1])
        with torch.no_grad():
            check_differences(label, run, parameters, inputs, upstream, found)
        tensors |= {f"{prefix}outputs.{key}": one for key, one in outputs.items()}
        tensors |= {f"{prefix}upstream.{key}": one for key, one in upstream.items()}
        tensors |= {f"{prefix}gradients.{key}": one for key, one in found.items()}
    kept = {key: (one.float() if one.is_floating_point() else one).contiguous().clone() for key, one in tensors.items()}
    assert all(one.isfinite().all() for one in kept.values()), f"{golden.name}: not finite"
    path = FOLDER / f"{golden.name}.safetensors"
    save_file(kept, path, metadata={"config": json.dumps(golden.config)})
    print(f"{path.name:32} {path.stat().st_size:8} bytes  {json.dumps(golden.config)}")


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    makers = {maker.__name__: maker for maker in modules.ALL + models.ALL}
    unknown = set(sys.argv[1:]) - makers.keys()
    if unknown:
        sys.exit(f"no golden {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    for name in sys.argv[1:] or makers:
        # A seed of its own, so that a new file changes no other.
        torch.manual_seed(SEED + zlib.crc32(name.encode()))
        write(makers[name]())
    size = sum(path.stat().st_size for path in FOLDER.glob("*.safetensors"))
    print(f"{size} bytes in all")
    assert size <= MOST_BYTES, f"{size} bytes of goldens, more than {MOST_BYTES}"


if __name__ == "__main__":
    main()
