"""How doctor calibrates counters: by ncu, by CUPTI, and by a message between two GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.child.build import build, pick_device
from dpbench.commands import doctor
from dpbench.commands.doctor import (
    DRAM_SIZED,
    EXAMPLE_BYTES,
    FAILED,
    IDLE_PHASE,
    LARGEST,
    MESSAGE,
    MESSAGE_EXAMPLES,
    MESSAGE_PHASE,
    OK,
    READ,
    SMALLEST,
    TRAINER,
    WARNING,
    WORK,
    WRITTEN,
    Diagnosis,
    judge,
    judge_message,
    table,
    work_that_fits,
)
from dpbench.commands.known_work import KnownMessage, KnownWork
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments.cupti.ranges import RECEIVED, SENT
from dpbench.instruments.logical.logical import Logical
from dpbench.launch.ranks import on_all_ranks
from dpbench.results.outcome import Outcome
from dpbench.training.parallel import rank_and_ranks
from tests.programs import program, reports

DATA = Path(__file__).parents[1] / "data"
H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04", free_bytes=139 * 10**9)

STAND_IN = f"""
import shutil, sys, time
sys.path.append({str(DATA.parents[1])!r})
if sys.argv[1:] == ["--version"]:
    print("Version 2025.3.1.0 (build 36398880) (public-release)")
    sys.exit()
