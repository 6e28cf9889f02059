"""What the benchmark of CUPTI says of saved runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import cupti
from dpbench import Case
from dpbench.instruments.cupti.recorder import cupti_rows
from dpbench.metrics import unit
from dpbench.results.outcome import Outcome, document
from dpbench.results.rows import Measurement

CASES = [Case(trainer, 8, 256, "1b") for trainer in ("standard", "dpsgd")]
NAMES = ("dram_read_bytes", "dram_write_bytes", *list(cupti.TOLERANCES)[1:])


def counted(total: float) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, total), "range_time_seconds": 0.5}


def by_cupti(case: Case, phases: float = 1e9) -> list[Measurement]:
    """A case that moved 2 GB in two phases of a step; 2.5 s in 5 steps."""
    record: dict[str, Any] = {
        "device": "NVIDIA H200",
        "torch": "2.11",
        "cupti": "13.0",
        "peak_memory_bytes": 1e9,
        "phase_seconds": [{"forward": 0.2, "backward": 0.3}] * 2,
        "counted": [
            {name: {**counted(phases), "range_time_seconds": 0.25} for name in ("forward", "clip")},
            {"step": counted(2e9)},
        ],
    }
    return list(cupti_rows(case, record))


def by_ncu(case: Case, factor: float = 1.0, metric: str = "") -> list[Measurement]:
    """The same under ncu, one metric of it so many times as much."""
    values = {name: 2e9 * (factor if name == metric else 1) for name in NAMES}
    return [
        Measurement(case, "ncu", phase, name, value, "B", 0, "NVIDIA H200", "ncu")
        for name, value in values.items()
        for phase in ("forward", "step")
    ]


def save(path: Path, rows: list[list[Measurement]], seconds: float = 6.0) -> Path:
    session = {
        "status": "complete",
        "seconds": seconds,
        "settings": {"cupti": {"steps": {"warmup": 1, "active": 2}}},
    }
    outcomes = [
        Outcome(case, tuple(r), 3.0, instruments=(r[0].instrument,))
        for case, r in zip(CASES, rows, strict=False)
    ]
    path.write_text(json.dumps(document(outcomes, {}, session)))
    return path


@pytest.mark.parametrize(
    ("factor", "metric", "phases", "status"),
    [
        (1.0, "", 1e9, 0),
        (1.009, "dram_read_bytes", 1e9, 0),  # 0.45 % of reads and writes together
        (1.012, "dram_read_bytes", 1e9, 1),
        (0.98, "l2_total_bytes", 1e9, 1),
        (1.009, "global_load_bytes", 1e9, 0),
        (1.0, "", 1.001e9, 1),
    ],
)
def test_each_case_must_agree_and_its_phases_add_up(
    factor: float, metric: str, phases: float, status: int, tmp_path: Path
) -> None:
    one = save(tmp_path / "cupti.json", [by_cupti(CASES[0]), by_cupti(CASES[1], phases)])
    other = save(tmp_path / "ncu.json", [by_ncu(CASES[0]), by_ncu(CASES[1], factor, metric)])
    assert cupti.main(["agree", str(one), str(other)]) == status


def test_runs_of_different_cases_do_not_agree(tmp_path: Path) -> None:
    one = save(tmp_path / "cupti.json", [by_cupti(CASES[0])])
    other = save(tmp_path / "ncu.json", [by_ncu(Case("dpsgd", 16, 256, "1b"))])
    assert cupti.main(["agree", str(one), str(other)]) == 1


@pytest.mark.parametrize(("seconds", "status"), [(5.9, 0), (6.1, 1)])
def test_a_grid_may_take_little_more_than_its_steps(
    seconds: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cases of one warm-up, two timed, and two counted steps of half a second each."""
    one = save(tmp_path / "cupti.json", [by_cupti(case) for case in CASES], seconds)
    other = save(tmp_path / "ncu.json", [by_ncu(case) for case in CASES], 60.0)
    assert cupti.main(["grid", str(one), "--saved", "--ncu", str(other)]) == status
    line = next(
        text for text in capsys.readouterr().out.splitlines() if text.startswith("session ")
    )
    assert line.split() == ["session", "5.0", str(seconds), "60.0"]


def test_a_grid_says_what_its_processes_did_with_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = save(tmp_path / "cupti.json", [by_cupti(case) for case in CASES], 5.9)
    log = tmp_path / "cupti-logs/1b-fp32/report_dpsgd_bs8_seq256.cupti.log"
    log.parent.mkdir(parents=True)
    record = {"case": asdict(CASES[1]), "spent_seconds": {"waiting": 0.5, "active": 1.25}}
    log.write_text(f"$ python\n{'0' * 16} {json.dumps(record)}\n")
    cupti.main(["grid", str(one), "--saved", "--ncu", str(one)])
    printed = capsys.readouterr().out
    assert f"{CASES[1].id:34}     1.25      0.50      1.25\n" in printed
    assert "of 5.9 s no case held the GPU for 4.7" in printed


@pytest.mark.parametrize(("busy", "status"), [(0.52, 0), (0.54, 1)])
def test_busy_shares_of_steps_must_agree(busy: float, status: int, tmp_path: Path) -> None:
    """Half of a step of 1 s by CUPTI; a phase, and how long a recorded step took, may be off."""
    seen = {
        ("nsys", "timeline_busy_seconds"): {"step": busy, "clip": 0.9},
        ("nsys", "timeline_seconds"): {"step": 1.3, "clip": 1.0},
        ("cupti", "gpu_busy_cycles"): {"step": 40.0, "clip": 50.0},
        ("cupti", "gpu_elapsed_cycles"): {"step": 100.0, "clip": 100.0},
        ("cupti", "range_time_seconds"): {"step": 1.25, "clip": 1.0},
        ("cupti", "step_time_seconds"): {"step": 1.0},
    }
    rows = [
        Measurement(CASES[0], tool, phase, metric, value, unit(metric), 0, "NVIDIA H200", tool)
        for (tool, metric), values in seen.items()
        for phase, value in values.items()
    ]
    assert cupti.main(["nsys", str(save(tmp_path / "both.json", [rows]))]) == status


def test_counted_steps_are_those_of_all_passes() -> None:
    assert cupti.further_steps({"passes": 2, "counted": [{}, {}, {}, {}]}) == 8


@pytest.mark.parametrize(("seconds", "status"), [(1.1, 0), (1.2, 1)])
def test_a_counted_case_may_cost_little_more_than_a_plain_one(
    seconds: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain process takes as many steps in a second."""
    record = {
        "passes": 1,
        "counted": [{}, {}],
        "phase_seconds": [{"forward": 0.1}],
        "spent_seconds": {"after": 0.3},
    }
    plain: list[list[str]] = []

    def run(command: list[str], case: Case, folder: str) -> tuple[float, dict[str, Any]]:
        if "--cupti" in command:
            return seconds, record
        plain.append(command)
        return 1.0, record

    monkeypatch.setattr(cupti, "seconds", run)
    assert cupti.main(["cost", "--pairs", "1"]) == status
    assert plain[0][-4:] == ["--warmup", "3", "--active", "7"]
