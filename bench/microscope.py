"""What looking and acting cost: head detectors and span mass at 100,000 tokens, interventions at 4,096.

    target/python/bin/python bench/microscope.py make DIR [TOKENS]       a model with a planted retrieval head, DIR/model, and DIR/text.txt
    bench/microscope.py heads DIR target/release/regard                  `regard heads --needle` beside a plain forward pass of the command
    PYTHONPATH=python target/python/bin/python bench/microscope.py mass DIR          `lens.mass` beside a plain forward pass
    PYTHONPATH=python target/python/bin/python bench/microscope.py intervene         a Llama of 135M parameters' shape, 4 layers

The model is a GPT-2 of two layers that copies by construction: head 0.0 attends to the token before (sinusoidal positions, shifted by one, as
queries and keys), head 1.0 to what followed earlier occurrences of the same token; heads 0.1 and 1.1 attend to everything alike. The text is
random words, a needle of eight words in its middle, and the needle once more at the end. Each run is a process of its own: peak memory is
`ru_maxrss` of the child; time is wall time, in turns.
"""

import json
import os
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import time

import numpy as np

WORDS, NEEDLE, WIDTH, SPACE, POSITION = 500, 8, 160, 64, 32


def model(folder, positions):
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = WORDS + NEEDLE + 1
    rng = np.random.default_rng(0)
    tokens, earlier, places = slice(0, SPACE), slice(SPACE, 2 * SPACE), slice(2 * SPACE, 2 * SPACE + POSITION)
    dim = WIDTH // 2

    def zeros(*shape):
        return np.zeros(shape, np.float32)

    embedding, position = zeros(vocabulary, WIDTH), zeros(positions, WIDTH)
    embedding[:, tokens] = rng.choice([-1, 1], (vocabulary, SPACE)) / SPACE**0.5
    frequencies = 2.5 * 0.8 ** np.arange(POSITION // 2)
    angles = np.arange(positions)[:, None] * frequencies
    position[:, places] = np.concatenate([np.cos(angles), np.sin(angles)], 1) / (POSITION / 2) ** 0.5
    tensors = {"wte.weight": embedding, "wpe.weight": position, "ln_f.weight": np.ones(WIDTH, np.float32), "ln_f.bias": zeros(WIDTH)}
    for layer in range(2):
        name = f"h.{layer}"
        for norm in ("ln_1", "ln_2"):
            tensors |= {f"{name}.{norm}.weight": np.ones(WIDTH, np.float32), f"{name}.{norm}.bias": zeros(WIDTH)}
        # q, k and v of head 0, then of head 1, as columns.
        attention, out = zeros(WIDTH, 3 * WIDTH), zeros(WIDTH, WIDTH)
        q, k, v = (attention[:, i * WIDTH : i * WIDTH + dim] for i in range(3))
        if layer == 0:
            turn = zeros(POSITION, POSITION)
            half = POSITION // 2
            cos, sin = np.diag(np.cos(frequencies)), np.diag(np.sin(frequencies))
            # The position before: angles less by one step.
            turn[:half, :half], turn[half:, :half], turn[:half, half:], turn[half:, half:] = cos, sin, -sin, cos
            q[places, :POSITION], k[places, :POSITION] = 30 * turn, np.eye(POSITION)
            v[tokens, :SPACE], out[:SPACE, earlier] = 0.1 * np.eye(SPACE), np.eye(SPACE)
        else:
            q[tokens, :SPACE], k[earlier, :SPACE] = 12 * np.eye(SPACE), np.eye(SPACE)
            v[tokens, :SPACE], out[:SPACE, tokens] = np.eye(SPACE), np.eye(SPACE)
        tensors |= {f"{name}.attn.c_attn.weight": attention, f"{name}.attn.c_attn.bias": zeros(3 * WIDTH)}
        tensors |= {f"{name}.attn.c_proj.weight": out, f"{name}.attn.c_proj.bias": zeros(WIDTH)}
        tensors |= {f"{name}.mlp.c_fc.weight": zeros(WIDTH, WIDTH), f"{name}.mlp.c_fc.bias": zeros(WIDTH)}
        tensors |= {f"{name}.mlp.c_proj.weight": zeros(WIDTH, WIDTH), f"{name}.mlp.c_proj.bias": zeros(WIDTH)}
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[f"transformer.{name}"] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.astype(np.float32).tobytes()
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocabulary, "n_embd": WIDTH, "n_layer": 2, "n_head": 2,
        "n_inner": WIDTH, "n_positions": positions, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "bos_token_id": vocabulary - 1,
        "eos_token_id": vocabulary - 1, "tie_word_embeddings": True, "torch_dtype": "float32",
    }))  # fmt: skip
    names = [f"w{i}" for i in range(WORDS)] + [f"needle{i}" for i in range(NEEDLE)] + ["end"]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "end"},
    }))  # fmt: skip


