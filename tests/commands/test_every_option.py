"""Options of ``dpbench`` that the other tests of its commands do not give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpbench.commands.cli import build_parser, main
from dpbench.core.gpu import Gpu
from dpbench.core.settings import Settings
from dpbench.results.schema import parsed
from dpbench.results.storage import Storage
from tests.programs import program

REPLAY = Path(__file__).parents[1] / "replay_ncu.py"
CELL = ["--batch-size=4", "--seq-len=64", "--model-size=tiny"]
AXES = ["--precision=bf16", "--attention=dp_mha", "--model=mine=outside:Model"]
CONFIGURATION = "tiny-bf16-dp_mha-mine"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another directory, with a replaying ``ncu`` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path("outside.py").touch()
    program(Path("ncu"), REPLAY)


def replayed_gpu(monkeypatch: pytest.MonkeyPatch, memory_bytes: int | None = None) -> None:
    """Let there be a GPU; of unknown memory, any case may fit it."""
    build_parser("run")  # a module that is first imported now would keep this GPU
    found = [Gpu("GPU-0", "NVIDIA H200", memory_bytes, "580.159.03")]
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: found)


@pytest.mark.slow
def test_run_counts_the_chosen_case_as_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed_gpu(monkeypatch)
    run = ["run", "--instrument=ncu", "--ncu-path=./ncu", "--trainer=dpsgd", *CELL, *AXES]
    kernels = ["--kernels-phase=clip"]
    how = ["--ncu-dir=deep", "--ncu-metrics=gld_throughput", "--ncu-warmup=2", "--ncu-active=4"]
    saved = ["--storage=kept", "--save=clip"]
    assert main([*run, *how, *kernels, *saved]) == 0
    folder = Path("deep") / CONFIGURATION
    task = json.loads((folder / "report_dpsgd_bs4_seq64.task.json").read_text())
    named = {"precision": "bf16", "attention": "dp_mha", "model": "mine=outside:Model"}
    assert named.items() <= task["case"].items()
    assert task["fields"]["steps"] == {"warmup": 2, "active": 4}
    log = (folder / "kernels/report_dpsgd_bs4_seq64.log").read_text()
    assert "--nvtx-include dpbench@0.clip" in log.splitlines()[0]
    [path] = Storage(Path("kept")).paths()
    assert path.name == "0001_clip.json"
    document = parsed(path.read_bytes())
    assert {row["metric"] for row in document["rows"] if row["instrument"] == "ncu"} == {
        "dram_read_bytes",
        "dram_write_bytes",
        "global_load_bytes",
    }
    assert {row["phase"] for row in document["kernels"]} == {"clip"}

    capsys.readouterr()
    assert main([*run, "--storage=kept", "--compare=1"]) == 0
    assert (
        "Change: tiny bf16, dp_mha, mine, batch 4, sequence 64, ncu on" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step", "--trainer=dpsgd", "--instrument=cupti", "--device=cpu"], "needs a GPU"),
        (["step", "--device=cpu"], "name a --trainer, or a --task"),
        (
            ["run", "--instrument=logical", "--json=run", "--markdown=./run"],
            "--json and --markdown name the same file, 'run'",
        ),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_doctor_looks_where_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Settings] = []
    monkeypatch.setattr(
        "dpbench.commands.doctor.examine", lambda setup: asked.append(setup) or iter(())
    )
    assert main(["doctor", "--ncu-dir=deep", "--timeout=7", "--ncu-path=./ncu", "--json"]) == 0
    assert asked == [Settings(ncu_dir=Path("deep"), own={"ncu_path": "./ncu"}, timeout=7.0)]
