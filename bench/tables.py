#!/usr/bin/env python3
"""The tables of the pages below (PAGES), made of bench/record and bench/features.json. Python 3.9, no packages.

    bench/tables.py            rewrites what stands between <!-- table: NAME --> and <!-- end -->
    bench/tables.py --check    changes nothing, and fails with a diff where a page says something else than the records

A case may be in several records. RECORDS is the order in which they are asked, so a new record is written before those it replaces.
Not among them: `2026-11-15-stand-back.jsonl`, which compares two commits, `2026-11-16-models.txt`, the race of docs/models.md, and
`2026-11-16-ladder.txt`, the steps of the book.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "bench/record/emerald-rapids-2-cores"
FEATURES = "bench/features.json"
LAB = "bench/record/lab/lab.jsonl"
PLAIN = "2026-11-15.jsonl"
FORWARD = "2026-11-17-forward-f32.jsonl"
HALF = "2026-11-15-half.jsonl"
WAYS = "2026-11-15-other-ways.jsonl"
LOOKS = "2026-11-15-looks.jsonl"
MODELS = "2026-11-16-python.txt"
RECORDS = [FORWARD, PLAIN, HALF, WAYS, LOOKS]

# The rows of the short table: a case that was measured on two threads, or a whole model, and what it is.
SHORT = [
    ("prefill-f32-n512-d64-causal", "forward, causal, 512 tokens, f32", "前向，因果，512 个词元，f32"),
    ("prefill-f32-n2048-d64-causal", "the same, 2048 tokens", "同上，2048 个词元"),
    ("prefill-bf16-n8192-d64-causal", "the same, 8192 tokens, bf16", "同上，8192 个词元，bf16"),
    ("short-bf16-n64-d64", "forward, 64 items of 64 tokens, bf16", "前向，64 条 64 个词元的序列，bf16"),
    ("prefill-f32-n2048-d128-f32", "forward, 2048 tokens, f32 on tiles, not the default", "前向，2048 个词元，f32 走 AMX 分块（非默认）"),
    ("decode-bf16-n32768-d128", "decode: one query of 32 heads over 32,768 keys, bf16", "解码：32 个头的一个查询，32768 个键，bf16"),
    ("backward-f32-n2048-d64-causal", "forward + backward, causal, 2048 tokens, f32", "前向加反向，因果，2048 个词元，f32"),
    ("backward-bf16-n2048-d64-causal", "the same, bf16", "同上，bf16"),
    ("backward-f32-n2048-d64-dropout", "forward + backward, dropout, 2048 tokens, f32", "前向加反向，dropout，2048 个词元，f32"),
    ("backward-f32-n2048-d64-causal-window256", "forward + backward, causal window of 256, f32", "前向加反向，256 的因果窗口，f32"),
    ("backward-f32-n2048-d256-h1-additive", "forward + backward, Bahdanau's additive attention, f32", "前向加反向，Bahdanau 加性注意力，f32"),
    ("llama-f32", "Llama-shaped model reads 4096 tokens, f32", "Llama 形状的模型读入 4096 个词元，f32"),
    ("bert-training-bf16", "BERT-base, a training step with dropout, bf16", "BERT-base 带 dropout 的一个训练步，bf16"),
    ("gemma2-bf16", "Gemma-2-shaped model (softcap, windows), bf16", "Gemma-2 形状的模型（softcap、窗口），bf16"),
    ("gpt-oss-bf16", "gpt-oss-shaped model (sinks, windows), bf16", "gpt-oss 形状的模型（sink、窗口），bf16"),
]

WORDS = {
    "en": {
        "short": ["on two threads", "Regard", "without it", "times faster", "record"],
        "feature": "on CPUs",
        "alone": ["what", "see it", "test"],
        "yes": "yes", "no": "no", "n2": "n²", "gpu": "GPU", "unknown": "?",
        PLAIN: "f32", FORWARD: "f32", HALF: "half", WAYS: "other ways", LOOKS: "looks", MODELS: "models",
    },
    "zh": {
        "short": ["两个线程", "Regard", "不用 Regard", "快多少倍", "记录"],
        "feature": "在 CPU 上",
        "alone": ["内容", "怎么看到", "测试"],
        "yes": "有", "no": "无", "n2": "n²", "gpu": "GPU", "unknown": "?",
        PLAIN: "f32", FORWARD: "f32", HALF: "半精度", WAYS: "其他方式", LOOKS: "观察", MODELS: "整个模型",
    },
}

# What whole models are called by bench/python.py, and what they are.
NAMES = {
    "llama": "Llama-shaped, 100 M parameters, prefill",
    "gemma2": "Gemma-2-shaped (softcap, windows), prefill",
    "gpt-oss": "gpt-oss-shaped (sinks, windows), prefill",
    "bert-training": "BERT-base, training step with dropout 0.1",
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
    Page("docs/speed.md", "en", "../"),
    Page("docs/python-huggingface.md", "en", "../"),
    Page("book/en/src/lab.md", "en", "../../../"),
]


# ---- records ----


def rows(record: str) -> list[dict[str, Any]]:
    """All that a record holds, each row with the name of the record."""
    lines = (ROOT / FOLDER / record).read_text(encoding="utf-8").splitlines()
    return [{**json.loads(line), "record": record} for line in lines]


def case(name: str, threads: int = 2) -> dict[str, Any]:
    """A case that was measured beside a rival, of the first record that has it."""
    for record in RECORDS:
        found = [row for row in rows(record) if row["case"] == name and row["threads"] == threads and row["rival"]]
        if len(found) > 1:
            raise SystemExit(f"{record} has {name} on {threads} threads {len(found)} times; leave one of them in")
        if found:
            return found[0]
    raise SystemExit(f"{name} on {threads} threads, beside a rival, is in none of {', '.join(RECORDS)}")


def models() -> dict[str, dict[str, Any]]:
    """Whole models by their names, as bench/python.py prints them, in rows like those of the other records."""
    form = re.compile(r"(\S+) +(\d+) tokens +regard +([\d.]+) s +(\w+) +([\d.]+) s +([\d.]+) x \(([\d.]+)\.\.([\d.]+)\), asked [\d.]+")
    found = {}
    for line in (ROOT / FOLDER / MODELS).read_text(encoding="utf-8").splitlines()[1:]:
        match = form.fullmatch(line)
        if not match:
            raise SystemExit(f"{MODELS}: not a line of bench/python.py: {line}")
        name, tokens, ours, rival, theirs, *ratio = match.groups()
        middle, low, high = map(float, ratio)
        found[name] = {
            "case": name, "tokens": int(tokens), "median_ms": 1000 * float(ours), "rival": rival, "rival_ms": 1000 * float(theirs),
            "vs_rival": middle, "vs_rival_p10": low, "vs_rival_p90": high, "record": MODELS,
        }
    return found


# ---- numbers ----


def time(ms: Optional[float]) -> str:
    if ms is None:
        return ""
    if ms < 1000:
        return f"{ms:.{2 if ms < 1 else 1 if ms < 99.95 else 0}f} ms"
    return f"{ms / 1000:.{2 if ms < 9995 else 1}f} s"


def times(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def ratio(row: dict[str, Any]) -> str:
    if row["vs_rival"] is None:
        return ""
    return f"{times(row['vs_rival'])} ({times(row['vs_rival_p10'])}-{times(row['vs_rival_p90'])})"


def memory(mib: Optional[float]) -> str:
    return "" if mib is None else f"{mib:,.{1 if mib < 9.95 else 0}f}"


def table(heads: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines]]


# ---- the tables ----


def short(page: Page) -> list[str]:
    """A dozen telling rows."""
    whole, lines = models(), []
    for name, en, zh in SHORT:
        row = whole.get(name) or case(name)
        rival = f"{row['rival']} " if name in whole else ""
        source = page.link(f"{FOLDER}/{row['record']}", page.word(row["record"]))
        lines.append([zh if page.language == "zh" else en, time(row["median_ms"]), rival + time(row["rival_ms"]), ratio(row), source])
    return table(page.word("short"), lines)


def beside(record: str, wanted: Callable[[dict[str, Any]], bool]) -> Callable[[Page], list[str]]:
    """All rows of a record that were measured beside PyTorch."""

    def make(page: Page) -> list[str]:
        chosen = [row for row in rows(record) if row["rival"] and wanted(row)]
        lines = [[f"`{r['case']}`", time(r["median_ms"]), time(r["rival_ms"]), ratio(r), memory(r["extra_rss_mb"])] for r in chosen]
        return [*said(page, record, chosen), *table(["case", "Regard", "PyTorch", "times faster", "MiB"], lines)]

    return make


def said(page: Page, record: str, chosen: list[dict[str, Any]]) -> list[str]:
    """The line above a table: where it is from, and what ran."""
    isas, rivals = ({row[key] for row in chosen if row[key]} for key in ("isa", "rival"))
    return [f"{page.link(f'{FOLDER}/{record}')}: {', '.join(sorted(isas))}; {', '.join(sorted(rivals)) or 'no rival'}.", ""]


def ways(page: Page) -> list[str]:
    chosen, lines = rows(WAYS), []
    for row in chosen:
        notes = [f"{row['row_ns']:.0f} ns a row"] if row["case"].startswith("linear") else []
        if "recall_top" in row:
            notes.append(f"keeps {row['recall_top']:.2f} of the mass of the true top 32, {row['recall_mass']:.2f} of all")
        if row.get("rival_extra_rss_mb"):
            notes.append(f"the rival {memory(row['rival_extra_rss_mb'])} MiB")
        threads = "" if row["threads"] == 2 else f", {row['threads']} thread"
        rival = (row["rival"] or "").replace("regard exact", "exact").split(" ")[0]
        times_ = [time(row["median_ms"]), f"{rival} {time(row['rival_ms'])}".strip(), ratio(row), memory(row["extra_rss_mb"])]
        lines.append([f"`{row['case']}`{threads}", *times_, "; ".join(notes)])
    return [*said(page, WAYS, chosen), *table(["case", "Regard", "rival", "times faster", "MiB", ""], lines)]


def limit(page: Page) -> list[str]:
    """What was measured without a rival; a case that was measured again has both."""
    chosen = [row for row in rows(PLAIN) if not row["rival"]]
    lines = []
    for name, threads in dict.fromkeys((row["case"], row["threads"]) for row in chosen):
        takes = [row for row in chosen if (row["case"], row["threads"]) == (name, threads)]
        each = [", ".join(form(row) for row in takes) for form in (lambda r: time(r["median_ms"]), lambda r: f"{r['of_limit']:.2f}")]
        lines.append([f"`{name}`", str(threads), *each, f"{takes[0]['visible']:.2f}", memory(takes[0]["extra_rss_mb"])])
    return [*said(page, PLAIN, chosen), *table(["case", "threads", "Regard", "of the limit", "pairs seen", "MiB"], lines)]


def looks(page: Page) -> list[str]:
    chosen = rows(LOOKS)
    lines = [[f"`{r['case']}`", time(r["median_ms"]), time(r["rival_ms"]), ratio(r), memory(r["extra_rss_mb"])] for r in chosen]
    return [*said(page, LOOKS, chosen), *table(["case", "look", "forward", "times faster", "MiB"], lines)]


def whole(page: Page) -> list[str]:
    head = (ROOT / FOLDER / MODELS).read_text(encoding="utf-8").splitlines()[0]
    lines = []
    for row in sorted(models().values(), key=lambda row: list(NAMES).index(row["case"].rpartition("-")[0])):
        kind, _, dtype = row["case"].rpartition("-")
        what = [f"{NAMES[kind]}, {dtype}", f"{row['tokens']:,}"]
        lines.append([*what, time(row["median_ms"]), f"{row['rival']} {time(row['rival_ms'])}", ratio(row)])
    return [f"{page.link(f'{FOLDER}/{MODELS}')}: {head}.", "", *table(["model", "tokens", "Regard", "without it", "times faster"], lines)]


def lab(page: Page) -> list[str]:
    lines = []
    for line in (ROOT / LAB).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        judged = [found for found in row["findings"] if found["judged"]]
        good = sum(found["holds"] for found in judged)
        lines.append([f"{row['id']} `{row['name']}`", row["claim"].replace("|", "\\|"), f"{good} of {len(judged)}", f"{row['seconds']:.0f} s"])
    return table(["", "claim", "as predicted", "time"], lines)


def features(page: Page) -> list[str]:
    data = json.loads((ROOT / FEATURES).read_text(encoding="utf-8"))
    lines = []
    for row in data["rows"]:
        holds(row["regard"]["test"])
        cells = [row["regard"]]
        for neighbour in data["neighbours"]:
            cell = row[neighbour["id"]]
            if not cell.get("source"):
                raise SystemExit(f"{FEATURES}: {row['en']}, {neighbour['id']}: no source")
            cells.append(cell)
        said_ = [cell[page.language] if page.language in cell else page.word(cell["say"]) for cell in cells]
        lines.append([row[page.language], *said_])
    heads = [page.word("feature"), "Regard", *(neighbour[page.language] for neighbour in data["neighbours"])]
    return table(heads, lines)


def alone(page: Page) -> list[str]:
    data = json.loads((ROOT / FEATURES).read_text(encoding="utf-8"))
    lines = []
    for row in data["alone"]:
        file, name = holds(row["test"])
        # A name is long and has no place to break a line: it is the title of the link.
        lines.append([row[page.language], f"`{row['command']}`", f'[{Path(file).name}]({page.up}{file} "{name}")'])
    return table(page.word("alone"), lines)


def holds(test: str) -> tuple[str, str]:
    """The file and the name of a test, which must be there."""
    file, _, name = test.partition("::")
    if not re.search(rf"\b(fn|def) {name}\b", (ROOT / file).read_text(encoding="utf-8")):
        raise SystemExit(f"{FEATURES}: {file} has no test {name}")
    return file, name


def starts(*passes: str) -> Callable[[dict[str, Any]], bool]:
    return lambda row: row["case"].startswith(passes)


TABLES: dict[str, Callable[[Page], list[str]]] = {
    "short": short,
    "features": features,
    "alone": alone,
    "forward": beside(FORWARD, starts("prefill", "short")),
    "backward": beside(PLAIN, starts("backward")),
    "half": beside(HALF, lambda row: True),
    "ways": ways,
    "limit": limit,
    "looks": looks,
    "models": whole,
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