export = sys.argv[sys.argv.index("--export") + 1]
"""
SUCCEED = f"""
shutil.copy({str(DATA / "tiny-fp32" / "report_standard_bs4_seq64.ncu-rep")!r}, export)
from tests.replay_ncu import say
from dpbench import Case
say(open({str(DATA / "ncu_output" / "success.txt")!r}).read(), Case("standard", 1, 1))
"""


def say(name: str) -> str:
    """Print what was recorded, and fail."""
    return f"print(open({str(DATA / 'ncu_output' / name)!r}).read()); sys.exit(1)"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, gpu):
        monkeypatch.setattr(module, "visible_gpus", lambda: [H200])


def under(tmp_path: Path, text: str, timeout: float = 20.0) -> Settings:
    """A setup whose ``ncu`` does this."""
    path = program(tmp_path / "ncu", f"{STAND_IN}\n{text}")
    return Settings(ncu_dir=tmp_path / "reports", own={"ncu_path": str(path)}, timeout=timeout)


def found_by(setup: Settings) -> dict[str, Diagnosis]:
    return {finding.check: finding for finding in doctor.counters(setup)}


@pytest.mark.usefixtures("one_gpu")
def test_what_can_be_counted_is_listed_and_held_to_known_work(tmp_path: Path) -> None:
    """The recorded step moved little; a copy, a fill and a read of 8.6 GB were asked for."""
    found = found_by(under(tmp_path, SUCCEED))
    assert found["counters"].status == OK
    assert "readable: dram_read_bytes, dram_write_bytes, l2_atomic" in found["counters"].detail
    assert found["ncu calibration"].status == FAILED
    assert "a copy, a fill and a read of 8.59 GB" in found["ncu calibration"].detail
    assert "dram_read_bytes of the copy" in found["ncu calibration"].detail
    assert "-99." in found["ncu calibration"].detail


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (say("counters_forbidden.txt"), "NVreg_RestrictProfilingToAdminUsers=0"),
        ("pass", ""),
    ],
)
def test_what_ncu_complains_of_is_told_with_its_remedy(
    text: str, remedy: str, tmp_path: Path
) -> None:
    [found] = doctor.examine(under(tmp_path, text), [doctor.counters])
    assert (found.check, found.status) == ("counters", FAILED)
    assert remedy in found.remedy
    assert ".log" in found.detail


@pytest.mark.usefixtures("one_gpu")
def test_a_hung_ncu_is_ended(tmp_path: Path) -> None:
    [found] = doctor.examine(under(tmp_path, "time.sleep(100)", timeout=0.5), [doctor.counters])
    assert "did not finish within 0.5 s" in found.detail


def exactly(examples: int, **changed: float) -> dict[str, dict[str, float]]:
    """What right counters count of the work; of the copy, ``changed`` times that."""
    size = float(examples * EXAMPLE_BYTES)
    counted = {
        phase: dict.fromkeys(READ, read * size) | dict.fromkeys(WRITTEN, written * size)
        for phase, (_, read, written) in WORK.items()
    }
    copied = counted["forward"]
    copied |= {metric: copied[metric] * times for metric, times in changed.items()}
    return counted


@pytest.mark.parametrize(
    ("examples", "metric", "share", "status"),
    [
        (LARGEST, "dram_read_bytes", 1.0099, OK),
        (LARGEST, "l2_sm_read_bytes", 0.9901, OK),
        (LARGEST, "l2_sm_write_bytes", 1.0101, FAILED),
        (DRAM_SIZED, "dram_write_bytes", 0.9, FAILED),
        (DRAM_SIZED - 1, "dram_write_bytes", 0.9, WARNING),
        (SMALLEST, "dram_read_bytes", 0.0, WARNING),
    ],
)
def test_counted_bytes_may_be_one_percent_off(
    examples: int, metric: str, share: float, status: str
) -> None:
    found = judge("ncu", examples, exactly(examples, **{metric: share}))
    assert (found.check, found.status) == ("ncu calibration", status)
    if status == OK:
        assert f"at most {abs(share - 1):.2%} off in dram_read_bytes, l2_sm_" in found.detail
    else:
        assert f"{metric} of the copy " in found.detail
        assert f"{share - 1:+.2%}" in found.detail
    assert bool(found.remedy) == (status != OK)


def test_one_table_has_what_each_instrument_counted() -> None:
    twice = exactly(LARGEST, l2_sm_read_bytes=1.5)
    for phase, (_, read, written) in WORK.items():
        twice[phase]["l2_served_bytes"] = 1.02 * (read + written) * LARGEST * EXAMPLE_BYTES
    found = [judge("ncu", LARGEST, exactly(LARGEST)), judge("cupti", LARGEST, twice)]
    made = table(found)
    assert made is not None
    lines = {(work, metric): cells for work, metric, *cells in made.cells}
    assert lines["copy", "l2_sm_read_bytes"] == ["8.59", "12.9", "+50.00%", "8.59", "+0.00%"]
    assert lines["read", "dram_write_bytes"] == ["0", "0", "+0.00%", "0", "+0.00%"]
    assert lines["fill", "l2_served_bytes"] == ["8.59", "8.76", "+2.00%", "-", "-"]
    assert "served" not in found[1].detail
    assert len(lines) == 3 * 7
    assert max(map(len, made.as_text().splitlines())) <= 80
    assert table([Diagnosis("gpu", OK, "there")]) is None


@pytest.mark.parametrize(
    ("free", "examples"),
    [(None, DRAM_SIZED), (139 * 10**9, LARGEST), (12 * 2**30, 192), (10**6, SMALLEST)],
)
def test_the_work_fits_in_free_memory(
    free: int | None, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [replace(H200, free_bytes=free)])
    assert work_that_fits().batch_size == examples


def test_the_calibrating_trainer_does_what_it_says() -> None:
    case, size = Case(TRAINER, SMALLEST, 1, "tiny"), SMALLEST * EXAMPLE_BYTES
    trainer, batches = build(case, torch.device("cpu"), 1)
    assert isinstance(trainer, KnownWork)
    trainer.train_step(batches[0])
    assert trainer.source.numel() * 4 == size
    rows = {(row.phase, row.metric): row.value for row in Logical().count(case).rows}
    for phase, (_, read, written) in WORK.items():
        assert rows[phase, "logical_read_bytes"] == read * size
        assert rows[phase, "logical_write_bytes"] == pytest.approx(written * size, abs=4)


COPIED = LARGEST * EXAMPLE_BYTES


def record(share: float = 1.0, resting: float = 0.0, **changed: Any) -> dict[str, Any]:
    """What the process of known work says, of which this share was counted."""

    def bytes_of(read: float, written: float) -> dict[str, float]:
        return {"dram_read_bytes": read * COPIED, "dram_write_bytes": written * COPIED}

    counted = {phase: bytes_of(share * r, share * w) for phase, (_, r, w) in WORK.items()}
    counted[IDLE_PHASE] = bytes_of(resting, resting)
    names = {"dram_read_bytes": ["dram__bytes_read.sum"], "l2_served_bytes": ["lts__t_sectors.sum"]}
    made = {"cupti": "13.0", "chip": "GH100", "passes": 1, "counters": names}
    return made | {"counted": [counted]} | changed


@pytest.fixture
def examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> Any:
    """What is found where a case's process prints this record."""

    def run(printed: dict[str, Any]) -> list[Diagnosis]:
        text = (
            "import json, sys; "
            "assert json.load(open(sys.argv[-1]))['instrument'].endswith(':Cupti'); "
            + reports(Outcome(Case("standard", 1, 1), (), details=printed))
        )
        monkeypatch.setattr(sys, "executable", str(program(tmp_path / "step", text)))
        return list(doctor.examine(Settings(ncu_dir=tmp_path), [doctor.cupti]))

    return run


