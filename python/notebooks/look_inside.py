# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Looking inside attention
#
# From five lines of NumPy to the heads of a running model, in a dozen short steps. Each cell stands on the ones before it. This file is a
# notebook (open it with Jupytext) and a program (`python look_inside.py`); it needs `regard` and NumPy, and the last two cells PyTorch and
# Transformers.

# %%
import numpy as np

import regard

rng = np.random.default_rng(0)


def picture(weights, rows=None, keys=None):
    """A map of weights as text: a line for each query, a sign for each key, the darkest for the largest weight; a dot is almost nothing, a
    blank is hidden."""
    weights = np.asarray(weights)
    signs = " ·░▒▓█"
    steps = np.ceil(weights / max(weights.max(), 1e-30) * (len(signs) - 1)).astype(int)
    names = [""] * len(weights) if rows is None else list(rows)
    width = max(map(len, names))
    if keys is not None:
        print(" " * width, " ", "".join(f"{key:>5.4}" for key in keys))
    for name, line in zip(names, steps):
        print(f"{name:>{width}} │", "".join(signs[step] * (2 if keys is None else 5) for step in line))


# %% [markdown]
# ## 1. The definition
#
# A query scores every key. The softmax makes weights of the scores, which are positive and sum to 1. The output is the mean of the
# values, each counted by its weight. That is all, and five lines say it. The engine computes the same without ever holding the weights.


# %%
def by_definition(q, k, v):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ v


q, k, v = (rng.normal(size=(2, 4, 300, 64)) for _ in range(3))  # batch, heads, length, features
difference = abs(regard.attention(q, k, v) - by_definition(q, k, v)).max()
print(f"largest difference of {q.size:,} numbers: {difference:.1e}")
assert difference < 1e-12

# %% [markdown]
# ## 2. Who may see whom
#
# A mask is a sentence: rules joined by `&` and `|`. Zeros score all keys alike, so the weights show the mask itself. Here a row sees the
# three keys up to its own, and every fourth before them: a strided pattern, as Child et al. (2019) use it.

# %%
zeros = np.zeros((1, 1, 16, 1))
found = regard.steps(zeros, zeros, zeros, mask="causal & (window 3 | dilated 4)")
picture(found.weights[0, 0] > 0)

# %% [markdown]
# ## 3. Every number of a small call
#
# `regard.steps` is the definition at work: what a query and a key make, what the softmax sees, what becomes of it. Hidden pairs score -inf
# and have no weight.

# %%
tiny = rng.normal(size=(1, 1, 3, 4)).round(1)
with np.printoptions(precision=3, suppress=True):
    for name, numbers in regard.steps(tiny, tiny, tiny, mask="causal")._asdict().items():
        print(f"{name} {list(numbers.shape)}\n{numbers[0, 0]}\n")

# %% [markdown]
# ## 4. The way back
#
# `aux.backward` gives exact gradients, by q, k, v and every option that is an array. Finite differences are the judge: move one number a
# little up and down, and see what the loss does.

# %%
q, k, v = (rng.normal(size=(1, 2, 20, 8)) for _ in range(3))
options = {"mask": "causal", "softcap": 5.0, "sinks": np.array([0.5, -1.0])}
direction = rng.normal(size=q.shape)  # the loss is sum(direction * out)

out, aux = regard.attention(q, k, v, **options, return_aux=True)
grads = aux.backward(direction)


def loss(x, place, step):
    x[place] += step
    value = (direction * regard.attention(q, k, v, **options)).sum()
    x[place] -= step
    return value


for name, x, grad in (("q", q, grads.q), ("k", k, grads.k), ("v", v, grads.v), ("sinks", options["sinks"], grads.learned["sinks"])):
    place = (0, 1, 7, 3) if x.ndim == 4 else (1,)
    measured = (loss(x, place, 1e-5) - loss(x, place, -1e-5)) / 2e-5
    print(f"by {name}{list(place)}: gradient {grad[place]:+.9f}, finite difference {measured:+.9f}")
    assert abs(grad[place] - measured) < 1e-7

# %% [markdown]
# ## 5. The online softmax
#
# How can an output be found without all weights? Cut the keys into parts. Each part gives an output and its `lse`, the logarithm of its sum
# of `e^score`; a part counts by its share of the whole sum. Parts may be joined in any order: a kernel walks over the keys this way, and so
# could many machines.

