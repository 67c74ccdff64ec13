"""Random parameters under our names, random inputs, and what a golden is made of.

Nothing is left at a value that hides mistakes: biases are not 0, the weights of norms are not 1.
"""
from dataclasses import dataclass, field
from typing import Callable

import torch


@dataclass
class Golden:
    name: str
    config: dict
    parameters: dict
    inputs: dict
    # Name to (the definition, the plain formula), each from (parameters, inputs) to outputs; "" where there is only one.
    variants: dict[str, tuple[Callable, Callable]]
    # Outputs that are only looked at: no gradient flows into them.
    seen: tuple = ()
    # For each padded output which of its rows are kept; the others get no upstream gradient.
    kept: dict = field(default_factory=dict)

    def upstream(self, outputs):
        """A model is differentiated from its loss alone, a module from everything it returns."""
        if "logits" in outputs:
            return {"loss": torch.ones((), dtype=torch.float64)}
        found = {name: draw(*one.shape).double() for name, one in outputs.items() if name not in self.seen}
        for name, rows in self.kept.items():
            found[name][~rows] = 0
        return found


def draw(*shape):
    return torch.randn(shape)


def below(length, lengths):
    """Which of `length` positions lie within each of the lengths."""
    return torch.arange(length) < lengths.unsqueeze(-1)


def named(prefix, parts):
    return {f"{prefix}.{key}": one for key, one in parts.items()}


def linear(outs, ins, bias=True):
    weight = {"weight": draw(outs, ins) * ins**-0.5}
    return weight | ({"bias": draw(outs) * 0.2} if bias else {})


def norm(dim, bias=True):
    return {"weight": 1 + draw(dim) * 0.2} | ({"bias": draw(dim) * 0.2} if bias else {})


def embedding(count, dim):
    return {"weight": draw(count, dim) * 0.5}


def attention(dim, kv=None, bias=True):
    sizes = {"q": (dim, dim), "k": (kv or dim, dim), "v": (kv or dim, dim), "out": (dim, dim)}
    return {key: one for name, size in sizes.items() for key, one in named(name, linear(*size, bias)).items()}


def feed_forward(dim, hidden, gate=False, bias=True):
    parts = named("up", linear(hidden, dim, bias)) | named("down", linear(dim, hidden, bias))
    return parts | (named("gate", linear(hidden, dim, bias)) if gate else {})


def block(dim, hidden, cross=False, kv=None, gate=False, bias=True):
    parts = named("attention_norm", norm(dim, bias)) | named("attention", attention(dim, kv, bias))
    if cross:
        parts |= named("cross_norm", norm(dim, bias)) | named("cross", attention(dim, kv, bias))
    return parts | named("feed_forward_norm", norm(dim, bias)) | named("feed_forward", feed_forward(dim, hidden, gate, bias))


def gru_cell(ins, hidden):
    return named("input", linear(3 * hidden, ins)) | named("hidden", linear(3 * hidden, hidden))


def gru(ins, hidden):
    return named("forward", gru_cell(ins, hidden)) | named("backward", gru_cell(ins, hidden))


def additive(queries, keys, hidden):
    parts = named("query", linear(hidden, queries, False)) | named("key", linear(hidden, keys, False))
    return parts | {"score": draw(hidden)}
