#!/usr/bin/env python3
"""The tables of the pages below (PAGES), made of bench/record and bench/features.json. Python 3.9, no packages.

    bench/tables.py            rewrites what stands between <!-- table: NAME --> and <!-- end -->
    bench/tables.py --check    changes nothing, and fails with a diff where a page says something else than the records

A record has one row a line, as `regard bench run --format json` and `regard bench suite` write them. Not among those that are read here:
`2026-11-15-stand-back.jsonl`, which compares two commits, `2026-11-16-models.txt`, the race of docs/models.md, and
`2026-11-16-ladder.txt`, the steps of the book.
"""

from __future__ import annotations

import difflib
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "bench/record"
FEATURES = "bench/features.json"
LAB = "bench/record/lab/lab.jsonl"
SUITE = "emerald-rapids-2-cores/suite.jsonl"
OTHERS = "emerald-rapids-2-cores/other-functions.jsonl"
ROOFLINE = "emerald-rapids-2-cores/roofline.jsonl"
LOOKS = "emerald-rapids-2-cores/looks.jsonl"
# Of a machine without AMX.
CACHES = "avx512-2-cores/caches.jsonl"
AVX512 = "avx512-2-cores/suite.jsonl"
ARCHITECTURES = "bench/record/architectures.jsonl"
JUDGES = "bench/record/judges"
# As python/tests/judges/run.py has them.
SUITES_OF_OTHERS = ["onnx", "opinfo", "transformers", "flash-attn", "vllm"]
OUTCOMES = ["passed", "failed", "not applicable", "too slow", "not collected"]
NONE = ["None yet."]

ENGINES = {"torch": "PyTorch", "vllm": "vLLM", "openvino": "OpenVINO", "onnxruntime": "onnxruntime", "auto-round": "auto-round", "llama.cpp": "llama.cpp", "ctranslate2": "CTranslate2"}


class Family(NamedTuple):
    """Cases that stand for one use."""

    name: str
    en: str
    zh: str
    cases: str  # a pattern of their names


# Each case of the suite belongs to the first of these that its name fits.
FAMILIES = [
    Family("options", "prefill with a window, softcap, sinks, padding, BSHD or grouped heads", "预填充：窗口、softcap、sink、填充、BSHD 布局、分组头", r"prefill-.*-(window512|softcap|sinks|padding|bshd|kv2)"),
    Family("prefill-f32", "prefill and short batches, f32", "预填充与短序列批次，f32", r"(prefill|short)-f32"),
    Family("prefill-bf16", "prefill and short batches, bf16", "预填充与短序列批次，bf16", r"(prefill|short)-bf16"),
    Family("decode", "decode: 1 and 4 queries over 1k to 32k keys", "解码：1 个和 4 个查询，1k 到 32k 个键", r"decode-"),
    Family("training", "forward and backward", "前向加反向", r"backward-"),
    Family("inference", "models that the command runs itself", "由命令自己运行的模型", r"model-(f32-minilm-embed|\w+-\w+-shape-)"),
    Family("models", "whole models, and a tiny call, from Python", "整个模型与极小的调用（Python）", r"(model|call)-"),
]
# As the pages have them.
ORDER = ["prefill-f32", "prefill-bf16", "options", "decode", "training", "models"]

WORDS = {
    "en": {
        "short": ["on two threads", "cases", "beside PyTorch in its fastest form", "beside the fastest engine of each case"],
        "feature": "on CPUs",
        "unique": ["what", "see it", "test"],
        "architectures": ["architecture", "models", "logits", "gradients", "generate: greedy and beam search", "attention"],
        "same": "same tokens", "other": "other tokens",
        "yes": "yes", "no": "no", "n2": "n²", "gpu": "GPU", "unknown": "?",
    },
    "zh": {
        "short": ["两个线程", "测试数", "与 PyTorch 最快的写法相比", "与每个测试中最快的引擎相比"],
        "feature": "在 CPU 上",
        "unique": ["内容", "怎么看到", "测试"],
        "architectures": ["架构", "模型数", "logits", "梯度", "生成：贪心与束搜索", "注意力"],
        "same": "词元相同", "other": "词元不同",
        "yes": "有", "no": "无", "n2": "n²", "gpu": "GPU", "unknown": "?",
    },
}

