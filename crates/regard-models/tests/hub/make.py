"""Makes a small model of every architecture with random weights, and what Transformers computes with it.

    python make.py OUT [NAME..]

Writes OUT/NAME as `save_pretrained` does, and OUT/NAME/expected.json:

    images         two images, files of OUT/NAME, in place of ids in models of images
    pixels         [image][channel][row][column] of what the image processor makes of them
    ids            two sequences of tokens (of the source, if there is a decoder beside an encoder)
    decoder_ids    two sequences of tokens of the decoder, in encoder-decoder models
    logits         [sequence][position][token], of the decoder if there is one; of classes: [sequence][class]
    hidden         the same of the last hidden state, in encoders without a head
    greedy, beam   12 tokens that follow each sequence, by greedy search and by beam search with 4 beams; in encoder-decoder
                   models all that the decoder writes, from its start token on
    attention      {"self" | "cross" | "encoder": {"first" | "last": [sequence][head][key]}}: rows of the last query of the first
                   and the last layer; sequences are images in models of images

Where a module of Regard learns too, OUT/NAME/gradients is the same model with each parameter's gradient in its place: of the sum over
sequences of the mean cross-entropy of their next tokens, of encoders of the sum of what the pooler returns.

Every sequence is computed by itself, in float32, on one thread, with eager attention.
"""

import copy
import json
import pathlib
import sys

import PIL.Image
import torch
import transformers as t

torch.set_num_threads(1)
VOCAB, LENGTH, NEW = 97, 24, 12
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
PLAIN = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
    max_position_embeddings=64, initializer_range=0.2, **IDS,
)
GQA = dict(PLAIN, num_key_value_heads=2)
BERT = dict(PLAIN, hidden_size=48, num_hidden_layers=2)
PAIR = dict(
    vocab_size=VOCAB, d_model=48, encoder_layers=2, decoder_layers=3, encoder_attention_heads=6, decoder_attention_heads=4,
    encoder_ffn_dim=64, decoder_ffn_dim=80, max_position_embeddings=64, init_std=0.2, forced_eos_token_id=None,
    decoder_start_token_id=2, **IDS,
)
T5 = dict(
    vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=80, num_layers=3, num_decoder_layers=2, num_heads=6,
    relative_attention_num_buckets=8, relative_attention_max_distance=20, initializer_factor=1.0,
    pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)


def rope(kind, **more):
    return dict(GQA, rope_parameters=dict(rope_type=kind, rope_theta=10000.0, **more))


CAUSAL = {
    "llama": (t.LlamaForCausalLM, t.LlamaConfig(**GQA)),
    "llama_bias_tied": (
        t.LlamaForCausalLM, t.LlamaConfig(**GQA, attention_bias=True, mlp_bias=True, head_dim=10, tie_word_embeddings=True),
    ),
    "llama_linear": (t.LlamaForCausalLM, t.LlamaConfig(**rope("linear", factor=4.0))),
    "llama_dynamic": (t.LlamaForCausalLM, t.LlamaConfig(**rope("dynamic", factor=4.0))),
    "llama_llama3": (
        t.LlamaForCausalLM,
        t.LlamaConfig(
            **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
        ),
    ),
    "llama_yarn": (
        t.LlamaForCausalLM, t.LlamaConfig(**rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0)),
    ),
    "llama_sharded": (t.LlamaForCausalLM, t.LlamaConfig(**GQA)),
    "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config(**GQA)),
    "qwen2_window": (
        t.Qwen2ForCausalLM, t.Qwen2Config(**GQA, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config(**GQA, head_dim=16)),
    "mistral": (t.MistralForCausalLM, t.MistralConfig(**GQA, sliding_window=6)),
    "gemma": (t.GemmaForCausalLM, t.GemmaConfig(**GQA, head_dim=16)),
    "gemma2": (
        t.Gemma2ForCausalLM,
        t.Gemma2Config(
            **GQA, head_dim=16, query_pre_attn_scalar=12, sliding_window=6, attn_logit_softcapping=5.0,
            final_logit_softcapping=8.0,
        ),
    ),
    "gemma3": (
        t.Gemma3ForCausalLM,
        t.Gemma3TextConfig(
            **GQA, head_dim=16, query_pre_attn_scalar=12, sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    "phi3": (t.Phi3ForCausalLM, t.Phi3Config(**GQA, sliding_window=9)),
    "phi3_longrope": (
        t.Phi3ForCausalLM,
        t.Phi3Config(
            **dict(GQA, max_position_embeddings=256), original_max_position_embeddings=64,
            rope_parameters=dict(
                rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                short_factor=[1.0, 1.1, 1.5], long_factor=[1.0, 2.0, 4.0],
            ),
        ),
    ),
    "smollm3": (t.SmolLM3ForCausalLM, t.SmolLM3Config(**GQA, no_rope_layer_interval=2)),
    "olmo2": (t.Olmo2ForCausalLM, t.Olmo2Config(**GQA)),
    "gpt2": (
        t.GPT2LMHeadModel,
        t.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=48, n_layer=3, n_head=6, initializer_range=0.2, **IDS),
    ),
    "gpt_neox": (
        t.GPTNeoXForCausalLM,
        t.GPTNeoXConfig(**PLAIN, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5)),
    ),
    "gpt_neox_serial": (
        t.GPTNeoXForCausalLM,
        t.GPTNeoXConfig(
            **PLAIN, use_parallel_residual=False,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
        ),
    ),
}

