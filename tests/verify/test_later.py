"""Wrong trainers fail verify, also if only some steps, buffers or states are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.registry import resolve
from dpbench.verify.trainer_checks import verify
from tests.verify import kinds, later

SMALL = "tests.verify.over_ranks:Small"
QUICK = {
    "HundredthWeak": "noise: 240 steps",
    "SigmaOfTwoDecimals": "noise: deviation",
    "ByParameterFromFiftieth": "gradient: 240 steps",
    "Stats": "buffers hold no data",
    "SecondMomentRaw": "buffers hold no data",
    "StaleLayer": "gradient: 240 steps",
}
TABLES = (later, kinds)
WRONG = {name: table for table in TABLES for name in table.WRONG}
RIGHT = {name: table for table in TABLES for name in table.RIGHT}
JUDGED_OTHERWISE = ("DecayBefore", "Master")
"""Trainers whose movement is not that of SGD, which another process must know too."""


def failed(name: str) -> dict[str, list[str]]:
    table = (WRONG | RIGHT)[name]
    axes: dict[str, Any] = {"batch_size": 4, "micro_batches": 2, "workload": SMALL}
    case = Case(f"{table.__name__}:{name}", **axes | table.ALL[name].get("axes", {}))
    checks = verify(resolve(case), "cpu", processes=name in JUDGED_OTHERWISE)
    return {c.name: [*c.wrong] for c in checks if not c.passed}


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in WRONG],
)
def test_a_wrong_trainer_fails(name: str) -> None:
    found = failed(name)
    assert found
    assert QUICK.get(name, "") in "; ".join(found)


@pytest.mark.parametrize(
    "name",
    [
        each if each == "DecayBefore" else pytest.param(each, marks=pytest.mark.slow)
        for each in RIGHT
    ],
)
def test_a_right_trainer_passes(name: str) -> None:
    assert not failed(name)


def test_no_row_is_lost() -> None:
    assert len(WRONG) >= 50
    assert len(RIGHT) >= 28
