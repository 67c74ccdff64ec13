# /// script
# requires-python = ">=3.11"
# dependencies = ["sacrebleu==2.6.0"]
# ///
"""Writes golden.json: what sacrebleu says of lines that were spoilt with a seed, of nasty ones, and of every character.

usage: make.py TEST.zh-en.tsv.gz

The argument is the test split of Tatoeba, Chinese, English and attribution on each line. `README.md` tells what is in
golden.json.
"""
import gzip
import json
import pathlib
import random
import sys

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF

SEED = 2017
TOKENIZERS = ["none", "13a", "zh", "char"]

# Hypothesis and reference.
EDGES = [
    ("the cat sat on the mat", "the cat sat on a mat"),
    ("", "Something was said."),
    ("Something was said.", ""),
    ("", ""),
    ("   ", " \t "),
    ("  leading and trailing  ", "leading and trailing"),
    ("one", "one"),
    ("two words", "two words"),
    ("a a a a a a", "a a b"),
    ("It costs 1,000.5 dollars.", "It costs 1,000.50 dollars."),
    ("1,000,000", "1.000.000"),
    (".5 and 5. and ,5 and 5,", "0.5 and 5.0 and ,5 and 5"),
    ("3.14.", "3.14"),
    ("He lives in the U.S.A.", "He lives in the U.S.A"),
    ("e.g., this i.e. that etc...", "e.g. this, i.e. that, etc."),
    ("wait...what,,no.,", "wait ... what , , no . ,"),
    ("....", ". . . ."),
    (",", "."),
    (",.,.1,.", "1,.,.,"),
    ("well-known 3-4 4-year-old -5 5- --", "well known 3 - 4 4 year old - 5 5"),
    ("1-2-3--4", "1 - 2 - 3 - - 4"),
    ("9-.9.-9", "9-. 9 .-9"),
    ("don't 'quote' it's '90s rock'n'roll", "do n't ' quote ' it 's '90s rock 'n' roll"),
    ('She said: "Yes!" and left?!', 'She said : " Yes ! " and left ? !'),
    ("“Curly” ‘quotes’ – dash — dash…", '"Curly" \'quotes\' - dash - dash...'),
    ("«Guillemets» „deutsch“ ‹x›", '"Guillemets" "deutsch" <x>'),
    ("&quot;quoted&quot; &amp; &lt;tag&gt;", '"quoted" & <tag>'),
    ("&amp;quot; &amp;amp; &amp;lt; &amp;gt;", "&quot; &amp; < >"),
    ("&QUOT;loud&QUOT; &Amp;", '"loud" &'),
    ("AT&T R&D &copy; &#39; &;", "AT & T R & D"),
    ("a<skipped>b <skipped> <SKIPPED>", "ab < skipped >"),
    ("&lt;skipped&gt;", "<skipped>"),
    ("trans-\nlation of\ntwo lines-\n", "translation of two lines-"),
    ("line\r\nfeed\x0bvertical\x0cform", "line feed vertical form"),
    ("unit\x1fsep\x1crecord\x85next\xa0hard", "unit sep record next hard"),
    ("zero\u200bwidth \u2009thin\u3000wide\ufeff", "zero width thin wide"),
    ("a_b [c] {d} (e) f/g h\\i j|k l~m n`o p^q", "a b c d e f g h i j k l m n o p q"),
    ("user@example.com https://example.com/a?b=c&d=e#f", "user@example.com https://example.com/a?b=c"),
    ("50% off $3.99 #1 *star* a+b=c", "50 % off $ 3.99 # 1 * star * a + b = c"),
    ("12:30:45 2024-01-02 01/02/2024", "12:30 2024-1-2 1/2/2024"),
    ("ÀÉÎÕÜ ß ẞ Ǆ ŸÇ", "àéîõü ß ß ǆ ÿç"),
    ("İstanbul ISPARTA ıi", "istanbul isparta ıi"),
    ("ΟΔΥΣΣΕΥΣ ΣΑΣ Σ Σ. ΑΣ, Α.Σ.Β", "οδυσσευς σας σ σ. ας, α.σ.β"),
    ("e\u0301te\u0301 n\u0303", "\u00e9t\u00e9 \u00f1"),
    ("😀 👍🏽 👨‍👩‍👧 🇫🇷", "😀 👍 👨‍👩‍👧 🇫🇷"),
    ("☀️ ✂ ➤ → ∑ ½ ① ㍿", "☀ ✂ ➤ → ∑ 1/2 1 株式会社"),
    ("我今年25岁了。", "我今年 25 岁了 。"),
    ("他说：“你好，World！”", "他说:“你好, world!”"),
    ("用Rust写的v1.2.3程序,很快.", "用 Rust 写的 v1.2.3 程序，很快。"),
    ("温度是－３．５℃，湿度８０％。", "温度是-3.5°C，湿度80%。"),
    ("ＡＢＣ　１２３，４５６．７", "ABC 123,456.7"),
    ("𠀀𪛖𫝀丽", "𠀀𪛖丽"),
    ("《红楼梦》（第一回）……——", "<<红楼梦>>(第一回)...--"),
    ("東京タワーは333mです。", "東京タワーは 333 m です。"),
    ("ひらがな カタカナ ｶﾅ", "ひらがなカタカナｶﾅ"),
    ("한국어 문장입니다.", "한국어 문장 입니다."),
    ("．５，.5,中.5文,6。7.", "．5,.5,中 .5 文,6。 7."),
    (".开头", "开头."),
    ("&quot;中文&amp;实体&quot;", "\"中文&实体\""),
    ("ไทย العربية עברית, हिन्दी।", "ไทย العربية עברית हिन्दी"),
    ("(hi) (hi !hi! ! !! ？好？ -a- a", "( hi ) hi ! ！ ？ 好 a -"),
    ("same line with enough words here", "same line with enough words here"),
    ("SAME LINE IN UPPER CASE", "same line in upper case"),
    ("x", "y"),
]


