"""Whole models of Transformers with attention by Regard, against what Transformers does without it, in one run.

    PYTHONPATH=python python bench/python.py [--rounds 5] [--only llama,gemma2] [--threads 2]

Each round runs one and then the other, so that both have the same machine; a line has the medians and the ratio of neighbours,
with its 10th and 90th percentile. Weights are random: what is measured does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers

import regard
import regard.hf


def llama(dtype):
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=8192, tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).to(dtype)


def gemma2(dtype):
    config = transformers.Gemma2Config(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        head_dim=96, query_pre_attn_scalar=96, sliding_window=1024, max_position_embeddings=8192,
    )
    return transformers.Gemma2ForCausalLM(config).to(dtype)


def gpt_oss(dtype):
    config = transformers.GptOssConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, sliding_window=128, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=8192,
    )
    return transformers.GptOssForCausalLM(config).to(dtype)


def bert(dtype):
    config = transformers.BertConfig(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1)
    return transformers.BertForMaskedLM(config).to(dtype)


def prefill(model, ids):
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=1)


def training_step(model, ids):
    model.train()
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)


CASES = {
    "llama-f32": (llama, torch.float32, "sdpa", prefill, (1, 4096), 1.2),
    "llama-bf16": (llama, torch.bfloat16, "sdpa", prefill, (1, 4096), 1.2),
    "gemma2-f32": (gemma2, torch.float32, "eager", prefill, (1, 4096), 3.0),
    "gpt-oss-f32": (gpt_oss, torch.float32, "eager", prefill, (1, 4096), 3.0),
    "gemma2-bf16": (gemma2, torch.bfloat16, "eager", prefill, (1, 4096), 3.0),
    "gpt-oss-bf16": (gpt_oss, torch.bfloat16, "eager", prefill, (1, 4096), 3.0),
    "bert-training-f32": (bert, torch.float32, "sdpa", training_step, (4, 512), 1.1),
    "bert-training-bf16": (bert, torch.bfloat16, "sdpa", training_step, (4, 512), 1.1),
}


def race(name, rounds):
    make, dtype, rival, run, size, asked = CASES[name]
    torch.manual_seed(0)
    model = make(dtype).eval()
    ids = torch.randint(10, 30000, size)
    times = {"regard": [], rival: []}
    for round_ in range(rounds + 1):
        for one in times:
            model.set_attn_implementation(one)
            start = time.perf_counter()
            run(model, ids)
            if round_:
                times[one].append(time.perf_counter() - start)
    ratios = sorted(b / a for a, b in zip(times["regard"], times[rival]))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    ours, theirs = (statistics.median(times[one]) for one in times)
    tokens = size[0] * size[1]
    print(
        f"{name:20} {tokens:6} tokens  regard {ours:7.3f} s  {rival} {theirs:7.3f} s  "
        f"{statistics.median(ratios):5.2f} x ({low:.2f}..{high:.2f}), asked {asked}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default=",".join(CASES))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    regard.hf.register()
    print(f"regard {regard.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, {args.threads} threads, {regard.isas()[-1]}")
    for name in args.only.split(","):
        race(name, args.rounds)


if __name__ == "__main__":
    main()