# What is measured from Python, by the names of records.
NAMES = {
    "call-tiny": "a tiny call: 2 heads, 16 tokens, 32 features",
    "model-llama-prefill": "Llama-shaped, 100 M parameters, prefill of 4,096 tokens",
    "model-llama-generate": "the same model, 64 tokens after 512",
    "model-bert-training": "BERT-base, training step with dropout and AdamW, 4 x 512 tokens",
    "model-gemma2-prefill": "Gemma-2-shaped (softcap, windows), prefill of 4,096 tokens",
    "model-gpt-oss-prefill": "gpt-oss-shaped (sinks, windows), prefill of 4,096 tokens",
    "model-minilm-encode": "MiniLM (BERT, 22 M parameters), 64 x 128 tokens",
    "model-minilm-ctranslate2": "the same model, beside CTranslate2",
    "model-smollm2-prompt": "SmolLM2-135M (4-bit file), prompt of about 500 tokens",
    "model-smollm2-generate": "the same model, each new token",
    "model-minilm-embed": "MiniLM, 1,000 sentences in sorted batches of 32",
    "model-smollm2-shape-prompt": "shape of SmolLM2-135M, random weights, prompt of 441 tokens",
    "model-smollm2-shape-generate": "the same model, 64 tokens after 16",
    "model-marian-shape-greedy": "shape of OPUS-MT (6 + 6 layers, d 512), random weights, 16 sentences, 32 tokens each, greedy search",
    "model-marian-shape-beam4": "the same model, beam search with 4 beams",
}


class Page(NamedTuple):
    """A page with tables: where it is, its language, and how one goes from it to the root."""

    path: str
    language: str
    up: str

    def link(self, file: str, text: Optional[str] = None) -> str:
        return f"[{text or '`' + Path(file).name + '`'}]({self.up}{file})"

    def word(self, name: str) -> Any:
        return WORDS[self.language][name]


PAGES = [
    Page("README.md", "en", ""),
    Page("README.zh.md", "zh", ""),
    Page("docs/compare.md", "en", "../"),
    Page("docs/compare.zh.md", "zh", "../"),
    Page("docs/speed.md", "en", "../"),
    Page("docs/models.md", "en", "../"),
    Page("docs/judges.md", "en", "../"),
    Page("book/en/src/howto/run-a-model.md", "en", "../../../../"),
    Page("book/zh/src/howto/run-a-model.md", "zh", "../../../../"),
    Page("book/en/src/lab.md", "en", "../../../"),
]


# ---- records ----


def rows(record: str) -> list[dict[str, Any]]:
    """All that a record holds."""
    lines = (ROOT / FOLDER / record).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def family(name: str) -> list[dict[str, Any]]:
    """The rows of a family of the suite."""

    def belongs(row: dict[str, Any]) -> bool:
        found = [one.name for one in FAMILIES if re.match(one.cases, row["case"])]
        if not found:
            raise SystemExit(f"{SUITE}: {row['case']} belongs to no family")
        return found[0] == name

    # Of a case that failed and was measured later, the later row.
    return [row for row in {row["case"]: row for row in rows(SUITE)}.values() if belongs(row)]


def compared(row: dict[str, Any], engine: Optional[str] = None) -> list[dict[str, Any]]:
    """The baselines of a row that were measured, or one of them."""
    return [one for one in row["baselines"] if "ratio" in one and engine in (None, one["engine"])]


# ---- numbers ----


def time(ms: Optional[float]) -> str:
    if ms is None:
        return ""
    if ms < 1000:
        return f"{ms:.{2 if ms < 1 else 1 if ms < 99.95 else 0}f} ms"
    return f"{ms / 1000:.{2 if ms < 9995 else 1}f} s"


def times(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def ratio(one: dict[str, Any]) -> str:
    return f"{times(one['ratio'])} ({times(one['ratio_low'])}-{times(one['ratio_high'])})"


def over(ratios: list[float]) -> str:
    """The median of some cases, and the range over them."""
    return f"{times(statistics.median(ratios))} ({times(min(ratios))}-{times(max(ratios))})" if ratios else ""


def memory(mib: Optional[float]) -> str:
    return "" if mib is None else f"{mib:,.{1 if mib < 9.95 else 0}f}"


def table(heads: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines]]


# ---- the tables ----


