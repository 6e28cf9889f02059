"""Faults in some steps, buffers or states only fail verify; right trainers like them pass."""

from __future__ import annotations

from typing import Any

import pytest

from dpbench.core.case import Case
from dpbench.core.case_names import resolve
from dpbench.verify.trainer_checks import verify
from tests.verify import later

SMALL = "tests.verify.over_ranks:Small"
QUICK = {
    "HundredthWeak": "noise: 240 steps",
    "SigmaOfTwoDecimals": "noise: deviation",
    "ByParameterFromFiftieth": "gradient: 240 steps",
    "Stats": "buffers hold no data",
    "SecondMomentRaw": "buffers hold no data",
}


def failed(name: str) -> dict[str, list[str]]:
    axes: dict[str, Any] = {"batch_size": 4, "micro_batches": 2, "workload": SMALL}
    case = Case(f"{later.__name__}:{name}", **axes | later.ALL[name].get("axes", {}))
    return {c.name: [*c.wrong] for c in verify(resolve(case), "cpu") if not c.passed}


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in later.WRONG],
)
def test_a_wrong_trainer_fails(name: str) -> None:
    found = failed(name)
    assert found
    assert QUICK.get(name, "") in "; ".join(found)


@pytest.mark.parametrize(
    "name",
    [
        each if each == "DecayBefore" else pytest.param(each, marks=pytest.mark.slow)
        for each in later.RIGHT
    ],
)
def test_a_right_trainer_passes(name: str) -> None:
    assert not failed(name)


def test_there_are_thirty_and_fifteen() -> None:
    assert len(later.WRONG) >= 30
    assert len(later.RIGHT) >= 15
