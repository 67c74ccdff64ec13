"""The modules, each defined by PyTorch or transformers where they have it. `plain` is the second opinion.

A definition takes our parameters, gives them to PyTorch's module under its names (`functional_call`), and returns outputs by
name; so the gradients are those of our parameters.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.t5.modeling_t5 import T5Attention

import plain
from draw import Golden, additive, attention as draw_attention, below, block, draw, embedding as draw_embedding
from draw import feed_forward as draw_feed_forward, gru as draw_gru, linear as draw_linear, named, norm as draw_norm

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def hidden_after(length):
    """PyTorch's causal mask, where true hides."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def attention_state(p, prefix=""):
    """Our q, k, v, out as nn.MultiheadAttention keeps them: the three in one."""
    return {
        f"{prefix}in_proj_weight": torch.cat([p[f"{name}.weight"] for name in "qkv"]),
        f"{prefix}in_proj_bias": torch.cat([p[f"{name}.bias"] for name in "qkv"]),
        f"{prefix}out_proj.weight": p["out.weight"],
        f"{prefix}out_proj.bias": p["out.bias"],
    }


def block_state(p):
    """Our block as nn.TransformerEncoderLayer or, with a cross attention, nn.TransformerDecoderLayer keeps it."""
    state = attention_state(plain.part(p, "attention"), "self_attn.")
    norms = ["attention_norm", "feed_forward_norm"]
    if "cross.q.weight" in p:
        state |= attention_state(plain.part(p, "cross"), "multihead_attn.")
        norms.insert(1, "cross_norm")
    ours = {f"norm{i + 1}": name for i, name in enumerate(norms)}
    ours |= {"linear1": "feed_forward.up", "linear2": "feed_forward.down"}
    return state | {f"{theirs}.{kind}": p[f"{name}.{kind}"] for theirs, name in ours.items() for kind in ("weight", "bias")}


def linear():
    config = {"in": 6, "out": 5, "variants": {name: {"activation": name} for name in ACTIVATIONS}}
    variants = {
        name: (
            lambda p, i, of=of: {"y": of(F.linear(i["x"], p["weight"], p["bias"]))},
            lambda p, i, name=name: {"y": plain.activate(name, plain.linear(p, i["x"]))},
        )
        for name, of in ACTIVATIONS.items()
    }
    return Golden("linear", config, draw_linear(5, 6), {"x": draw(2, 3, 6)}, variants)


def layer_norm():
    config = {"dim": 8, "eps": 1e-5}
    torchs = lambda p, i: {"y": F.layer_norm(i["x"], (8,), p["weight"], p["bias"], config["eps"])}
    plains = lambda p, i: {"y": plain.norm(p, i["x"], config["eps"])}
    return Golden("layer_norm", config, draw_norm(8), {"x": draw(2, 3, 8) + 0.5}, {"": (torchs, plains)})


def rms_norm():
    config = {"dim": 8, "eps": 1e-6}
    torchs = lambda p, i: {"y": F.rms_norm(i["x"], (8,), p["weight"], config["eps"])}
    plains = lambda p, i: {"y": plain.norm(p, i["x"], config["eps"])}
    return Golden("rms_norm", config, draw_norm(8, False), {"x": draw(2, 3, 8) + 0.5}, {"": (torchs, plains)})


def cross_entropy():
    smoothings = {"plain": 0.0, "smoothed": 0.1}
    config = {"classes": 7, "ignored": -100, "variants": {name: {"smoothing": one} for name, one in smoothings.items()}}
    inputs = {"logits": draw(2, 5, 7) * 2, "labels": torch.tensor([[3, 0, 6, 3, 1], [2, 5, -100, -100, -100]])}
    variants = {
        name: (
            lambda p, i, s=s: {"loss": F.cross_entropy(i["logits"].flatten(0, 1), i["labels"].flatten(), label_smoothing=s)},
            lambda p, i, s=s: {"loss": plain.cross_entropy(i["logits"], i["labels"], s)},
        )
        for name, s in smoothings.items()
    }
    return Golden("cross_entropy", config, {}, inputs, variants)