def short(page: Page) -> list[str]:
    """A line for each family: the median over its cases, and the range."""
    lines = []
    for name in ORDER:
        one = next(one for one in FAMILIES if one.name == name)
        measured = [row for row in family(name) if compared(row)]
        torch = [other["ratio"] for row in measured for other in compared(row, "torch")]
        fastest = [min(other["ratio"] for other in compared(row)) for row in measured]
        lines.append([one.zh if page.language == "zh" else one.en, str(len(measured)), over(torch), over(fastest)])
    return table(page.word("short"), lines)


def kernels(name: str) -> Callable[[Page], list[str]]:
    """All cases of a family beside every engine that was measured in one of them."""

    def make(page: Page) -> list[str]:
        return beside_engines(page, SUITE, family(name))

    return make


def caches(page: Page) -> list[str]:
    return beside_engines(page, CACHES, rows(CACHES))


def avx512(page: Page) -> list[str]:
    return beside_engines(page, AVX512, rows(AVX512))


def beside_engines(page: Page, record: str, chosen: list[dict[str, Any]]) -> list[str]:
    """Cases of a record beside every engine that was measured in one of them."""
    engines = [engine for engine in ENGINES if any(compared(row, engine) for row in chosen)]
    lines = []
    for row in chosen:
        cells = []
        for engine in engines:
            one = (compared(row, engine) or [None])[0]
            form = f", {one['form']}" if one and engine in ("torch", "vllm") and one["form"] not in ("default", "vllm") else ""
            cells.append(f"{ratio(one)}{form}" if one else "")
        torch = (compared(row, "torch") or [{}])[0]
        taken = " / ".join(filter(None, [memory(row["extra_rss_mb"]), memory(torch.get("extra_rss_mb"))]))
        lines.append([f"`{row['case']}`", time(row["median_ms"]), f"{row['of_roofline']:.2f}", *cells, taken])
    heads = ["case", "Regard", "of the roofline", *(ENGINES[engine] for engine in engines), "MiB"]
    return [*said(page, record, chosen), *table(heads, lines)]


def said(page: Page, record: str, chosen: list[dict[str, Any]]) -> list[str]:
    """The line above a table: where it is from, and what ran."""
    each = lambda key: sorted({row[key] for row in chosen if row.get(key)})
    engines = sorted({one.get("name") or one["engine"] for row in chosen for one in compared(row)})
    commits = [f"commit {commit}" for commit in each("commit")]
    few = "; of fewer than 9 samples the range is from the least to the largest" if "min-max" in each("range") else ""
    few += "; some percentiles are of fewer than 9 samples" if any(row["samples"] < 9 and row["range"] == "p10-p90" for row in chosen) else ""
    told = ", ".join([*each("date"), *commits, *each("cpu"), *each("isa"), *engines])
    return [f"{page.link(f'{FOLDER}/{record}')}: {told}{few}.", ""]


def others(page: Page) -> list[str]:
    chosen, lines = rows(OTHERS), []
    for row in chosen:
        notes = [f"{row['row_ns']:.0f} ns a row"] if row["case"].startswith("linear") else []
        if row.get("recall_top") is not None:
            notes.append(f"keeps {row['recall_top']:.2f} of the mass of the true top 32, {row['recall_mass']:.2f} of all")
        one = (compared(row) or [None])[0]
        if one and one.get("extra_rss_mb"):
            notes.append(f"the baseline {memory(one['extra_rss_mb'])} MiB")
        threads = "" if row["threads"] == 2 else f", {row['threads']} thread"
        beside = [f"{one['engine'].replace('regard exact', 'exact')} {time(one['median_ms'])}", ratio(one)] if one else ["", ""]
        lines.append([f"`{row['case']}`{threads}", time(row["median_ms"]), *beside, memory(row["extra_rss_mb"]), "; ".join(notes)])
    return [*said(page, OTHERS, chosen), *table(["case", "Regard", "baseline", "ratio", "MiB", ""], lines)]


def roofline(page: Page) -> list[str]:
    """What was measured without a baseline."""
    chosen, lines = rows(ROOFLINE), []
    for row in chosen:
        of = f"{row['of_roofline']:.2f} ({row['of_roofline_low']:.2f}-{row['of_roofline_high']:.2f})"
        lines.append([f"`{row['case']}`", str(row["threads"]), time(row["median_ms"]), of, f"{row['visible']:.2f}", memory(row["extra_rss_mb"])])
    return [*said(page, ROOFLINE, chosen), *table(["case", "threads", "Regard", "of the roofline", "visible pairs", "MiB"], lines)]


