"""``dpbench fit`` names the largest batch."""

from __future__ import annotations

import pytest

from dpbench.cli import main

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
