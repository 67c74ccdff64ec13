"""What all tests share: in the gate, a test that is skipped is a test that failed."""

import os

import pytest


def failed(report, place: str) -> None:
    """Turns a skip into a failure that says what is missing."""
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("REGARD_NO_SKIPS"):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{place}: skipped, and REGARD_NO_SKIPS is set: {why}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    failed(report, item.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A whole file is skipped while it is collected."""
    report = yield
    failed(report, collector.nodeid)
    return report
