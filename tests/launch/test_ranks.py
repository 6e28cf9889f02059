"""Cases of several ranks, for real: gloo, on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import signal
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from dpbench.child.case import with_gpus_locked
from dpbench.child.messages import Steps
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.gpu import Gpu
from dpbench.core.registry import resolve
from dpbench.core.settings import Settings
from dpbench.instruments.timing import Timing
from dpbench.launch.case_process import CaseProcess
from dpbench.launch.ranks import check_backend, on_all_ranks
from dpbench.results.rows import STEP
from dpbench.runner import measure
from dpbench.session import Session
from tests.launch.failing_ranks import Uneven

FAILING = "tests.launch.failing_ranks"


def ranks(trainer: str, parallel: str = "ddp", gpus: int = 2) -> Case:
    return Case(
        trainer, batch_size=4, seq_len=8, model_size="16x8x1x2", parallel=parallel, gpus=gpus
    )


def timing(directory: Path) -> Timing:
    return Timing(directory, device="cpu", steps=Steps(0, 1), timeout=120)


def failing(trainer: str, directory: Path) -> CaseProcess:
    return timing(directory).start(resolve(ranks(f"{FAILING}:{trainer}")))


def test_each_rank_has_rows_of_its_own(tmp_path: Path) -> None:
    running = timing(tmp_path).start(ranks("dpsgd_ghost", "fsdp2"))
    rows = running.outcome().rows
    assert {row.rank for row in rows} == {0, 1}
    assert [row.rank for row in rows if (row.phase, row.unit) == (STEP, "s")] == [0, 1]


def test_ranks_take_as_many_steps_as_the_one_that_wants_most(tmp_path: Path) -> None:
    uneven = Uneven(tmp_path, device="cpu", steps=Steps(0, 2), timeout=120)
    rows = uneven.measure(ranks("standard")).rows
    assert [(row.rank, row.value) for row in rows] == [(0, 4), (1, 5)]


def test_a_refusal_is_one_line_that_names_the_rank(tmp_path: Path) -> None:
    running = timing(tmp_path).start(ranks("dpsgd", "fsdp2"))
    message = running.outcome().message
    assert re.search(r"rank \d: DPSGDTrainer does not train .*fsdp2", message)


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("trainer", "line"),
    [
        ("Killed", "rank 1: killed by SIGKILL"),
        ("Exits", "rank 1: ended with exit code 3"),
        ("Leaves", "rank 1: the trainer exited with status 0"),
        ("Vanishes", "rank 0: lost the connection to another rank (RuntimeError: "),
        ("Raises", "rank 1: ValueError: the loss is not finite"),
        ("FillsMemory", "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_the_rank_that_failed_is_named(tmp_path: Path, trainer: str, line: str) -> None:
    running = failing(trainer, tmp_path)
    outcome = running.outcome()
    assert (outcome.error == "CaseOutOfMemory") == (trainer == "FillsMemory")
    message = outcome.message.removeprefix(f"{running.case.id}: ")
    assert message.startswith(line)
    assert "\n" not in message
    log = running.log.read_text()
    assert "elastic/multiprocessing/api.py:" not in log.replace("in _wrap", "")
    assert ('raise ValueError("the loss is not finite' in log) == (trainer == "Raises")


@pytest.fixture
def alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """What can be read once no rank of `Waits` is left."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("alive")
    return os.open("alive", os.O_RDONLY | os.O_NONBLOCK)


def in_its_step(running: CaseProcess) -> None:
    """Wait until both ranks are where they stay; they are in the group that the guard ends."""
    for rank in (0, 1):
        while not (path := Path(f"group{rank}")).exists() or not path.read_text():
            assert running.group.process.poll() is None, running.log.read_text()
            time.sleep(0.05)
        assert int(path.read_text()) == running.group.process.pid
    time.sleep(1)


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("trainer", "was"),
    [("Waits", r"was in fail \(failing_ranks.py:\d+\)"), ("Returns", "had finished its steps")],
)
def test_ranks_that_hang_say_where_they_were(
    tmp_path: Path, alive: int, trainer: str, was: str
) -> None:
    running = failing(trainer, tmp_path)
    in_its_step(running)
    running.timeout = 1
    other = r"rank 0 waited for other ranks in train_step \(standard.py:\d+\)"
    outcome = running.outcome()
    assert outcome.error == "CaseTimedOut"
    assert re.search(f"within 1 s: rank 1 {was}; {other};", outcome.message)
    assert select.select([alive], [], [], 60)[0]


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path, alive: int) -> None:
    running = failing("Waits", tmp_path)
    in_its_step(running)
    os.kill(running.group.process.pid, signal.SIGKILL)
    assert "the process was killed by SIGKILL" in running.outcome().message
    assert select.select([alive], [], [], 60)[0]


