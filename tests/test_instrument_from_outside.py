"""Tests of an instrument from outside the package, from the command line to a comparison."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpbench.commands.cli import main
from dpbench.core.metrics import METRICS
from dpbench.core.settings import Settings
from dpbench.instruments import INSTRUMENTS, choose
from dpbench.results.run import Run
from dpbench.results.schema import parsed
from tests.commands import scripts
from tests.commands.test_exec import ProcessHere
from tests.plugin import conftest as sessions

imports = sessions.imports  # a fixture

POWER = """
import os
from dataclasses import dataclass
from typing import ClassVar

from dpbench import Case, Instrument, Measurement, Outcome, PendingMeasurement
from dpbench.core.metrics import METRICS, Metric

METRICS.register(Metric("energy_joules", "energy\\nJ", ("power",)))

@dataclass(frozen=True)
class Power(Instrument):
    name: ClassVar[str] = "power"
    hardware: ClassVar[bool] = {hardware}

    device: str = "cpu"

    @classmethod
    def from_settings(cls, settings):
        return cls(settings.device)

    def start(self, case):
        return Reading(self, case)

@dataclass
class Reading(PendingMeasurement):
    instrument: Power
    case: Case

    def outcome(self):
        if self.case.trainer == "dpsgd_fgc":
            raise LookupError("no meter")
        if self.case.trainer == os.environ.get("INTERRUPTED"):
            raise KeyboardInterrupt
        joules = {joules} * self.case.batch_size
        row = Measurement(
            self.case, "power", "step", "energy_joules", joules, "J", 0, {device}, "1"
        )
        return Outcome(self.case, (row,))

class Plain(Instrument):
    name = "power"
    versions = {{"meter": "7"}}

    def start(self, case):
        return Reading(Power(), case)
