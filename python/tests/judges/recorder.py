"""A plugin of pytest that records what tests of others say about Regard: one line of JSON for each, `passed`, `failed` or `not applicable`.

A test that is in the record already is not run again, so a long suite runs in pieces: `--judge-minutes` ends a piece. `--judge-sample` runs
a seeded sample. A test that takes longer than `--judge-seconds` is `not applicable`, with that as its reason.
"""

from __future__ import annotations

import json
import random
import signal
import time
from itertools import chain, filterfalse, islice, zip_longest
from pathlib import Path

import pytest

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
        self.known = {one["test"] for one in map(json.loads, lines) if one["suite"] == self.suite}

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
            item.session.shouldstop = "the minutes of this piece are over"
        return report

    def pytest_collectreport(self, report):
        """A file that cannot be imported: mostly, a package is missing that its tests need."""
        if report.failed:
            self.write(report.nodeid, "not applicable", str(report.longrepr).splitlines()[-1])

    def add(self, item, call, report):
        error = call.excinfo.value if call.excinfo else None
        outcome, why = "passed", ""
        if isinstance(error, TooLong):
            outcome, why = "not applicable", f"takes longer than {self.seconds} s"
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, why)
        elif report.skipped:
            outcome, why = "not applicable", str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        elif isinstance(error, NotImplementedError):
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
