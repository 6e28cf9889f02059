"""Tests of metrics, trainers and workloads that a project adds to dpbench."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.commands.cli import main
from dpbench.core.gpu import Gpu
from dpbench.core.metrics import METRICS, Counters, Metric
from dpbench.core.registry import TRAINERS, WORKLOADS
from dpbench.results.schema import parsed
from tests.programs import program

TESTS = Path(__file__).parent
GRID1 = TESTS / "data/saved/grid1.json"
LDST = "l1tex__t_bytes_pipe_lsu_mem_global_op_{}.sum"
REPLAY = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import replay_ncu
sys.exit(replay_ncu.main())
"""
MEASURED = ["run", "--instrument=ncu", "--ncu-path=./ncu", "--model-size=tiny", "--batch-size=4"]
MEASURED += ["--seq-len=64", "--trainer=standard", "--trainer=dpsgd"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a directory with a replaying ``ncu``, as if the machine had a GPU."""
    program(tmp_path / "ncu", REPLAY)
    monkeypatch.chdir(tmp_path)
    gpus = [Gpu("GPU-0", "NVIDIA H200", None, "580.159.03")]
    monkeypatch.setattr("dpbench.core.gpu.visible_gpus", lambda: gpus)
    return tmp_path


@pytest.fixture
def saved(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Save a run with a metric that only its session registered; return the printed text."""
    with monkeypatch.context() as session:
        session.setattr(METRICS, "_known", dict(METRICS._known))
        session.setattr(METRICS, "_every", {})
        counters = Counters((LDST.format("ld"), LDST.format("st")))
        METRICS.register(Metric("global_bytes", "global\nboth", ("ncu",), counters))
        assert main([*MEASURED, "--save=own"]) == 0
    assert METRICS.find("global_bytes") is None
    return capsys.readouterr().out


def document() -> tuple[dict[str, Any], dict[tuple[str, str], float]]:
    """Return the saved run, and the values of its steps by trainer and metric."""
    [path] = Path(".dpbench").rglob("0001_own.json")
    document = parsed(path.read_bytes())
    steps = [row for row in document["rows"] if row["phase"] == "step"]
    return document, {(row["trainer"], row["metric"]): row["value"] for row in steps}


def test_a_registered_metric_of_counters_is_measured_and_shown(saved: str) -> None:
    _, values = document()
    for trainer in ("standard", "dpsgd"):
        both = values[trainer, "global_load_bytes"] + values[trainer, "global_store_bytes"]
        assert values[trainer, "global_bytes"] == both > 0
    assert {"global", "both"} <= {*saved.split()}


@pytest.mark.slow
def test_a_saved_run_contains_the_definitions_of_its_metrics(
    saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, values = document()
    assert main(["show", "1"]) == 0
    assert capsys.readouterr().out == saved
    assert main(["show", "1", "--columns=global_bytes,global_ratio", "--sort=global_ratio"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["both", "÷", "std"] in lines
    ratio = values["dpsgd", "global_bytes"] / values["standard", "global_bytes"]
    assert next(line[-1] for line in lines if line[:1] == ["dpsgd"]) == f"{ratio:.2f}"
    assert main(["show", "1", "--columns=global_ratio", "--expect=global_ratio:1-1.01"]) == 0
    said = "global both: above 1.01 × standard, the limit of --expect: dpsgd"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["show", str(GRID1), "--columns=global_bytes"]) == 2
    assert "'global_bytes'" in capsys.readouterr().err


@pytest.mark.slow
def test_runs_with_a_registered_metric_are_compared(
    saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, _ = document()
    for row in changed["rows"]:
        if (row["trainer"], row["metric"]) == ("dpsgd", "global_bytes"):
            row["value"] *= 1.1
    Path("more.json").write_text(json.dumps(changed))
    assert main(["compare", "1", "more.json"]) == 0
    assert "+10.00%" in capsys.readouterr().out
    for limit, code in (("global_bytes:5%", 1), ("global_ratio:5%", 1), ("global_bytes:11%", 0)):
        assert main(["compare", "1", "more.json", f"--fail={limit}"]) == code
    [own] = [metric for metric in changed["metrics"] if metric["name"] == "global_bytes"]
    own["how"]["names"].pop()
    Path("more.json").write_text(json.dumps(changed))
    capsys.readouterr()
    assert main(["compare", "1", "more.json"]) == 0
    assert "different from 0001_own: the definition of global_bytes" in capsys.readouterr().out


def test_metric_of_an_installed_package_is_known_to_every_command(tmp_path: Path) -> None:
    """Declare a sum of other metrics, which earlier runs therefore have, too."""
    (tmp_path / "ownmetrics.py").write_text(
        "from dpbench.core.metrics import Metric, Sum\n"
        "MOVED = Metric(\n"
        "    'dram_moved_bytes', 'DRAM\\nmoved', how=Sum(('dram_read_bytes', 'dram_write_bytes'))\n"
        ")\n"
    )
    installed = tmp_path / "ownmetrics-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ownmetrics\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[dpbench.metrics]\nmoved = ownmetrics:MOVED\n")

    show = ["show", str(GRID1), "--columns=dram_read_bytes,dram_write_bytes,dram_moved_bytes"]
    compare = ["compare", str(GRID1), str(GRID1), "--fail=dram_moved_ratio@backward:1%"]
    both = f"from dpbench.commands.cli import main; exit(main({show}) or main({compare}))"
    done = subprocess.run(
        [sys.executable, "-c", both],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    standard = next(line for line in done.stdout.splitlines() if line.startswith("standard"))
    read, write, moved = map(float, standard.split()[1:])
    assert moved == pytest.approx(read + write, abs=0.11)


TRAINED = """
from dpbench import DPSGDTrainer, Workload
from torch import nn
import torch

class Halving(DPSGDTrainer):
    '''Clips to a part of the threshold.'''

    def __init__(self, model, *, part=0.5, sign="+", **options):
        self.part, self.sign = part, sign
        super().__init__(model, **options)
        self.labels = {"clips": "flat" if part == 1 else "to a part", "sign": sign}

class Line(Workload):
    def __init__(self, *, width: int = 4):
        self.width = width

    def model(self):
        return nn.Linear(self.width, 1)

    def batches(self, batch_size):
        return [torch.ones(batch_size, self.width)]

    def losses(self, model, batch):
        return model(batch).square().mean(dim=1)
"""


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module with a trainer and a workload, both with parameters."""
    name = f"trained_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:8]}"
    (tmp_path / f"{name}.py").write_text(TRAINED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
    monkeypatch.setattr(WORKLOADS, "_targets", dict(WORKLOADS._targets))
    return name


@pytest.mark.usefixtures("counted_here")
def test_labels_and_parameters_of_trainer_and_workload_are_saved_and_shown(
    trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--instrument=logical", "--batch-size=4"]
    line += [f"--workload=Line={trained}:Line:width=6", f"--baseline={trained}:Halving:part=1"]
    halving = [f"--trainer={trained}:Halving{part}" for part in (":part=1", ":part=0.5,sign=x:y=z")]
    assert main(["run", *line, *halving, "--save=own"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    halved = "Halving:part=0.5,sign=x:y=z"
    assert f"Only {halved}: clips to a part. Only {halved}: sign x:y=z." in shown

    [path] = Path(".dpbench").rglob("0001_own.json")
    document = parsed(path.read_bytes())
    labels = {case["trainer"]: case["labels"] for case in document["cases"]}
    assert labels == {
        "Halving:part=1": {"clips": "flat", "sign": "+"},
        halved: {"clips": "to a part", "sign": "x:y=z"},
    }
    assert {(case["workload"], case["set"]) for case in document["cases"]} == {("Line", "width=6")}
    assert {row["trainer"] for row in document["ratios"]} == {halved}

    assert main(["show", "1"]) == 0
    assert f"Only {halved}: clips to a part." in " ".join(capsys.readouterr().out.split())
    without = {"cases": [{k: v for k, v in c.items() if k != "labels"} for c in document["cases"]]}
    Path("before.json").write_text(json.dumps(document | without))
    assert main(["show", "before.json"]) == 0
    assert "Only " not in capsys.readouterr().out
    assert main(["compare", "before.json", "1", "--fail=logical_bytes:1%"]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--trainer={}:Halving:parts=1"],
            "unknown parameter of trainer Halving 'parts'; choose from part, sign, clip, grad_",
        ),
        (
            ["--trainer=dpsgd", "--workload={}:Line:widths=1"],
            "unknown parameter of workload Line 'widths'; choose from width",
        ),
    ],
)
def test_an_unknown_parameter_is_refused_before_anything_is_measured(
    options: list[str], said: str, trained: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [option.format(trained) for option in options]
    assert main(["run", "--instrument=timing", "--device=cpu", "--batch-size=4", *named]) == 2
    assert said in capsys.readouterr().err
    assert not Path("ncu_reports").exists()
