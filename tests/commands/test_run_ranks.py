"""``dpbench run`` of cases of several GPUs, beside those of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.rows import STEP
from dpbench.results.schema import parsed

RUN = ["run", "--seq-len=8", "--model-size=99x16x1x2", "--batch-size=4", "--trainer=standard"]
READ_AND_WRITTEN = ("logical_read_bytes", "logical_write_bytes")
BOTH = ["--parallel=none", "--parallel=ddp", "--gpus=1", "--gpus=2"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("counted_here")
def test_several_gpus_are_shown_beside_one_with_the_same_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logical = [*RUN, *BOTH, "--instrument=logical"]
    assert main([*logical, "--trainer=dpsgd", "--json=run.json"]) == 0
    captured = capsys.readouterr()
    assert "left out: parallel=none with gpus=2, parallel=ddp with gpus=1" in captured.err
    table = captured.out.partition("÷ one GPU, same batch")[2]
    moved = Counter[int]()
    for row in parsed(Path("run.json").read_bytes())["rows"]:
        if (row["trainer"], row["phase"]) == ("dpsgd", STEP) and row["metric"] in READ_AND_WRITTEN:
            moved[row["gpus"]] += row["value"]
    line = next(line for line in table.splitlines() if line.startswith("dpsgd "))
    assert line.split()[1] == f"{moved[2] / moved[1]:.2f}"
    assert main([*logical, "--columns=logical_over_one_gpu"]) == 0
    assert "÷ one GPU" in capsys.readouterr().out


@pytest.mark.parametrize("instrument", ["logical", pytest.param("timing", marks=pytest.mark.slow)])
def test_a_parameter_with_fewer_rows_than_ranks_is_named(
    instrument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counted and for real alike: Opacus's noise for all shards cannot be added to its shards."""
    ghost = ["--trainer=dpsgd_ghost", "--trainer=fused", "--parallel=fsdp2", "--gpus=2"]
    command = [*RUN[:2], "--model-size=1x8x1x2", "--batch-size=4", f"--instrument={instrument}"]
    assert main([*command, "--device=cpu", "--active=1", *ghost, "--json=run.json"]) == 1
    cases = parsed(Path("run.json").read_bytes())["cases"]
    refused, trained = sorted(cases, key=lambda case: str(case["trainer"]))
    assert "noise to token_embedding.weight, which has only 1 row for 2 ranks" in refused["message"]
    assert "\n" not in refused["message"]
    assert not trained["error"]
