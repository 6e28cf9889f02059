"""A session's file: written as it goes, resumed only under the same premise."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.case import GRIDS, Case
from dpbench.errors import ConfigurationError
from dpbench.instruments.ncu.ranges import Ncu
from dpbench.results.outcome import INTERRUPTED, Outcome, write_json
from dpbench.results.reference import history
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.session import Premise, RunFile, premise_differences
from dpbench.results.storage import Storage

CASE = Case("dpsgd", batch_size=8, seq_len=256)
CODE = {"commit": "4663987", "dirty": False, "changes": None}
ENVIRONMENT = {
    "python": "3.12.3",
    "versions": {"torch": "2.11.0", "ncu": "2025.3.1"},
    "gpu": {"uuid": "GPU-0", "name": "NVIDIA H200", "driver": "580"},
    "code": CODE,
}
NCU = Ncu(Path("reports"), "ncu")
DONE = Outcome(
    CASE,
    (Measurement(CASE, "ncu", STEP, "dram_read_bytes", 5.0, "B", 0, "NVIDIA H200", ""),),
    1.5,
    instruments=("ncu",),
)
FAILED = Outcome(Case("standard", 8, 256), (), 1.0, error="CaseTimedOut", instruments=("ncu",))


def premise(grid: str = "grid1", ncu: Ncu = NCU, **environment: Any) -> Premise:
    return Premise.now({**ENVIRONMENT, **environment}, GRIDS[grid], [ncu])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "runs")


def broken_off(storage: Storage) -> Run:
    """A run whose session ended before its time."""
    file = RunFile.create(storage, "first", "NVIDIA H200", premise())
    file.write([DONE, FAILED])
    file.close()
    return Run.load(file.path)


def test_file_is_interrupted_until_its_session_is_over(storage: Storage) -> None:
    file = RunFile.create(storage, "first", "NVIDIA H200", premise())
    assert (Run.load(file.path).status, Run.load(file.path).outcomes) == (INTERRUPTED, ())
    file.write([DONE])
    assert (Run.load(file.path).status, Run.load(file.path).outcomes) == (INTERRUPTED, (DONE,))
    file.write([DONE], complete=True, regressions=[{"metric": "dram_bytes"}])
    run = Run.load(file.path)
    assert (run.status, run.regressed) == ("complete", True)
    assert run.session["grid"]["batch_size"] == [8, 16]


def test_resumed_run_goes_on_with_what_did_not_fail_and_adds_up_its_time(storage: Storage) -> None:
    run = broken_off(storage)
    file, kept = RunFile.resume(storage, run, replace(premise(), earlier_seconds=0))
    assert kept == [DONE]
    assert file.path == run.path
    assert file.premise.earlier_seconds == run.seconds
    with pytest.raises(ConfigurationError, match="is being written"):
        RunFile.resume(storage, run, premise())
    file.close()
    RunFile.resume(storage, run, premise())[0].close()


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (premise(versions={"torch": "2.12.0", "ncu": "2025.3.1"}), "torch 2.11.0 -> 2.12.0"),
        (premise(gpu={**ENVIRONMENT["gpu"], "driver": "590"}), "driver 580 -> 590"),
        (premise(gpu={**ENVIRONMENT["gpu"], "name": "L4"}), "GPU NVIDIA H200 -> L4"),
        (premise(code={"commit": "51", "changes": None}), "commit 4663987 -> 51"),
        (premise(code={**CODE, "dirty": True, "changes": "ab"}), "uncommitted changes none -> ab"),
        (premise(grid="grid2"), "grid's batch_size [8, 16] -> [4, 8]"),
        (premise(ncu=replace(NCU, metrics=NCU.metrics[:1])), "ncu's metrics ['dram_read_bytes', "),
    ],
)
def test_run_is_not_resumed_under_another_premise(
    storage: Storage, now: Premise, words: str
) -> None:
    run = broken_off(storage)
    with pytest.raises(ConfigurationError) as caught:
        RunFile.resume(storage, run, now)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Run.load(run.path).document == run.document


def test_another_card_of_the_same_model_is_the_same_premise(storage: Storage) -> None:
    other = premise(ncu=replace(NCU, path="/opt/ncu"), gpu={**ENVIRONMENT["gpu"], "uuid": "GPU-9"})
    file, _ = RunFile.resume(storage, broken_off(storage), other)
    file.close()


def test_what_a_document_does_not_say_is_no_difference() -> None:
    results = Path(__file__).parents[2] / "docs/results"
    full, older = (Run.load(results / f"h200-{name}.json") for name in ("grid1", "grid2"))
    assert full.session["grid"]["batch_size"] != [4, 8], "which the other ran, and does not say"
    assert not older.session
    assert premise_differences(full, older) == []


def test_changes_to_committed_code_are_a_difference(storage: Storage) -> None:
    clean = broken_off(storage)
    dirty = RunFile.create(
        storage, "second", "H200", premise(code={**CODE, "dirty": True, "changes": "ab"})
    )
    dirty.write([DONE])
    dirty.close()
    found = premise_differences(clean, Run.load(dirty.path))
    assert found == ["uncommitted changes none -> ab"]


def test_cases_that_were_written_into_a_run_later_have_another_premise(
    tmp_path: Path,
) -> None:
    cases = [Case(trainer, 8, 256) for trainer in ("standard", "dpsgd", "dpsgd_fgc")]
    outcomes = [
        replace(DONE, case=case, rows=tuple(replace(row, case=case) for row in DONE.rows))
        for case in cases
    ]
    newer = premise(versions={"torch": "2.12.0", "ncu": "2025.3.1"})
    updates = history([], {cases[0].id: ["ncu", "timing"], cases[1].id: ["ncu"]}, newer)
    updates = history(updates, {cases[0].id: ["ncu"]}, premise(python="3.13.0"))
    assert [entry["cases"] for entry in updates] == [
        {cases[0].id: ["timing"], cases[1].id: ["ncu"]},
        {cases[0].id: ["ncu"]},
    ]
    session = premise().session("complete")
    for name, found in (("plain", ()), ("updated", updates)):
        write_json(tmp_path / f"{name}.json", outcomes, ENVIRONMENT, session, found)
    plain, updated = (Run.load(tmp_path / f"{name}.json") for name in ("plain", "updated"))
    assert updated.environment == ENVIRONMENT
    with pytest.raises(ConfigurationError, match="cases were written into it by"):
        RunFile.resume(Storage(tmp_path), updated, premise())
    assert premise_differences(updated, plain) == [
        "of updated, 2 cases were written later, by other premises"
    ]


def test_full_disk_leaves_what_the_file_held(storage: Storage) -> None:
    file = RunFile.create(storage, "first", "NVIDIA H200", premise())
    file.write([DONE])
    held = file.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(held), hard))
    try:
        with pytest.raises(OSError, match=r"0001_first\.json") as caught:
            file.write([DONE, FAILED])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.read_bytes() == held
    assert [path.name for path in file.path.parent.glob("*.json")] == ["0001_first.json"]
    assert not list(file.path.parent.glob("*.partial"))
    assert file.give_up(caught.value).endswith(
        "0001_first.json: File too large; the file holds 1 case"
    )

    empty = RunFile.create(storage, "second", "NVIDIA H200", premise())
    assert empty.give_up(caught.value).endswith("File too large; nothing is saved")
    assert storage.paths() == [file.path]


def test_file_in_which_nothing_stands_is_removed(storage: Storage) -> None:
    file = RunFile.create(storage, None, None, premise())
    assert file.path.name.startswith("0001_4663987_2")
    file.discard()
    assert storage.paths() == []