def embedding():
    config = {"count": 7, "dim": 4}
    inputs = {"ids": torch.tensor([[3, 0, 3, 6], [6, 3, 1, 1]])}
    torchs = lambda p, i: {"y": F.embedding(i["ids"], p["weight"])}
    plains = lambda p, i: {"y": F.one_hot(i["ids"], 7).double() @ p["weight"]}
    return Golden("embedding", config, draw_embedding(7, 4), inputs, {"": (torchs, plains)})


def multi_head_self():
    config = {"d_model": 16, "n_heads": 4, "causal": True}
    lengths = torch.tensor([5, 3])
    inputs = {"x": draw(2, 5, 16), "lengths": lengths}
    module = nn.MultiheadAttention(16, 4, batch_first=True).double()

    def torchs(p, i):
        masks = {"attn_mask": hidden_after(5), "key_padding_mask": ~below(5, i["lengths"]), "need_weights": False}
        return {"y": functional_call(module, attention_state(p), (i["x"],) * 3, masks)[0]}

    def plains(p, i):
        mask = plain.causal(5, 5) & below(5, i["lengths"]).view(2, 1, 1, 5)
        return {"y": plain.attention(p, i["x"], i["x"], 4, mask)}

    kept = {"y": below(5, lengths)}
    return Golden("multi_head_self", config, draw_attention(16), inputs, {"": (torchs, plains)}, kept=kept)


def multi_head_cross():
    config = {"d_model": 16, "n_heads": 4, "causal": False}
    inputs = {"x": draw(2, 4, 16), "memory": draw(2, 6, 16), "memory_lengths": torch.tensor([6, 2])}
    module = nn.MultiheadAttention(16, 4, batch_first=True).double()

    def torchs(p, i):
        masks = {"key_padding_mask": ~below(6, i["memory_lengths"]), "need_weights": False}
        return {"y": functional_call(module, attention_state(p), (i["x"], i["memory"], i["memory"]), masks)[0]}

    def plains(p, i):
        rows = zip(i["x"], i["memory"], i["memory_lengths"])
        return {"y": torch.cat([plain.attention(p, x[None], memory[None, :n], 4) for x, memory, n in rows])}

    return Golden("multi_head_cross", config, draw_attention(16), inputs, {"": (torchs, plains)})


def rotary(length, dim, base):
    """cos and sin [1, length, dim] as transformers' halves want them, in f64."""
    angle = torch.arange(length).double().view(-1, 1) * base ** (-torch.arange(0, dim, 2).double() / dim)
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos(), angle.sin()


def multi_head_grouped():
    config = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "causal": True, "rope": "halves", "rope_base": 10000.0}

    def torchs(p, i):
        q, k, v = (F.linear(i["x"], p[f"{name}.weight"]).unflatten(-1, (-1, 8)).transpose(1, 2) for name in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *rotary(6, 8, config["rope_base"]))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return {"y": F.linear(out.transpose(1, 2).flatten(-2), p["out.weight"])}

    def plains(p, i):
        return {"y": plain.attention(p, i["x"], i["x"], 4, plain.causal(6, 6), rope=config["rope_base"])}

    parameters = draw_attention(32, 16, False)
    return Golden("multi_head_grouped", config, parameters, {"x": draw(2, 6, 32)}, {"": (torchs, plains)})


def weighted(scores, values, lengths):
    """Softmax of scores [batch, m, n] over the keys within each length, and the values' mean under it."""
    mask = below(scores.shape[-1], lengths).unsqueeze(1)
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
    return {"context": weights @ values, "weights": weights}


def bahdanau_attention(p, queries, keys, lengths):
    """score = score . tanh(query q + key k); values are the keys."""
    hidden = torch.tanh(F.linear(queries, p["query.weight"]).unsqueeze(2) + F.linear(keys, p["key.weight"]).unsqueeze(1))
    return weighted(hidden @ p["score"], keys, lengths)


def each_query(one, i):
    """A formula for a single query, over all of them, with the padding cut off."""
    contexts, weights = [], []
    for queries, keys, n in zip(i["queries"], i["keys"], i["lengths"]):
        found = [one(query, keys[:n]) for query in queries]
        contexts.append(torch.stack([context for context, _ in found]))
        weights.append(torch.stack([plain.padded(row, len(keys)) for _, row in found]))
    return {"context": torch.stack(contexts), "weights": torch.stack(weights)}