def work(case: Case) -> dict[str, float]:
    return {"sum": float(torch.ones(1_000_000).exp().sum())}


def test_ranks_of_a_process_that_has_trained_leave_it_as_it_was() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    environment = dict(os.environ)
    try:
        expected = work(ranks("standard"))  # starts threads that no fork has
        results = on_all_ranks(work, ranks("standard"), "cpu")
    finally:
        torch.set_num_threads(threads)
    assert [each["sum"] for each in results] == [pytest.approx(expected["sum"])] * 2
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers
    assert dict(os.environ) == environment


def inherits(case: Case) -> dict[str, bool]:
    return {"fork": hasattr(sys, "inherited")}


@pytest.mark.repeats
@pytest.mark.parametrize("poisoned", [False, True])
def test_ranks_are_no_forks_of_a_process_whose_forks_cannot_use_cuda(
    poisoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: poisoned)
    monkeypatch.setattr(sys, "inherited", True, raising=False)
    results = on_all_ranks(inherits, ranks("standard"), "cpu")
    assert [each["fork"] for each in results] == [not poisoned] * 2


# --- several GPUs ----------------------------------------------------------------------------


@pytest.mark.parametrize(("parallel", "gpus"), [("none", 2), ("ddp", 1)])
def test_several_gpus_need_a_way_to_share(parallel: str, gpus: int) -> None:
    with pytest.raises(ConfigurationError, match="parallel=ddp or fsdp2"):
        ranks("standard", parallel, gpus)


def test_the_batch_is_that_of_all_ranks() -> None:
    with pytest.raises(ConfigurationError, match=r"shared by 3 GPUs, .* choose a multiple of 3"):
        ranks("standard", gpus=3)


def test_what_cannot_measure_several_gpus_says_so_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "visible_gpus", list)
    monkeypatch.setenv(gpu.SESSION_GPUS, "GPU-0")
    one = measure(ranks("standard"), [replace(timing(tmp_path), device="cuda")])
    assert one.message.endswith(
        "but 1 can be used here; --instrument logical counts one rank without a GPU"
    )

    class Single(Timing):
        by_rank = False

    single = measure(ranks("standard"), [Single(tmp_path, device="cpu")])
    assert single.message.startswith("timing supports one process only, and standard-bs4")
    assert single.message.endswith("choose timing, cupti, logical or torch_profiler")
    plan = [(ranks("standard"), Single(tmp_path, device="cpu"))]
    refused = pytest.raises(ConfigurationError, match="timing supports one process only")
    with closing(Session(plan, Settings(directory=tmp_path))) as session, refused:
        session.begin()
    assert not [*tmp_path.iterdir()]


def test_a_case_of_several_gpus_sees_those_that_follow_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2")
    monkeypatch.setenv(gpu.SESSION_GPUS, "GPU-0,GPU-1,GPU-2")
    running = timing(tmp_path).start(ranks("standard"))
    running.cancel()
    assert "CUDA_VISIBLE_DEVICES=GPU-2,GPU-0 " in running.log.read_text().partition("\n")[0]


@pytest.mark.skipif(distributed.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_pytorch_without_the_library_for_collectives_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"ranks on cuda need nccl, but torch .* was built without nccl"
    ):
        check_backend(torch.device("cuda"))


def take_both(order: list[int], done: Path) -> None:
    cards = [Gpu(f"GPU-{number}", "NVIDIA H200", None, "580") for number in order]
    gpu.visible_gpus = lambda: cards
    for _ in range(20):
        with with_gpus_locked(torch.device("cuda"), "a case", 2):
            done.write_text("alone")
            time.sleep(0.01)
            assert done.read_text() == "alone"
            done.write_text("")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sessions_on_the_same_gpus_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    start = multiprocessing.get_context("fork").Process
    both = [start(target=take_both, args=(o, tmp_path / "now")) for o in ([0, 1], [1, 0])]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in both] == [0, 0]
