"""Checks run one after the other, and none of them hides another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench import ConfigurationError
from dpbench.commands.machine.calibration import FAILED, OK, Diagnosis
from dpbench.commands.machine.checks import CHECKS, examine
from dpbench.core.errors import CaseFailed, CaseTimedOut
from dpbench.core.settings import Settings


def works(setup: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("works", OK, "fine")


def falls_over(setup: Settings) -> Iterator[Diagnosis]:
    yield Diagnosis("falls over", OK, "so far")
    raise ZeroDivisionError("in a driver")


def is_interrupted(setup: Settings) -> Iterator[Diagnosis]:
    yield from ()
    raise KeyboardInterrupt


def test_what_breaks_one_check_hides_no_other() -> None:
    found = list(examine(Settings(), [works, falls_over, works]))
    assert [(f.check, f.status) for f in found] == [
        ("works", OK),
        ("falls over", OK),
        ("falls over", FAILED),
        ("works", OK),
    ]
    assert found[2].detail == "ZeroDivisionError: in a driver"


def test_an_interruption_ends_them_all() -> None:
    with pytest.raises(KeyboardInterrupt):
        list(examine(Settings(), [is_interrupted, works]))


def test_every_check_has_a_name_and_says_what_it_is_about() -> None:
    for check in CHECKS:
        assert check.__doc__, check


def test_the_finding_of_an_error_keeps_its_remedy_apart() -> None:
    error = CaseTimedOut("ncu did not finish within 9 s", log=Path("dir/x.log"))
    found = Diagnosis.from_error("profiling", error)
    assert found.detail == "ncu did not finish within 9 s (log: dir/x.log)"
    assert found.remedy == CaseTimedOut.remedy


def test_an_error_without_a_remedy_is_told_whole() -> None:
    assert Diagnosis.from_error("x", CaseFailed("it fell over")).detail == "it fell over"
    assert Diagnosis.from_error("x", ConfigurationError("no; not so")).detail == "no; not so"
