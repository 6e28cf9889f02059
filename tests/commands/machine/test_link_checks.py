"""The message between two GPUs that the doctor sends, and what is made of its counts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.child.build import build, pick_device
from dpbench.commands.machine import checks
from dpbench.commands.machine.calibration import (
    EXAMPLE_BYTES,
    MESSAGE,
    MESSAGE_EXAMPLES,
    MESSAGE_PHASE,
    OK,
    WARNING,
    Diagnosis,
    judge_message,
    table,
)
from dpbench.commands.machine.known_work import KnownMessage
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.instruments.cupti.ranges import RECEIVED, SENT
from dpbench.launch.ranks import on_all_ranks
from dpbench.results.outcome import Outcome
from dpbench.training.parallel import rank_and_ranks
from tests.programs import program, reports

SIZE = float(MESSAGE_EXAMPLES * EXAMPLE_BYTES)
H200 = Gpu("GPU-0", "NVIDIA H200", 150_754_820_096, "580.159.04")


@pytest.mark.parametrize(
    ("sent", "received", "status"),
    [(1.0, 1.0, OK), (1.0099, 0.9901, OK), (1.02, 1.0, WARNING), (1.0, 0.0, WARNING)],
)
def test_a_message_may_be_counted_one_percent_off(
    sent: float, received: float, status: str
) -> None:
    sender = {SENT: sent * SIZE, "nvlink_sent_bytes": 1.065 * SIZE, "pcie_write_bytes": 0.0}
    found = judge_message(sender, {RECEIVED: received * SIZE})
    assert (found.check, found.status) == ("links", status)
    assert "a message of 1.07 GB from one GPU to another" in found.detail
    assert "nvlink_sent_bytes 1.14 GB, pcie_write_bytes 0 GB" in found.detail


def test_the_table_has_each_source_and_says_which_are_not_judged() -> None:
    sender = {SENT: SIZE, "nvlink_sent_bytes": 1.065 * SIZE, "pcie_write_bytes": 0.0}
    made = table([judge_message(sender, {RECEIVED: SIZE})])
    assert made is not None
    lines = {metric: cells for _, metric, *cells in made.cells}
    assert lines[SENT] == lines[RECEIVED] == ["1.07", "1.07", "+0.00%"]
    assert lines["nvlink_sent_bytes"] == ["1.07", "1.14", "+6.50%"]
    assert "nvlink_sent_bytes and pcie_write_bytes" in made.as_text().replace("\n", " ")
    assert max(map(len, made.as_text().splitlines())) <= 80


def found_by(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    notes: list[str],
    *ranks: dict[str, dict[str, float]],
) -> list[Diagnosis]:
    """What is found where a case's process counts this in its ranks."""
    for module in (checks, gpu):
        cards = [H200, replace(H200, uuid="GPU-1")]
        monkeypatch.setattr(module, "visible_gpus", lambda cards=cards: cards)
    details = {"ranks": [{"counted": [each]} for each in ranks]}
    outcome = Outcome(Case("standard", 1, 1), (), notes=tuple(notes), details=details)
    monkeypatch.setattr(sys, "executable", str(program(folder / "step", reports(outcome))))
    return list(checks.links(Settings(ncu_dir=folder)))


@pytest.mark.parametrize(("first", "status"), [(0, OK), (1, WARNING)])
def test_the_first_rank_is_the_one_that_sends(
    first: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [{SENT: SIZE, RECEIVED: 0.0}, {SENT: 0.0, RECEIVED: SIZE}]
    by_phase = [{MESSAGE_PHASE: ranks[first]}, {MESSAGE_PHASE: ranks[1 - first]}]
    [found] = found_by(tmp_path, monkeypatch, [], *by_phase)
    assert found.status == status


def test_bytes_that_arrive_before_the_receiver_is_in_the_phase_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = {"outside": {RECEIVED: 0.1 * SIZE}, MESSAGE_PHASE: {RECEIVED: 0.9 * SIZE}}
    [found] = found_by(tmp_path, monkeypatch, [], {MESSAGE_PHASE: {SENT: SIZE}}, receiver)
    assert found.status == OK


def test_where_nvml_refuses_the_rest_is_shown_and_the_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "NVLink's payload is not counted: NVML says 'Not Supported' of GPU-0"
    sender = {MESSAGE_PHASE: {"pcie_write_bytes": 1.1 * SIZE}}
    [found] = found_by(tmp_path, monkeypatch, [why], sender, {})
    assert found.status == WARNING
    assert found.detail.endswith(f"pcie_write_bytes 1.18 GB; {why}")


def test_one_gpu_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: [H200])
    assert list(checks.links(Settings(ncu_dir=tmp_path))) == []


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
