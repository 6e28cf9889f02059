"""The ``dpbench`` command, as a person types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench import __version__
from dpbench.commands.cli import COMMANDS, main
from dpbench.core.case import Case
from dpbench.instruments.ncu.report import write_description
from tests.programs import program

DATA = Path(__file__).parents[1] / "data" / "tiny-fp32"
TINY = ["--model-size", "tiny", "--batch-size", "4", "--seq-len", "16"]

PATIENCE = 300
"""Seconds after which what should have happened will not; on a busy machine all takes long."""

OUTSIDE = """
import time
from dpbench import StandardTrainer, SimpleBigModel, phase

class Doubling(StandardTrainer):
    def train_step(self, batch):
        super().train_step(batch)
        return super().train_step(batch)

class Drifting(StandardTrainer):
    def train_step(self, batch):
        for parameter in self.model.parameters():
            parameter.data += 1
        return parameter.sum()

class Crashing(StandardTrainer):
    def train_step(self, batch):
        raise RuntimeError("the clipping kernel fell over")

class Hanging(StandardTrainer):
    def train_step(self, batch):
        time.sleep(100)

class Greedy(StandardTrainer):
    def train_step(self, batch):
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 61.04 GiB.")

class NarrowModel(SimpleBigModel):
    pass
"""


NCU = f"""
# Replays a recorded run; trainers that fail do so as ncu and the process under it would.
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import replay_ncu

command = " ".join(sys.argv)
if "Crashing" in command:
    sys.exit(1)
if "Hanging" in command:
    print("dpbench: measuring", flush=True)
    time.sleep(100)
if "Greedy" in command:
    print("torch.OutOfMemoryError: CUDA out of memory.")
    sys.exit(9)
sys.exit(replay_ncu.main())
"""
REPLAYED = ["run", "--instrument=ncu", "--ncu-path=./ncu", "--json=run.json"]
REPLAYED += ["--model-size=tiny", "--batch-size=4", "--seq-len=64"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another directory, with an outside module of trainers and a replaying ``ncu`` in it."""
    (tmp_path / "outside.py").write_text(OUTSIDE)
    program(tmp_path / "ncu", NCU)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("outside", None)


def test_smoke_says_which_trainers_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "standard: [TEST OK] StandardTrainer passed local test.",
        "dpsgd: [TEST OK] DPSGDTrainer passed local test.",
        "dpsgd_ghost: [TEST OK] DPGhostClippingTrainer passed local test.",
        "dpsgd_fgc: [TEST OK] DPFastGradientClippingTrainer passed local test.",
        "micro_batch: [TEST OK] MicroBatchTrainer passed local test.",
        "fused: [TEST OK] FusedTrainer passed local test.",
    ]


def test_smoke_fails_when_a_trainer_does(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["smoke", "--trainer", "standard", "--trainer", "outside:Crashing"]) == 1
    shown = capsys.readouterr().out
    assert "standard: [TEST OK] " in shown
    assert "[TEST FAILED] Crashing: RuntimeError: the clipping kernel fell over" in shown


def test_smoke_refuses_ranks_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "--parallel", "ddp", "--gpus", "2"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(
        "dpbench smoke: smoke trains in one process: for several ranks, use dpbench verify"
    )