def bahdanau():
    config = {"query_dim": 6, "key_dim": 8, "hidden": 5}
    inputs = {"queries": draw(2, 3, 6), "keys": draw(2, 5, 8), "lengths": torch.tensor([5, 2])}
    torchs = lambda p, i: bahdanau_attention(p, i["queries"], i["keys"], i["lengths"])
    plains = lambda p, i: each_query(lambda query, keys: plain.additive(p, query, keys), i)
    return Golden("bahdanau", config, additive(6, 8, 5), inputs, {"": (torchs, plains)}, seen=("weights",))


def luong():
    """dot: q . k; general: q . W k; concat: score . tanh(W [q; k]). No score is scaled; values are the keys."""
    config = {"dim": 6, "hidden": 5, "variants": {name: {"score": name} for name in ("dot", "general", "concat")}}
    parameters = named("general", draw_linear(6, 6, False)) | named("concat", draw_linear(5, 12, False)) | {"score": draw(5)}
    inputs = {"queries": draw(2, 3, 6), "keys": draw(2, 5, 6), "lengths": torch.tensor([5, 2])}

    def pairs(queries, keys):
        shape = (*queries.shape[:2], keys.shape[1], -1)
        return torch.cat([queries.unsqueeze(2).expand(shape), keys.unsqueeze(1).expand(shape)], -1)

    scores = {
        "dot": lambda p, q, k: q @ k.mT,
        "general": lambda p, q, k: q @ F.linear(k, p["general.weight"]).mT,
        "concat": lambda p, q, k: torch.tanh(F.linear(pairs(q, k), p["concat.weight"])) @ p["score"],
    }
    single = {
        "dot": lambda p, q, k: q @ k,
        "general": lambda p, q, k: q @ p["general.weight"] @ k,
        "concat": lambda p, q, k: p["score"] @ torch.tanh(p["concat.weight"] @ torch.cat([q, k])),
    }

    def plains(name):
        def one(p, query, keys):
            weights = plain.softmax(torch.stack([single[name](p, query, key) for key in keys]))
            return weights @ keys, weights

        return lambda p, i: each_query(lambda query, keys: one(p, query, keys), i)

    def torchs(name):
        return lambda p, i: weighted(scores[name](p, i["queries"], i["keys"]), i["keys"], i["lengths"])

    variants = {name: (torchs(name), plains(name)) for name in scores}
    return Golden("luong", config, parameters, inputs, variants, seen=("weights",))


def gru_states(p, x, lengths):
    """nn.GRU in both directions over padded x [batch, n, d]: states [batch, n, 2 hidden], 0 in the padding, and last
    states [batch, 2 hidden], of the forward direction at the last word, of the backward direction at the first."""
    hidden = p["forward.hidden.weight"].shape[1]
    module = nn.GRU(x.shape[-1], hidden, batch_first=True, bidirectional=True).double()
    state = {}
    for side, suffix in (("forward", ""), ("backward", "_reverse")):
        for ours, theirs in (("input", "ih"), ("hidden", "hh")):
            state[f"weight_{theirs}_l0{suffix}"] = p[f"{side}.{ours}.weight"]
            state[f"bias_{theirs}_l0{suffix}"] = p[f"{side}.{ours}.bias"]
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    states, last = functional_call(module, state, (packed,))
    states, _ = pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])
    return states, last.transpose(0, 1).flatten(1)


def gru():
    config = {"in": 4, "hidden": 5, "bidirectional": True}
    inputs = {"x": draw(3, 6, 4), "lengths": torch.tensor([4, 6, 1])}
    torchs = lambda p, i: dict(zip(("states", "last"), gru_states(p, i["x"], i["lengths"])))

    def plains(p, i):
        found = [plain.gru(p, x[:n]) for x, n in zip(i["x"], i["lengths"])]
        states = torch.stack([plain.padded(states, 6) for states, _ in found])
        return {"states": states, "last": torch.stack([last for _, last in found])}

    kept = {"states": below(6, inputs["lengths"])}
    return Golden("gru", config, draw_gru(4, 5), inputs, {"": (torchs, plains)}, kept=kept)