DISTILBERT = dict(
    vocab_size=VOCAB, dim=48, hidden_dim=80, n_layers=2, n_heads=6, max_position_embeddings=64, initializer_range=0.2,
    pad_token_id=0,
)
MODERNBERT = dict(PLAIN, local_attention=8, cls_token_id=1, sep_token_id=2, initializer_cutoff_factor=3.0)
ROBERTA = dict(BERT, bos_token_id=0, pad_token_id=1, eos_token_id=2, type_vocab_size=1)
ENCODERS = {
    "bert": (t.BertModel, t.BertConfig(**BERT)),
    "bert_mlm": (t.BertForMaskedLM, t.BertConfig(**BERT)),
    "bert_classes": (t.BertForSequenceClassification, t.BertConfig(**BERT, num_labels=3)),
    "roberta": (t.RobertaModel, t.RobertaConfig(**ROBERTA)),
    "roberta_mlm": (t.RobertaForMaskedLM, t.RobertaConfig(**ROBERTA)),
    "roberta_classes": (
        t.RobertaForSequenceClassification, t.RobertaConfig(**ROBERTA, id2label={0: "no", 1: "maybe", 2: "yes"}),
    ),
    "xlm_roberta": (t.XLMRobertaModel, t.XLMRobertaConfig(**ROBERTA)),
    "distilbert": (t.DistilBertModel, t.DistilBertConfig(**DISTILBERT)),
    "distilbert_mlm": (t.DistilBertForMaskedLM, t.DistilBertConfig(**DISTILBERT)),
    "distilbert_classes": (t.DistilBertForSequenceClassification, t.DistilBertConfig(**DISTILBERT)),
    "modernbert": (t.ModernBertModel, t.ModernBertConfig(**MODERNBERT)),
    "modernbert_mlm": (t.ModernBertForMaskedLM, t.ModernBertConfig(**MODERNBERT)),
    "modernbert_classes": (
        t.ModernBertForSequenceClassification, t.ModernBertConfig(**MODERNBERT, classifier_pooling="mean", num_labels=3),
    ),
}