def test_smoke_says_in_a_line_what_a_trainers_module_could_not_import(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lacking.py").write_text("import missing_library\n")
    assert main(["smoke", "--trainer", "lacking:Mine"]) == 1
    assert capsys.readouterr().out == (
        "lacking:Mine: [TEST FAILED] Mine: ModuleNotFoundError: No module named 'missing_library' "
        "(lacking.py:1: import missing_library)\n"
    )


def test_step_prints_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "--device=cpu", "--warmup=1", "--active=2"]
    assert main(["step", "--trainer=dpsgd", *options]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["case"]["trainer"] == "dpsgd"
    assert record["details"]["parameters"] == 293_632
    assert len(record["details"]["phase_seconds"]) == 2
    assert set(record["details"]["phase_seconds"][0]) >= {
        "forward",
        "backward",
        "clip",
        "noise",
        "optimizer",
    }


def test_a_step_that_fails_says_why_in_its_record(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*TINY, "--device=cpu", "--warmup=0", "--active=1"]
    with pytest.raises(RuntimeError):
        main(["step", "--trainer=outside:Crashing", *options])
    message = "RuntimeError: the clipping kernel fell over "
    message += '(outside.py:18: raise RuntimeError("the clipping kernel fell over"))'
    record = json.loads(capsys.readouterr().out)
    assert (record["error"], record["message"]) == ("CaseFailed", message)
    assert main(["step", "--trainer=outside:Greedy", *options]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["error"] == "CaseOutOfMemory"
    assert record["message"].startswith("CUDA out of memory. Tried to allocate 61.04 GiB.; use a")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step", "--trainer", "sgd"], "unknown trainer 'sgd'; choose from standard, dpsgd"),
        (["step", "--trainer", "dpsgd", "--precision", "int8"], "choose from fp32, tf32, bf16"),
        (["step", "--trainer", "dpsgd", "--batch-size", "0"], "batch size must be a positive"),
        (["step", "--trainer", "dpsgd", "--model-size", "10x10x1x3"], "not divisible by heads 3"),
        (["step", "--trainer", "json:Nothing"], "unknown class of json 'Nothing'"),
        (["run", "--grid", "grid9"], "unknown grid 'grid9'; choose from grid1, grid2"),
        (["run", "--instrument", "ncu", "--ncu-metrics", "dram"], "unknown metric 'dram'"),
        (
            ["run", "--trainer", "no.such:Absent"],
            "no module named 'no'; run in the module's directory",
        ),
        (["run", "--ncu-path", "/nowhere/ncu"], "no program '/nowhere/ncu'"),
        (["run", "--ncu-path", "/nowhere/ncu", "--kernels-phase", "x"], "unknown phase 'x'"),
        (["run", "--instrument", "timing"], "no CUDA GPU is visible"),
        (["run", "--timeout", "-1", "--ncu-path", sys.executable], "time-out must be positive"),
        (["run", "--instrument", "logical", "--json", "/"], "is a directory; name a file"),
        (["step", "--trainer", "dpsgd", "--active", "0"], "active >= 1"),
        (["step", "--trainer", "dpsgd", "--batch-size", str(10**20)], "below 2^31"),
        (["run", "--instrument", "logical", "--top", "0"], "must be at least 1, not 0"),
        (["run", "--instrument", "logical", "--save", ""], "run name '' must be made of"),
        (["run", "--instrument", "logical", "--save", "a", "--autosave"], "omit --save"),
        (["run", "--instrument", "logical", "--profile-schedule", "foo=1"], "'foo'"),
        (["list", "--storage", __file__], "Not a directory"),
        (
            ["show", "absent.json"],
            "no run file absent.json, and no run of that name in .dpbench; dpbench list shows",
        ),
        (["show", "7", "--storage", "absent"], "no run number 0007 in absent; it has no runs"),
        (["show", "9" * 5000], "File name too long"),
        (["show", __file__, "--html", __file__], "and --html name the same file, 'test_cli.py'"),
        (["show", "nothing.ncu-rep"], "nothing.ncu-rep: no such file"),
    ],
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(arguments) in (1, 2)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1
    assert shown[0].startswith(f"dpbench {arguments[0]}: ")
    assert words in shown[0]


def test_show_needs_no_class_for_the_names_in_a_report(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = elsewhere / "tiny-fp32-narrow"
    folder.mkdir()
    report = folder / "report_twice_bs4_seq16.ncu-rep"
    report.write_bytes((DATA / "report_standard_bs4_seq64.ncu-rep").read_bytes())
    write_description(report, Case("twice", 4, 16, "tiny", model="narrow"), {})
    assert main(["show", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "twice" in shown
    assert "narrow" in shown


def test_two_reports_of_one_case_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their rows would add up to twice the bytes."""
    report = DATA / "report_dpsgd_bs4_seq64.ncu-rep"
    assert main(["show", str(report), str(report)]) == 2
    assert "have the same case" in capsys.readouterr().err


def test_reports_without_their_cases_are_shown_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for trainer in ("standard", "dpsgd"):
        recorded = DATA / f"report_{trainer}_bs4_seq64.ncu-rep"
        Path(f"{trainer}.ncu-rep").write_bytes(recorded.read_bytes())
    assert main(["show", "standard.ncu-rep", "dpsgd.ncu-rep"]) == 0
    shown = capsys.readouterr().out
    assert "standard.ncu-rep " in shown
    assert "dpsgd.ncu-rep " in shown
    assert "NVIDIA H200: MB per step" in shown


def test_the_installed_command_finds_a_trainer_in_the_current_directory_but_no_library(
    elsewhere: Path,
) -> None:
    for library in ("pandas", "json", "torch"):
        (elsewhere / f"{library}.py").write_text("raise SystemExit('taken for a library')")
    command = Path(sys.executable).with_name("dpbench")
    smoke = subprocess.run(
        [command, "smoke", "--trainer", "outside:Drifting"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert smoke.stdout == "outside:Drifting: [TEST OK] Drifting passed local test.\n", smoke.stderr


def test_show_prints_tables_from_saved_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", *map(str, sorted(DATA.glob("*.ncu-rep")))]) == 0
    shown = capsys.readouterr().out
    assert "tiny fp32, batch 4, sequence 64, NVIDIA H200: MB per step" in shown
    assert shown.index("standard ") < shown.index("dpsgd ")
    assert "WARNING: at this size much of the data stays in the L2 cache" in shown


def test_every_help_has_examples_and_a_short_one_fits_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(command: str, option: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main([command, option])
        return capsys.readouterr().out

    for command in COMMANDS:
        assert f"dpbench {command}" in shown(command, "--help").partition("Examples:")[2]
    for command in ("run", "exec", "show"):
        short, whole = shown(command, "--help"), shown(command, "--help-all")
        assert len(short.splitlines()) <= 66
        assert "--help-all" in short
        assert "--storage" in whole
        assert "--storage" not in short
        options = re.findall(r"^  (--[a-z-]+)", short, re.MULTILINE)
        assert len(options) >= 7
        assert command != "exec" or {"--name", "--json"} <= {*options}  # README's first commands
        assert all(f"  {option}" in whole for option in options)


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"dpbench {__version__}\n"


def test_help_names_every_command_and_imports_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.commands.cli.import_module", None)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "List the saved runs" in shown
    assert all(f"\n    {command} " in shown for command in COMMANDS)
