"""A process is told by a file all that its parent knows of the case and the instrument."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.child.messages import Schedule, Steps
from dpbench.child.task import Program, Task
from dpbench.core.case import Case
from dpbench.core.registry import INSTRUMENTS
from dpbench.core.subject import Script
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.interface import Instrument
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.ncu.ncu import Ncu, NcuKernels
from dpbench.instruments.nsys.nsys import Nsys
from dpbench.instruments.script import ScriptRun
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler.profiler import TorchProfiler

CASE = Case("dpsgd:clip=per_layer", 4, 16, "tiny", micro_batches=2)
FOLDER = Path("a folder/ü")


def told(task: Task, folder: Path) -> Task:
    task.write(folder / "task.json")
    return Task.read(folder / "task.json")


@pytest.mark.parametrize(
    "instrument",
    [
        Timing(FOLDER, "cpu", Steps(1, 2), 7.5),
        Logical(3.0),
        Cupti(FOLDER, names=("l2_read_bytes", "dram_bytes__x.sum")),
        Nsys(FOLDER, path="/nsys"),
        TorchProfiler(FOLDER, schedule=Schedule(active=3, repeat=2), threshold=2.5),
        Ncu(FOLDER, path="/ncu"),
        NcuKernels(FOLDER, phases=("clip",)),
    ],
    ids=lambda instrument: instrument.name,
)
def test_each_instrument_is_the_same_in_its_process(instrument: Instrument, tmp_path: Path) -> None:
    assert told(Task(CASE, instrument), tmp_path) == Task(CASE, instrument)


def test_what_only_the_parent_needs_stays_there(tmp_path: Path) -> None:
    instrument = Ncu(FOLDER)
    chosen = replace(instrument, metrics=instrument.metrics[:1])
    assert told(Task(CASE, chosen), tmp_path).instrument == instrument


@pytest.mark.parametrize("timeout", [None, 2.5, float("inf")])
def test_a_script_has_its_own_arguments(timeout: float | None, tmp_path: Path) -> None:
    words = ("train.py", "--lr", "0.1", "two words", "")
    program = Program(words, skip=0, steps=2, go_on=True, timeout=timeout)
    script = ScriptRun(Timing(FOLDER), *vars(program).values())
    task = told(Task(Script("train", 8), script.instrument, script), tmp_path)
    assert task == Task(Script("train", 8), Timing(FOLDER), program)
    assert isinstance(task.case, Script)


def test_an_instrument_of_a_folder_that_nothing_names_is_found_in_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from dpbench.instruments.timing import Timing\nclass Slow(Timing):\n    name = 'slow'\n"
    (tmp_path / "slow_timing.py").write_text(text)
    monkeypatch.setattr(INSTRUMENTS, "_targets", dict(INSTRUMENTS._targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        from slow_timing import Slow  # type: ignore[import-not-found]

        Task(CASE, Slow(FOLDER)).write(tmp_path / "task.json")
    sys.modules.pop("slow_timing")
    path = [*sys.path]
    assert type(Task.read(tmp_path / "task.json").instrument).__name__ == "Slow"
    assert sys.path == path
    sys.modules.pop("slow_timing")