# %%
parts = [regard.attention(q, k[:, :, a : a + 5], v[:, :, a : a + 5], return_aux=True) for a in range(0, 20, 5)]
outs, lses = [out for out, _ in parts], [aux.lse for _, aux in parts]

whole_lse = np.logaddexp.reduce(lses)
by_hand = sum(np.exp(lse - whole_lse)[..., None] * out for out, lse in zip(outs, lses))
merged, _ = regard.merge(outs, lses)
print(f"largest difference, by hand: {abs(by_hand - regard.attention(q, k, v)).max():.1e}")
print(f"by regard.merge:             {abs(merged - regard.attention(q, k, v)).max():.1e}")
assert np.allclose(merged, regard.attention(q, k, v), atol=1e-12) and np.allclose(by_hand, merged, atol=1e-12)

# %% [markdown]
# ## 6. A head that looks one step back
#
# Queries and keys made by hand. Position j has a direction of its own, which is its key; query i points where key i - 1 does. The larger
# the scale, the sharper the look: the entropy falls from "all alike" towards 0. Weights are made again from q, k and `lse` alone.

# %%
words = "the cat sat on the mat and the cat".split()
n = len(words)
place = np.eye(n)
key, query = place[None, None], np.roll(place, -1, axis=0).T[None, None]  # row i of the query is row i - 1 of the keys
for scale in (1.0, 8.0):
    _, aux = regard.attention(query, key, key, mask="causal", scale=scale, return_aux=True)
    view = regard.AttentionView(query, key, aux, mask="causal", scale=scale)
    print(f"scale {scale:.0f}, mean entropy {view.entropy().mean():.2f} nats (all alike would be {np.log(np.arange(1, n + 1)).mean():.2f})")
    picture(view.tile((0, n), (0, n))[0], words, words)
assert (view.top_k(1)[0][0, 1:, 0] == np.arange(n - 1)).all()

# %% [markdown]
# ## 7. A head that remembers what came next
#
# Now a key speaks of the word *before* it, and a query of its own word. So the second "the" looks at the word that followed the first one,
# and "cat" at what followed "cat": this is how models go on with what they have read once (an induction head). A sink, a score without a
# key, takes the weight of rows that find nothing.

# %%
meaning = {word: rng.normal(size=32) for word in words}
query = np.array([meaning[word] for word in words])[None, None]
key = np.array([np.zeros(32)] + [meaning[word] for word in words[:-1]])[None, None]
options = {"mask": "causal", "scale": 1.0, "sinks": np.array([12.0])}
_, aux = regard.attention(query, key, key, **options, return_aux=True)
view = regard.AttentionView(query, key, aux, **options)
picture(view.tile((0, n), (0, n))[0], words, words)
for row in (4, 8):
    found = view.top_k(1)[0][0, row, 0]
    print(f"{words[row]!r} in place {row} looks at {words[found]!r} in place {found}")
print("what the sink takes:", *(f"{word} {share:.2f}" for word, share in zip(words, view.sink_mass()[0])))
assert words[view.top_k(1)[0][0, 8, 0]] == "sat"

# %% [markdown]
# ## 8. As long as you like
#
# 16,384 tokens: the map of one head would take a gigabyte. Its entropies, its largest weights and an overview take a few megabytes, for
# weights are made again and counted as they come. One needle is hidden in the hay: the last query and key 5,000 point the same way.

# %%
n = 16384
q, k = (rng.normal(size=(1, 1, n, 64)).astype(np.float32) for _ in range(2))
q[0, 0, -1] = 1.5 * k[0, 0, 5000]
_, aux = regard.attention(q, k, k, mask="causal", return_aux=True)
view = regard.AttentionView(q, k, aux, mask="causal")
found = view.measure(entropy=True, top_k=8, pooled=(16, 16, "sum"), mass=["window 512"])

