"""``dpbench exec``: scripts of other people, unmodified, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.case import script_case
from dpbench.cli import main
from tests.commands import scripts


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, text in vars(scripts).items():
        if name.isupper():
            Path(f"{name.lower()}.py").write_text(text, encoding="utf-8")


def rows(path: str, metric: str) -> dict[tuple[str, str], list[float]]:
    """The values of a metric by trainer and phase."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in json.loads(Path(path).read_text())["rows"]:
        if row["metric"] == metric:
            found.setdefault((row["trainer"], row["phase"]), []).append(row["value"])
    return found


def test_private_script_against_a_plain_one_is_a_ratio_by_phase(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = ["exec", "--save=plain", "--skip=1", "--steps=2", "training.py"]
    assert main(plain) == 0
    told = ["--name=private", "--baseline=1", "--json=private.json", "--skip=1", "--steps=2"]
    private = ["exec", *told, "--save=private", "-m", "training", "--private", "--batch_size=8"]
    assert main(private) == 0
    shown = capfd.readouterr()
    assert "logical (no hardware): logical GB by phase (÷ standard)" in shown.out
    assert "standard: is training, of a saved run." in shown.out
    assert "dpbench exec: baseline: 0001_plain" in shown.err
    ratios = {
        row["phase"]: row["ratio"]
        for row in json.loads(Path("private.json").read_text())["ratios"]
        if row["metric"] == "logical_bytes"
    }
    assert ratios["forward"] == pytest.approx(1)
    assert ratios["step"] > 3
    weights = 4 * (256 * 512 + 512 + 512 * 16 + 16)
    written = rows("private.json", "logical_write_bytes")
    assert set(written) >= {("private", "clip"), ("private", "noise"), ("standard", "optimizer")}
    assert written["standard", "optimizer"] == [weights] * 2  # set to None, and nothing zeroed
    assert written["private", "backward"][0] > 8 * weights  # a gradient for each of 8 examples

    # The same once more is judged by what was saved, and passes; by less than nothing it fails.
    again = ["exec", *told, "--compare=2", "-m", "training", "--private", "--batch_size=8"]
    assert main([again[0], "--compare-fail=logical_ratio:0%", *again[1:]]) == 0
    other = [word for word in again if word != "--private"]
    limit = "--compare-fail=logical_bytes@backward:±5%"
    assert main([other[0], limit, *other[1:]]) == 1


def test_times_of_a_script_that_goes_on_to_the_end_it_would_have_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    alone = subprocess.run(
        [sys.executable, "training.py", "--lr", "a_b"], capture_output=True, text=True, check=True
    )
    told = ["--instrument=timing", "--steps=2", "--continue", "--json=run.json"]
    assert main(["exec", *told, "training.py", "--lr", "a_b"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith(alone.stdout)
    assert "['--lr', 'a_b'] __main__" in alone.stdout
    assert "cpu: ms by phase (÷ standard)" in shown
    times = rows("run.json", "step_time_seconds")
    parts = ("forward", "backward", "optimizer", "outside")
    assert {phase for _, phase in times} == {"step", *parts}
    assert sum(times["training", part][1] for part in parts) == times["training", "step"][1]
    assert all(len(values) == 2 for values in times.values())


@pytest.mark.parametrize(
    ("program", "words", "counted"),
    [
        (["training.py", "--fails"], "the script failed with ValueError: the data is gone; 2 ", 2),
        (["training.py", "--exits"], "the script ended with exit code 3; what was counted", 2),
        (["no_step.py"], "took no step that can be found: no torch.optim optimizer stepped", 0),
        (["thread.py"], "the script trains in a thread: 4 steps of an optimizer", 0),
        (["ranks.py"], "took no step in its own process, but started others", 0),
        (["needs_arguments.py"], "ended by itself with exit status 2, before its first step", 0),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_said_in_a_line(
    capfd: pytest.CaptureFixture[str], program: list[str], words: str, counted: int
) -> None:
    assert main(["exec", "--instrument=timing", "--json=run.json", *program]) == 1
    errors = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("dpbench exec:")
    ]
    assert len(errors) == 1
    assert words in errors[0]
    document: dict[str, Any] = json.loads(Path("run.json").read_text())
    repeats = {row["repeat"] for row in document["rows"]}
    assert len(repeats) == counted


def test_traceback_of_a_script_is_its_own_and_shown_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    main(["exec", "--instrument=timing", "training.py", "--fails"])
    error = capfd.readouterr().err
    assert error.count("Traceback") == 1
    assert error.count('raise ValueError("the data is gone")') == 1
    assert "process/script.py" not in error


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name a script, or a module with -m"),
        (["absent.py"], "absent.py: no such file"),
        (
            ["--nonsense", "training.py"],
            "unknown option --nonsense; options of a script come after",
        ),
        (["--instrument=nsys", "training.py"], "'nsys'; choose from timing, logical, cupti"),
        (["--steps=0", "training.py"], "needs --skip >= 0 and --steps >= 1, not 3 and 0"),
        (["--name=standard", "training.py"], "'standard' is what the baseline of ratios is called"),
        (["--baseline=7", "training.py"], "no run number 0007"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_script_runs(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["exec", *options]) == 2
    assert words in capsys.readouterr().err


def test_case_of_a_script_is_called_what_the_script_is() -> None:
    assert script_case("private").id == "private"
    assert script_case("private").baseline.id == "standard"
