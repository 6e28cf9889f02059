"""A session's file: written as it goes, resumed only under the same conditions."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.grid import GRIDS
from dpbench.instruments.ncu.instrument import Ncu
from dpbench.results.conditions import Conditions, premise_differences
from dpbench.results.outcome import COMPLETE, INTERRUPTED, Outcome, document, write_document
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from dpbench.results.storage import RunFile, Storage

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


def under(grid: str = "grid1", ncu: Ncu = NCU, **environment: Any) -> Conditions:
    return Conditions.now({**ENVIRONMENT, **environment}, GRIDS[grid], [ncu])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path / "runs")


def written(outcomes: list[Outcome], status: str = INTERRUPTED, **rest: Any) -> dict[str, Any]:
    now = under(**rest)
    return document(outcomes, now.environment, now.session(status))


def broken_off(storage: Storage) -> Run:
    """A run whose session ended before its time."""
    file = RunFile.create(storage, "first", "NVIDIA H200", under())
    file.write(written([DONE, FAILED]))
    file.close()
    return Run.load(file.path)


def test_file_is_interrupted_until_its_session_is_over(storage: Storage) -> None:
    file = RunFile.create(storage, "first", "NVIDIA H200", under())
    assert (Run.load(file.path).status, Run.load(file.path).outcomes) == (INTERRUPTED, ())
    file.write(written([DONE]))
    assert (Run.load(file.path).status, Run.load(file.path).outcomes) == (INTERRUPTED, (DONE,))
    file.write(written([DONE], COMPLETE))
    run = Run.load(file.path)
    assert run.status == COMPLETE
    assert run.session["grid"]["batch_size"] == [8, 16]


def test_resumed_run_goes_on_with_what_did_not_fail_and_adds_up_its_time(storage: Storage) -> None:
    run = broken_off(storage)
    file, now, kept = RunFile.resume(storage, run.path, under())
    assert kept == [DONE]
    assert file.path == run.path
    assert now.earlier_seconds == run.session["seconds"]
    with pytest.raises(ConfigurationError, match="is being written"):
        RunFile.resume(storage, run.path, under())
    file.close()
    RunFile.resume(storage, run.path, under())[0].close()


def test_a_run_that_another_session_has_completed_is_not_resumed(storage: Storage) -> None:
    path, _ = storage.interrupted("NVIDIA H200")
    assert path is None
    run = broken_off(storage)
    path, _ = storage.interrupted("NVIDIA H200")
    assert path == run.path
    write_document(path, written([DONE], COMPLETE))  # by another, meanwhile
    with pytest.raises(ConfigurationError, match="completed by another session"):
        RunFile.resume(storage, path, under())
    with storage.writing(path):  # which was let go of
        pass


def test_a_clock_that_is_put_back_takes_no_time_from_a_session() -> None:
    later = replace(under(), started="2999-01-01T00:00:00+00:00", earlier_seconds=5.0)
    assert later.session(INTERRUPTED)["seconds"] >= 5


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (under(versions={"torch": "2.12.0", "ncu": "2025.3.1"}), "torch 2.11.0 -> 2.12.0"),
        (under(gpu={**ENVIRONMENT["gpu"], "driver": "590"}), "driver 580 -> 590"),
        (under(gpu={**ENVIRONMENT["gpu"], "name": "L4"}), "GPU NVIDIA H200 -> L4"),
        (under(code={"commit": "51", "changes": None}), "commit 4663987 -> 51"),
        (
            under(code={**CODE, "dirty": True, "changes": "ab"}),
            "uncommitted changes none -> ab",
        ),
        (under(grid="grid2"), "grid's batch_size [8, 16] -> [4, 8]"),
        (
            under(ncu=replace(NCU, metrics=NCU.metrics[:1])),
            "ncu's metrics ['dram_read_bytes', ",
        ),
    ],
)
def test_run_is_not_resumed_under_another_conditions(
    storage: Storage, now: Conditions, words: str
) -> None:
    run = broken_off(storage)
    with pytest.raises(ConfigurationError) as caught:
        RunFile.resume(storage, run.path, now)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Run.load(run.path).document == run.document


def test_another_card_of_the_same_model_is_the_same(storage: Storage) -> None:
    other = under(ncu=replace(NCU, path="/opt/ncu"), gpu={**ENVIRONMENT["gpu"], "uuid": "GPU-9"})
    RunFile.resume(storage, broken_off(storage).path, other)[0].close()


def test_what_a_document_does_not_say_is_no_difference() -> None:
    results = Path(__file__).parents[2] / "docs/results"
    full, older = (Run.load(results / f"h200-{name}.json") for name in ("grid1", "grid2"))
    assert full.session["grid"]["batch_size"] != [4, 8], "which the other ran, and does not say"
    assert not older.session
    assert premise_differences(full, older) == []


def test_changes_to_committed_code_are_a_difference(storage: Storage) -> None:
    clean = broken_off(storage)
    changed = {**CODE, "dirty": True, "changes": "ab"}
    dirty = RunFile.create(storage, "second", "H200", under(code=changed))
    dirty.write(written([DONE], code=changed))
    dirty.close()
    found = premise_differences(clean, Run.load(dirty.path))
    assert found == ["uncommitted changes none -> ab"]


def test_full_disk_leaves_what_the_file_held(storage: Storage) -> None:
    file = RunFile.create(storage, "first", "NVIDIA H200", under())
    file.write(written([DONE]))
    held = file.path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(held), hard))
    try:
        with pytest.raises(OSError, match=r"0001_first\.json") as caught:
            file.write(written([DONE, FAILED]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.path.read_bytes() == held
    assert [path.name for path in file.path.parent.glob("*.json")] == ["0001_first.json"]
    assert not list(file.path.parent.glob("*.partial"))
    assert file.give_up(caught.value).endswith(
        "0001_first.json: File too large; the file holds 1 case"
    )

    empty = RunFile.create(storage, "second", "NVIDIA H200", under())
    assert empty.give_up(caught.value).endswith("File too large; nothing is saved")
    assert storage.paths() == [file.path]


def test_file_in_which_nothing_stands_is_removed(storage: Storage) -> None:
    file = RunFile.create(storage, None, None, under())
    assert file.path.name.startswith("0001_4663987_2")
    file.discard()
    assert storage.paths() == []
