"""Under which conditions a session measures: it resumes a run only under the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.grid import GRIDS
from dpbench.instruments.ncu.ncu import Ncu
from dpbench.results.conditions import (
    automatic_name,
    differing_conditions,
    merge_interrupted,
    new_run,
)
from dpbench.results.outcome import COMPLETE, INTERRUPTED
from dpbench.results.run import Run

CODE = {"commit": "4663987", "dirty": False, "changes": None}
ENVIRONMENT: dict[str, Any] = {
    "python": "3.12.3",
    "versions": {"torch": "2.11.0", "ncu": "2025.3.1"},
    "gpu": {"uuid": "GPU-0", "name": "NVIDIA H200", "driver": "580"},
    "code": CODE,
}
NCU = Ncu(Path("reports"))


def under(grid: str = "grid1", ncu: Ncu = NCU, **environment: Any) -> Run:
    return new_run({**ENVIRONMENT, **environment}, GRIDS[grid].as_json(), [ncu])


def broken_off(now: Run, **session: Any) -> Run:
    """A run whose session ended before its time."""
    session = {**now.session, "status": INTERRUPTED, **session}
    return Run(Path("0001_first.json"), {**now.document, "session": session})


BEFORE = broken_off(under(), seconds=5.0, cases_asked=3)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ({"commit": "4663987abc", "dirty": False}, "4663987_20260102T030405Z"),
        ({"commit": "4663987abc", "dirty": True}, "4663987-dirty_20260102T030405Z"),
        (None, "20260102T030405Z"),
    ],
)
def test_automatic_name_says_commit_and_time(code: dict[str, Any] | None, name: str) -> None:
    session = {"started": "2026-01-02T03:04:05+00:00"}
    assert automatic_name(Run.of("", (), {"code": code}, session)) == name


def test_what_json_does_not_know_is_text_as_in_a_file() -> None:
    now = under(rack=Path("B7"))
    assert now.environment["rack"] == "B7"
    assert now.session["grid"]["batch_size"] == [8, 16]
    assert now.session["settings"]["ncu"]["metrics"][0] == "dram_read_bytes"


def test_a_resumed_run_goes_on_with_its_time_and_the_cases_that_were_asked_for() -> None:
    now = merge_interrupted(BEFORE, under())
    assert (now.session["seconds"], now.cases_asked) == (5.0, 3)


def test_parts_that_differ_are_named_beside_another_run() -> None:
    other = under(versions={"torch": "2.12.0", "ncu": "2025.3.1"})
    merged = Run.merge([under(), other, under()])
    assert [part["environment"]["versions"]["torch"] for part in merged.parts] == [
        "2.11.0",
        "2.12.0",
    ]
    assert differing_conditions(under(), merged) == ["torch 2.11.0 -> 2.11.0 and 2.12.0"]
    assert differing_conditions(merged, Run.merge([merged, other])) == []


def test_a_run_that_another_session_has_completed_is_not_resumed() -> None:
    with pytest.raises(ConfigurationError, match="another session has completed it"):
        merge_interrupted(broken_off(under(), status=COMPLETE), under())


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (under(versions={"torch": "2.12.0", "ncu": "2025.3.1"}), "torch 2.11.0 -> 2.12.0"),
        (under(gpu={**ENVIRONMENT["gpu"], "driver": "590"}), "driver 580 -> 590"),
        (under(gpu={**ENVIRONMENT["gpu"], "name": "L4"}), "GPU NVIDIA H200 -> L4"),
        (under(gpu=None), "GPU NVIDIA H200 -> None"),
        (under(code={"commit": "51", "changes": None}), "commit 4663987 -> 51"),
        (
            under(code={**CODE, "dirty": True, "changes": "ab"}),
            "this session differs: uncommitted changes in the code of this session",
        ),
        (under(grid="grid2"), "grid's batch_size [8, 16] -> [4, 8]"),
        (
            under(ncu=replace(NCU, metrics=NCU.metrics[:1])),
            "ncu's metrics ['dram_read_bytes', ",
        ),
    ],
)
def test_run_is_not_resumed_under_other_conditions(now: Run, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        merge_interrupted(BEFORE, now)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_another_card_of_the_same_model_is_the_same() -> None:
    gpu = {**ENVIRONMENT["gpu"], "uuid": "GPU-9"}
    merge_interrupted(BEFORE, under(ncu=replace(NCU, path="/opt/ncu"), gpu=gpu))


def test_what_a_document_does_not_say_is_no_difference() -> None:
    runs = Path(__file__).parents[1] / "data/saved"
    full, older = (Run.load(runs / f"{name}.json") for name in ("grid1", "first_version"))
    full.session["grid"]["batch_size"] = [4]
    assert {outcome.case.batch_size for outcome in older.outcomes} == {8, 16}
    assert not older.session
    assert differing_conditions(full, older) == []


def test_changes_to_committed_code_are_named_by_the_run_that_had_them() -> None:
    one, two = (under(code={**CODE, "dirty": True, "changes": each}) for each in ("ab", "cd"))
    of = "uncommitted changes in the code of"
    assert differing_conditions(BEFORE, one) == [f"{of} this session"]
    assert differing_conditions(broken_off(one), under()) == [f"{of} 0001_first"]
    said = [f"different {of} 0001_first and this session"]
    assert differing_conditions(broken_off(one), two) == said


def test_changes_that_only_one_run_can_know_of_are_not_known() -> None:
    unknown = under(code={"commit": "4663987"})
    assert differing_conditions(BEFORE, unknown) == []
    said = ["uncommitted changes are not known"]
    assert differing_conditions(BEFORE, unknown, resumed=True) == said
