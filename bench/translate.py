"""Translations a second of `regard serve` and of CTranslate2, with 1, 4 and 16 clients at once.

    bench/translate.py make DIR        a model of OPUS-MT's shape with random weights, for both: DIR/opus-zh-en, DIR/ct2
    regard serve DIR/opus-zh-en --listen 127.0.0.1:8080 --max-tokens 32
    bench/translate.py run DIR http://127.0.0.1:8080

Needs an environment of `bench/environment` with `pip install sentencepiece`. CTranslate2 is called in this process, a request at a time as
LibreTranslate does, with each division of the threads; its best way is a batch of 16 in one call, which a server must first collect. Both
write 32 tokens of greedy search, f32, the sentences of data/tatoeba-zh-en.
"""

import gzip
import http.client
import json
import pathlib
import shutil
import sys
import threading
import time
import urllib.parse

ROOT = pathlib.Path(__file__).parent.parent
TOKENS, SECONDS, ROUNDS = 32, 6, 3


def make(folder):
    import ctranslate2.converters
    import torch
    from transformers import MarianConfig, MarianMTModel

    fixture = ROOT / "crates/regard-models/tests/fixtures/marian"
    words = [word for word in json.loads((fixture / "vocab.json").read_text()) if word != "<pad>"]
    # As many words as OPUS-MT has; the pad token is the last.
    words += [f"<{i}>" for i in range(65000 - len(words))] + ["<pad>"]
    torch.manual_seed(1)
    sizes = dict(d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8, decoder_attention_heads=8)
    widths = dict(encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="swish", scale_embedding=True)
    pad = len(words) - 1
    marks = dict(vocab_size=len(words), pad_token_id=pad, decoder_start_token_id=pad, eos_token_id=words.index("</s>"), forced_eos_token_id=None)
    config = MarianConfig(**sizes, **widths, **marks)
    model = folder / "opus-zh-en"
    MarianMTModel(config).save_pretrained(model)
    for name in ("source.spm", "target.spm"):
        shutil.copy(fixture / name, model / name)
    (model / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (model / "tokenizer_config.json").write_text('{"target_lang": "en", "source_lang": "zh"}')
    ctranslate2.converters.TransformersConverter(str(model)).convert(str(folder / "ct2"), force=True)


def rate(clients, ask):
    """Requests a second, and the median of their milliseconds."""
    end, times = time.perf_counter() + SECONDS, []

    def client(number):
        at = number
        while time.perf_counter() < end:
            start = time.perf_counter()
            ask(at)
            times.append(time.perf_counter() - start)
            at += clients

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return len(times) / (time.perf_counter() - start), 1000 * sorted(times)[len(times) // 2]


def run(folder, url):
    import ctranslate2
    import sentencepiece

    with gzip.open(ROOT / "data/tatoeba-zh-en/test.zh-en.tsv.gz", "rt", encoding="utf-8") as file:
        texts = [line.split("\t")[0] for line in file][:400]
    words = sentencepiece.SentencePieceProcessor(str(folder / "opus-zh-en/source.spm"))
    tokens = [words.encode(text, out_type=str) + ["</s>"] for text in texts]
    host = urllib.parse.urlparse(url).netloc

    def ours(at):
        connection = http.client.HTTPConnection(host)
        body = json.dumps({"q": texts[at % len(texts)], "source": "zh", "target": "en"})
        connection.request("POST", "/translate", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
        if answer.status != 200:
            raise ValueError(told)

    def theirs(inter, intra, size=1):
        model = ctranslate2.Translator(str(folder / "ct2"), inter_threads=inter, intra_threads=intra, compute_type="float32")
        return lambda at: model.translate_batch([tokens[(at + i) % len(tokens)] for i in range(size)], beam_size=1, max_decoding_length=TOKENS)

    ways = {"regard serve": ours, "CTranslate2, 2 x 1 threads": theirs(2, 1), "CTranslate2, 1 x 2 threads": theirs(1, 2)}
    for clients in (1, 4, 16):
        found = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, ask in ways.items():
                found[name].append(rate(clients, ask))
        for name, rates in found.items():
            each, wait = sorted(rates)[ROUNDS // 2]
            print(f"{clients:2} clients  {name:28} {each:5.1f} a second  {wait:6.0f} ms", flush=True)
    batch = theirs(1, 2, 16)
    print("CTranslate2, 16 in one call:", ", ".join(f"{16 * rate(1, batch)[0]:.1f}" for _ in range(ROUNDS)), "a second")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(pathlib.Path(folder))
        case ["run", folder, url]:
            run(pathlib.Path(folder), url)
        case _:
            sys.exit(__doc__)
