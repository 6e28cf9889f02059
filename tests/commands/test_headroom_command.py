"""``dpbench headroom`` holds methods to a floor."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main

SMALL = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2"]


def test_methods_stand_below_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["headroom", *SMALL, "--trainer=standard", "--trainer=dpsgd"]) == 0
    lines = capsys.readouterr().out.splitlines()
    floor, standard, dpsgd = (
        next(line.split() for line in lines if line.startswith(name))
        for name in ("the floor", "standard", "dpsgd")
    )
    assert floor[3] == "1.00"
    assert float(standard[2]) < 1 < float(dpsgd[2])


@pytest.mark.usefixtures("counted_once")
def test_what_was_measured_stands_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    timed = ["run", "--instrument=timing", "--device=cpu", "--active=1", "--warmup=1"]
    assert main([*timed, *SMALL, "--trainer=standard", "--json=run.json"]) == 0
    capsys.readouterr()
    methods = ["--trainer=standard", "--trainer=dpsgd"]
    assert main(["headroom", "run.json", *SMALL, *methods]) == 0
    table = capsys.readouterr().out
    assert "run has nothing measured of dpsgd." in " ".join(table.split())
    assert " ms" in table


def test_a_method_that_cannot_be_counted_is_named_below_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["--trainer=dpsgd:grad_sample=ew", "--trainer=standard"]
    assert main(["headroom", *SMALL, *methods]) == 1
    table = " ".join(capsys.readouterr().out.split())
    assert " standard 0." in table
    assert "dpsgd:grad_sample=ew-bs2-seq8-99x16x1x2-fp32: counting logical bytes failed" in table


def test_a_method_that_nobody_named_may_lack_a_way_to_be_parallel(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = [*SMALL, "--parallel=fsdp2", "--gpus=2"]
    assert main(["headroom", *ranks]) == 0
    assert "LeanTrainer does not train under parallel=fsdp2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["headroom", *ranks, "--trainer=lean"]) == 1


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["headroom", "absent.json", *SMALL]) == 2
    assert "no run file absent.json" in capsys.readouterr().err


def test_where_a_private_method_moves_less_the_floor_is_said_to_be_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One example at a time needs no mask for each."""
    layer = ["--workload=layer", "--set=layer=mha", "--set=width=16", "--batch-size=4"]
    assert main(["headroom", *layer, "--trainer=micro_batch", "--trainer=dpsgd"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "micro_batch moves less: the floor is none here" in table
    assert "dpsgd moves less" not in table
