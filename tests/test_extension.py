"""What a project adds to dpbench from outside the package, as CONTRIBUTING shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.cli import main
from dpbench.gpu import Gpu
from dpbench.metrics import METRICS, Counters, Metric
from tests.programs import program

TESTS = Path(__file__).parent
GRID1 = TESTS.parent / "docs/results/h200-grid1.json"
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
    """A directory with a replaying ``ncu``, on a machine with a GPU."""
    program(tmp_path / "ncu", REPLAY)
    monkeypatch.chdir(tmp_path)
    gpus = [Gpu("GPU-0", "NVIDIA H200", None, "580.159.03")]
    monkeypatch.setattr("dpbench.gpu.visible_gpus", lambda: gpus)
    return tmp_path


@pytest.fixture
def saved(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """A run with a metric that its session registered, and nobody knows after it; what it said."""
    with monkeypatch.context() as session:
        session.setattr(METRICS, "_known", dict(METRICS._known))
        session.setattr(METRICS, "_every", {})
        counters = Counters((LDST.format("ld"), LDST.format("st")))
        METRICS.register(Metric("global_bytes", "global\nboth", ("ncu",), counters))
        assert main([*MEASURED, "--save=own"]) == 0
    assert METRICS.find("global_bytes") is None
    return capsys.readouterr().out


def document() -> tuple[dict[str, Any], dict[tuple[str, str], float]]:
    """The saved run, and its values of whole steps by trainer and metric."""
    [path] = Path(".dpbench").rglob("0001_own.json")
    document = json.loads(path.read_text())
    steps = [row for row in document["rows"] if row["phase"] == "step"]
    return document, {(row["trainer"], row["metric"]): row["value"] for row in steps}


def test_metric_of_counters_is_one_line_and_shown_in_its_session(saved: str) -> None:
    _, values = document()
    for trainer in ("standard", "dpsgd"):
        both = values[trainer, "global_load_bytes"] + values[trainer, "global_store_bytes"]
        assert values[trainer, "global_bytes"] == both > 0
    assert {"global", "both"} <= {*saved.split()}


def test_saved_run_says_what_its_metrics_are(
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
    said = "global both: expected range 1 to 1.01 x standard; outside: dpsgd"
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["show", str(GRID1), "--columns=global_bytes"]) == 2
    assert "'global_bytes'" in capsys.readouterr().err


def test_runs_with_it_are_compared(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "Different from 0001_own: what global_bytes is" in capsys.readouterr().out


def test_metric_of_an_installed_package_is_known_to_every_command(tmp_path: Path) -> None:
    """It is a sum of others, so runs that were saved before it was declared have it, too."""
    (tmp_path / "ownmetrics.py").write_text(
        "from dpbench.metrics import Metric, Sum\n"
        "MOVED = Metric(\n"
        "    'l2_moved_bytes', 'L2\\nmoved', how=Sum(('l2_read_bytes', 'l2_write_bytes'))\n"
        ")\n"
    )
    installed = tmp_path / "ownmetrics-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ownmetrics\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[dpbench.metrics]\nmoved = ownmetrics:MOVED\n")

    show = ["show", str(GRID1), "--columns=l2_read_bytes,l2_write_bytes,l2_moved_bytes"]
    compare = ["compare", str(GRID1), str(GRID1), "--fail=l2_moved_ratio@backward:1%"]
    both = f"import sys; from dpbench.cli import main; sys.exit(main({show}) or main({compare}))"
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
