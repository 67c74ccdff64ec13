"""Makes the weights and the tokens of a model that `regard bench` runs itself.

Reads a case as one line of JSON and writes FOLDER/model, as `save_pretrained` does, unless the model is there already, and FOLDER/inputs.json: the folder
of the model, `ids` (rows of tokens), `new` (tokens to write) and `beams`. Tokens are drawn with a fixed seed: what is measured depends on their number.
"""
import json
import pathlib
import sys

import torch
import transformers

case = json.loads(sys.stdin.readline())
folder = pathlib.Path(case["folder"])
torch.manual_seed(0)
torch.set_grad_enabled(False)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def tokens(length, vocab):
    return torch.randint(1000, vocab, (length,)).tolist()


def minilm():
    """1,000 rows as long as short sentences, sorted, so that a batch needs little padding."""
    lengths = torch.randn(1000).mul(0.45).add(2.7).exp().round().int().clamp(4, 64).tolist()
    return case["minilm"], {"ids": [tokens(length, 30000) for length in sorted(lengths)]}


def smollm2(length, new):
    """The shape of SmolLM2-135M with random weights in bf16."""

    def make():
        config = transformers.LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
            max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        )
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
        return folder / "model", {"ids": [tokens(length, config.vocab_size)], "new": new}

    return make


def marian(beams):
    """The shape of OPUS-MT with random weights: 16 sentences, and 32 tokens of each translation."""

    def make():
        vocab = 65001
        config = transformers.MarianConfig(
            vocab_size=vocab, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8,
            encoder_ffn_dim=2048, decoder_ffn_dim=2048, max_position_embeddings=512, activation_function="swish", scale_embedding=True,
            pad_token_id=vocab - 1, decoder_start_token_id=vocab - 1, eos_token_id=0, bos_token_id=None, forced_eos_token_id=None,
            init_std=0.1,
        )
        model = transformers.MarianMTModel(config).eval()
        model.generation_config.bad_words_ids = [[vocab - 1]]
        # As they are made, embeddings and the nets between would outweigh attention, and all sentences have the same translation.
        model.model.shared.weight.mul_(0.5)
        for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
            layer.fc2.weight.mul_(0.1)
        model.save_pretrained(folder / "model")
        return folder / "model", {"ids": [tokens(20 + row % 8, vocab - 1) + [0] for row in range(16)], "new": 32, "beams": beams}

    return make


CASES = {
    "model-f32-minilm-embed": minilm,
    "model-bf16-smollm2-shape-prompt": smollm2(441, 0),
    "model-bf16-smollm2-shape-generate": smollm2(16, 64),
    "model-f32-marian-shape-greedy": marian(1),
    "model-f32-marian-shape-beam4": marian(4),
}

model, inputs = CASES[case["name"]]()
(folder / "inputs.json").write_text(json.dumps({"model": str(model), "new": 0, "beams": 1, **inputs}))
