"""The models, each defined by PyTorch or transformers where they have it; `seq2seq` and `han` are defined here.

Every model returns `logits` and `loss`, the mean cross entropy over the labels that are not -100, and is differentiated from
the loss; BERT has no labels and is differentiated from its outputs.
"""
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers import ViTConfig, ViTForImageClassification

import plain
from draw import Golden, additive, below, block, draw, embedding, gru_cell, linear, named, norm
from draw import gru as draw_gru
from modules import bahdanau_attention, block_state, gru_states, hidden_after, rotary, sinusoids


def loss(logits, labels, smoothing=0.0):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing)


def scored(logits, labels, smoothing=0.0):
    return {"logits": logits, "loss": loss(logits, labels, smoothing)}


def plainly(logits, labels, smoothing=0.0):
    return {"logits": logits, "loss": plain.cross_entropy(logits, labels, smoothing)}


def blocks(prefix, count, *sizes, **options):
    return {key: one for i in range(count) for key, one in named(f"{prefix}.{i}", block(*sizes, **options)).items()}


def renamed(p, names):
    """Their state from our parameters: `names` are pairs (theirs, ours); {i} runs over the layers, both kinds over each."""
    state = {}
    for theirs, ours in names:
        for i in range(2 if "{i}" in theirs else 1):
            for kind in ("weight", "bias"):
                if (name := f"{ours.format(i=i)}.{kind}") in p:
                    state[f"{theirs.format(i=i)}.{kind}"] = p[name]
    return state


def words(vocab, *lengths):
    """Ids [batch, longest] with padding 0 behind each length."""
    ids = torch.randint(1, vocab, (len(lengths), max(lengths)))
    return ids * below(max(lengths), torch.tensor(lengths))


def labels(vocab, *lengths):
    """Labels of the same form, -100 in the padding."""
    found = torch.randint(0, vocab, (len(lengths), max(lengths)))
    return found.masked_fill(~below(max(lengths), torch.tensor(lengths)), -100)


def gpt():
    config = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "vocab": 50, "context": 32}
    config |= {"activation": "gelu_tanh", "norm": "pre", "eps": 1e-5, "tied": True}
    parameters = named("embedding", embedding(50, 32)) | named("positions", embedding(32, 32))
    parameters |= blocks("blocks", 2, 32, 64) | named("norm", norm(32))
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    theirs = GPT2Config(n_layer=2, n_embd=32, n_head=4, n_inner=64, vocab_size=50, n_positions=32, **drops)
    module = GPT2LMHeadModel(theirs).double().eval()

    def torchs(p, i):
        names = [("wte", "embedding"), ("wpe", "positions"), ("ln_f", "norm")]
        names += [("h.{i}.ln_1", "blocks.{i}.attention_norm"), ("h.{i}.ln_2", "blocks.{i}.feed_forward_norm")]
        state = renamed(p, names)
        for layer in range(2):
            for at, ours in (
                ("attn.c_attn", ["attention.q", "attention.k", "attention.v"]),
                ("attn.c_proj", ["attention.out"]),
                ("mlp.c_fc", ["feed_forward.up"]),
                ("mlp.c_proj", ["feed_forward.down"]),
            ):
                # GPT-2 keeps its linear maps as [in, out].
                state[f"h.{layer}.{at}.weight"] = torch.cat([p[f"blocks.{layer}.{name}.weight"] for name in ours]).T
                state[f"h.{layer}.{at}.bias"] = torch.cat([p[f"blocks.{layer}.{name}.bias"] for name in ours])
        state = {f"transformer.{key}": one for key, one in state.items()}
        return scored(functional_call(module, state, (i["ids"],), {"use_cache": False}).logits, i["labels"])

    def plains(p, i):
        x = p["embedding.weight"][i["ids"]] + p["positions.weight"][: i["ids"].shape[1]]
        for layer in range(2):
            x = plain.block(plain.part(p, f"blocks.{layer}"), x, config, plain.causal(*[x.shape[1]] * 2))
        x = plain.norm(plain.part(p, "norm"), x, config["eps"])
        return plainly(x @ p["embedding.weight"].T, i["labels"])

    inputs = {"ids": words(50, 9, 6), "labels": labels(50, 9, 6)}
    return Golden("gpt", config, parameters, inputs, {"": (torchs, plains)})


class Rotary(nn.Module):
    """Llama's, in f64: its own rounds the angles to f32."""

    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, x, position_ids):
        cos, sin = rotary(position_ids.shape[1], self.dim, self.base)
        return cos.expand(len(x), -1, -1), sin.expand(len(x), -1, -1)