def make(folder, tokens="100000"):
    folder, tokens = pathlib.Path(folder), int(tokens)
    model(folder / "model", tokens + 352)
    words, needle = random.Random(0), [f"needle{i}" for i in range(NEEDLE)]
    hay = [f"w{words.randrange(WORDS)}" for _ in range(tokens - 2 * NEEDLE)]
    half = len(hay) // 2
    (folder / "text.txt").write_text(" ".join([*hay[:half], *needle, *hay[half:], *needle]))


def measured(command, **more):
    """Wall seconds and peak megabytes of a child, and what it printed."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
    out = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} ended with {status}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024, out


def in_turns(name, ways, rounds):
    found = {way: [] for way in ways}
    for _ in range(rounds):
        for way, command in ways.items():
            seconds, megabytes, out = measured(command)
            found[way].append((seconds, megabytes))
            print(f"{name} {way:8} {seconds:7.1f} s  peak {megabytes:6.0f} MB", flush=True)
    ratio = [(other[0] / plain[0], other[1] / plain[1]) for plain, other in zip(*found.values())]
    for i, what in enumerate(("time", "peak memory")):
        own = [one[i] for one in ratio]
        print(f"{name} {what}: {statistics.median(own):.2f} ({min(own):.2f}-{max(own):.2f}) of the plain pass")
    return out


def heads(folder, command, rounds="3"):
    model_path, text = f"{folder}/model", f"@{folder}/text.txt"
    needle = " ".join(f"needle{i}" for i in range(NEEDLE))
    plain = [command, "generate", model_path, "-p", text, "-n", "1"]
    look = [command, "heads", model_path, text, "--needle", needle]
    print(in_turns("regard heads", {"forward": plain, "heads": look}, int(rounds)))


def mass(folder, rounds="3"):
    run = [sys.executable, __file__, "mass-once", folder]
    in_turns("lens.mass", {"forward": [*run, "plain"], "mass": [*run, "mass"]}, int(rounds))


def mass_once(folder, way):
    import regard.hf
    import regard.lens
    import torch
    from transformers import GPT2LMHeadModel

    regard.hf.register()
    of = GPT2LMHeadModel.from_pretrained(f"{folder}/model", attn_implementation="regard").transformer.eval()
    words = pathlib.Path(folder, "text.txt").read_text().split()
    numbers = {name: i for i, name in enumerate([f"w{i}" for i in range(WORDS)] + [f"needle{i}" for i in range(NEEDLE)])}
    ids = torch.tensor([[numbers[word] for word in words]])
    n, half = len(words), (len(words) - 2 * NEEDLE) // 2
    with torch.no_grad():
        if way == "plain":
            of(ids, use_cache=False)
            return
        spans = {"instruction": (0, 100), "needle": (half, half + NEEDLE), "context": (100, n)}
        with regard.lens.mass(of, spans, rows="all") as found:
            of(ids, use_cache=False)
    of_copies = found["needle"][:, :, n - NEEDLE : n - 1].mean(-1)
    assert of_copies[1, 0] > 0.9 and of_copies[0].max() < 0.1, of_copies


def intervene(rounds="7", tokens="4096"):
    import regard.hf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    regard.hf.register()
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=1000, hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9,
                         num_key_value_heads=3, max_position_embeddings=8192, attn_implementation="regard")  # fmt: skip
    of = LlamaForCausalLM(config).eval().model
    ids = torch.randint(0, 1000, (1, int(tokens)))
    ways = {
        "no rule": [],
        "a rule for no layer of the model": [{"layers": [99], "drop": True}],
        "one edge set dropped": [{"layers": [2], "heads": [1], "rows": (100, None), "keys": (10, 50), "drop": True}],
        "edges scaled in all layers and heads": [{"keys": (10, 500), "times": 0.5}],
        "a head ablated": [{"layers": [2], "heads": [1], "output": 0.0}],
    }

    def seconds(rules):
        start = time.perf_counter()
        with torch.no_grad():
            if rules is None:
                of(ids, use_cache=False)
            else:
                with regard.hf.intervene(of, rules):
                    of(ids, use_cache=False)
        return time.perf_counter() - start

    import warnings

    warnings.simplefilter("ignore")
    seconds(None)
    for name, rules in ways.items():
        pairs = [(seconds(None), seconds(rules)) for _ in range(int(rounds))]
        ratio = sorted(other / plain for plain, other in pairs)
        print(f"{name:38} {statistics.median(ratio):.3f} ({ratio[0]:.3f}-{ratio[-1]:.3f}) of {statistics.median(p for p, _ in pairs):.2f} s", flush=True)


if __name__ == "__main__":
    verbs = {"make": make, "heads": heads, "mass": mass, "mass-once": mass_once, "intervene": intervene}
    if len(sys.argv) < 2 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
