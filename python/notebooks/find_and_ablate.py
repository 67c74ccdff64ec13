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
# # Find, ablate and restore the induction heads of a real model
#
# An induction head completes what occurred before: after `A B .. A` it attends to `B` and predicts it ([Olsson et al.
# 2022](https://arxiv.org/abs/2209.11895)). This notebook finds such heads in SmolLM2-135M by their attention, shows by ablation that the
# model predicts repeated text with them, finds what they depend on, and puts it back. Every claim is an assertion with a number.
#
# It needs `pip install torch transformers gguf`, the model (`regard models get smollm2`, 93 MB), 2 GB of memory and a minute.

# %%
import os
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import regard.hf
import regard.lens

regard.hf.register()
cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
folder = Path(os.environ.get("REGARD_CACHE") or cache) / "smollm2"
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", attn_implementation="regard").eval()
layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
torch.set_grad_enabled(False)
print(f"{layers} layers of {heads} heads")

# %% [markdown]
# ## 1. Random tokens, twice
#
# Nothing predicts a random token, except that it followed the same token before. So the loss of the second half measures induction and
# nothing else.

# %%
half, first = 64, 0  # the token 0 begins a text
words = torch.randint(1000, 40000, (2, half), generator=torch.Generator().manual_seed(0))
ids = torch.cat([torch.full((2, 1), first), words, words], 1)
rows = np.arange(half + 1, 2 * half)  # rows of the second half: position i repeats position i - half
targets = rows - half + 1  # what followed the first occurrence


def losses():
    """Mean loss of the first half, of the second half, and the logits."""
    logits = model(ids).logits
    loss = -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return loss[:, :half].mean().item(), loss[:, half + 1 :].mean().item(), logits


before, clean_loss, clean_logits = losses()
print(f"loss of the first half {before:.2f} nats, of its repetition {clean_loss:.2f}")
assert before > 10 and clean_loss < 4

# %% [markdown]
# ## 2. Find: prefix-matching scores
#
# The score of a head is its mean weight on the token that followed the first occurrence. `keep=True` stores q and k, so any weight can be
# computed afterwards; no n x n matrix is made while the model runs. `regard heads smollm2` prints the same table for a terminal.


# %%
def scores(seen, keys, at=rows):
    """Mean weight of each head on one key for each row, [layer, head]."""
    weights = [record.tile((int(at[0]), int(at[-1]) + 1), (0, ids.shape[1])) for record in seen]
    return np.stack([one[:, :, np.arange(len(at)), keys].mean((0, 2)) for one in weights])


