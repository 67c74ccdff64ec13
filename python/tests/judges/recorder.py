"""A plugin of pytest that records what tests of others say about Regard, as lines of JSON.

Outcomes: `passed`, `failed`, `not applicable` (skipped, or refused by a judge of this folder), `too slow` (longer than `--judge-seconds`),
`not collected` (a file that cannot be imported), and `started`, which another line follows unless the process ends before.

A test that is in the record already is not run again, so a long suite runs in pieces: `--judge-minutes` ends a piece. `--judge-sample` runs
a seeded sample.
"""

from __future__ import annotations

import json
import random
import signal
import time
from itertools import chain, filterfalse, islice, zip_longest
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WORST_FIRST = ("failed", "not collected", "too slow", "not applicable", "passed", "started")


def outcomes(lines):
    """Of each test its worst line: a test that passes may fail to clean up."""
    worst = {}
    for one in map(json.loads, lines):
        other = worst.setdefault(one["test"], one)
        if WORST_FIRST.index(one["outcome"]) < WORST_FIRST.index(other["outcome"]):
            worst[one["test"]] = one
    return worst


class TooLong(BaseException):
    """Not an Exception: no test may take it for an error of the code that it tests."""


def pytest_addoption(parser):
    group = parser.getgroup("judges")
    group.addoption("--judge-record", help="the file of the record")
    group.addoption("--judge-suite", help="the name of the suite in the record")
    group.addoption("--judge-sample", type=int, default=0, help="run so many tests, as many of each function, by --judge-seed")
    group.addoption("--judge-seed", type=int, default=0)
    group.addoption("--judge-minutes", type=float, default=float("inf"))
    group.addoption("--judge-seconds", type=int, default=300)


def pytest_configure(config):
    config.pluginmanager.register(Recorder(config), "judge-recorder")


class Recorder:
    def __init__(self, config):
        option = config.getoption
        self.file, self.suite = Path(option("judge_record")), option("judge_suite")
        self.sample, self.seed, self.seconds = option("judge_sample"), option("judge_seed"), option("judge_seconds")
        self.end = time.monotonic() + 60 * option("judge_minutes")
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = {test for test, one in outcomes(lines).items() if one["outcome"] != "started"}
        self.over = False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        chosen = self.chosen(items) if 0 < self.sample < len(items) else set(items)
        run = [item for item in items if item in chosen and _name(item) not in self.known]
        config.hook.pytest_deselected(items=list(set(items) - set(run)))
        items[:] = run

    def chosen(self, items):
        """A sample with as many tests of each function as of any other, or all of a function that has fewer. Without those of another
        machine."""
        functions = {}
        for item in sorted(filterfalse(_is_skipped, items), key=lambda item: item.nodeid):
            functions.setdefault(item.originalname, []).append(item)
        random.seed(self.seed)
        shuffled = [random.sample(tests, len(tests)) for tests in functions.values()]
        turns = chain.from_iterable(zip_longest(*shuffled))
        return set(islice((item for item in turns if item is not None), self.sample))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.write(_name(item), "started", "")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        def stop(*_):
            raise TooLong

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(self.seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.when == "call" or not report.passed:
            self.add(item, call, report)
        if time.monotonic() > self.end:
            item.session.shouldstop, self.over = "the minutes of this piece are over", True
        return report

    def pytest_sessionfinish(self, session):
        if self.over:
            session.exitstatus = pytest.ExitCode.OK  # else that of an interruption

    def pytest_collectreport(self, report):
        """A file that cannot be imported: mostly, a package is missing that its tests need."""
        name = "/".join(report.nodeid.split("/")[-2:])
        if not report.passed and name not in self.known:
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr).splitlines()[-1]
            self.write(name, "not collected", why)

    def add(self, item, call, report):
        error = call.excinfo.value if call.excinfo else None
        outcome, why = "passed", ""
        if isinstance(error, TooLong):
            outcome, why = "too slow", f"takes longer than {self.seconds} s"
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, why)
        elif report.skipped:
            outcome, why = "not applicable", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif isinstance(error, NotImplementedError) and Path(call.excinfo.traceback[-1].path).parent == HERE:
            outcome, why = "not applicable", str(error)
        elif report.failed:
            outcome, why = "failed", f"{type(error).__name__}: {error}"
        self.write(_name(item), outcome, why)

    def write(self, test, outcome, why):
        why = " ".join(why.removeprefix("Skipped: ").split())[:300]
        line = {"suite": self.suite, "test": test, "outcome": outcome, "why": why}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _is_skipped(item) -> bool:
    return any(mark.args and mark.args[0] is True for mark in item.iter_markers("skipif"))


def _name(item) -> str:
    """File, class and name, without the folders that a checkout is in."""
    return "::".join([item.path.parent.name + "/" + item.path.name, *item.nodeid.split("::")[1:]])