def llama():
    config = {"d_model": 32, "n_heads": 4, "n_kv_heads": 2, "n_layers": 2, "d_ff": 64, "vocab": 50, "activation": "silu"}
    config |= {"gate": True, "norm": "pre", "eps": 1e-5, "rope": "halves", "rope_base": 10000.0, "tied": False}
    parameters = named("embedding", embedding(50, 32)) | blocks("blocks", 2, 32, 64, kv=16, gate=True, bias=False)
    parameters |= named("norm", norm(32, False)) | named("head", linear(50, 32, False))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 50, "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 32}
    theirs = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **sizes)
    module = LlamaForCausalLM(theirs).double().eval()
    rounded = LlamaForCausalLM(theirs).double().eval()
    # transformers rounds the norms and angles to f32 even in a model of f64; PyTorch's own norm does not.
    module.model.rotary_emb = Rotary(8, 10000.0)
    for parent in [module.model, *module.model.layers]:
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, nn.RMSNorm(32, eps=1e-5).double())

    def torchs(p, i):
        names = [("embed_tokens", "embedding"), ("norm", "norm")]
        names += [(f"layers.{{i}}.self_attn.{name[0]}_proj", f"blocks.{{i}}.attention.{name}") for name in ("q", "k", "v", "out")]
        names += [(f"layers.{{i}}.mlp.{name}_proj", f"blocks.{{i}}.feed_forward.{name}") for name in ("gate", "up", "down")]
        names += [("layers.{i}.input_layernorm", "blocks.{i}.attention_norm")]
        names += [("layers.{i}.post_attention_layernorm", "blocks.{i}.feed_forward_norm")]
        state = {f"model.{key}": one for key, one in renamed(p, names).items()} | renamed(p, [("lm_head", "head")])
        logits = functional_call(module, state, (i["ids"],), {"use_cache": False}).logits
        with torch.no_grad():
            stock = functional_call(rounded, state, (i["ids"],), {"use_cache": False}).logits
        assert (logits - stock).abs().max() < 1e-4, "llama: not what transformers computes"
        return scored(logits, i["labels"])

    def plains(p, i):
        x = p["embedding.weight"][i["ids"]]
        for layer in range(2):
            x = plain.block(plain.part(p, f"blocks.{layer}"), x, config, plain.causal(*[x.shape[1]] * 2))
        x = plain.norm(plain.part(p, "norm"), x, config["eps"])
        return plainly(plain.linear(plain.part(p, "head"), x), i["labels"])

    inputs = {"ids": words(50, 9, 6), "labels": labels(50, 9, 6)}
    return Golden("llama", config, parameters, inputs, {"": (torchs, plains)})


def bert():
    """hidden: the last layer; pooled: tanh(pooler of the first token)."""
    config = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "vocab": 50, "context": 32, "token_types": 2}
    config |= {"activation": "gelu", "norm": "post", "eps": 1e-12}
    parameters = named("embedding", embedding(50, 32)) | named("positions", embedding(32, 32)) | named("token_types", embedding(2, 32))
    parameters |= named("norm", norm(32)) | blocks("blocks", 2, 32, 64) | named("pooler", linear(32, 32))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    module = BertModel(BertConfig(max_position_embeddings=32, **sizes)).double().eval()

    def torchs(p, i):
        tables = {"word": "embedding", "position": "positions", "token_type": "token_types"}
        names = [(f"embeddings.{name}_embeddings", ours) for name, ours in tables.items()]
        names += [("embeddings.LayerNorm", "norm"), ("pooler.dense", "pooler")]
        layer = {"attention.output.dense": "attention.out", "attention.output.LayerNorm": "attention_norm"}
        layer |= {f"attention.self.{name}": f"attention.{name[0]}" for name in ("query", "key", "value")}
        layer |= {"intermediate.dense": "feed_forward.up", "output.dense": "feed_forward.down"}
        layer |= {"output.LayerNorm": "feed_forward_norm"}
        state = renamed(p, names + [(f"encoder.layer.{{i}}.{name}", f"blocks.{{i}}.{ours}") for name, ours in layer.items()])
        masks = {"attention_mask": below(8, i["lengths"]).long(), "token_type_ids": i["token_types"]}
        out = functional_call(module, state, (i["ids"],), masks)
        return {"hidden": out.last_hidden_state, "pooled": out.pooler_output}

    def plains(p, i):
        x = p["embedding.weight"][i["ids"]] + p["positions.weight"][:8] + p["token_types.weight"][i["token_types"]]
        x = plain.norm(plain.part(p, "norm"), x, config["eps"])
        for layer in range(2):
            x = plain.block(plain.part(p, f"blocks.{layer}"), x, config, below(8, i["lengths"]).view(-1, 1, 1, 8))
        return {"hidden": x, "pooled": torch.tanh(plain.linear(plain.part(p, "pooler"), x[:, 0]))}

    lengths = torch.tensor([8, 5])
    token_types = (torch.arange(8) >= 3).long().expand(2, 8).clone() * below(8, lengths)
    inputs = {"ids": words(50, 8, 5), "token_types": token_types, "lengths": lengths}
    return Golden("bert", config, parameters, inputs, {"": (torchs, plains)}, kept={"hidden": below(8, lengths)})


