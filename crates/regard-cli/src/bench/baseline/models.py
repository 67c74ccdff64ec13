"""Other engines on the weights and tokens of a model that `regard bench` runs itself: PyTorch with Transformers, onnxruntime, CTranslate2.

ENGINE is one of them, said before this text. FOLDER/inputs.json is what weights.py wrote, FOLDER/ours.json what Regard computed of it: an engine that finds something else is not measured.
"""


def agree(found, ours, near):
    """Refuses numbers that are further from ours than `near`, of the largest, and tokens that are others."""
    tokens, numbers = found if isinstance(found, tuple) else ([], found)
    if tokens != ours["tokens"]:
        raise ValueError(f"it writes other tokens: {sum(a != b for a, b in zip(tokens, ours['tokens']))} of {len(ours['tokens'])}")
    numbers, right = (numpy.asarray(x, dtype=numpy.float64).ravel() for x in (numbers, ours["numbers"]))
    if numbers.shape != right.shape:
        raise ValueError(f"it returns {numbers.size} numbers, Regard {right.size}")
    if (far := apart([numbers], [right])) > near:
        raise ValueError(f"it returns something else: {far:.1e} apart")


def checked(call, ours, near):
    """A form that is compared with ours the first time, if there is something to compare."""
    left = [ours] if ours else []

    def run():
        found = call()
        if left:
            agree(found, left.pop(), near)
        return ()

    return run


def batches(ids, pad=0, rows=32):
    """Rows of tokens in batches, padded, with their masks."""
    found = []
    for at in range(0, len(ids), rows):
        some = ids[at : at + rows]
        longest = max(map(len, some))
        padded = numpy.array([one + [pad] * (longest - len(one)) for one in some])
        mask = numpy.array([[1] * len(one) + [0] * (longest - len(one)) for one in some])
        found.append((padded, mask))
    return found


def pooled(hidden, mask):
    """The mean over the tokens of each row, of length 1; of tensors."""
    kept = mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=-1)


def embed_torch(inputs, case):
    some = [tuple(map(torch.from_numpy, batch)) for batch in batches(inputs["ids"])]

    def form(attention):
        model = transformers.BertModel.from_pretrained(inputs["model"], attn_implementation=attention, add_pooling_layer=False, dtype=torch.float32).eval()
        return lambda: torch.cat([pooled(model(input_ids=ids, attention_mask=mask).last_hidden_state, mask) for ids, mask in some])

    return {name: form(name) for name in ("sdpa", "eager")}


def embed_onnxruntime(inputs, case):
    """The graph of Transformers' model, as onnxruntime's own tool for BERT fuses it and as it is."""
    import pathlib

    import onnxruntime
    from onnxruntime.transformers import optimizer

    model = transformers.BertModel.from_pretrained(inputs["model"], attn_implementation="eager", add_pooling_layer=False, dtype=torch.float32).eval()
    some = batches(inputs["ids"])
    config, plain = model.config, pathlib.Path(case["folder"], "plain.onnx")

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model.requires_grad_(False)

        def forward(self, ids, mask):
            return pooled(self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)

    sizes = {0: "rows", 1: "tokens"}
    names = {"input_names": ["ids", "mask"], "output_names": ["out"], "dynamic_axes": {"ids": sizes, "mask": sizes}}
    torch.onnx.export(Whole(), tuple(map(torch.from_numpy, some[-1])), plain, opset_version=17, dynamo=False, **names)
    fused = plain.with_name("fused.onnx")
    optimizer.optimize_model(str(plain), "bert", config.num_attention_heads, config.hidden_size, opt_level=1).save_model_to_file(str(fused))
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads, settings.log_severity_level = case["threads"], 1, 3
    settings.add_session_config_entry("session.set_denormal_as_zero", "1")  # as ours

    def form(file):
        session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
        return lambda: numpy.concatenate([session.run(None, {"ids": ids, "mask": mask})[0] for ids, mask in some])

    return {"fused graph": form(fused), "graph": form(plain)}