"""
CELL = ["--batch-size=4", "--seq-len=16", "--model-size=tiny"]
RUN = ["run", "--instrument=meter:Power", *CELL, "--trainer=standard"]


@pytest.fixture(autouse=True)
def meter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a user's module with instruments into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(INSTRUMENTS, "_targets", dict(INSTRUMENTS._targets))
    monkeypatch.setattr(METRICS, "_known", dict(METRICS._known))
    write(tmp_path)
    yield tmp_path
    sys.modules.pop("meter", None)


def write(place: Path, joules: float = 2.0, hardware: bool = True) -> None:
    device = "self.instrument.device" if hardware else "'logical (no hardware)'"
    text = POWER.format(joules=joules, hardware=hardware, device=device)
    (place / "meter.py").write_text(text)
    sys.modules.pop("meter", None)


@pytest.mark.parametrize("hardware", [False, True], ids=["counts", "on hardware"])
def test_an_instrument_runs_and_its_runs_are_saved_and_compared(
    hardware: bool, meter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(meter, hardware=hardware)
    on_cpu = ["--device=cpu"]
    assert main([*RUN, *on_cpu, "--save=first", "--json=run.json"]) == 0
    [row] = parsed(Path("run.json").read_bytes())["rows"]
    assert (row["instrument"], row["metric"], row["value"]) == ("power", "energy_joules", 8.0)
    assert "energy" in capsys.readouterr().out  # shown by default
    assert main([*RUN, *on_cpu, "--compare"]) == 0
    assert "compared with 0001_first" in capsys.readouterr().err


def test_an_instrument_without_options_runs_and_its_versions_are_saved() -> None:
    run = ["run", "--instrument=meter:Plain", *RUN[2:], "--device=cpu"]
    assert main([*run, "--save=first", "--json=run.json"]) == 0
    environment = parsed(Path("run.json").read_bytes())["environment"]
    assert environment["versions"]["meter"] == "7"


def test_a_metric_of_the_instrument_is_a_column_in_its_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    columns = "--columns=energy_joules,energy_ratio"
    assert main([*RUN, "--trainer=dpsgd", "--device=cpu", columns]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "dpsgd 8.00 1.00" in lines


@pytest.mark.slow
def test_limits_also_check_the_kept_cases_of_a_resumed_run(
    meter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*RUN, "--trainer=dpsgd", "--device=cpu"]
    limited = ["--compare-fail=energy_joules:5%"]
    assert main([*run, "--save=first"]) == 0
    write(meter, joules=3.0)
    for end in ("kept", "edited"):
        with monkeypatch.context() as interrupted:
            interrupted.setenv("INTERRUPTED", "dpsgd")
            assert main([*run, f"--save={end}"]) == 130
        capsys.readouterr()
        if end == "edited":
            write(meter)  # so the kept case is measured again
        assert main([*run, "--resume", *limited]) == (end == "kept")
        said = capsys.readouterr()
        assert "compared with 0001_first" in said.err
        assert ("energy_joules@step of standard-" in said.err) == (end == "kept")


@pytest.mark.repeats
@pytest.mark.parametrize("joules", ["float('nan')", "float('inf')", "'2'", "None", "10**400 // 1"])
def test_an_impossible_number_is_refused_by_name_and_other_rows_are_kept(
    meter: Path, capsys: pytest.CaptureFixture[str], joules: str
) -> None:
    text = (meter / "meter.py").read_text()
    wrong = f"        if self.case.trainer == 'dpsgd': joules = {joules}\n        row ="
    (meter / "meter.py").write_text(text.replace("        row =", wrong))
    run = [*RUN, "--trainer=dpsgd", "--device=cpu", "--instrument=logical"]
    assert main([*run, "--save=first"]) == 1
    assert "power has recorded the value " in (said := capsys.readouterr().err)
    assert "for energy_joules@step of step 0" in said
    saved = Run.load(next(Path(".dpbench").rglob("0001_first.json")))
    assert [outcome.error for outcome in saved.outcomes] == [None, "RowsRefused"]
    known = [{row.instrument for row in outcome.rows} for outcome in saved.outcomes]
    assert known == [{"power", "logical"}, {"logical"}]


def test_an_error_of_the_instrument_fails_only_its_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--trainer=dpsgd_fgc", "--json=run.json"]) == 1
    cases = parsed(Path("run.json").read_bytes())["cases"]
    assert [case["error"] for case in cases] == [None, "LookupError"]


def test_a_name_that_is_no_instrument_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in {
        "meter:Reading": "instrument 'Reading' is not a subclass of dpbench.Instrument",
        "metre": "unknown instrument 'metre'; choose from timing, ncu",
        "meter:Metre": "unknown class of meter 'Metre'",
    }.items():
        assert main(["run", f"--instrument={name}", *CELL]) == 2
        assert words in capsys.readouterr().err


def test_an_installed_package_may_name_instruments(
    meter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = meter / "meter-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: meter\nVersion: 1\n")
    (folder / "entry_points.txt").write_text("[dpbench.instruments]\nwatts = meter:Power\n")
    monkeypatch.syspath_prepend(meter)
    assert [entry.name for entry in metadata.entry_points(group="dpbench.instruments")] == ["watts"]
    [chosen] = choose(["watts"], Settings(device="cpu"))
    assert chosen.name == "power"


PACE = """
import time
from dataclasses import dataclass
from typing import ClassVar

import dpbench
from dpbench.core.metrics import METRICS, Metric

METRICS.register(Metric("phases_times", "phases", ("pace",)))

@dataclass(frozen=True)
class Pace(dpbench.InProcessInstrument):
    \"\"\"Counts the phases of a step, times a factor.\"\"\"

    name: ClassVar[str] = "pace"
    pace_times: int = dpbench.option("factor of the count", 1, metavar="N")

    def recorder(self, case, steps=None):
        return PaceRecorder(self.pace_times, steps)

class PaceRecorder(dpbench.Recorder):
    def __init__(self, times, wanted):
        super().__init__(wanted)
        self.times = times

    def rows(self, case):
        return [
            dpbench.Measurement(
                case, "pace", "step", "phases_times", self.times * len(phases), "1", i, "cpu", "1"
            )
            for i, phases in enumerate(self.phases)
        ]