def transformer():
    """Words enter as sqrt(d_model) * embedding + sinusoid. The loss is smoothed by 0.1."""
    config = {"d_model": 32, "n_heads": 4, "n_encoder_layers": 2, "n_decoder_layers": 2, "d_ff": 64, "source_vocab": 40}
    config |= {"target_vocab": 30, "activation": "relu", "norm": "pre", "eps": 1e-5, "smoothing": 0.1, "base": 10000.0}
    parameters = named("source", embedding(40, 32)) | named("target", embedding(30, 32))
    parameters |= blocks("encoder", 2, 32, 64) | named("encoder_norm", norm(32))
    parameters |= blocks("decoder", 2, 32, 64, cross=True) | named("decoder_norm", norm(32)) | named("head", linear(30, 32))
    options = {"dropout": 0.0, "activation": "relu", "batch_first": True, "norm_first": True}
    encoder = nn.TransformerEncoderLayer(32, 4, 64, **options)
    encoder = nn.TransformerEncoder(encoder, 2, nn.LayerNorm(32), enable_nested_tensor=False).double()
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, **options), 2, nn.LayerNorm(32)).double()

    def state(p, side):
        layers = [block_state(plain.part(p, f"{side}.{i}")) for i in range(2)]
        found = {f"layers.{i}.{key}": one for i, layer in enumerate(layers) for key, one in layer.items()}
        return found | named("norm", plain.part(p, f"{side}_norm"))

    def torchs(p, i):
        hidden = ~below(i["source"].shape[1], i["source_lengths"])
        enter = lambda name: F.embedding(i[name], p[f"{name}.weight"]) * 32**0.5 + sinusoids(i[name].shape[1], 32)
        memory = functional_call(encoder, state(p, "encoder"), (enter("source"),), {"src_key_padding_mask": hidden})
        masks = {"tgt_mask": hidden_after(i["target"].shape[1]), "memory_key_padding_mask": hidden}
        out = functional_call(decoder, state(p, "decoder"), (enter("target"), memory), masks)
        return scored(F.linear(out, p["head.weight"], p["head.bias"]), i["labels"], 0.1)

    def plains(p, i):
        rows = []
        for source, n, target in zip(i["source"], i["source_lengths"], i["target"]):
            enter = lambda name, ids: (p[f"{name}.weight"][ids] * 32**0.5 + plain.sinusoid(len(ids), 32, 10000.0))[None]
            memory, x = enter("source", source[:n]), enter("target", target)
            for layer in range(2):
                memory = plain.block(plain.part(p, f"encoder.{layer}"), memory, config)
            memory = plain.norm(plain.part(p, "encoder_norm"), memory, config["eps"])
            for layer in range(2):
                x = plain.block(plain.part(p, f"decoder.{layer}"), x, config, plain.causal(*[len(target)] * 2), memory)
            rows.append(plain.linear(plain.part(p, "head"), plain.norm(plain.part(p, "decoder_norm"), x, config["eps"])))
        return plainly(torch.cat(rows), i["labels"], 0.1)

    inputs = {"source": words(40, 7, 4), "source_lengths": torch.tensor([7, 4])}
    inputs |= {"target": words(30, 4, 6), "labels": labels(30, 4, 6)}
    return Golden("transformer", config, parameters, inputs, {"": (torchs, plains)})


