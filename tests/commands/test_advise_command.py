"""``dpbench advise`` says what to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.core.gpu import Gpu
from dpbench.core.subject import Script
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.run import Run
from tests.named import target
from tests.workloads.digits import Normalised

pytestmark = pytest.mark.usefixtures("counted_here")

SMALL = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]
METHODS = ["--trainer=dpsgd", "--trainer=dpsgd_fgc"]


def test_the_first_line_says_what_to_use_and_a_table_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["advise", *SMALL, *METHODS, "--gpu=h100"]) == 0
    first, _, title, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("Use `")
    assert title.startswith("99x16x1x2 fp32, batch 2, sequence 8, NVIDIA H100 80GB HBM3")
    table = [line for line in lines if line.startswith(("standard", "dpsgd"))]
    assert len(table) == 3, "the whole table fits in 100 columns"
    assert max(map(len, lines)) <= 100
    notes = " ".join(" ".join(lines).split())
    assert "Bytes, FLOP, launches and peak memory are counted." in notes
    assert "Launch is 25 µs (assumed, because no GPU is visible) of CPU time for each" in notes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu=h300"], "unknown card 'h300'; choose from a100-40gb"),
        (["--gpu=b200"], "the memory of NVIDIA B200 is unknown: add --memory"),
        (["--memory=80"], "write memory as 80GB or 80GiB, not as '80'"),
        (["--trainer=dpsdg"], "unknown trainer 'dpsdg'"),
        (["absent.json"], "no run file absent.json"),
        (["train.py"], "train.py is no saved run: measure a script with dpbench exec"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", *SMALL, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_method_that_was_named_and_refuses_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = [*SMALL, "--parallel=fsdp2", "--gpus=2", "--trainer=dpsgd_ghost"]
    assert main(["advise", *ranks]) == 0
    assert main(["advise", *ranks, "--trainer=dpsgd_fgc"]) == 1
    table = " ".join(capsys.readouterr().out.split())
    assert "dpsgd_fgc: DPFastGradientClippingTrainer does not train under parallel=fsdp2" in table


def test_other_workloads_have_no_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ["--workload=layer", "--set=layer=linear", "--set=width=16", "--memory=2GB"]
    assert main(["advise", *layer, "--trainer=dpsgd"]) == 0
    out = capsys.readouterr().out
    assert "sequence" not in out
    assert "with 2 GB" in out


@pytest.mark.slow
def test_the_card_here_is_asked_about_with_the_memory_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slice of a GPU has less memory than the card."""
    part = Gpu("GPU-0", "NVIDIA H100 80GB HBM3", 10 * 10**9, "580")
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [part])
    assert main(["advise", *SMALL, "--trainer=dpsgd"]) == 0
    assert "NVIDIA H100 80GB HBM3 with 10 GB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_saved_runs_cells_have_tables_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cases = [Case(name, size, 8, "99x16x1x2") for size in (2, 4) for name in ("standard", "dpsgd")]
    of_step = ("timing", STEP, "step_time_seconds", 0.1, "s", 0, "cpu", "torch")
    outcomes = [Outcome(case, (Measurement(case, *of_step),)) for case in cases]
    Path("run.json").write_text(Run.of("run", outcomes).text)
    assert main(["advise", "run.json", "--batch-size=4"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("Use `") == 1
    assert "measured" in shown
    assert main(["advise", "run.json", "--batch-size=8"]) == 2
    assert "run has no case" in capsys.readouterr().err


def test_a_saved_run_of_a_script_has_no_case_to_advise_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(Run.of("run", [Outcome(Script("mine"), ())]).text)
    assert main(["advise", "run.json"]) == 2
    assert "run is a run of a script, which is no case" in capsys.readouterr().err


def test_if_no_method_trains_a_model_the_first_line_says_what_to_change_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["--trainer=fused", "--trainer=micro_batch"]
    assert main(["advise", f"--workload={target(Normalised)}", "--batch-size=4", *methods]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("Change the model first: `fused`, `micro_batch` refuse: ")
    assert "use GroupNorm instead" in first
    assert first.endswith("As it is: No private method trains this case.")
    assert "GroupNorm" not in " ".join(others)
