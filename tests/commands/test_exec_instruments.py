"""``dpbench exec`` with ncu and with the profiler, and the rows of a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from dpbench.child.task import Task
from dpbench.commands.cli import main
from dpbench.core.case import ALL_PHASES
from dpbench.core.errors import CaseFailed
from dpbench.core.gpu import Gpu
from dpbench.core.subject import Script, subject_from
from dpbench.instruments.ncu import ncu
from dpbench.instruments.timing import timing_rows
from dpbench.results.outcome import Outcome
from dpbench.results.rows import Measurement
from tests.commands import scripts, test_exec
from tests.commands.test_exec import rows
from tests.programs import program, reports

# fixtures
elsewhere = test_exec.elsewhere
processes_here = test_exec.processes_here
script_here = test_exec.script_here


NCU = """
import json, shutil, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("Version 2025.3.1.0")
    sys.exit()
start = arguments.index("-c")
shutil.copy(arguments[start + 2], "task.json")
with open("arguments.json", "w") as stream:
    json.dump(arguments, stream)
shutil.copy("recorded.ncu-rep", arguments[arguments.index("--export") + 1])
REPORT
"""


NCU_REFUSES = """
import sys
if sys.argv[1:] == ["--version"]:
    print("Version 2025.3.1.0")
    sys.exit()
with open(sys.argv[sys.argv.index("--log-file") + 1], "w") as stream:
    print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", file=stream)
sys.exit(9)
"""


@pytest.mark.parametrize(
    "error", ["", pytest.param("the script failed with KeyError", marks=pytest.mark.slow)]
)
def test_script_under_ncu_has_the_rows_of_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: str
) -> None:
    gpu = Gpu("GPU-0", "NVIDIA H200", 141 * 10**9, "580.159.03")
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [gpu])
    recorded = Path(__file__).parents[1] / "data/tiny-fp32/report_dpsgd_bs4_seq64.ncu-rep"
    Path("recorded.ncu-rep").write_bytes(recorded.read_bytes())
    details = {"torch": "2.11.0", "observed": 1}
    outcome = Outcome(Script("training"), (), details=details)
    if error:
        outcome = outcome.with_error(CaseFailed(error))
    program(Path("ncu"), NCU.replace("REPORT", reports(outcome)))
    read = ncu.read

    def further_step(*of: Any, **how: Any) -> list[Measurement]:
        return [each for row in read(*of, **how) for each in (row, replace(row, repeat=1))]

    monkeypatch.setattr(ncu, "read", further_step)
    how = ["--instrument=ncu", "--ncu-path=./ncu", "--steps=1"]
    assert main(["exec", *how, "--json=run.json", "training.py", "--private"]) == bool(error)
    said = capsys.readouterr()
    assert "NVIDIA H200: DRAM MB by phase\n" in said.out
    assert error in said.err
    arguments = json.loads(Path("arguments.json").read_text())
    task = Task.read(Path("task.json"))
    report = "ncu_reports/script/report_training"
    under = ["--replay-mode", "app-range", "--nvtx-include", "regex:dpbench@.*"]
    assert {*under, f"{report}.ncu-rep", f"{report}.log"} <= {*arguments}
    assert arguments[-2:] == ["training.py", "--private"]
    assert task.program
    assert (task.instrument.name, task.program.skip, task.program.steps) == ("ncu", 3, 1)
    moved = rows("run.json", "dram_read_bytes")
    assert {("training", "clip"), ("training", "step")} <= set(moved)
    assert len(moved["training", "step"]) == 1, "of the step that came to its end"


def test_script_that_ncu_ended_fails_with_what_ncu_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("GPU-0", "NVIDIA H200", 141 * 10**9, "580.159.03")
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [gpu])
    program(Path("ncu"), NCU_REFUSES)
    assert main(["exec", "--instrument=ncu", "--ncu-path=./ncu", "training.py"]) == 1
    assert "ERR_NVGPUCTRPERM" in (said := capsys.readouterr().err)
    assert "run as root or with CAP_SYS_ADMIN" in said


@pytest.mark.usefixtures("processes_here")
def test_script_under_the_profiler_has_a_trace_of_each_step_and_a_report(
    capfd: pytest.CaptureFixture[str],
) -> None:
    how = ["--instrument=torch_profiler", "--steps=20", "--profile-dir=profiles"]
    assert main(["exec", *how, "--json=run.json", "training.py", "--private"]) == 0
    shown = capfd.readouterr()
    assert "training, cpu: PyTorch profiler, per step" in shown.out
    assert "5 steps were counted, and 20 were requested" in shown.out
    folder = Path("profiles/training")
    assert f"operators by time and memory: {folder.absolute()}/report.txt" in shown.err
    assert "Operators and CUDA calls by CPU time" in (folder / "report.txt").read_text()
    assert len([*folder.glob("trace_*.json.gz")]) == 5  # without what follows the last step
    phases = rows("run.json", "cpu_time_seconds")
    assert {(name, len(values)) for (_, name), values in phases.items()} == {
        (name, 5) for name in (*ALL_PHASES, "step")
    }
    whole = sum(sum(values) for (_, name), values in phases.items() if name != "step")
    assert whole == pytest.approx(sum(phases["training", "step"]))


def test_script_that_profiles_itself_is_not_profiled(
    script_here: Callable[..., Outcome],
) -> None:
    lines = f"with torch.autograd.profiler.profile():\n{indent(scripts.TRAINING, '    ')}"
    Path("profiled.py").write_text(f"import torch\n{lines}", encoding="utf-8")
    found = script_here("profiled.py", instrument="torch_profiler")
    assert "the script itself runs the PyTorch profiler, which cannot" in found.message


def test_case_of_a_script_claims_nothing_that_nobody_says() -> None:
    case = Script("private 100%")
    assert (case.id, case.with_trainer("standard").id) == ("private 100%", "standard")
    known = {axis: value for axis, value in case.columns.items() if value}
    assert known == {"trainer": "private 100%", "workload": "script"}
    assert subject_from({**case.columns, "precision": "fp32", "optimizer": "sgd"}) == case


def test_batch_size_that_is_said_makes_samples_per_second_of_times() -> None:
    record = {
        "phase_seconds": [{"forward": 0.2}],
        "peak_memory_bytes": None,
        "device": "cpu",
        "torch": "2",
    }
    found = [timing_rows(Script("mine", size), record) for size in (0, 8)]
    assert [{r.metric: r.value for r in rows}.get("samples_per_second") for rows in found] == [
        None,
        pytest.approx(40),
    ]