def vit():
    """A patch is flattened as [channel, row, column]; patches are counted row by row behind the class token."""
    config = {"d_model": 32, "n_heads": 4, "n_layers": 2, "d_ff": 64, "image": 16, "patch": 4, "channels": 3, "classes": 5}
    config |= {"activation": "gelu", "norm": "pre", "eps": 1e-12}
    parameters = named("patches", linear(32, 48)) | {"class": draw(1, 1, 32), "positions": draw(17, 32) * 0.5}
    parameters |= blocks("blocks", 2, 32, 64) | named("norm", norm(32)) | named("head", linear(5, 32))
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    module = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes)).double().eval()

    def torchs(p, i):
        at = "vit.embeddings."
        layer = {f"attention.{name[0]}_proj": f"attention.{name}" for name in ("q", "k", "v", "out")}
        layer |= {"layernorm_before": "attention_norm", "layernorm_after": "feed_forward_norm"}
        layer |= {"mlp.fc1": "feed_forward.up", "mlp.fc2": "feed_forward.down"}
        names = [(f"vit.layers.{{i}}.{name}", f"blocks.{{i}}.{ours}") for name, ours in layer.items()]
        state = renamed(p, names + [("vit.layernorm", "norm"), ("classifier", "head")])
        state |= {f"{at}cls_token": p["class"], f"{at}position_embeddings": p["positions"][None]}
        state[f"{at}patch_embeddings.projection.weight"] = p["patches.weight"].view(32, 3, 4, 4)
        state[f"{at}patch_embeddings.projection.bias"] = p["patches.bias"]
        return scored(functional_call(module, state, (i["pixels"],)).logits, i["labels"])

    def plains(p, i):
        cut = [i["pixels"][:, :, y : y + 4, x : x + 4].flatten(1) for y in range(0, 16, 4) for x in range(0, 16, 4)]
        x = plain.linear(plain.part(p, "patches"), torch.stack(cut, 1))
        x = torch.cat([p["class"].expand(len(x), -1, -1), x], 1) + p["positions"]
        for layer in range(2):
            x = plain.block(plain.part(p, f"blocks.{layer}"), x, config)
        x = plain.norm(plain.part(p, "norm"), x, config["eps"])[:, 0]
        return plainly(plain.linear(plain.part(p, "head"), x), i["labels"])

    inputs = {"pixels": draw(2, 3, 16, 16), "labels": torch.tensor([3, 1])}
    return Golden("vit", config, parameters, inputs, {"": (torchs, plains)})


def seq2seq():
    """The definition, for a source of n words and target words y[1..m] (teacher forcing):

    h[1..n], last = GRU both ways over source[words]     h[i] = [forward; backward], last = [forward at n; backward at 1]
    s[0]          = tanh(bridge last)
    w[t], c[t]    = Bahdanau attention of the query s[t-1] over the keys = values h
    s[t]          = GRU cell of the input [target[y[t]]; c[t]] and the state s[t-1]
    logits[t]     = head [s[t]; c[t]]

    weights is w, [batch, m, n], 0 in the padding of the source. The GRU is PyTorch's: rows of reset, update, new; reset is
    applied after the hidden map and its bias.
    """
    config = {"embedding": 12, "encoder_hidden": 10, "decoder_hidden": 14, "attention_hidden": 8}
    config |= {"source_vocab": 30, "target_vocab": 20}
    parameters = named("source", embedding(30, 12)) | named("target", embedding(20, 12)) | named("encoder", draw_gru(12, 10))
    parameters |= named("bridge", linear(14, 20)) | named("attention", additive(14, 20, 8))
    parameters |= named("decoder", gru_cell(12 + 20, 14)) | named("head", linear(20, 14 + 20))

    def torchs(p, i):
        entered = F.embedding(i["source"], p["source.weight"])
        keys, last = gru_states(plain.part(p, "encoder"), entered, i["source_lengths"])
        state = torch.tanh(F.linear(last, p["bridge.weight"], p["bridge.bias"]))
        cell = [p[f"decoder.{name}"] for name in ("input.weight", "hidden.weight", "input.bias", "hidden.bias")]
        logits, weights = [], []
        for word in F.embedding(i["target"], p["target.weight"]).unbind(1):
            seen = bahdanau_attention(plain.part(p, "attention"), state[:, None], keys, i["source_lengths"])
            context = seen["context"][:, 0]
            state = torch.gru_cell(torch.cat([word, context], -1), state, *cell)
            logits.append(F.linear(torch.cat([state, context], -1), p["head.weight"], p["head.bias"]))
            weights.append(seen["weights"][:, 0])
        return scored(torch.stack(logits, 1), i["labels"]) | {"weights": torch.stack(weights, 1)}

    def plains(p, i):
        logits, weights = [], []
        for source, n, target in zip(i["source"], i["source_lengths"], i["target"]):
            keys, last = plain.gru(plain.part(p, "encoder"), p["source.weight"][source[:n]])
            state = torch.tanh(plain.linear(plain.part(p, "bridge"), last))
            for y in target:
                context, row = plain.additive(plain.part(p, "attention"), state, keys)
                state = plain.gru_cell(plain.part(p, "decoder"), torch.cat([p["target.weight"][y], context]), state)
                logits.append(plain.linear(plain.part(p, "head"), torch.cat([state, context])))
                weights.append(plain.padded(row, len(source)))
        shape = i["target"].shape
        found = plainly(torch.stack(logits).unflatten(0, shape), i["labels"])
        return found | {"weights": torch.stack(weights).unflatten(0, shape)}

    inputs = {"source": words(30, 4, 7), "source_lengths": torch.tensor([4, 7])}
    inputs |= {"target": words(20, 5, 3), "labels": labels(20, 5, 3)}
    return Golden("seq2seq", config, parameters, inputs, {"": (torchs, plains)})