def test_it_says_what_the_chip_counts_and_that_it_is_right(examined: Any) -> None:
    counts, finding = examined(record(0.9999, 0.0001))
    assert (counts.status, finding.status) == (OK, OK)
    assert counts.detail == (
        "libcupti 13.0 counts everything on GH100 in 1 step by phase: "
        "dram__bytes_read.sum, lts__t_sectors.sum"
    )
    assert "a copy, a fill and a read of 8.59 GB: at most 0.01% off in dram" in finding.detail
    assert finding.detail.endswith("0.00172 GB while the GPU was idle")


@pytest.mark.parametrize(("share", "resting"), [(0.98, 0.0), (1.0, 0.02)])
def test_other_bytes_fail_the_calibration(share: float, resting: float, examined: Any) -> None:
    counts, finding = examined(record(share, resting))
    assert (counts.status, finding.status) == (OK, FAILED)
    assert "everything else that uses the GPU" in finding.remedy


def test_a_chip_without_counters_of_bytes_is_no_failure(examined: Any) -> None:
    found = examined(record(counted=[{"forward": {}, "outside": {}}]))
    assert [finding.status for finding in found] == [OK, WARNING]
    assert "this GPU counts none of the bytes" in found[1].detail


def test_without_a_gpu_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = Settings(ncu_dir=tmp_path / "reports")
    assert not [*doctor.ncu(settings), *doctor.cupti(settings), *doctor.counters(settings)]
    assert not (tmp_path / "reports").exists()


SIZE = float(MESSAGE_EXAMPLES * EXAMPLE_BYTES)


@pytest.mark.parametrize(
    ("sent", "received", "status"),
    [(1.0099, 0.9901, OK), (1.02, 1.0, WARNING), (1.0, 0.0, WARNING)],
)
def test_a_message_may_be_counted_one_percent_off(
    sent: float, received: float, status: str
) -> None:
    sender = {SENT: sent * SIZE, "nvlink_sent_bytes": 1.065 * SIZE, "pcie_write_bytes": 0.0}
    found = judge_message(sender, {RECEIVED: received * SIZE})
    assert (found.check, found.status) == ("links", status)
    assert "a message of 1.07 GB from one GPU to another" in found.detail
    assert "nvlink_sent_bytes 1.14 GB, pcie_write_bytes 0 GB" in found.detail


def linked(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
    *ranks: dict[str, dict[str, float]],
) -> list[Diagnosis]:
    """What is found where a case's process counts this in its ranks."""
    for module in (doctor, gpu):
        cards = [H200, replace(H200, uuid="GPU-1")]
        monkeypatch.setattr(module, "visible_gpus", lambda cards=cards: cards)
    details = {"ranks": [{"counted": [each]} for each in ranks]}
    outcome = Outcome(Case("standard", 1, 1), (), notes=tuple(notes), details=details)
    monkeypatch.setattr(sys, "executable", str(program(folder / "step", reports(outcome))))
    return list(doctor.links(Settings(ncu_dir=folder)))


@pytest.mark.parametrize(("first", "status"), [(0, OK), (1, WARNING)])
def test_the_first_rank_is_the_one_that_sends(
    first: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [{SENT: SIZE, RECEIVED: 0.0}, {SENT: 0.0, RECEIVED: SIZE}]
    by_phase = [{MESSAGE_PHASE: ranks[first]}, {MESSAGE_PHASE: ranks[1 - first]}]
    [found] = linked(tmp_path, monkeypatch, [], *by_phase)
    assert found.status == status


def test_bytes_that_arrive_before_the_receiver_is_in_the_phase_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = {"outside": {RECEIVED: 0.1 * SIZE}, MESSAGE_PHASE: {RECEIVED: 0.9 * SIZE}}
    [found] = linked(tmp_path, monkeypatch, [], {MESSAGE_PHASE: {SENT: SIZE}}, receiver)
    assert found.status == OK


def test_one_gpu_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "visible_gpus", lambda: [H200])
    assert list(doctor.links(Settings(ncu_dir=tmp_path))) == []


def message_after_a_step(case: Case) -> dict[str, Any]:
    trainer, batches = build(case, pick_device("cpu"), 1)
    assert isinstance(trainer, KnownMessage)
    if rank := rank_and_ranks()[0]:
        trainer.message.fill_(rank)
    trainer.train_step(batches[0])
    return {"bytes": trainer.message.nbytes, "ends": trainer.message[[0, -1]].tolist()}


def test_the_other_rank_gets_the_first_ones_message() -> None:
    case = Case(MESSAGE, 2, 1, "tiny", parallel="ddp", gpus=2)
    first, other = on_all_ranks(message_after_a_step, case, "cpu")
    assert first["bytes"] == other["bytes"] == EXAMPLE_BYTES
    assert first["ends"] == other["ends"] != [1.0, 1.0]
