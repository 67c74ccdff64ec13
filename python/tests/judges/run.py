"""Runs test suites of others against Regard, and says by name what did not pass, and why. docs/judges.md has the commands.

    run.py onnx
    run.py opinfo
    run.py transformers --checkout DIR [NAME ..]    DIR: git clone --branch vVERSION https://github.com/huggingface/transformers
    run.py flash-attn --checkout DIR --sample 500   DIR: git clone https://github.com/huggingface/kernels-community
    run.py vllm --checkout DIR --sample 100         DIR: git clone https://github.com/vllm-project/vllm

A checkout is outside of this repository, which contains none of its code. NAMEs are folders of `tests/models`; by default all whose layers
call registered attention functions. A suite can run in pieces: after `--minutes` it ends, and the same command goes on, from the lines in
target/judges; `--again` begins anew. Writes bench/record/judges/SUITE.json; status 1 if a test failed.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from recorder import outcomes

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent


class Suite(NamedTuple):
    plugin: str
    tests: str
    """The file of the tests, in the checkout or, without a plugin, here."""
    packages: tuple[str, ...]
    """Packages whose versions are part of the result."""


SUITES = {
    "onnx": Suite("", "python/tests/test_onnx.py", ("onnx",)),
    "opinfo": Suite("", "python/tests/test_opinfo.py", ("torch",)),
    "flash-attn": Suite("flash_attn_judge", "flash-attn2/tests/test_flash_attn.py", ("torch",)),
    "vllm": Suite("vllm_judge", "tests/kernels/attention/test_cpu_attn.py", ("torch",)),
    "transformers": Suite("transformers_judge", "tests/models", ("torch", "transformers")),
}
OUTCOMES = ("passed", "failed", "not applicable", "too slow", "not collected")
ENDED_WELL = (0, 1, 5)
"""Exit codes of pytest: all passed, some failed, no test was left to run."""


def architectures() -> list[str]:
    """Folders of models of the installed Transformers whose layers call registered attention functions."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    return sorted({path.parent.name for path in models.glob("*/modeling_*.py") if "_supports_attention_backend = True" in path.read_text()})


def paths(name: str, folder: Path, names: list[str]) -> list[Path]:
    """Files of tests."""
    tests = folder / SUITES[name].tests
    expected = [tests / one for one in names or [""]]
    missing = [path for path in expected if not path.exists()]
    if missing:
        raise SystemExit(f"{missing[0]}: no such file or folder; --checkout is the repository of the tests, see --help")
    if name != "transformers":
        return expected
    return [path for one in names or architectures() for path in sorted((tests / one).glob("test_modeling_*.py"))]


def pytest(arguments: argparse.Namespace, lines: Path, folder: Path) -> list[dict[str, str]]:
    """One process for all files, or one for each model, whose tests need memory that they do not give back. Failures of processes in which
    no test ran."""
    suite, found = SUITES[arguments.suite], paths(arguments.suite, folder, arguments.names)
    options = ["-q", "--tb=no", "--disable-warnings", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull, f"--rootdir={folder}"]
    options += ["--continue-on-collection-errors"]
    options += [word for plugin in ("recorder", suite.plugin) if plugin for word in ("-p", plugin)]
    options += [f"--judge-record={lines}", f"--judge-suite={arguments.suite}"]
    options += [f"--judge-{name}={getattr(arguments, name)}" for name in ("sample", "seed", "seconds")]
    search = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(x) for x in search if x)}
    start, failures = datetime.datetime.now(), []
    for files in [[path] for path in found] if arguments.suite == "transformers" else [found]:
        left = arguments.minutes - (datetime.datetime.now() - start).total_seconds() / 60
        if left <= 0:
            print("the minutes are over; the same command goes on")
            break
        command = [sys.executable, "-m", "pytest", *options, f"--judge-minutes={left}", *map(str, files)]
        known = len(lines.read_text())
        code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        if code not in ENDED_WELL:
            failures += crashed(arguments.suite, code, files, lines, known)
    return failures