def feed_forward():
    config = {"d_model": 6, "d_ff": 10, "activation": "gelu", "gate": False}
    module = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()

    def torchs(p, i):
        state = {f"{at}.{kind}": p[f"{name}.{kind}"] for at, name in ((0, "up"), (2, "down")) for kind in ("weight", "bias")}
        return {"y": functional_call(module, state, (i["x"],))}

    plains = lambda p, i: {"y": plain.feed_forward(p, i["x"], "gelu")}
    return Golden("feed_forward", config, draw_feed_forward(6, 10), {"x": draw(2, 3, 6)}, {"": (torchs, plains)})


def feed_forward_gated():
    config = {"d_model": 6, "d_ff": 10, "activation": "silu", "gate": True}

    def torchs(p, i):
        hidden = F.silu(F.linear(i["x"], p["gate.weight"])) * F.linear(i["x"], p["up.weight"])
        return {"y": F.linear(hidden, p["down.weight"])}

    plains = lambda p, i: {"y": plain.feed_forward(p, i["x"], "silu")}
    parameters = draw_feed_forward(6, 10, True, False)
    return Golden("feed_forward_gated", config, parameters, {"x": draw(2, 3, 6)}, {"": (torchs, plains)})


def sinusoids(length, dim, base=10000.0):
    """[length, dim]: sin at even features, cos at odd ones, of position / base^(2i / dim)."""
    angle = torch.arange(length).double().view(-1, 1) * base ** (-torch.arange(0, dim, 2).double() / dim)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


def sinusoid():
    """Nothing to learn: only the table."""
    config = {"length": 40, "dim": 12, "base": 10000.0}
    torchs = lambda p, i: {"positions": sinusoids(40, 12)}
    plains = lambda p, i: {"positions": plain.sinusoid(40, 12, 10000.0)}
    return Golden("sinusoid", config, {}, {}, {"": (torchs, plains)}, seen=("positions",))


def t5_bucket(far, causal, buckets, most):
    """The bucket of a key at `far` = key - row, in whole numbers where the definition is exact."""
    base = 0
    if not causal:
        buckets //= 2
        base, far = (buckets, far) if far > 0 else (0, -far)
    else:
        far = max(0, -far)
    exact = buckets // 2
    if far < exact:
        return base + far
    share = math.log(far / exact) / math.log(most / exact)
    return base + min(buckets - 1, exact + int(share * (buckets - exact) + 1e-9))


def t5_bias():
    """T5's attention: scores are not scaled, and a learned bias per head and bucket of distance is added."""
    config = {"d_model": 16, "n_heads": 4, "scale": 1.0, "buckets": 8, "max_distance": 16}
    config["variants"] = {"full": {"causal": False}, "causal": {"causal": True}}
    parameters = draw_attention(16, None, False) | {"table": draw(8, 4)}
    n = 20

    def both(causal):
        sizes = {"d_model": 16, "d_kv": 4, "num_heads": 4, "dropout_rate": 0.0}
        sizes |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
        theirs = T5Config(is_decoder=causal, **sizes)
        theirs._attn_implementation = "eager"
        module = T5Attention(theirs, has_relative_attention_bias=True, layer_idx=0).double().eval()

        def torchs(p, i):
            state = {f"{name[0]}.weight": p[f"{name}.weight"] for name in ("q", "k", "v", "out")}
            state["relative_attention_bias.weight"] = p["table"]
            mask = torch.zeros(n, n).double().masked_fill(hidden_after(n), -math.inf).view(1, 1, n, n) if causal else None
            return {"y": functional_call(module, state, (i["x"],), {"mask": mask})[0]}

        def plains(p, i):
            buckets = torch.tensor([[t5_bucket(key - row, causal, 8, 16) for key in range(n)] for row in range(n)])
            mask = plain.causal(n, n) if causal else None
            bias = p["table"][buckets].permute(2, 0, 1)
            return {"y": plain.attention(p, i["x"], i["x"], 4, mask, bias, scale=1.0)}

        return torchs, plains

    variants = {name: both(one["causal"]) for name, one in config["variants"].items()}
    return Golden("t5_bias", config, parameters, {"x": draw(1, n, 16)}, variants)