"""


@pytest.fixture
def pace(meter: Path) -> Iterator[None]:
    (meter / "pace.py").write_text(PACE)
    yield
    sys.modules.pop("pace", None)


def values(path: str) -> list[float]:
    return [row["value"] for row in parsed(Path(path).read_bytes())["rows"]]


@pytest.mark.usefixtures("pace")
def test_a_recorder_with_an_option_records_the_steps_of_a_case(
    capfd: pytest.CaptureFixture[str],
) -> None:
    how = ["--instrument=pace:Pace", "--pace-times=3", "--device=cpu", "--active=2"]
    columns = "--columns=phases_times"
    assert main(["run", *how, *CELL, "--trainer=standard", columns, "--json=run.json"]) == 0
    said = capfd.readouterr()
    [line] = [line for line in said.err.splitlines() if line.startswith("$ ")]
    task = json.loads(Path(line.rpartition(" ")[2]).read_text())
    assert (task["instrument"], task["fields"]["pace_times"]) == ("pace:Pace", 3)
    assert "standard 12.0 " in " ".join(said.out.split())
    assert values("run.json") == [12.0, 12.0]
    settings = parsed(Path("run.json").read_bytes())["session"]["settings"]
    assert settings["pace"]["pace_times"] == 3


@pytest.mark.usefixtures("pace")
def test_a_recorder_records_the_steps_of_a_script_and_of_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = SimpleNamespace(Popen=ProcessHere)
    monkeypatch.setattr("dpbench.instruments.script.subprocess", here)
    Path("folder").mkdir()
    Path("folder/training.py").write_text(scripts.TRAINING)
    how = ["--instrument=pace:Pace", "--pace-times=2", "--steps=2", "--json=run.json"]
    assert main(["exec", *how, "folder/training.py"]) == 0
    assert values("run.json") == [8.0, 8.0]
    settings = parsed(Path("run.json").read_bytes())["session"]["settings"]["pace"]
    assert (settings["pace_times"], settings["steps"], "directory" in settings) == (2, 2, False)

    from dpbench import observe

    with observe("pace:Pace") as seen, seen.step():
        pass
    assert seen.report.value("phases_times") == 1


@pytest.mark.usefixtures("pace")
@pytest.mark.parametrize("command", ["run", "exec", "step"])
def test_help_lists_the_instrument_with_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--instrument=pace:Pace", "--help"])
    said = capsys.readouterr().out
    assert "instrument Pace:\n  Counts the phases of a step" in said
    assert "--pace-times N" in said


@pytest.mark.usefixtures("pace")
def test_pytest_has_the_options_of_the_instrument(
    pytester: pytest.Pytester, imports: sessions.Imports
) -> None:
    pytester.makepyfile(pace=PACE)
    pytester.makepyfile(
        """
        def test_own(counters):
            def step():
                pass
            assert counters(step).value("phases_times") == 5
        """
    )
    how = ["--dpbench-instrument=pace:Pace", "--dpbench-pace-times=5", "--dpbench-device=cpu"]
    pytester.syspathinsert()
    result = sessions.in_this_process(pytester, [*sessions.WITHOUT, *how], imports)
    result.assert_outcomes(passed=1)


@pytest.mark.usefixtures("pace")
def test_an_option_with_the_name_of_another_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pace.py").write_text(PACE.replace("pace_times", "warmup"))
    assert main(["run", "--instrument=pace:Pace", *CELL]) == 2
    said = capsys.readouterr().err
    assert "instrument Pace cannot be declared (argument --warmup: conflicting option" in said
    assert said.endswith("): rename the field in its class\n")


def test_an_instrument_without_recorder_is_refused_for_scripts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("training.py").touch()
    assert main(["exec", "--instrument=meter:Power", "training.py"]) == 2
    assert "power cannot measure a script: choose timing" in capsys.readouterr().err
