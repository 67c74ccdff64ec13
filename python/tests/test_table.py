"""The case table of the engine through both front ends: every call as the engine's own tests make it, forward and backward, in the same bits.

The engine's answers come with each row, computed in Rust from the same memory, so a difference is the front end's. Masks come as what each
row sees (`masks.ranges`), whatever rule they were; tests/test_masks.py holds the rules themselves against their definitions.
"""

from __future__ import annotations

import json
import re

import ml_dtypes  # noqa: F401  bf16 of NumPy
import numpy as np
import pytest

import regard
from regard import _arrays, _regard, masks

TABLE = _regard.Table()
NAMES = TABLE.names()
DTYPES = ("f32", "f64", "f16", "bf16")
EXPRESSIBLE = [i for i in range(len(NAMES)) if not TABLE.has_rule(i)]


def keywords(row, array):
    """The options of a row as a front end takes them, and its tensors that learn by name, in the front end's order of gradients."""
    options = json.loads(row.options)
    arrays = {name: array(owned) for name, owned in row.arrays}
    learned = {name: x for name, x in arrays.items() if name != "ranges"}
    if "ranges" in arrays:
        options["mask"] = masks.ranges(arrays["ranges"])
    for name in ("bias", "alibi", "sinks"):
        if name in learned:
            options[name] = learned[name]
    if "relative" in learned:
        kind, *rest = options["relative"]
        options["relative"] = (kind, learned["relative"], *rest)
    reach, similarity = options.pop("reach"), options["similarity"]
    if reach is not None:
        options["local"] = (learned["centers"], reach)
    if similarity == "general":
        options["similarity"] = ("general", learned["w"])
    if similarity == "additive":
        options["similarity"] = ("additive", learned["w_q"], learned.get("w_k"), learned["w_v"])
    return options, learned


def same(a, b):
    """The same bits; NaN is NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.tobytes() == b.tobytes():
        return True
    bits = [np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (a, b)]
    return bool(((bits[0] == bits[1]) | (np.isnan(a) & np.isnan(b))).all())


def compare(found, expected):
    """The names of what differs."""
    assert found.keys() == expected.keys()
    return [name for name in found if not same(found[name], expected[name])]


def outputs(row):
    """What the engine found, by name."""
    found = {name: getattr(row.saved, name) for name in ("out", "lse", "entropy", "max_score")}
    return {name: _arrays.numpy_of(x) for name, x in found.items() if x is not None}


def gradients(row):
    """The engine's gradients, by name."""
    names = ["q", "k", "v"] + [name for name, _ in row.arrays if name != "ranges"]
    return {f"d_{name}": _arrays.numpy_of(x) for name, x in zip(names, row.gradients[0])}


def through_numpy(row):
    """Both ways through `regard.attention`: what differs."""
    options, learned = keywords(row, _arrays.numpy_of)
    q, k, v = map(_arrays.numpy_of, row.tensors)
    d_out, d_lse, d_entropy = (None if x is None else _arrays.numpy_of(x) for x in row.output_grads)
    out, aux = regard.attention(q, k, v, return_aux=True, **options)
    grads = aux.backward(d_out, d_lse=d_lse, d_entropy=d_entropy)
    found = {"out": out, "lse": aux.lse, "entropy": aux.entropy, "max_score": aux.max_score}
    wrong = compare({name: x for name, x in found.items() if x is not None}, outputs(row))
    found = {"d_q": grads.q, "d_k": grads.k, "d_v": grads.v, **{f"d_{name}": x for name, x in grads.learned.items()}}
    wrong += compare(found, gradients(row))
    numbers = [np.float64(x) for x in (grads.scale, grads.temperature, *row.gradients[1:])]
    return wrong + [name for name, a, b in zip(("scale", "temperature"), numbers, numbers[2:]) if not same(a, b)]


def through_torch(row):
    """Both ways through `regard.torch.attention` and autograd: what differs."""
    import torch

    import regard.torch

    q, k, v = (_arrays.torch_of(x).requires_grad_() for x in row.tensors)
    options, learned = keywords(row, _arrays.torch_of)
    for x in learned.values():
        x.requires_grad_()
    out, aux = regard.torch.attention(q, k, v, return_aux=True, **options)
    found = {"out": out, "lse": aux.lse, "entropy": aux.entropy, "max_score": aux.max_score}
    wrong = compare({name: numpy_of(x.detach()) for name, x in found.items() if x is not None}, outputs(row))
    output_grads = [(x, _arrays.torch_of(d)) for x, d in zip((out, aux.lse, aux.entropy), row.output_grads) if d is not None]
    inputs = [q, k, v, *learned.values()]
    grads = torch.autograd.grad([x for x, _ in output_grads], inputs, [d for _, d in output_grads])
    found = {f"d_{name}": numpy_of(x) for name, x in zip(["q", "k", "v", *learned], grads)}
    # Autograd wants gradients in the type of the tensor; the engine sums those that rows share in a wider one.
    expected = {name: x.astype(found[name].dtype) for name, x in gradients(row).items()}
    return wrong + compare(found, expected)


def numpy_of(x):
    """A tensor of PyTorch as an array."""
    import torch

    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def test_only_score_rules_written_in_rust_cannot_pass_the_doors():
    rule = re.compile(r"-(?:[^-]*[+])?custom(?:[+][^-]*)?-(?:bhsd|bshd|slice)-")
    left = [name for i, name in enumerate(NAMES) if TABLE.has_rule(i)]
    print(f"{len(NAMES)} rows, {len(left)} of them with a score rule in Rust")
    assert left == [name for name in NAMES if rule.search(name)]
    assert len(NAMES) > 10_000 and 100 < len(left) < 1_000


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("front_end", [through_numpy, through_torch])
def test_every_row_of_the_table_has_the_bits_of_the_engine(front_end, dtype):
    if front_end is through_torch:
        pytest.importorskip("torch")
    rows = [i for i in EXPRESSIBLE if NAMES[i].startswith(f"{dtype}-")]
    wrong = {}
    for i in rows:
        if found := front_end(TABLE.row(i)):
            wrong[NAMES[i]] = found
    print(f"{dtype}: {len(rows)} rows, {len(wrong)} differ")
    assert len(rows) > 500 and not wrong, list(wrong.items())[:10]