def causal(inputs):
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs["model"], attn_implementation="sdpa", dtype=torch.bfloat16).eval()
    ids = torch.tensor(inputs["ids"])
    return model, ids, lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.float()


def prompt_torch(inputs, case):
    return {"sdpa": causal(inputs)[2]}


def generate_torch(inputs, case):
    """All of a call, by `generate` and by a loop without what `generate` does beside it. Random weights say what rounding makes them say, and that
    differs where activations are bf16: the scores after the prompt are compared instead of tokens."""
    model, ids, scores = causal(inputs)
    agree(scores(), inputs.pop("ours"), NEAR["bf16"])
    settings = dict(max_new_tokens=inputs["new"], min_new_tokens=inputs["new"], do_sample=False, use_cache=True, pad_token_id=0)
    whole = lambda **more: model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more)

    def loop():
        cache, fed = transformers.DynamicCache(config=model.config), ids
        for _ in range(inputs["new"]):
            fed = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    return {"generate": whole, "generate, static cache": lambda: whole(cache_implementation="static"), "loop": loop}


def translate_ctranslate2(inputs, case):
    import types

    import ctranslate2

    class Converter(ctranslate2.converters.TransformersConverter):
        """Tokens are named by their numbers: there is no text."""

        def load_tokenizer(self, kind, path, **options):
            names = {"</s>": 0, "<unk>": 1, **{str(i): i for i in range(2, END)}, "<pad>": END}
            return types.SimpleNamespace(eos_token="</s>", unk_token="<unk>", get_vocab=lambda: names)

    config = transformers.AutoConfig.from_pretrained(inputs["model"])
    END = config.vocab_size - 1
    folder = case["folder"] + "/ctranslate2"
    Converter(inputs["model"]).convert(folder, force=True)
    translator = ctranslate2.Translator(folder, intra_threads=case["threads"], inter_threads=1, compute_type="float32")
    sources = [["</s>" if one == 0 else str(one) for one in ids] for ids in inputs["ids"]]
    new = inputs["new"]
    settings = dict(beam_size=inputs["beams"], min_decoding_length=new, max_decoding_length=new, max_batch_size=0, length_penalty=1, return_scores=True)

    def run():
        found = translator.translate_batch(sources, **settings)
        # A score is the mean of a token.
        return [1 if one == "<unk>" else int(one) for row in found for one in row.hypotheses[0]], [new * row.scores[0] for row in found]

    return {"ctranslate2": run}


# How far numbers may be apart, of the largest.
CASES = {
    ("model-f32-minilm-embed", "torch"): (embed_torch, NEAR["f32"]),
    ("model-f32-minilm-embed", "onnxruntime"): (embed_onnxruntime, NEAR["f32"]),
    ("model-bf16-smollm2-shape-prompt", "torch"): (prompt_torch, NEAR["bf16"]),
    ("model-bf16-smollm2-shape-generate", "torch"): (generate_torch, None),
    ("model-f32-marian-shape-greedy", "ctranslate2"): (translate_ctranslate2, NEAR["f32"]),
    ("model-f32-marian-shape-beam4", "ctranslate2"): (translate_ctranslate2, NEAR["f32"]),
}


def forms(case):
    torch.set_num_threads(case["threads"])
    read = lambda name: json.loads(open(os.path.join(case["folder"], name)).read())
    inputs = {**read("inputs.json"), "ours": read("ours.json")}
    make, near = CASES[case["name"], ENGINE]
    found = make(inputs, case)
    return {name: checked(call, inputs.get("ours"), near) for name, call in found.items()}


def start():
    global numpy, torch, F, transformers
    import numpy
    import torch
    import torch.nn.functional as F
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_flush_denormal(True)  # as ours
    torch.set_grad_enabled(False)
    from importlib.metadata import version

    packages = ["torch", "transformers"] if ENGINE == "torch" else [ENGINE]
    return ", ".join(f"{package} {version(package)}" for package in packages), forms, lambda out: out


serve(start)