def looks(page: Page) -> list[str]:
    chosen = rows(LOOKS)
    lines = []
    for row in chosen:
        one = compared(row)[0]
        lines.append([f"`{row['case']}`", time(row["median_ms"]), time(one["median_ms"]), ratio(one), memory(row["extra_rss_mb"])])
    return [*said(page, LOOKS, chosen), *table(["case", "look", "forward", "ratio", "MiB"], lines)]


def whole(page: Page) -> list[str]:
    chosen, lines = family("models"), []
    for row in chosen:
        kind, dtype, rest = row["case"].split("-", 2)
        what = f"{NAMES[f'{kind}-{rest}']}, {dtype}"
        if not compared(row):
            why = row.get("error") or "; ".join(one.get("error", "") for one in row["baselines"])
            lines.append([what, "", f"not measured: {why}", "", ""])
            continue
        one = compared(row)[0]
        slower = [f"{name} {time(ms)}" for name, ms in one["forms_ms"].items() if name != one["form"]]
        lines.append([what, time(row["median_ms"]), f"{one['form']} {time(one['median_ms'])}", ratio(one), ", ".join(slower)])
    return [*said(page, SUITE, chosen), *table(["what", "Regard", "fastest form without it", "ratio", "other forms"], lines)]


def inference(page: Page) -> list[str]:
    """Models that the command runs itself, a line for each engine beside it."""
    chosen, lines = family("inference"), []
    for row in chosen:
        kind, dtype, rest = row["case"].split("-", 2)
        for one in row["baselines"]:
            beside = f"{ENGINES[one['engine']]} ({one['form']}) {time(one['median_ms'])}" if "ratio" in one else f"not measured: {one.get('error', '')}"
            lines.append([f"{NAMES[f'{kind}-{rest}']}, {dtype}", time(row["median_ms"]), beside, ratio(one) if "ratio" in one else ""])
    if not lines:
        return ["Not measured yet."]
    return [*said(page, SUITE, chosen), *table(["what", "Regard", "beside", "ratio"], lines)]