PAIRS = {
    "t5": (t.T5ForConditionalGeneration, t.T5Config(**T5)),
    "t5_gated": (
        t.T5ForConditionalGeneration, t.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "marian": (
        t.MarianMTModel,
        t.MarianConfig(
            **dict(PAIR, decoder_start_token_id=VOCAB - 1, pad_token_id=VOCAB - 1, eos_token_id=0, bos_token_id=None),
            activation_function="swish", scale_embedding=True,
        ),
    ),
    "marian_two_tables": (
        t.MarianMTModel,
        t.MarianConfig(
            **dict(PAIR, decoder_start_token_id=0), share_encoder_decoder_embeddings=False, decoder_vocab_size=VOCAB - 8,
            activation_function="relu", scale_embedding=True,
        ),
    ),
    "m2m_100": (
        t.M2M100ForConditionalGeneration,
        t.M2M100Config(**dict(PAIR, bos_token_id=0, pad_token_id=1, eos_token_id=2), scale_embedding=True),
    ),
    "bart": (
        t.BartForConditionalGeneration, t.BartConfig(**dict(PAIR, bos_token_id=0, pad_token_id=1, eos_token_id=2)),
    ),
    "mbart": (
        t.MBartForConditionalGeneration,
        t.MBartConfig(**dict(PAIR, bos_token_id=0, pad_token_id=1, eos_token_id=2), scale_embedding=True),
    ),
}

VIT = dict(
    hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, initializer_range=0.2,
    id2label={0: "cat", 1: "dog", 2: "tree"},
)
# With the settings of their image processors. Sides of 32 and 40 are reduced from those of IMAGES, and enlarged.
VISION = {
    "vit": (t.ViTForImageClassification, t.ViTConfig(**VIT, image_size=32, patch_size=8), {}),
    "vit_wide": (
        t.ViTForImageClassification,
        t.ViTConfig(**VIT, image_size=[24, 40], patch_size=[6, 8], qkv_bias=False, hidden_act="gelu_new"),
        dict(resample=3, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
    ),
}


# Factors of queries and keys where attention would be almost uniform.
SHARPER = {"bert": 1.5, "roberta": 1.5, "xlm-roberta": 1.5, "marian": 2.6, "bart": 1.6, "mbart": 1.6, "m2m_100": 1.6}
QUERIES = tuple(f"_attn.{side}_proj.weight" for side in ("q", "k", "v", "out")) + ("self.query.weight", "self.key.weight")


def randomise(model):
    """Norms, biases and buffers that start as constants get numbers of their own, so that none can be left out unseen, and queries
    and keys are made larger where attention would be almost uniform."""
    for name, parameter in model.named_parameters():
        if name.endswith(QUERIES):
            parameter.mul_(SHARPER.get(model.config.model_type, 1))
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    # A head that is the embedding would say the last token again and again.
    head, translator = model.get_output_embeddings(), hasattr(model, "final_logits_bias")
    if translator:
        model.final_logits_bias.copy_(torch.randn_like(model.final_logits_bias) * 0.3)
    if translator or head is not None and head.weight is model.get_input_embeddings().weight:
        head.weight.mul_(0.4 if translator else 0.15)


def attention(rows):
    return {"first": rows[0][:, -1].tolist(), "last": rows[-1][:, -1].tolist()}


def gather(parts):
    """[{"self": {"first": x}}, ..] of sequences as {"self": {"first": [x, ..]}}."""
    return {kind: {at: [part[kind][at] for part in parts] for at in rows} for kind, rows in parts[0].items()}


def expected(model, ids, decoder_ids):
    """All that a model computes of each sequence by itself."""
    out, attentions = {"ids": ids}, []
    vocab = getattr(model.config, "decoder_vocab_size", None) or model.config.vocab_size
    if decoder_ids:
        out["decoder_ids"] = decoder_ids
    for row, source in enumerate(ids):
        inputs = {"input_ids": torch.tensor([source])}
        if decoder_ids:
            inputs["decoder_input_ids"] = torch.tensor([decoder_ids[row]])
        found = model(**inputs, output_attentions=True)
        if getattr(found, "logits", None) is not None:
            out.setdefault("logits", []).append(found.logits[0].tolist())
        else:
            out.setdefault("hidden", []).append(found.last_hidden_state[0].tolist())
        first = lambda layers: [layer[0] for layer in layers]
        if decoder_ids:
            attentions.append({
                "encoder": attention(first(found.encoder_attentions)),
                "self": attention(first(found.decoder_attentions)),
                "cross": attention(first(found.cross_attentions)),
            })
        else:
            attentions.append({"self": attention(first(found.attentions))})
        if model.can_generate() and found.logits.shape[-1] == vocab and (decoder_ids or name_of(model) in CAUSAL_CLASSES):
            for kind, beams in [("greedy", 1), ("beam", 4)]:
                written = model.generate(
                    inputs["input_ids"], attention_mask=torch.ones_like(inputs["input_ids"]), max_new_tokens=NEW,
                    num_beams=beams, do_sample=False, length_penalty=1.0, early_stopping="never",
                )[0].tolist()
                out.setdefault(kind, []).append(written if decoder_ids else written[len(source):])
    out["attention"] = gather(attentions)
    return out


# Models that modules of Regard can learn with.
LEARNING = ("llama", "llama_bias_tied", "gpt2", "bert")


@torch.enable_grad()
def gradients(model, ids):
    """The model with its gradients as parameters."""
    model = copy.deepcopy(model).requires_grad_()
    for row in ids:
        tokens = torch.tensor([row])
        if name_of(model) in CAUSAL_CLASSES:
            logits = model(input_ids=tokens).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).backward()
        else:
            model(input_ids=tokens).pooler_output.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        parameter.data = parameter.grad
    return model


def name_of(model):
    return type(model).__name__


CAUSAL_CLASSES = {kind.__name__ for kind, _ in CAUSAL.values()}


@torch.no_grad()
def make(out, name, seed):
    kind, config = (CAUSAL | ENCODERS | PAIRS)[name]
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    randomise(model)
    if name == "t5_gated":
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 48))
    if name.startswith("t5"):
        # T5 is made for scores that are not divided by sqrt(head_dim).
        for at, parameter in model.named_parameters():
            if at.endswith((".q.weight", ".k.weight")):
                parameter.mul_(1.5)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    size = "40KB" if name == "llama_sharded" else "5GB"
    model.save_pretrained(folder, max_shard_size=size)
    numbers = torch.Generator().manual_seed(seed)
    tokens = lambda length, vocab: torch.randint(3, vocab - 1, (length,), generator=numbers).tolist()
    ids = [tokens(LENGTH, VOCAB), tokens(LENGTH - 5, VOCAB)]
    decoder_ids = None
    if name in PAIRS:
        vocab = getattr(config, "decoder_vocab_size", None) or VOCAB
        start = [config.decoder_start_token_id]
        decoder_ids = [start + tokens(LENGTH - 9, vocab), start + tokens(LENGTH - 12, vocab)]
    found = expected(model, ids, decoder_ids)
    # What is on the disk is what was computed.
    again = kind.from_pretrained(folder, attn_implementation="eager").eval()
    inputs = {"input_ids": torch.tensor(ids[:1])}
    if decoder_ids:
        inputs["decoder_input_ids"] = torch.tensor(decoder_ids[:1])
    one, other = model(**inputs)[0], again(**inputs)[0]
    assert torch.allclose(one, other, atol=1e-5), f"{name}: {(one - other).abs().max()}"
    if name in LEARNING:
        gradients(model, ids).save_pretrained(folder / "gradients")
    (folder / "expected.json").write_text(json.dumps(found))
    tell(name, found)


