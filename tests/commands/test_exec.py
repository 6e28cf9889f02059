"""``dpbench exec``: scripts of other people, unmodified, in processes of their own."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.child.messages import RECORDS, reported
from dpbench.child.script import run
from dpbench.child.task import Task
from dpbench.commands.cli import main
from dpbench.core.settings import Settings
from dpbench.core.subject import Script
from dpbench.instruments import choose
from dpbench.instruments.script import ScriptRun
from dpbench.results.outcome import Outcome
from dpbench.results.schema import parsed
from dpbench.results.storage import Storage
from tests.commands import scripts

FORKS = (("3", 3), ("", 0))


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
    for row in parsed(Path(path).read_bytes())["rows"]:
        if row["metric"] == metric:
            found.setdefault((row["trainer"], row["phase"]), []).append(row["value"])
    return found


@contextmanager
def as_left_before() -> Iterator[None]:
    """Let a script run in this process, and leave that as it was."""
    handler = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("argv", "path"):
            patch.setattr(sys, name, [*getattr(sys, name)])
        patch.setitem(sys.modules, "__main__", sys.modules["__main__"])
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)


class ProcessHere:
    """Stands in for a script's process: runs it in this one, which has loaded PyTorch already."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        task = Task.read(Path(command[command.index("-c") + 2]))
        assert task.program
        with as_left_before():
            self.status, _ = run(task, task.program, env[RECORDS])

    def wait(self) -> int | str:
        return self.status or 0

    poll = wait


@pytest.fixture
def processes_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(Popen=ProcessHere)
    monkeypatch.setattr("dpbench.instruments.script.subprocess", here)