def architectures(page: Page) -> list[str]:
    """The largest error of each architecture over its models."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in (ROOT / ARCHITECTURES).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.setdefault(row["family"], []).append(row)

    def worst(some: list[dict[str, Any]], key: str) -> str:
        errors = [row[key] for row in some if row[key] is not None]
        return f"{max(errors):.0e}".replace("e-0", "e-") if errors else "-"

    def written(some: list[dict[str, Any]]) -> str:
        same = [row[key] for row in some for key in ("greedy", "beam") if row[key] is not None]
        return page.word("same" if all(same) else "other") if same else "-"

    lines = [
        [f"`{name}`", str(len(some)), worst(some, "logits"), worst(some, "gradients"), written(some), worst(some, "attention")]
        for name, some in sorted(found.items())
    ]
    return table(page.word("architectures"), lines)


def judged() -> list[tuple[dict[str, Any], str]]:
    """What suites of others found, and the files of these records. A suite without a record is in no table."""
    files = sorted((ROOT / JUDGES).glob("*.json"), key=lambda file: SUITES_OF_OTHERS.index(file.stem))
    return [(json.loads(file.read_text(encoding="utf-8")), f"{JUDGES}/{file.name}") for file in files]


def judges(page: Page) -> list[str]:
    lines = []
    for found, file in judged():
        versions = [f"{name} {version}" for name, version in found["packages"].items()]
        tests = versions + ([f"tests of commit {found['tests'][:12]}"] if found["tests"] else [])
        counts = [str(found[outcome]) for outcome in OUTCOMES]
        lines.append([page.link(file, found["suite"]), found["date"], ", ".join(tests), *counts])
    return table(["suite", "run on", "versions", *OUTCOMES], lines) if lines else NONE


def judged_models(page: Page) -> list[str]:
    """Architectures by what the common tests of Transformers found."""
    found = next((one for one, _ in judged() if one["suite"] == "transformers"), None)
    if found is None:
        return NONE
    kinds: dict[str, list[str]] = {}
    for name, counts in found["groups"].items():
        kind = "with failures" if "failed" in counts else "all that apply pass" if "passed" in counts else "none applies"
        kinds.setdefault(kind, []).append(f"{name} ({counts.get('passed', 0)})")
    lines = [[kind, str(len(names)), ", ".join(names)] for kind, names in sorted(kinds.items())]
    return table(["", "", "architectures, and how many tests pass"], lines)


def not_applicable(page: Page) -> list[str]:
    """Why tests neither passed nor failed, most frequent first."""
    lines = []
    for found, _ in judged():
        for outcome in OUTCOMES[2:]:
            for why, names in sorted(found["why"][outcome].items(), key=lambda one: (-len(one[1]), one[0])):
                lines.append([found["suite"], outcome, str(len(names)), why.replace("|", "\\|")])
    return table(["suite", "outcome", "tests", "reason"], lines) if lines else NONE


def lab(page: Page) -> list[str]:
    lines = []
    for line in (ROOT / LAB).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        judged = [found for found in row["results"] if found["checked"]]
        good = sum(found["holds"] for found in judged)
        lines.append([f"{row['id']} `{row['name']}`", row["claim"].replace("|", "\\|"), f"{good} of {len(judged)}", f"{row['seconds']:.0f} s"])
    return table(["", "claim", "as predicted", "time"], lines)


def features(page: Page) -> list[str]:
    data = json.loads((ROOT / FEATURES).read_text(encoding="utf-8"))
    lines = []
    for row in data["rows"]:
        if row["regard"].get("say") != "no":
            holds(row["regard"]["test"])
        cells = [row["regard"]]
        for neighbour in data["neighbours"]:
            cell = row[neighbour["id"]]
            if not cell.get("source", "").startswith("https://"):
                raise SystemExit(f"{FEATURES}: {row['en']}, {neighbour['id']}: no public source")
            cells.append(cell)
        words = [cell[page.language] if page.language in cell else page.word(cell["say"]) for cell in cells]
        lines.append([row[page.language], words[0], *(f"[{word}]({cell['source']})" for word, cell in zip(words[1:], cells[1:]))])
    heads = [page.word("feature"), "Regard", *(neighbour[page.language] for neighbour in data["neighbours"])]
    return table(heads, lines)


def unique(page: Page) -> list[str]:
    data = json.loads((ROOT / FEATURES).read_text(encoding="utf-8"))
    lines = []
    for row in data["unique"]:
        file, name = holds(row["test"])
        # A name is long and has no place to break a line: it is the title of the link.
        lines.append([row[page.language], f"`{row['command']}`", f'[{Path(file).name}]({page.up}{file} "{name}")'])
    return table(page.word("unique"), lines)


def holds(test: str) -> tuple[str, str]:
    """The file and the name of a test, which must be there."""
    file, _, name = test.partition("::")
    if not re.search(rf"\b(fn|def) {name}\b", (ROOT / file).read_text(encoding="utf-8")):
        raise SystemExit(f"{FEATURES}: {file} has no test {name}")
    return file, name


TABLES: dict[str, Callable[[Page], list[str]]] = {
    "short": short,
    "features": features,
    "unique": unique,
    **{name: kernels(name) for name in ORDER if name != "models"},
    "others": others,
    "roofline": roofline,
    "looks": looks,
    "caches": caches,
    "avx512": avx512,
    "models": whole,
    "inference": inference,
    "architectures": architectures,
    "judges": judges,
    "judged-models": judged_models,
    "not-applicable": not_applicable,
    "lab": lab,
}


def written(page: Page, text: str) -> str:
    """A page with its tables as the records say."""

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise SystemExit(f"{page.path}: no table is called {name}; there are {', '.join(TABLES)}")
        return "\n".join([f"<!-- table: {name} -->", "", *TABLES[name](page), "", "<!-- end -->"])

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end -->", put, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        raise SystemExit(__doc__)
    wrong = 0
    for page in PAGES:
        path = ROOT / page.path
        old = path.read_text(encoding="utf-8")
        new = written(page, old)
        if not arguments:
            path.write_text(new, encoding="utf-8")
        elif new != old:
            wrong += 1
            ends = (f"{page.path} as it is", f"{page.path} as the records say")
            sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), *ends))
    if wrong:
        print(f"{wrong} pages are not what the records say; bench/tables.py puts them right", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
