"""What leaves no reports needs no folder for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.schema import parsed

SIZE = ["--batch-size=2", "--seq-len=8", "--model-size=99x16x1x2", "--trainer=standard"]


@pytest.fixture(autouse=True)
def no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("ncu_reports", "runs"):  # even root cannot make a folder where a file is
        Path(name).touch()


def test_counting_and_timing_go_on() -> None:
    both = ["--instrument=logical", "--instrument=timing"]
    run = ["run", *both, "--device=cpu", "--active=1", *SIZE]
    assert main([*run, "--json=run.json"]) == 0
    assert parsed(Path("run.json").read_bytes())["rows"]


def test_what_leaves_files_is_refused_before_it_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--instrument=torch_profiler", "--device=cpu", *SIZE]) == 2
    assert "directory runs cannot be written" in capsys.readouterr().err