def largest(table, count):
    return [(int(i) // heads, int(i) % heads) for i in np.argsort(-table, axis=None)[:count]]


with regard.lens.capture(model, keep=True) as clean:
    model(ids)
induction = scores(clean, targets)
found = largest(induction, 6)
for layer, head in found:
    print(f"layer {layer}, head {head}: {induction[layer, head]:.2f}")
assert induction[found[0]] > 0.8 and np.median(induction) < 0.02  # a few heads, and clearly

# %% [markdown]
# ## 3. Ablate
#
# Zero ablation sets the output of a head to 0, mean ablation to its mean over other texts, which keeps what it adds to every text ([Wang
# et al. 2023](https://arxiv.org/abs/2211.00593)). The control is as many other heads, drawn from the same layers.


# %%
def of_layers(chosen, **action):
    """A rule for each layer of these heads."""
    by_layer = {at: [head for layer, head in chosen if layer == at] for at, _ in chosen}
    return [{"layers": [layer], "heads": own, **action} for layer, own in by_layer.items()]


def loss_with(rules):
    with regard.hf.intervene(model, rules):
        return losses()[1]


other_words = torch.randint(1000, 40000, (2, 2 * half), generator=torch.Generator().manual_seed(1))
with regard.hf.head_means(model) as means:
    model(torch.cat([ids[:, :1], other_words], 1))
rng = np.random.default_rng(0)
others = [(layer, head) for layer in {layer for layer, _ in found} for head in range(heads) if induction[layer, head] < 0.05]
controls = [[others[i] for i in rng.choice(len(others), len(found), replace=False)] for _ in range(3)]
zero, mean = loss_with(of_layers(found, output=0.0)), loss_with(of_layers(found, output=means))
control = max(loss_with(of_layers(one, output=0.0)) for one in controls)
print(f"loss of the second half: {clean_loss:.2f} nats; without {len(found)} induction heads {zero:.2f}, with their means {mean:.2f}")
print(f"without as many others: at most {control:.2f}")
assert zero - clean_loss > 6 and mean - clean_loss > 6
assert control - clean_loss < 1

# %% [markdown]
# ## 4. Knock out single edges
#
# A head does more than one thing. Attention knockout cuts only the edge from each row to the token that followed its first occurrence;
# the control cuts the edge to the next key instead. Scores are changed inside the fused kernel.


# %%
def cut(shift):
    edges = [{"rows": (int(row), int(row) + 1), "keys": (int(key) + shift, int(key) + shift + 1)} for row, key in zip(rows, targets)]
    return [rule for edge in edges for rule in of_layers(found, drop=True, **edge)]


knockout, beside = loss_with(cut(0)), loss_with(cut(1))
print(f"second half: {clean_loss:.2f} nats; without the induction edges {knockout:.2f}, without those beside them {beside:.2f}")
assert knockout - clean_loss > 6 and abs(beside - clean_loss) < 0.1

# %% [markdown]
# ## 5. What the heads depend on: previous-token heads
#
# A key must tell which token came before it. Heads of earlier layers write that, by attending to the previous token; without them the
# induction heads do not find their keys (K-composition, [Elhage et al.
# 2021](https://transformer-circuits.pub/2021/framework/index.html)).

# %%
positions = np.arange(1, ids.shape[1])
previous = scores(clean, positions - 1, positions)
early = largest(previous[: found[0][0]], 3)
without_early = of_layers(early, output=0.0)
with regard.hf.intervene(model, without_early), regard.lens.capture(model, keep=True) as seen:
    early_loss = losses()[1]
lost = np.mean([scores(seen, targets)[at] / induction[at] for at in found])
print(f"without previous-token heads {early}: loss {early_loss:.2f}, induction scores fall to {lost:.0%}")
assert early_loss - clean_loss > 5 and lost < 0.2

# %% [markdown]
# ## 6. Restore
#
# Keep those heads ablated, and give the induction heads the pattern of the clean run: values are of this run, weights of the other. What
# comes back went through where the induction heads look, the rest through elsewhere. In the clean run a frozen pattern changes no bit,
# and neither does a context that is left.

# %%
frozen = of_layers(found, pattern=clean)
restored = loss_with(without_early + frozen)
print(f"with the clean pattern of the induction heads: {restored:.2f} nats, from {early_loss:.2f}")
assert early_loss - restored > 0.6 * (early_loss - clean_loss)
with regard.hf.intervene(model, cut(0) + frozen):
    assert torch.equal(losses()[2], clean_logits)
assert torch.equal(losses()[2], clean_logits)

# %% [markdown]
# ## 7. Weights and what they move
#
# Heads that find nothing rest on the first token, whose value is small (an attention sink), so its share of what is moved is smaller than
# its share of the weights ([Kobayashi et al. 2020](https://arxiv.org/abs/2004.10102)). Span mass sums the weights of parts of a text;
# here for the best induction head.

# %%
with regard.lens.capture(model, keep=True, value_weighted=True) as moved:
    model(ids)
sink, moved_sink = (np.mean([record.row(-1)[..., 0].mean() for record in run]) for run in (clean, moved))
print(f"the first token: {sink:.0%} of the weight, {moved_sink:.0%} of what is moved")
assert moved_sink < 0.7 * sink

spans = {"first token": (0, 1), "first half": (1, half + 1), "second half": (half + 1, None)}
with regard.lens.mass(model, spans, rows="all") as mass:
    model(ids)
on = {name: mass[name][found[0]][rows].mean() for name in mass.names}
print(f"layer {found[0][0]}, head {found[0][1]}:", ", ".join(f"{value:.0%} on the {name}" for name, value in on.items()))
assert on["first half"] > 0.85
