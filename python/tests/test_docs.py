"""Every block of Python in the documents runs, each page from top to bottom, and so do the notebooks.

A block that cannot run here has a line `<!-- not run: why -->` before it. The tutorials and how-to guides of the book run in English; the
Chinese pages have the same code, but for comments.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Optional

import pytest

import regard
from regard import masks
from regard._call import describe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/python.md"
OPTIONS = ROOT / "docs/options.md"
BOOK = ROOT / "book/en/src"
GUIDES = sorted(path for folder in ("tutorials", "howto") for path in (BOOK / folder).glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "python/README.md", *sorted((ROOT / "docs").glob("python*.md"))]
NOTEBOOKS = ROOT / "python/notebooks"
OPTIONAL = {"bertviz", "ml_dtypes", "nnsight", "onnx", "pandas", "pyarrow", "torch", "transformers", "usearch"}
"""Packages that a page may need and a machine may lack."""
LACKING = 77
"""What the process of a page returns where it lacks one."""


class Block(NamedTuple):
    """Code of a page."""

    line: int
    code: str
    not_run: Optional[str]
    """Why it cannot run, where it says so."""


def blocks(page: Path) -> list[Block]:
    found, before, code, start = [], "", None, 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if code is not None and line.strip() == "```":
            reason = re.fullmatch(r"<!-- not run:(.*)-->", before)
            found.append(Block(start, "\n".join(code), reason and reason[1].strip()))
            before, code = "", None
        elif code is not None:
            code.append(line)
        elif line.strip() == "```python":
            code, start = [], number
        elif line.strip():
            before = line.strip()
    assert code is None, f"{page.name}: the block of line {start} has no end"
    return found


# Some guides are about Rust or the command alone, or need a server.
PAGES += [path for path in GUIDES if any(block.not_run is None for block in blocks(path))]


def run(page: Path) -> None:
    """Runs a page, and ends with LACKING where it needs a package that is not here."""
    names = {"__name__": "__main__"}
    for block in blocks(page):
        if block.not_run is not None:
            continue
        try:
            exec(compile("\n" * block.line + block.code, str(page), "exec", dont_inherit=True), names)
        except ModuleNotFoundError as missing:
            if missing.name not in OPTIONAL:
                raise
            print(f"line {block.line} needs {missing.name}")
            sys.exit(LACKING)


def python(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    """A process of its own: pages register and install things, and write files."""
    path = os.pathsep.join([str(Path(regard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run([sys.executable, *arguments], check=False, cwd=folder, env=environment, capture_output=True, encoding="utf-8")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The processes of the selected pages, two at a time: each spends most of its seconds importing PyTorch on one core."""
    selected = [item.callspec.params["page"] for item in request.session.items if item.name.startswith("test_every_block")]
    with ThreadPoolExecutor(2) as pool:
        folder = tmp_path_factory.mktemp
        yield {page: pool.submit(python, __file__, str(page), folder=folder("page")) for page in selected}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_a_page_runs(page, runs):
    assert any(block.not_run is None for block in blocks(page)), f"{page.name} has no code that runs"
    done = runs[page].result()
    if done.returncode == LACKING:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr


def test_a_block_that_is_not_run_says_why():
    for page in PAGES:
        for block in blocks(page):
            assert block.not_run is None or len(block.not_run.split()) > 1, f"{page.name}, line {block.line}"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.relative_to(BOOK).as_posix())
def test_a_chinese_guide_has_the_code_of_the_english_one(page):
    def code(path: Path) -> list[tuple[str, bool]]:
        return [(ast.dump(ast.parse(block.code)), block.not_run is not None) for block in blocks(path)]

    assert code(ROOT / "book/zh/src" / page.relative_to(BOOK)) == code(page)


def column(heading: str, title: str) -> list[str]:
    """The cells of the column with this title in the tables below a heading of docs/options.md."""
    section = OPTIONS.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in section.splitlines() if line.startswith("|")]
    at = [cell.strip() for cell in rows[0]].index(title)
    return [row[at].strip() for row in rows[2:] if len(row) == len(rows[0])]


def test_the_table_of_options_has_every_option_and_no_other():
    cells = column("Scores", "Python") + column("Options of the call", "Python")
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    names |= {"mask", "similarity", "normalizer"}  # these have tables of their own
    assert names == {*inspect.signature(describe).parameters, "return_aux"} - {"q", "unknown"}


def test_the_table_of_masks_has_every_rule_and_no_other():
    names = {name for cell in column("Masks", "`regard.masks.`") for name in re.findall(r"`(\w+)\(", cell)}
    assert names == {name for name in masks.__all__ if name not in ("Mask", "of", "parse")}


def test_the_page_tells_of_everything_that_is_public():
    text = PAGE.read_text(encoding="utf-8")
    beside = {"Aux", "Grads", "LinearState", "Steps"}  # what calls return
    missing = [name for name in regard.__all__ if name not in beside and not re.search(rf"\b{name}\b", text)]
    assert not missing


def run_notebook(name: str, folder: Path, before: str = "") -> str:
    """What a notebook prints as a program, with some code run first."""
    code = f"{before}\nimport runpy, sys\nrunpy.run_path(sys.argv[1], run_name='__main__')"
    done = python("-c", code, str(NOTEBOOKS / name), folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_notebook_runs_as_a_program(tmp_path):
    pytest.importorskip("transformers")
    said = run_notebook("look_inside.py", tmp_path)
    assert "looks at 'sat' in place 2" in said and "is not here" not in said
    assert "<html" in (tmp_path / "look_inside.html").read_text(encoding="utf-8")


def test_the_notebook_says_what_is_missing(tmp_path):
    said = run_notebook("look_inside.py", tmp_path, "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None")
    assert "PyTorch is not here" in said and "Transformers is not here" in said
    assert not list(tmp_path.iterdir())


def test_the_induction_heads_of_a_real_model_are_found_ablated_and_restored(tmp_path):
    """The notebook asserts every number itself. Needs `regard models get smollm2`, and fails without it."""
    pytest.importorskip("gguf")
    said = run_notebook("find_and_ablate.py", tmp_path)
    assert "30 layers of 9 heads" in said and "layer 18, head 6" in said


if __name__ == "__main__":
    run(Path(sys.argv[1]))