@pytest.mark.usefixtures("processes_here")
def test_private_script_against_a_plain_one_is_a_ratio_by_phase(
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = ["exec", "--save=plain", "--skip=1", "--steps=2", "training.py"]
    assert main(plain) == 0
    told = ["--name=private", "--baseline=1", "--json=private.json", "--skip=1", "--steps=2"]
    private = ["exec", *told, "--save=private", "-m", "training", "--private", "--batch_size=8"]
    assert "÷" not in capfd.readouterr().out  # nothing is divided
    elsewhere = Path(".dpbench/cpu-logical/0001_plain.json").read_text()
    Path("gpu.json").write_text(elsewhere.replace("logical (no hardware)", "NVIDIA H200"))
    assert main(["exec", "--baseline=gpu.json", "training.py", "--private"]) == 2
    words = (
        "no steps of a script that were measured on logical (no hardware) by logical; it has "
        "measurements on NVIDIA H200 by logical"
    )
    assert words in capfd.readouterr().err
    assert main([*private[:2], "--batch-size=8", *private[2:]]) == 2
    refused = "the batch size of training is not given, here it is 8"
    assert refused in capfd.readouterr().err
    assert main(private) == 0
    shown = capfd.readouterr()
    assert "logical (no hardware): logical MB by phase (÷ training)" in shown.out
    assert "dpbench exec: baseline: 0001_plain" in shown.err
    ratios = {
        row["phase"]: row["ratio"]
        for row in parsed(Path("private.json").read_bytes())["ratios"]
        if row["metric"] == "logical_bytes"
    }
    assert ratios["forward"] == pytest.approx(1)
    assert ratios["step"] > 3
    weights = 4 * (256 * 512 + 512 + 512 * 16 + 16)
    written = rows("private.json", "logical_write_bytes")
    assert set(written) >= {("private", "clip"), ("private", "noise"), ("training", "optimizer")}
    assert written["training", "optimizer"] == [weights] * 2  # set to None, and nothing zeroed
    assert written["private", "backward"][0] > 8 * weights  # a gradient for each of 8 examples

    # Plain training under the name of the saved private training differs where it should.
    limits = [
        "--compare-fail=logical_bytes@forward:0%",
        "--compare-fail=logical_bytes@backward:±5%",
    ]
    again = ["--compare=2", "--skip=1", "--steps=2", "--name=private", "--json=again.json"]
    assert main(["exec", *again, "--baseline=2", "training.py"]) == 2
    assert "its script is also called private; name this one" in capfd.readouterr().err
    assert main(["exec", *limits, *again, "--baseline=1", "training.py"]) == 1
    session = parsed(Path("again.json").read_bytes())["session"]
    assert [(row["trainer"], row["phase"]) for row in session["regressions"]] == [
        ("private", "backward"),
    ]
    assert session["unjudged"] == []


@pytest.fixture
def script_here() -> Iterator[Callable[..., Outcome]]:
    """Run a script as its own process would, in this one; returns what that writes down."""

    def run_here(*program: str, instrument: str = "timing", **how: Any) -> Outcome:
        [chosen] = choose([instrument], Settings(device="cpu"), "script")
        script = ScriptRun(chosen, program, **how)
        Path("records").unlink(missing_ok=True)
        run(Task(Script("mine"), chosen), script, "records")
        outcome = reported(Path("records"))
        assert outcome
        return outcome

    with as_left_before():
        yield run_here


def test_script_that_goes_on_comes_to_the_end_that_it_would_have_alone(
    script_here: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["training.py", "--lr"])
    exec(scripts.TRAINING, {"__name__": "__main__"})
    alone = capsys.readouterr().out
    found = script_here("training.py", "--lr", steps=2, go_on=True)
    assert (capsys.readouterr().out, found.message) == (alone, "")
    assert "['--lr'] __main__" in alone
    times = {(row.phase, row.repeat): row.value for row in found.rows}
    parts = ("forward", "backward", "optimizer", "outside")
    assert set(times) == {(phase, repeat) for phase in ("step", *parts) for repeat in (0, 1)}
    assert sum(times[part, 1] for part in parts) == pytest.approx(times["step", 1])


@pytest.mark.parametrize(
    ("program", "words", "counted"),
    [
        (
            ["training.py", "--fails"],
            "the script failed with ValueError: the data is gone; steps counted until then: 2",
            2,
        ),
        (["no_step.py"], "took no step that can be found: no torch.optim optimizer stepped", 0),
        (["fork.py"], "took no step that can be found", 0),
        (
            ["needs_arguments.py"],
            "ended by itself with exit status 2, before any step was counted",
            0,
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_said_in_a_line(
    script_here: Callable[..., Outcome], program: list[str], words: str, counted: int
) -> None:
    found = script_here(*program)
    assert words in found.message
    assert "\n" not in found.message
    assert len({row.repeat for row in found.rows}) == counted


def test_traceback_of_a_script_is_its_own_and_shown_once(
    script_here: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    script_here("training.py", "--fails")
    error = capsys.readouterr().err
    assert error.count("Traceback") == 1
    assert error.count('raise ValueError("the data is gone")') == 1
    assert "dpbench/child/" not in error


def test_script_that_leaves_no_record_is_an_error_of_its_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("dies.py").write_text("import os; os.kill(os.getpid(), 9)", encoding="utf-8")
    assert main(["exec", "--save=dies", "dies.py"]) == 1
    said = "dies: the script was killed by SIGKILL after no counted step(s)\n"
    assert said in capfd.readouterr().err
    [saved], _ = Storage(Path(".dpbench")).listing()
    assert saved.status == "interrupted"  # and no reference for others


@pytest.mark.parametrize(
    ("given", "status"), [("'gone'", 1), *(pytest.param(*s, marks=pytest.mark.slow) for s in FORKS)]
)
def test_fork_of_a_script_ends_with_its_own_status_under_a_time_out_too(
    capfd: pytest.CaptureFixture[str], given: str, status: int
) -> None:
    Path("forks.py").write_text(
        f"import os, sys\nif not (fork := os.fork()):\n    sys.exit({given})\n"
        "print('status', os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))"
    )
    assert main(["exec", "--timeout=100", "forks.py"]) == 1
    out, err = capfd.readouterr()
    assert f"status {status}\n" in out
    assert "took no step that can be found" in err
    assert ("gone" in err) == (given == "'gone'")


@pytest.mark.parametrize("how", [["script/ends.py"], ["-m", "ends"]], ids=" ".join)
def test_script_finds_the_modules_that_it_would_alone_and_ours_none_of_its(
    capfd: pytest.CaptureFixture[str], how: list[str]
) -> None:
    """Those of its own directory, by ``-m`` of the current one."""
    of_script, other = (Path("script"), Path()) if len(how) == 1 else (Path(), Path("script"))
    Path("script").mkdir()
    for name in ("json", "signal", "tempfile"):
        (other / f"{name}.py").write_text("raise SystemExit('not the one of the standard library')")
    (of_script / "statuses.py").write_text("STATUS = 7")
    (of_script / "ends.py").write_text("import json, statuses, sys; sys.exit(statuses.STATUS)")
    assert main(["exec", *how]) == 1
    assert "ended by itself with exit status 7, before any step" in capfd.readouterr().err


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("ends", "status", "words"),
    [
        ("--killed", 1, "the script was killed by SIGKILL after 2 counted step(s)\n"),
        pytest.param(
            *("--exits-at-once", 1, "the script ended with exit code 3 after 1 counted step(s)"),
            marks=pytest.mark.slow,
        ),
        ("--interrupted", 130, "but the steps that were counted before are kept\n"),
    ],
)
def test_what_was_counted_until_the_end_is_kept_however_it_comes(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends: str,
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr("dpbench.instruments.script.GRACE_SECONDS", 300)  # on a busy machine
    how = ["--instrument=timing", "--instrument=logical", "--steps=20", "--json=run.json"]
    if status == 1:
        how.remove("--instrument=logical")  # an interrupted script is not run once more
    assert main(["exec", *how, "training.py", ends]) == status
    assert words in capfd.readouterr().err
    kept = 1 if ends == "--exits-at-once" else 2  # it ends within what follows its second update
    assert len(rows("run.json", "step_time_seconds")["training", "step"]) == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "name a script, or a module with -m"),
        (
            ["--instrument=nsys", "training.py"],
            "nsys cannot measure a script: choose timing",
        ),
        (["--steps=0", "training.py"], "--skip is 3 and --steps is 0"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_script_runs(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["exec", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("processes_here")
def test_lines_that_hold_the_peak_of_memory_are_shown_saved_and_compared(
    capfd: pytest.CaptureFixture[str],
) -> None:
    exec_ = ["exec", "--instrument=logical", "--skip=1", "--steps=1", "--name=mine"]
    assert main([*exec_, "--json=before.json", "training.py", "--private"]) == 0
    shown = capfd.readouterr().out
    assert "mine: counted memory at the peak, " in shown
    assert "compute_linear_grad_sample" in shown
    # wider than the column, and not broken
    assert re.search(r"^opacus/grad_sample/grad_sample_module\.py:\d+ ", shown, re.M)
    lines = parsed(Path("before.json").read_bytes())["memory_lines"]
    [peak] = rows("before.json", "peak_memory_bytes")["mine", "step"]
    assert sum(line["held_bytes"] for line in lines) == peak
    weights = 4 * (256 * 512 + 512 + 512 * 16 + 16)
    samples = {line["line"]: line["held_bytes"] for line in lines if line["phase"] == "backward"}
    assert max(samples.values()) == 8 * weights  # a gradient for each of 8 examples

    grows = scripts.TRAINING.replace("for step in", "kept = []\nfor step in").replace(
        "    loss.backward()\n",
        "    kept.append(torch.ones(1000, 1000) * loss)\n    loss.backward()\n",
    )
    Path("training.py").write_text("# another line\n" + grows)
    assert main([*exec_, "--compare=before.json", "training.py", "--private"]) == 0
    most = capfd.readouterr().out.partition("What changed most:\n")[2].splitlines()
    lines = [line for line in most if line.startswith("  mine")]
    assert lines[0].startswith("  mine forward: aten.")
    of_memory = [line for line in lines if ": memory of " in line]
    assert of_memory[0].startswith("  mine forward: memory of training.py +")
    assert len(of_memory) <= 3