def spoil(items, glue, other, rng):
    """A worse translation: items dropped, swapped, doubled and replaced; another case, other punctuation."""
    items = list(items)
    for _ in range(rng.choice([0, 1, 1, 2, 3, 5])):
        at = rng.randrange(len(items)) if items else 0
        kind = rng.choice(["drop", "swap", "double", "replace"])
        if kind == "drop":
            del items[at : at + 1]
        elif kind == "swap":
            items[at : at + 2] = items[at : at + 2][::-1]
        elif kind == "double":
            items[at:at] = items[at : at + 1]
        else:
            items[at : at + 1] = [rng.choice(other)]
    line = glue.join(items)
    if rng.random() < 0.15:
        line = rng.choice([str.upper, str.lower, str.title, str.swapcase])(line)
    if rng.random() < 0.15:
        line = rng.choice([line.rstrip(".?!。？！"), line + "!", f'"{line}"', line.replace("'", "’"), line + " ", f"({line})"])
    return line


def bleu(tokenize, lowercase, hypotheses, references):
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    found = metric.corpus_score(hypotheses, [references])
    return {
        "tokenize": tokenize,
        "lowercase": lowercase,
        "score": found.score,
        "precisions": found.precisions,
        "matches": found.counts,
        "totals": found.totals,
        "brevity_penalty": found.bp,
        "hypothesis_length": found.sys_len,
        "reference_length": found.ref_len,
        "text": str(found),
        "signature": str(metric.get_signature()),
    }


def chrf(char_order, word_order, beta, lowercase, hypotheses, references):
    metric = CHRF(char_order=char_order, word_order=word_order, beta=beta, lowercase=lowercase)
    found = metric.corpus_score(hypotheses, [references])
    return {
        "char_order": char_order,
        "word_order": word_order,
        "beta": beta,
        "lowercase": lowercase,
        "score": found.score,
        "text": str(found),
        "signature": str(metric.get_signature()),
    }


def scored(hypotheses, references, tokenizers):
    lines = hypotheses, references
    kinds = [(6, 0, 2, False), (6, 2, 2, False), (6, 0, 2, True), (6, 2, 2, True), (4, 1, 1, False), (6, 0, 3, False)]
    return {
        "hypotheses": hypotheses,
        "references": references,
        "bleu": [bleu(name, lowercase, *lines) for name in tokenizers for lowercase in [False, True]],
        "chrf": [chrf(*kind, *lines) for kind in kinds],
    }


def words(tokenize, line):
    """What BLEU counts."""
    return BLEU(tokenize=tokenize)._preprocess_segment(line).split()


def each(hypotheses, references):
    """The lines one by one, so that a difference cannot hide in a sum."""
    lines = []
    for hypothesis, reference in zip(hypotheses, references):
        metrics = {name: BLEU(tokenize=name, effective_order=True, force=True) for name in TOKENIZERS}
        lines.append({
            "words": {name: [" ".join(words(name, line)) for line in (hypothesis, reference)] for name in TOKENIZERS},
            "bleu": {name: bleu(name, False, [hypothesis], [reference])["score"] for name in TOKENIZERS},
            "sentence": {name: metric.sentence_score(hypothesis, [reference]).score for name, metric in metrics.items()},
            "chrf": CHRF().sentence_score(hypothesis, [reference]).score,
            "chrf++": CHRF(word_order=2).sentence_score(hypothesis, [reference]).score,
        })
    return lines


def cuts(tokenize):
    """The ranges of characters that end a word, when they stand between two letters."""
    tokenizer = BLEU(tokenize=tokenize).tokenizer
    found = []
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000 or tokenizer(f"a{chr(code)}a").split() == [f"a{chr(code)}a"]:
            continue
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def main(tatoeba):
    assert sacrebleu.__version__ == "2.6.0", sacrebleu.__version__
    rows = [line.split("\t") for line in gzip.open(tatoeba, "rt", encoding="utf-8").read().splitlines()]
    chinese, english = [row[0] for row in rows], [row[1] for row in rows]
    rng = random.Random(SEED)
    vocabulary = [word for line in english for word in line.split()]
    characters = [c for line in chinese for c in line]
    hypotheses, references = map(list, zip(*EDGES))
    golden = {
        "attribution": "english and chinese: sentences of Tatoeba (https://tatoeba.org), CC BY 2.0 FR; the hypotheses are changed",
        "english": scored([spoil(line.split(), " ", vocabulary, rng) for line in english], english, ["13a", "none"]),
        "chinese": scored([spoil(line, "", characters, rng) for line in chinese], chinese, ["zh", "char"]),
        "edges": scored(hypotheses, references, TOKENIZERS),
        "each": each(hypotheses, references),
        "cuts": {name: cuts(name) for name in ["none", "13a", "zh"]},
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in golden.items())
    path = pathlib.Path(__file__).with_name("golden.json")
    path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    print(path, path.stat().st_size)


main(*sys.argv[1:])