def han():
    """The definition, the same level twice: words to a sentence, sentences to a document.

    h[1..n] = GRU both ways over the inputs          (of a sentence's words: embedding[ids])
    u[i]    = tanh(attention.hidden h[i])
    w       = softmax over i of u[i] . attention.context
    vector  = sum of w[i] h[i]

    logits = head(vector of the document). Positions beyond a length, and sentences beyond the document's, take no part: their
    weights are 0.
    """
    config = {"embedding": 8, "word_hidden": 6, "word_attention": 7, "sentence_hidden": 5, "sentence_attention": 4}
    config |= {"vocab": 40, "classes": 3}

    def level(ins, hidden, attention):
        parts = named("gru", draw_gru(ins, hidden)) | named("attention.hidden", linear(attention, 2 * hidden))
        return parts | {"attention.context": draw(attention)}

    parameters = named("embedding", embedding(40, 8)) | named("words", level(8, 6, 7))
    parameters |= named("sentences", level(12, 5, 4)) | named("head", linear(3, 10))

    def pooled(p, x, lengths):
        states, _ = gru_states(plain.part(p, "gru"), x, lengths)
        hidden = torch.tanh(F.linear(states, p["attention.hidden.weight"], p["attention.hidden.bias"]))
        scores = (hidden @ p["attention.context"]).masked_fill(~below(x.shape[1], lengths), -torch.inf)
        weights = torch.softmax(scores, -1)
        return (weights.unsqueeze(1) @ states).squeeze(1), weights

    def torchs(p, i):
        full = i["word_lengths"] > 0
        found, seen = pooled(plain.part(p, "words"), F.embedding(i["ids"][full], p["embedding.weight"]), i["word_lengths"][full])
        vectors = torch.zeros(*full.shape, found.shape[-1], dtype=found.dtype).masked_scatter(full.unsqueeze(-1), found)
        word_weights = torch.zeros(i["ids"].shape, dtype=seen.dtype).masked_scatter(full.unsqueeze(-1), seen)
        document, weights = pooled(plain.part(p, "sentences"), vectors, i["sentence_lengths"])
        logits = F.linear(document, p["head.weight"], p["head.bias"])
        return scored(logits, i["labels"]) | {"word_weights": word_weights, "sentence_weights": weights}

    def plain_pooled(p, x):
        states, _ = plain.gru(plain.part(p, "gru"), x)
        weights = plain.softmax(torch.tanh(plain.linear(plain.part(p, "attention.hidden"), states)) @ p["attention.context"])
        return weights @ states, weights

    def plains(p, i):
        logits, sentence_weights, word_weights = [], [], []
        for ids, lengths, n in zip(i["ids"], i["word_lengths"], i["sentence_lengths"]):
            found = [plain_pooled(plain.part(p, "words"), p["embedding.weight"][row[:m]]) for row, m in zip(ids[:n], lengths)]
            document, weights = plain_pooled(plain.part(p, "sentences"), torch.stack([vector for vector, _ in found]))
            logits.append(plain.linear(plain.part(p, "head"), document))
            sentence_weights.append(plain.padded(weights, len(ids)))
            rows = torch.stack([plain.padded(row, ids.shape[1]) for _, row in found])
            word_weights.append(plain.padded(rows, len(ids)))
        found = {"sentence_weights": torch.stack(sentence_weights), "word_weights": torch.stack(word_weights)}
        return plainly(torch.stack(logits), i["labels"]) | found

    lengths = torch.tensor([[5, 2, 4], [3, 6, 0], [1, 0, 0]])
    ids = torch.randint(1, 40, (3, 3, 6)) * below(6, lengths)
    inputs = {"ids": ids, "word_lengths": lengths, "sentence_lengths": torch.tensor([3, 2, 1]), "labels": torch.tensor([2, 0, 1])}
    return Golden("han", config, parameters, inputs, {"": (torchs, plains)})


ALL = [gpt, llama, bert, transformer, vit, seq2seq, han]
