"""Trains two small SentencePiece models as the sides of a Marian folder and writes what SentencePiece and Transformers make of texts.

    pip install sentencepiece sacremoses transformers
    python make_spm.py ../fixtures/marian
"""

import io
import json
import random
import sys
from pathlib import Path

import sentencepiece as spm
from transformers import M2M100Tokenizer, MarianTokenizer

NOUNS = "cat dog river house letter window garden teacher winter mountain story number answer morning".split()
VERBS = "sees finds writes opens reads keeps leaves follows counts remembers".split()
ADJECTIVES = "small old quiet cold bright second empty friendly".split()
# A few rules of NFKC, with one of two characters: the map of all of them has 240 KB.
RULES = [("\uff21", "A"), ("\uff22", "B"), ("\u3000", " "), ("\u200b", " "), ("\t", " "), ("\n", " "), ("e\u0301", "é"), ("\ufb01", "fi"), ("①", "1"), ("㍿", "株式会社"), ("\u00ad", "")]
FIXED = [
    "", " ", "   ", "the old cat", "  The   cat  sees. ", "ＡＢ Ａ", "cafe\u0301 ﬁnd", "①②㍿", "𠀀𠮷 x", "👍🏽 ok", "\x00a\x01",
    "\u3000全角\u3000", "a\u200bb", "▁a ▁", "unknown ÿ ß", "<sep>", "the<sep>cat <sep> dog", "cat's 1234", "\u00ad", "a\tb\nc", "'", "…",
]
SPECIAL = ["</s>", "the</s> cat", "<unk> a <pad>", ">>eng<< the cat", ">>xyz<<the cat", ">>", ">> a << b", "the >>eng<< cat"]


def sentences(chance):
    for _ in range(4000):
        noun = lambda: f"the {chance.choice(ADJECTIVES)} {chance.choice(NOUNS)}"
        end = chance.choice(".!?") if chance.random() < 0.9 else f", {chance.randrange(1000)}."
        yield f"{noun().capitalize()} {chance.choice(VERBS)} {noun()}{end}"


def texts(chance):
    letters = list("abcdefghiklmnoprstuvwy  .,!?'ABT012") + ["the ", "cat", "Ａ", "e\u0301", "\u3000", "\u200b", "é", "ÿ", "你", "👍", "①", "▁", "\x01", "<sep>"]
    for _ in range(80):
        yield "".join(chance.choice(letters) for _ in range(chance.randrange(1, 30)))


def train(folder, name, lines, **options):
    rules = folder / "rules.tsv"
    code = lambda text: " ".join(f"{ord(c):X}" for c in text)
    rules.write_text("".join(f"{code(a)}\t{code(b)}\n" for a, b in RULES))
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, normalization_rule_tsv=str(rules), user_defined_symbols=["<sep>"],
        num_threads=1, minloglevel=2, **options,
    )
    rules.unlink()
    (folder / name).write_bytes(out.getvalue())


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    lines = list(sentences(chance))
    train(folder, "source.spm", lines, model_type="unigram", vocab_size=150)
    train(folder, "target.spm", lines, model_type="bpe", vocab_size=400, byte_fallback=True, remove_extra_whitespaces=False)
    sides = {side: spm.SentencePieceProcessor(model_file=str(folder / f"{side}.spm")) for side in ["source", "target"]}
    pieces = sorted({model.id_to_piece(i) for model in sides.values() for i in range(len(model))} - {"<s>", "</s>", "<unk>"})
    # A character that only one side has, and a language.
    vocab = ["</s>", "<unk>", *pieces, "ÿ", ">>eng<<", "<pad>", "<s>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocab)}, ensure_ascii=False) + "\n")
    marian = MarianTokenizer.from_pretrained(str(folder))
    all_texts = FIXED + list(texts(chance))
    expected = {}
    for side, model in sides.items():
        expected[f"{side}.spm"] = [[text, model.encode(text), model.decode(model.encode(text))] for text in all_texts]
    for side, argument in [("source", "text"), ("target", "text_target")]:
        rows = expected[side] = []
        for text in all_texts + SPECIAL:
            ids = marian(**{argument: text})["input_ids"]
            rows.append([text, ids, marian.decode(ids, skip_special_tokens=True, use_source_tokenizer=side == "source")])
    m2m = M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "target.spm"), src_lang="zh", additional_special_tokens=["__en__"])
    rows = expected["m2m100"] = []
    for text in FIXED + ["</s> the", "<s> a<pad>", ">>eng<< a"]:
        ids = m2m(text)["input_ids"]
        rows.append([text, ids, m2m.decode(ids[1:], skip_special_tokens=True)])
    (folder / "expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
