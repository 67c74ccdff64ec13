"""Every golden once more, by formula and without PyTorch's modules: the second opinion that `make.py` asks for.

Padding is cut off where it can be, and not masked, so that a mask which lets something through is found out.
"""
import math

import torch


def part(p, prefix):
    """The parameters below a name."""
    return {key[len(prefix) + 1 :]: one for key, one in p.items() if key.startswith(prefix + ".")}


def linear(p, x):
    y = x @ p["weight"].T
    return y + p["bias"] if "bias" in p else y


def norm(p, x, eps):
    """With a bias the layer norm, without one the RMS norm."""
    if "bias" not in p:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"]
    far = x - x.mean(-1, keepdim=True)
    return far / (far.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"] + p["bias"]


def activate(name, x):
    if name == "relu":
        return x * (x > 0)
    if name == "gelu":
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    if name == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "silu":
        return x / (1 + torch.exp(-x))
    return x


def softmax(scores):
    raised = torch.exp(scores - scores.max(-1, keepdim=True).values)
    return raised / raised.sum(-1, keepdim=True)


def causal(rows, keys):
    return torch.arange(keys) <= torch.arange(rows).view(-1, 1)


def turn(x, base):
    """Rotary positions by halves: feature i pairs with i + d/2."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2]).view(-1, 1) * base ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attention(p, x, memory, heads, mask=None, bias=0.0, rope=None, scale=None):
    """x [batch, rows, d], memory [batch, keys, d]; mask (true = sees) and bias broadcast to [batch, heads, rows, keys]."""
    dim = p["q.weight"].shape[0] // heads
    split = lambda y: y.unflatten(-1, (-1, dim)).transpose(1, 2)
    q, k, v = (split(linear(part(p, name), of)) for name, of in (("q", x), ("k", memory), ("v", memory)))
    if rope:
        q, k = turn(q, rope), turn(k, rope)
    groups = heads // k.shape[1]
    k, v = (torch.stack([y[:, head // groups] for head in range(heads)], 1) for y in (k, v))
    scores = (scale or dim**-0.5) * torch.einsum("bhid,bhjd->bhij", q, k) + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    out = torch.einsum("bhij,bhjd->bihd", softmax(scores), v)
    return linear(part(p, "out"), out.flatten(-2))


def feed_forward(p, x, activation):
    """With a gate: down(activation(gate x) * up x)."""
    up = linear(part(p, "up"), x)
    hidden = activate(activation, linear(part(p, "gate"), x)) * up if "gate.weight" in p else activate(activation, up)
    return linear(part(p, "down"), hidden)


def block(p, x, config, mask=None, memory=None, memory_mask=None):
    """Residual steps, each with its norm before ("pre") or after ("post") it."""

    def step(name, x, inner):
        of = lambda y: norm(part(p, f"{name}_norm"), y, config["eps"])
        return x + inner(of(x)) if config["norm"] == "pre" else of(x + inner(x))

    heads, rope = config["n_heads"], config.get("rope_base")
    x = step("attention", x, lambda y: attention(part(p, "attention"), y, y, heads, mask, rope=rope))
    if memory is not None:
        x = step("cross", x, lambda y: attention(part(p, "cross"), y, memory, heads, memory_mask))
    return step("feed_forward", x, lambda y: feed_forward(part(p, "feed_forward"), y, config["activation"]))


def gru_cell(p, x, state):
    """Rows of reset, update and new, in this order."""
    a, b = linear(part(p, "input"), x), linear(part(p, "hidden"), state)
    (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
    r, z = torch.sigmoid(ar + br), torch.sigmoid(az + bz)
    return (1 - z) * torch.tanh(an + r * bn) + z * state


def gru(p, x):
    """One sequence [n, d] without padding to its states [n, 2 hidden] and its last states [2 hidden]."""
    sides = []
    for name, order in (("forward", range(len(x))), ("backward", reversed(range(len(x))))):
        state, states = x.new_zeros(p[f"{name}.hidden.weight"].shape[1]), {}
        for i in order:
            states[i] = state = gru_cell(part(p, name), x[i], state)
        sides.append((torch.stack([states[i] for i in range(len(x))]), state))
    return torch.cat([states for states, _ in sides], -1), torch.cat([last for _, last in sides], -1)


def padded(rows, length):
    """Zeros below rows [n, ...]."""
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def cross_entropy(logits, labels, smoothing=0.0):
    """Mean over the labels that are not -100; smoothing spreads a share of each target evenly over all classes."""
    logs = (logits - logits.logsumexp(-1, keepdim=True)).flatten(0, -2)
    losses = [
        -(1 - smoothing) * row[label] - smoothing * row.mean() for row, label in zip(logs, labels.flatten()) if label != -100
    ]
    return torch.stack(losses).mean()


def sinusoid(length, dim, base):
    rows = [
        [(math.cos if j % 2 else math.sin)(i / base ** (j // 2 * 2 / dim)) for j in range(dim)] for i in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def additive(p, query, keys):
    """Bahdanau: one query [dq] over keys [n, dk] without padding; context and weights."""
    weights = softmax(torch.tanh(p["query.weight"] @ query + keys @ p["key.weight"].T) @ p["score"])
    return weights @ keys, weights
