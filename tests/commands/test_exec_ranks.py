"""``dpbench exec`` in each rank of a script, as torchrun starts them."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.child import script_ranks
from dpbench.child.script_ranks import Rank
from dpbench.commands.cli import main
from dpbench.core.errors import CaseFailed, CaseTimedOut, ConfigurationError, ScriptInterrupted
from dpbench.core.subject import Script
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.schema import parsed

UNCOLLECTED = """
import gc
gc.disable()  # a quarter of the time of imports is the collector's
"""

PRIVATE = f"""{UNCOLLECTED}
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DistributedDPOptimizer
from torch import distributed, nn

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
model = GradSampleModule(DifferentiallyPrivateDistributedDataParallel(model))
optimizer = DistributedDPOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    expected_batch_size=4,
)
for step in range(6):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
"""

HANGS = f"""{UNCOLLECTED}
import time

import torch
from torch import distributed

def read_batch():
    if distributed.get_rank() == 1:
        time.sleep(600)
    return torch.ones(1)

alive = open("alive", "w")  # until this process ends
distributed.init_process_group("gloo")
distributed.all_reduce(read_batch())
"""

EXEC = [sys.executable, "-m", "dpbench", "exec", "--instrument=timing", "--skip=1", "--steps=2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("private.py").write_text(PRIVATE)
    Path("hangs.py").write_text(HANGS)


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    command = [*launcher, "--standalone", *EXEC, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_torchruns_ranks_are_one_run_with_rows_by_rank() -> None:
    ended = torchrun("--batch-size=8", "--json=run.json", "private.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("batch 8, cpu: per step") == 1
    rows = parsed(Path("run.json").read_bytes())["rows"]
    steps = [row for row in rows if row["phase"] == STEP and row["unit"] == "s"]
    assert [(row["rank"], row["repeat"]) for row in steps] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {"clip", "noise"} < {row["phase"] for row in rows if row["rank"] == 1}
    rates = [row["value"] for row in rows if row["metric"] == "samples_per_second"]
    assert rates == [pytest.approx(4 / row["value"]) for row in steps]  # of 8 that all train


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_no_process_is_left() -> None:
    os.mkfifo("alive")
    alive = os.open("alive", os.O_RDONLY | os.O_NONBLOCK)
    for seconds in (6, 40, 200):  # in which both are where they stay; imports may take long
        ended = torchrun(f"--timeout={seconds}", "hangs.py")
        assert ended.returncode == 1
        if "was in read_batch" in ended.stderr:
            break
    line = rf"hangs: rank 1: did not finish within {seconds} s: was in read_batch \(hangs.py:12\)"
    assert re.search(line, ended.stderr), ended.stderr
    assert select.select([alive], [], [], 60)[0]
    assert os.read(alive, 1) == b""


def test_a_script_alone_that_hangs_says_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    Path("waits.py").write_text("import time\n\ndef load():\n    time.sleep(600)\n\nload()\n")
    assert main(["exec", "--instrument=timing", "--timeout=0.5", "waits.py"]) == 1
    assert "waits: did not finish within 0.5 s: was in load (waits.py:4)" in capfd.readouterr().err
    assert main(["exec", "--timeout=0", "waits.py"]) == 2
    assert "the time-out must be positive, not 0 s" in capfd.readouterr().err


# --- what the first rank makes of all --------------------------------------------------------

CASE = Script("train")


def outcome(*steps: float, **failure: str) -> Outcome:
    rows = [
        Measurement(CASE, "timing", STEP, "step_time_seconds", seconds, "s", repeat, "cpu", "torch")
        for repeat, seconds in enumerate(steps)
    ]
    return Outcome(CASE, tuple(rows), instruments=("timing",), **failure)  # type: ignore[arg-type]


def failed(message: str, kind: type[Exception] = CaseFailed) -> Outcome:
    return outcome(error=kind.__name__, message=message)


LOST = failed("train: the script failed with RuntimeError: [gloo/transport/tcp/pair.cc:553]")
INTERRUPTED = failed("interrupted", ScriptInterrupted)
LATE = failed("train: did not finish within 5 s: was in load (train.py:3)", CaseTimedOut)
LATE_FOR = failed(
    "train: did not finish within 5 s: waited for other ranks in f (a.py:1)", CaseTimedOut
)
RAISED = failed("train: the script failed with ValueError: the data is gone")


def gathered(folder: Path, *outcomes: Outcome | None) -> Outcome:
    first, *others = outcomes
    for number, other in enumerate(others, 1):
        if other:
            Rank(number, len(outcomes), folder).hand_over(other)
    assert first
    return Rank(0, len(outcomes), folder).gather(first)


def test_steps_that_some_ranks_did_not_take_do_not_count(tmp_path: Path) -> None:
    whole = gathered(tmp_path, outcome(1.0, 2.0, 3.0), outcome(1.5, 2.5))
    assert [(row.rank, row.value) for row in whole.rows] == [(0, 1), (0, 2), (1, 1.5), (1, 2.5)]
    assert whole.notes == (
        "the ranks took 3, 2 steps: only steps that every rank took are counted",
    )


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        ((LATE_FOR, LATE), "rank 1: did not finish within 5 s: was in load"),
        ((LOST, RAISED), "rank 1: the script failed with ValueError: the data is gone"),
        ((INTERRUPTED, outcome(1.0), RAISED), "rank 2: the script failed with ValueError"),
        ((INTERRUPTED, INTERRUPTED), "rank 0: interrupted"),
        ((outcome(1.0), None), "rank 1: it left no record of its steps"),
    ],
)
def test_the_rank_at_fault_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: tuple[Outcome | None, ...],
    message: str,
) -> None:
    monkeypatch.setattr(script_ranks, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(script_ranks, "CAUSE_SECONDS", 0.1)
    whole = gathered(tmp_path, *outcomes)
    assert whole.message.startswith(f"train: {message}")
    assert whole.error
    assert not whole.rows


def test_ranks_of_other_launchers_or_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(ConfigurationError, match="there are 16 ranks, which are on several"):
        Rank.here()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/tmp/attempt_0/3/error.json")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigurationError, match="there are 16 ranks, which are on several"):
        Rank.here()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "3")
    assert Rank.here() == Rank(3, 16, Path("/tmp/attempt_0"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["ncu"], "ncu supports one process only, and this is one of several"),
        (["timing", "logical"], "ranks run a script only once: choose one --instrument"),
    ],
)
def test_ranks_run_a_script_once_by_what_measures_each(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    names: list[str],
    words: str,
) -> None:
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}
    for name, value in (told | {"TORCHELASTIC_ERROR_FILE": "attempt_0/0/error.json"}).items():
        monkeypatch.setenv(name, value)
    chosen = [f"--instrument={name}" for name in names]
    assert main(["exec", *chosen, f"--ncu-path={sys.executable}", "private.py"]) == 2
    assert words in capsys.readouterr().err
