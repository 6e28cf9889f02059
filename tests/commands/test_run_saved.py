"""``dpbench run`` saves, resumes and compares as pytest does."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

import dpbench.runner
from dpbench.commands.cli import main
from dpbench.core.files import write_text
from dpbench.results.run import Run
from dpbench.results.schema import parsed

pytestmark = pytest.mark.usefixtures("counted_once")

RUN = ["run", "--instrument=logical", "--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]
TWO = ["--trainer=standard", "--trainer=dpsgd"]
SAVED = Path(".dpbench/cpu-logical")


def test_run_is_saved_resumed_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measure = dpbench.runner.measure
    counted: list[str] = []

    def interrupted_at_dpsgd(case, instruments, **rest):  # type: ignore[no-untyped-def]
        counted.append(case.trainer)
        if counted == ["standard", "dpsgd"]:
            raise KeyboardInterrupt
        return measure(case, instruments, **rest)

    monkeypatch.setattr("dpbench.session.measure", interrupted_at_dpsgd)
    assert main([*RUN, *TWO, "--save=first"]) == 130
    first = SAVED / "0001_first.json"
    assert Run.load(first).status == "interrupted"

    assert main([*RUN, "--trainer=standard", "--resume"]) == 2
    assert "grid's trainer ['standard', 'dpsgd'] -> ['standard']" in capsys.readouterr().err
    assert main([*RUN, *TWO, "--resume"]) == 0
    assert counted == ["standard", "dpsgd", "dpsgd"]
    run = Run.load(first)
    assert run.status == "complete"
    assert [outcome.case.trainer for outcome in run.outcomes] == ["standard", "dpsgd"]

    data = parsed(first.read_bytes())
    for row in data["rows"]:
        row["value"] *= 0.9 if row["trainer"] == "dpsgd" else 1
    first.write_text(json.dumps(data))
    capsys.readouterr()
    assert main([*RUN, *TWO, "--autosave", "--compare-fail=logical_ratio:5%"]) == 1
    captured = capsys.readouterr()
    assert "compared with 0001_first" in captured.err
    assert "5% exceeded" in captured.out
    assert "What changed most:" not in captured.out, "the operators are the same"
    [second] = SAVED.glob("0002_*.json")
    assert Run.load(second).regressed

    another_batch = [text.replace("--batch-size=2", "--batch-size=4") for text in RUN]
    limited = [*another_batch, *TWO[:1], "--compare-fail=logical_bytes:5%"]
    assert main(limited) == 2
    said = "with any of these cases in .dpbench, so limits cannot be checked; add"
    assert said in capsys.readouterr().err
    assert main([*limited, "--compare-first-run-ok"]) == 0
    assert main([*limited, "--compare=1"]) == 1
    errors = capsys.readouterr().err
    assert "logical_bytes:5% was not checked for standard-bs4-seq8-99x16x1x2-fp32" in errors
    assert main([*limited, "--compare=1", "--compare-first-run-ok"]) == 0


@pytest.mark.repeats
@pytest.mark.parametrize("damage", [('"schema": 3', '"schema": 99'), ('"rows"', "rows")], ids=str)
def test_a_reference_that_cannot_be_read_is_not_a_first_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    damage: tuple[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    one = [*RUN, "--trainer=standard"]
    limited = [*one, "--compare-fail=logical_bytes:1%", "--compare-first-run-ok"]
    assert main([*limited, "--save=first"]) == 0
    first = SAVED / "0001_first.json"
    first.write_text(first.read_text().replace(*damage))
    assert main(limited) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if "ERROR" in line]
    assert "may be in a run that was skipped: run file" in line
    assert "0001_first.json cannot be read" in line
    assert main([*one, "--save=second"]) == 0
    assert main(limited) == 0  # there is one that can be read


def test_a_file_that_cannot_be_written_later_is_a_problem_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measure = dpbench.runner.measure

    def measure_and_take_the_folder_away(case, instruments, **rest):  # type: ignore[no-untyped-def]
        if case.trainer == "dpsgd":
            Path("out").rename("moved")
            Path("out").touch()
        return measure(case, instruments, **rest)

    monkeypatch.setattr("dpbench.session.measure", measure_and_take_the_folder_away)
    assert main([*RUN, *TWO, "--json=out/run.json", "--save=kept"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("dpbench run: ERROR: out/run.json: ") == 1
    assert "dpsgd" in captured.out
    assert len(json.loads(Path("moved/run.json").read_text())["cases"]) == 1
    assert Run.load(SAVED / "0001_kept.json").status == "complete"


def test_numbers_outlast_a_full_directory_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        if path.name != "run.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_text(path, text)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dpbench.session_store.write_text", full)
    assert main([*RUN, *TWO, "--json=run.json"]) == 0
    assert len(parsed(Path("run.json").read_bytes())["cases"]) == 2