def alibi():
    """Causal attention with -slope * distance added; slopes 2^(-8 (head + 1) / heads)."""
    config = {"d_model": 16, "n_heads": 4, "causal": True, "slopes": [2.0 ** (-8 * (head + 1) / 4) for head in range(4)]}
    n = 7

    def torchs(p, i):
        q, k, v = (F.linear(i["x"], p[f"{name}.weight"], p[f"{name}.bias"]).unflatten(-1, (4, 4)) for name in "qkv")
        # Bloom's depends on the key alone, which softmax does not tell from the distance.
        bias = build_alibi_tensor(torch.ones(1, n), 4, torch.float64).view(1, 4, 1, n).masked_fill(hidden_after(n), -math.inf)
        out = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)), attn_mask=bias)
        return {"y": F.linear(out.transpose(1, 2).flatten(-2), p["out.weight"], p["out.bias"])}

    def plains(p, i):
        far = torch.arange(n) - torch.arange(n).view(-1, 1)
        bias = torch.tensor(config["slopes"]).double().view(4, 1, 1) * far
        return {"y": plain.attention(p, i["x"], i["x"], 4, plain.causal(n, n), bias)}

    return Golden("alibi", config, draw_attention(16), {"x": draw(2, n, 16)}, {"": (torchs, plains)})


def encoder_block(norm, activation):
    config = {"d_model": 16, "n_heads": 4, "d_ff": 24, "activation": activation, "norm": norm, "eps": 1e-5}
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm == "pre"}
    module = nn.TransformerEncoderLayer(16, 4, 24, **options).double()
    lengths = torch.tensor([5, 3])

    def torchs(p, i):
        masks = {"src_key_padding_mask": ~below(5, i["lengths"])}
        return {"y": functional_call(module, block_state(p), (i["x"],), masks)}

    plains = lambda p, i: {"y": plain.block(p, i["x"], config, below(5, i["lengths"]).view(2, 1, 1, 5))}
    inputs = {"x": draw(2, 5, 16), "lengths": lengths}
    kept = {"y": below(5, lengths)}
    return Golden(f"encoder_block_{norm}", config, block(16, 24), inputs, {"": (torchs, plains)}, kept=kept)


def encoder_block_pre():
    return encoder_block("pre", "gelu")


def encoder_block_post():
    return encoder_block("post", "relu")


def decoder_block(norm, activation):
    config = {"d_model": 16, "n_heads": 4, "d_ff": 24, "activation": activation, "norm": norm, "eps": 1e-5, "causal": True}
    options = {"dropout": 0.0, "activation": activation, "batch_first": True, "norm_first": norm == "pre"}
    module = nn.TransformerDecoderLayer(16, 4, 24, **options).double()

    def torchs(p, i):
        masks = {"tgt_mask": hidden_after(4), "memory_key_padding_mask": ~below(6, i["memory_lengths"])}
        return {"y": functional_call(module, block_state(p), (i["x"], i["memory"]), masks)}

    def plains(p, i):
        rows = zip(i["x"], i["memory"], i["memory_lengths"])
        return {"y": torch.cat([plain.block(p, x[None], config, plain.causal(4, 4), memory[None, :n]) for x, memory, n in rows])}

    inputs = {"x": draw(2, 4, 16), "memory": draw(2, 6, 16), "memory_lengths": torch.tensor([6, 2])}
    return Golden(f"decoder_block_{norm}", config, block(16, 24, cross=True), inputs, {"": (torchs, plains)})


def decoder_block_pre():
    return decoder_block("pre", "gelu")


def decoder_block_post():
    return decoder_block("post", "relu")


ALL = [linear, layer_norm, rms_norm, cross_entropy, embedding]
ALL += [multi_head_self, multi_head_cross, multi_head_grouped, bahdanau, luong]
ALL += [gru, feed_forward, feed_forward_gated, sinusoid, t5_bias, alibi]
ALL += [encoder_block_pre, encoder_block_post, decoder_block_pre, decoder_block_post]
