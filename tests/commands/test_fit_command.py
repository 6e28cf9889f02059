"""``dpbench fit`` names the largest batch."""

from __future__ import annotations

import os
import subprocess
import sys
import termios
from contextlib import closing

import pytest

from dpbench.commands.cli import main
from dpbench.core.gpu import Gpu

SMALL = ["fit", "--seq-len=64", "--model-size=2000x64x1x2"]


def test_each_trainer_and_number_of_parts_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["--trainer=dpsgd", "--micro-batches=1", "--micro-batches=4"]
    assert main([*SMALL, "--memory=1.52GB", *parts]) == 0
    table = capsys.readouterr().out
    lines = [line.split() for line in table.splitlines() if line.startswith("dpsgd")]
    batches = {int(parts): int(batch) for _, parts, batch, *_ in lines}
    assert batches[4] > batches[1] > 1
    assert "Counted, not measured" in table


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu=h300"], "unknown card 'h300'"),
        (["--gpu=b200"], "the memory of NVIDIA B200 is not known: give --memory"),
        (["--memory=80"], "memory is e.g. 80GB or 80GiB, not '80'"),
        (["--memory=80GB", "--trainer=dpsdg"], "unknown trainer 'dpsdg'"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    assert said in capsys.readouterr().err


def test_what_does_not_fit_at_all_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--memory=1GB", "--trainer=standard"]) == 0
    assert "not even one example" in capsys.readouterr().out


def test_the_title_says_the_length_of_sequences_if_there_are_any(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--memory=1GB", "--trainer=standard"]) == 0
    assert "2000x64x1x2-fp32, sequence 64, 1GB: the largest" in capsys.readouterr().out
    layer = ["fit", "--workload=layer", "--set=layer=linear", "--set=width=16", "--memory=1GB"]
    assert main([*layer, "--trainer=standard"]) == 0
    assert "sequence" not in capsys.readouterr().out


def test_a_batch_beyond_which_none_was_tried_is_no_largest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--memory=900GB", "--trainer=standard"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "standard 1 ≥ 4096" in table
    assert "4096 fits too, and larger ones were not tried" in table


def test_a_slice_of_a_gpu_is_filled_and_not_the_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What NVML says of a slice: see `tests/test_gpu.py`."""
    part = Gpu("GPU-0", "NVIDIA A100", 10 * 10**9, "580")
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: [part])
    assert main([*SMALL, "--trainer=standard"]) == 0
    assert "NVIDIA A100 with 10 GB" in capsys.readouterr().out


def test_a_terminal_shows_which_batch_is_tried() -> None:
    terminal, shown = os.openpty()
    termios.tcsetwinsize(shown, (24, 120))
    command = [sys.executable, "-m", "dpbench", *SMALL, "--memory=1.52GB", "--trainer=standard"]
    with closing(os.fdopen(terminal, "rb", buffering=0)) as screen:
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=shown, timeout=120, check=True)
        os.set_blocking(terminal, False)
        text = screen.read().decode()
    os.close(shown)
    assert "standard-bs1-seq64-2000x64x1x2-fp32" in text
    assert "1/1" in text
