"""A tiny call from Python, whole models of Transformers with attention by Regard and without, and SmolLM2 beside llama.cpp.

Weights are random where it does not matter what a model says: what is measured does not depend on them.
"""


def tiny(case, dtype):
    q, k, v = (torch.randn(1, 2, 16, 32, dtype=dtype) for _ in range(3))
    return {"regard": lambda: regard.torch.attention(q, k, v), "sdpa": lambda: F.scaled_dot_product_attention(q, k, v)}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        max_position_embeddings=8192, tie_word_embeddings=True,
    ))


def gemma2():
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=4,
        head_dim=96, query_pre_attn_scalar=96, sliding_window=1024, max_position_embeddings=8192,
    ))


def gpt_oss():
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, sliding_window=128, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=8192,
    ))


def with_attention(model, names, run):
    """One model, run with each way of attention."""

    def form(name):
        def call():
            model.set_attn_implementation(name)
            return run(model)

        return call

    return {name: form(name) for name in names}


def prefill(make, others):
    def forms(case, dtype):
        model = make().to(dtype).eval()
        ids = torch.randint(10, 30000, (1, 4096))
        return with_attention(model, ["regard", *others], lambda m: m(input_ids=ids, use_cache=False, logits_to_keep=1).logits)

    return forms


def generate(case, dtype):
    """64 tokens after 512."""
    model = llama().to(dtype).eval()
    ids = torch.randint(10, 30000, (1, 512))
    settings = dict(max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0)
    run = lambda m: m.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, :513]
    return with_attention(model, ["regard", "sdpa"], run)


def training(case, dtype):
    """A step of BERT-base with dropout 0.1, the optimizer in it."""
    model = transformers.BertForMaskedLM(transformers.BertConfig(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1)).to(dtype).train()
    ids = torch.randint(10, 30000, (4, 512))
    step = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def run(model):
        with torch.enable_grad():
            loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
            loss.backward()
        step.step()
        step.zero_grad(set_to_none=True)
        return loss.detach()

    return with_attention(model, ["regard", "sdpa", "eager"], run)


def minilm(against):
    """64 texts of 128 tokens through MiniLM's real weights."""

    def forms(case, dtype):
        import subprocess
        import tempfile

        listed = subprocess.run([case["regard"], "models", "--format", "json"], capture_output=True, text=True, check=True).stdout
        path = next(one["path"] for one in map(json.loads, listed.splitlines()) if one["name"] == "minilm")
        model = transformers.BertModel.from_pretrained(path, dtype=dtype).eval()
        ids = torch.randint(1000, 20000, (64, 128))
        run = lambda m: m(input_ids=ids).last_hidden_state
        if against == "transformers":
            return with_attention(model, ["regard", "sdpa", "eager"], run)
        import ctranslate2

        folder = tempfile.TemporaryDirectory()
        ctranslate2.converters.TransformersConverter(path).convert(folder.name, force=True)
        encoder = ctranslate2.Encoder(folder.name, intra_threads=case["threads"], inter_threads=1, compute_type="float32")
        texts = ids.tolist()

        def encode():
            return torch.from_numpy(numpy.array(encoder.forward_batch(texts).last_hidden_state))

        return {**with_attention(model, ["regard"], run), "ctranslate2": encode}

    return forms


SENTENCE = "The history of mathematics is the history of people who measured fields, counted sheep, watched the stars and asked why the numbers agreed. "
NEW = 64