def draw(folder, numbers):
    """Two images of odd sizes: noise in color, and a gradient in gray that has an alpha channel."""
    noise = torch.randint(0, 256, (53, 37, 3), generator=numbers, dtype=torch.uint8)
    level = torch.arange(19)[:, None] * 9 + torch.arange(61)[None] * 2
    gradient = torch.stack([level, 255 - level], dim=-1).clamp(0, 255).to(torch.uint8)
    PIL.Image.fromarray(noise.numpy()).save(folder / "noise.png")
    PIL.Image.fromarray(gradient.numpy()).save(folder / "gradient.png")
    return ["noise.png", "gradient.png"]


@torch.no_grad()
def make_vision(out, name, seed):
    kind, config, settings = VISION[name]
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = kind(config).eval()
    randomise(model)
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    sides = config.image_size if isinstance(config.image_size, list) else [config.image_size] * 2
    processor = t.ViTImageProcessorPil(size={"height": sides[0], "width": sides[1]}, **settings)
    processor.save_pretrained(folder)
    found, attentions = {"images": draw(folder, torch.Generator().manual_seed(seed)), "pixels": [], "logits": []}, []
    for file in found["images"]:
        pixels = processor(PIL.Image.open(folder / file).convert("RGB"), return_tensors="pt").pixel_values
        scored = model(pixels, output_attentions=True)
        found["pixels"].append(pixels[0].tolist())
        found["logits"].append(scored.logits[0].tolist())
        attentions.append({"self": attention([layer[0] for layer in scored.attentions])})
    # What is on the disk is what was computed, of the last image.
    other = kind.from_pretrained(folder, attn_implementation="eager").eval()(pixels).logits
    assert torch.allclose(scored.logits, other, atol=1e-5), f"{name}: {(scored.logits - other).abs().max()}"
    found["attention"] = gather(attentions)
    (folder / "expected.json").write_text(json.dumps(found))
    tell(name, found)


def tell(name, found):
    rows = found["attention"]["self"]["last"][0]
    print(f"{name}: highest weight of the last query {max(max(row) for row in rows):.2f}, of {len(rows[0])} keys", flush=True)


if __name__ == "__main__":
    t.logging.set_verbosity_error()
    out = pathlib.Path(sys.argv[1])
    for seed, name in enumerate(CAUSAL | ENCODERS | PAIRS | VISION):
        if len(sys.argv) == 2 or name in sys.argv[2:]:
            (make_vision if name in VISION else make)(out, name, seed)