print(f"the map: {n * n * 4 / 2**30:.0f} GiB; what was asked for: {sum(x.nbytes for x in found.values()) / 2**20:.1f} MiB")
top = zip(found["top_keys"][0, -1, :3], found["top_weights"][0, -1, :3])
print("the last row looks at", ", ".join(f"key {key} ({weight:.4f})" for key, weight in top))
print("entropies:", ", ".join(f"row {row} {found['entropy'][0, row]:.2f}" for row in (100, 1000, n - 2, n - 1)))
print(f"a window of 512 would keep {found['mass 0'].mean():.0%} of the weight; the whole map in 16 x 16 cells:")
picture(found["pooled"][0])
assert found["top_keys"][0, -1, 0] == 5000

# %% [markdown]
# ## 9. The same bits
#
# The number of threads changes no bit of a result, and neither does the batch around an item. What runs is told by `regard.plan`.

# %%
q = rng.normal(size=(2, 4, 500, 64)).astype(np.float32)
a, b = regard.attention(q, q, q, threads=1), regard.attention(q, q, q, threads=2)
alone = regard.attention(q[1:], q[1:], q[1:])
print("1 thread and 2 threads:", "the same bits" if np.array_equal(a, b) else "other bits")
print("alone and in a batch:  ", "the same bits" if np.array_equal(a[1:], alone) else "other bits")
print(regard.plan(q, q, q, mask="causal"))
assert np.array_equal(a, b) and np.array_equal(a[1:], alone)

# %% [markdown]
# ## 10. PyTorch
#
# `regard.torch.attention` is the same function for tensors, and gradients flow through it. Here one head learns to look at one place: the
# loss is the distance from the value at key 3, and steps go down the gradient of the queries alone.

# %%
try:
    import torch

    import regard.torch
except ModuleNotFoundError:
    torch = None
    print("PyTorch is not here: pip install torch, and run this cell again")

if torch is not None:
    torch.manual_seed(0)
    q = torch.randn(1, 1, 1, 16, requires_grad=True)
    k, v = torch.randn(1, 1, 10, 16), torch.randn(1, 1, 10, 16)
    for step in range(301):
        out = regard.torch.attention(q, k, v)
        distance = (out - v[:, :, 3:4]).square().mean()
        if step % 100 == 0:
            _, aux = regard.torch.attention(q.detach(), k, v, return_aux=True)
            weights = regard.AttentionView(q.detach(), k, aux).row(0)[0]
            print(f"step {step:3}, distance {distance.item():.4f}, the weight of key 3 is {weights[3]:.2f}")
        (grad,) = torch.autograd.grad(distance, q)
        with torch.no_grad():
            q -= 5 * grad
    assert weights[3] > 0.9

# %% [markdown]
# ## 11. A running model
#
# `regard.lens.capture` looks on while a model of Hugging Face runs or generates. Only answers are kept, so the length does not matter. This
# GPT-2 is small and knows nothing: its weights are random, and so is what its heads look at. Put a model of yours in its place.

# %%
try:
    import transformers

    import regard.lens
except ModuleNotFoundError:
    transformers = None
    print("Transformers is not here: pip install torch transformers, and run this cell again")

if transformers is not None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=64, n_embd=64, n_layer=3, n_head=4, initializer_range=0.2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1 + sorted(set(words)).index(word) for word in words]])
    with regard.lens.capture(model, tokens=words) as seen, torch.no_grad():
        model(ids)
    print(seen)
    for record in seen:
        print(record, "mean entropy of its heads:", record.means["entropy"][0].round(2))
    print("what the last word looks at in layer 2, head 0:")
    picture(seen[2].row(-1)[0, :1], [words[-1]], words)
    assert np.allclose(seen[2].row(-1).sum(-1), 1, atol=1e-5)

# %% [markdown]
# ## 12. A page to keep
#
# What was seen displays itself in a notebook, and `report` writes it all as one page that needs nothing but itself: every head, in
# pictures, numbers and words.

# %%
if transformers is not None:
    seen.report("look_inside.html")
    print("written: look_inside.html")
seen if transformers is not None else None

# %% [markdown]
# ## Where to go on
#
# - `docs/python.md`: every option, every mask, caches, what else can be asked of weights
# - `docs/python-torch.md`, `docs/python-huggingface.md`, `docs/python-lens.md`: PyTorch, models, the lens
# - `docs/microscope.md`: pictures from the command line, and a map of a million tokens to zoom into