def crashed(suite: str, code: int, files: list[Path], lines: Path, known: int) -> list[dict[str, str]]:
    """Records as failed the test that ran when a process ended, so that the next piece goes on after it; without one, returns the failure of
    its files. The process wrote what comes after `known` characters."""
    why = {"suite": suite, "outcome": "failed", "why": f"process ended with {code}"}
    running = [test for test, one in outcomes(lines.read_text()[known:].splitlines()).items() if one["outcome"] == "started"]
    with lines.open("a") as file:
        for test in running:
            file.write(json.dumps({**why, "test": test}) + "\n")
    return [] if running else [{**why, "test": f"{path.parent.name}/{path.name}"} for path in files]


def group(suite: str, test: str) -> str:
    """What a test is about: a model, an operator, a function."""
    file, _, name = test.partition("::")
    if suite == "transformers":
        return file.partition("/")[0]
    function = name.rpartition("::")[2].partition("[")[0] or file
    if suite == "onnx" and name.startswith("TestOnnxBackend"):
        return re.match("test_(linear_attention|attention|rotary_embedding|tensorscatter)", function)[1]
    return function


def result(arguments: argparse.Namespace, lines: Path, folder: Path, failures: list[dict[str, str]]) -> dict[str, Any]:
    """Counts, and the names of tests that did not pass, by reason."""
    tests = outcomes(lines.read_text().splitlines())
    files = {test.partition("::")[0] for test in tests if "::" in test}
    # Of a file that could not be imported in an earlier piece, its tests count.
    found = [one for test, one in tests.items() if one["outcome"] in OUTCOMES and not (one["outcome"] == "not collected" and test in files)]
    found += failures
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: dict[str, dict[str, list[str]]] = {outcome: {} for outcome in OUTCOMES if outcome != "passed"}
    for one in found:
        groups[group(arguments.suite, one["test"])][one["outcome"]] += 1
        if one["outcome"] != "passed":
            reasons[one["outcome"]].setdefault(one["why"], []).append(one["test"])
    commit = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    total = collections.Counter(one["outcome"] for one in found)
    return {
        "suite": arguments.suite,
        "date": datetime.date.today().isoformat(),
        "tests": commit if SUITES[arguments.suite].plugin else "",
        "packages": {name: importlib.metadata.version(name) for name in SUITES[arguments.suite].packages},
        "sample": arguments.sample,
        "seed": arguments.seed,
        **{outcome: total[outcome] for outcome in OUTCOMES},
        "groups": {name: {outcome: count[outcome] for outcome in OUTCOMES if count[outcome]} for name, count in sorted(groups.items())},
        "why": reasons,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("names", nargs="*", help="models, for transformers")
    parser.add_argument("--checkout", type=Path, help="the repository with the tests")
    parser.add_argument("--sample", type=int, default=0, help="run so many of the tests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so long; the same command goes on")
    parser.add_argument("--seconds", type=int, default=300, help="a test that takes longer is ended, as too slow")
    parser.add_argument("--again", action="store_true", help="forget what was run")
    arguments = parser.parse_intermixed_args()
    if SUITES[arguments.suite].plugin and arguments.checkout is None:
        parser.error(f"{arguments.suite}: --checkout is missing")
    folder = arguments.checkout.resolve() if arguments.checkout else ROOT
    lines = ROOT / "target/judges" / f"{arguments.suite}.jsonl"
    lines.parent.mkdir(parents=True, exist_ok=True)
    if arguments.again:
        lines.unlink(missing_ok=True)
    lines.touch()
    failures = pytest(arguments, lines, folder)
    found = result(arguments, lines, folder, failures)
    place = ROOT / "bench/record/judges" / f"{arguments.suite}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found, indent=1) + "\n")
    for outcome in reversed(OUTCOMES[1:]):
        for why, names in found["why"][outcome].items():
            print(f"{outcome}: {why}")
            print(*[f"    {name}" for name in names], sep="\n")
    print(", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES), f"in {place.relative_to(ROOT)}")
    return 1 if found["failed"] or not found["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
