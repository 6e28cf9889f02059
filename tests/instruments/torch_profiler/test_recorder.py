"""The process under the PyTorch profiler, on the CPU: the same as on a GPU, without CUDA."""

from __future__ import annotations

import json
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpbench import Case
from dpbench.child.messages import Schedule
from dpbench.commands.cli import main
from dpbench.core.case import OUTSIDE
from dpbench.instruments.torch_profiler.profile_folder import OPERATORS, REPORT, prepare, read_trace

CASE = Case("dpsgd", 2, 8, "100x16x1x2")
SCHEDULE = Schedule(skip_first=0, wait=1, warmup=1, active=2, repeat=2)


class Profiled(NamedTuple):
    """The folder with everything that profiling leaves, and what the process printed."""

    folder: Path
    record: dict[str, Any]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    folder = tmp_path_factory.mktemp("runs") / CASE.id
    command = ["step", "--device", "cpu", "--trainer", "dpsgd", "--batch-size", "2"]
    command += ["--seq-len", "8", "--model-size", CASE.model_size]
    command += ["--instrument", "torch_profiler", "--profile-dir", str(folder.parent)]
    command += ["--profile-schedule", str(SCHEDULE), "--profile-threshold", "0"]
    with redirect_stdout(StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's own, of several cycles
        assert main(command) == 0
    return Profiled(folder, json.loads(printed.getvalue().splitlines()[-1]))


@pytest.fixture
def folder(profiled: Profiled) -> Path:
    return profiled.folder


def test_each_cycle_leaves_a_trace_of_its_active_steps(folder: Path) -> None:
    traces = sorted(folder.glob("trace_*.json.gz"))
    assert [len(read_trace(path).cpu_seconds) for path in traces] == [
        SCHEDULE.active
    ] * SCHEDULE.repeat


def test_phases_are_annotated_without_the_trainer_knowing(folder: Path) -> None:
    for seconds in read_trace(folder / "trace_0.json.gz").cpu_seconds:
        assert set(seconds) == {"forward", "backward", "clip", "noise", "optimizer", OUTSIDE}
        assert min(seconds.values()) > 0


def test_there_is_a_row_for_each_step_and_phase(profiled: Profiled) -> None:
    rows = profiled.record["rows"]
    assert {row["repeat"] for row in rows} == {0, 1, 2, 3}
    assert {row["metric"] for row in rows} == {"cpu_time_seconds", "memory_growth_bytes"}
    step = {r["phase"]: r["value"] for r in rows if r["repeat"] == 3 and r["unit"] == "s"}
    total = step.pop("step")
    assert total == pytest.approx(sum(step.values()))


def test_the_report_says_what_ran_and_lists_operators(profiled: Profiled) -> None:
    text = (profiled.folder / REPORT).read_text()
    torch = profiled.record["details"]["torch"]
    assert text.startswith(f"torch {torch}, cpu; schedule: skip_first 0, wait 1")
    for title in ("by CPU time", "by CPU memory", "and input shapes by CPU time", "Bottlenecks"):
        assert title in text
    assert "GPU" not in text


def test_operators_are_summed_by_name_and_by_shape_over_the_steps_of_a_cycle(
    profiled: Profiled,
) -> None:
    text = (profiled.folder / OPERATORS).read_text()
    assert f"Sums over {SCHEDULE.active} recorded steps." in text
    tables = text.split("Operators ")[1:]
    by_time, by_memory, by_shape = map(counts, tables)
    assert {*by_time, *by_memory} == {6 * SCHEDULE.active}
    assert "Input Shapes" in tables[2]
    # Those of its shapes that are among the operators that take longest, if any is.
    assert max(by_shape, default=0) < 6 * SCHEDULE.active


def counts(table: str) -> list[int]:
    """How often matrix products with a bias were called, of each line about them."""
    [header] = [line for line in table.splitlines() if "# of Calls" in line]
    end = header.index("# of Calls") + len("# of Calls")
    lines = [line for line in table.splitlines() if line.split()[:1] == ["aten::addmm"]]
    return [int(line[:end].split()[-1]) for line in lines]


def test_tensorboard_shows_scalars_by_step_and_the_case(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(folder)).Reload()
    points = log.Scalars("cpu_time_seconds/backward")
    assert [point.step for point in points] == [0, 1, 2, 3]
    hyper_parameters = str(log.summary_metadata)
    assert "trainer" in hyper_parameters
    assert "dpsgd" in hyper_parameters


def test_a_second_profile_replaces_the_first_and_nothing_else(tmp_path: Path) -> None:
    for name in ("trace_0.json.gz", "trace_12.json.gz", OPERATORS, "notes.txt", "trace_of_mine"):
        (tmp_path / name).touch()
    prepare(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "trace_of_mine"}
