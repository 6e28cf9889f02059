"""Reports a test as failed after it has ended, in place of what was reported then."""

from __future__ import annotations

from copy import copy
from typing import Any
from xml.etree.ElementTree import Element

import pytest


def report_failed(
    config: pytest.Config, report: pytest.TestReport, reasons: str, *sections: tuple[str, str]
) -> None:
    """Send every reporter a failure of a test, and let it forget the earlier report.

    Args:
        config: of the session.
        report: the last report of the test before its teardown.
        reasons: why it has failed.
        sections: titles and texts that are added to the report.
    """
    failed = copy(report)
    failed.outcome, failed.longrepr = "failed", reasons
    failed.sections = [*report.sections, *sections]
    vars(failed).pop("wasxfail", None)  # an xfail mark expects another failure
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    for listed in terminal.stats.values() if terminal else ():
        if report in listed:
            listed.remove(report)
    most, config.option.maxfail = config.option.maxfail, 0  # there is nothing left to stop
    try:
        config.hook.pytest_runtest_logreport(report=failed)
    finally:
        config.option.maxfail = most
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "node_reporters_ordered"):  # pytest's own, of --junitxml
            _merge_last(plugin, report.outcome)


def _merge_last(junit: Any, outcome: str) -> None:
    """Move the failure that was reported last into the test's element, and count the test once."""
    *others, last = junit.node_reporters_ordered
    new: Element = last.to_xml()
    named = {name: new.get(name) for name in ("classname", "name")}
    for other in reversed(others):
        old: Element = other.to_xml()
        if named.items() <= old.attrib.items():
            for skipped in old.findall("skipped"):
                old.remove(skipped)
            old[:0] = new.findall("failure")
            junit.node_reporters_ordered.remove(last)
            junit.stats[outcome] -= 1
            return