class Llama:
    """llama.cpp on the same file, by the programs that npm has ready."""

    SCRIPT = """
import readline from "readline";
const {getLlama, LlamaLogLevel} = await import(process.argv[2]);
const threads = +process.argv[4];
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error, progressLogs: false, skipDownload: true});
const model = await llama.loadModel({modelPath: process.argv[3], gpuLayers: 0});
const context = await model.createContext({contextSize: 2048, batchSize: 512, threads, flashAttention: true});
const sequence = context.getSequence();
console.log("ready");
for await (const line of readline.createInterface({input: process.stdin})) {
    const {prompt, count} = JSON.parse(line);
    await sequence.clearHistory();
    const start = process.hrtime.bigint(), made = [];
    let first = 0n;
    for await (const token of sequence.evaluate(model.tokenize(prompt), {temperature: 0, yieldEogToken: true})) {
        if (made.length === 0) first = process.hrtime.bigint();
        made.push(token);
        if (made.length > count) break;
    }
    console.log(JSON.stringify([Number(first - start) / 1e9, Number(process.hrtime.bigint() - first) / 1e9 / Math.max(1, made.length - 1)]));
}
process.exit(0);
"""

    def __init__(self, model, threads):
        import pathlib
        import subprocess
        import tempfile

        module = pathlib.Path(sys.prefix, "llama.cpp", "node_modules", "node-llama-cpp", "dist", "index.js")
        if not module.exists():
            raise ValueError("llama.cpp is not there: `bench/environment` installs it from npm")
        self.folder = tempfile.TemporaryDirectory()
        script = pathlib.Path(self.folder.name, "llama.mjs")
        script.write_text(self.SCRIPT)
        command = ["node", str(script), str(module), model, str(threads)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.child.stdout.readline().strip() != "ready":
            raise ValueError("llama.cpp did not start")

    def __call__(self, prompt, count):
        print(json.dumps({"prompt": prompt, "count": count}), file=self.child.stdin, flush=True)
        return json.loads(self.child.stdout.readline())


class PyLlama:
    """llama.cpp on the same file, as a wheel has it built: slower at prompts (no AMX), faster at single tokens."""

    def __init__(self, model, threads):
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel, params.n_ctx = 1, 2048
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)

    def __call__(self, prompt, count):
        asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        told = self.server.handle_completions(asked)
        told = (json.loads(told) if isinstance(told, str) else told)["timings"]
        return told["prompt_ms"] / 1e3, told["predicted_per_token_ms"] / 1e3


class Told:
    """A program that tells how long it took."""

    nbytes = 0

    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self):
        self.seconds()
        return ()


def smollm2(which):
    """Seconds of a prompt of about 500 tokens, or of each token after a short one."""

    def forms(case, dtype):
        import re
        import subprocess

        def ran(*arguments):
            done = subprocess.run([case["regard"], *arguments], capture_output=True, text=True, env={**os.environ, "RAYON_NUM_THREADS": str(case["threads"])})
            if done.returncode:
                raise ValueError(done.stderr.strip().splitlines()[-1])
            return done

        path = next(one["path"] for one in map(json.loads, ran("models", "--format", "json").stdout.splitlines()) if one["name"] == "smollm2")
        prompt = SENTENCE * 19 + "In short," if which == "prompt" else "Once upon a time"

        def ours(count):
            """Seconds of the prompt, and of each token after the first."""
            told = ran("generate", "smollm2", "--prompt", prompt, "--max-tokens", str(count), "--greedy", "--format", "json").stderr
            tokens, prompted, generated = re.search(r"prompt: (\d+) tokens, ([\d.]+) a second; generated: \d+ tokens, ([\d.]+)", told).groups()
            return int(tokens) / float(prompted), 1 / max(float(generated), 1e-9)

        counts, what = ([1, 1], 0) if which == "prompt" else ([NEW + 1, NEW], 1)
        baselines = {"llama.cpp": Llama(path, case["threads"]), "llama.cpp (xllamacpp)": PyLlama(path, case["threads"])}
        forms = {"regard": Told(lambda: ours(counts[0])[what])}
        forms.update((name, Told(lambda one=one: one(prompt, counts[1])[what])) for name, one in baselines.items())
        return forms

    return forms


CASES = {
    "call-tiny": tiny,
    "model-llama-prefill": prefill(llama, ["sdpa"]),
    "model-llama-generate": generate,
    "model-bert-training": training,
    "model-gemma2-prefill": prefill(gemma2, ["flex_attention", "eager"]),
    "model-gpt-oss-prefill": prefill(gpt_oss, ["flex_attention", "eager"]),
    "model-minilm-encode": minilm("transformers"),
    "model-minilm-ctranslate2": minilm("ctranslate2"),
    "model-smollm2-prompt": smollm2("prompt"),
    "model-smollm2-generate": smollm2("generate"),
}


def forms(case):
    torch.manual_seed(0)
    torch.set_num_threads(case["threads"])
    kind, dtype, *rest = case["name"].split("-")
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16}
    return CASES["-".join([kind, *rest])](case, dtypes.get(dtype))


def start():
    global numpy, torch, F, transformers, regard
    import numpy
    import torch
    import torch.nn.functional as F
    import transformers

    import regard.hf
    import regard.torch

    regard.hf.register()
    torch.set_flush_denormal(True)  # as ours
    torch.set_grad_enabled(False)
    name = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    return name, forms, lambda out: out.float().numpy()


serve(start)
