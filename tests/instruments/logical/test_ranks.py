"""Counts of one rank equal those of real gloo ranks, and closed forms."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg

from dpbench.child.build import build
from dpbench.core.case import MODEL_SIZES, Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.registry import TRAINERS
from dpbench.instruments.logical import one_rank, rules
from dpbench.instruments.logical.counter import RealTensorCounter, without_data
from dpbench.instruments.logical.logical import Counting, Logical
from dpbench.instruments.logical.memory import track_resizing
from dpbench.instruments.logical.recorder import freeze_existing_objects
from dpbench.results.gate import Gate
from dpbench.results.kernels import OperatorCount
from dpbench.results.limits import Limit
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP
from dpbench.results.run import Run
from dpbench.results.schema import parsed
from dpbench.training.phases import observed_step
from dpbench.workloads.transformer import SimpleBigModel
from tests.instruments.logical.cases import count, totals
from tests.instruments.logical.ranks import (
    PAIRS,
    Alive,
    DrawsAll,
    Heards,
    Noisy,
    ReducesTwice,
    case_of,
)
from tests.results.figures import tables_of
from tests.results.verdicts import failures

F32 = 4


def between_ranks(operators: Any) -> set[OperatorCount]:
    """The counts of collectives, and of FSDP2's copies for them."""
    spaces = ("c10d.", "_c10d_functional.", "fsdp.")
    return {each for each in operators if each.operator.startswith(spaces)}


def sent(outcome: Outcome) -> dict[str, float]:
    """The bytes that a rank sends, by phase."""
    return {row.phase: row.value for row in outcome.rows if row.metric == "collective_bytes"}


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_count_is_what_ranks_do(
    pair: tuple[str, str], gpus: int, heard: Callable[[int], Heards]
) -> None:
    counted = count(case_of(*pair, gpus))
    assert between_ranks(counted.operators)
    for rank in heard(gpus):
        outcome = rank[PAIRS.index(pair)]
        assert sent(outcome) == sent(counted)
        assert between_ranks(outcome.operators) == between_ranks(counted.operators)


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_buckets_are_copied_as_ddp_does(gpus: int, heard: Callable[[int], Heards]) -> None:
    def of_backward(outcome: Outcome) -> set[OperatorCount]:
        return {each for each in outcome.operators if each.phase == "backward"}

    counted = count(case_of("standard", "ddp", gpus))
    assert of_backward(heard(gpus)[0][0]) == of_backward(counted)
    reduced = next(each for each in counted.operators if each.operator == "c10d.allreduce_")
    assert reduced.calls == 2


def peak_of(case: Case) -> float:
    """The counted peak of live bytes in a step."""
    rows = count(case).rows
    return next(r.value for r in rows if (r.phase, r.metric) == (STEP, "peak_memory_bytes"))


@pytest.mark.repeats
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if "ddp" in pair], ids="-".join)
def test_a_replica_holds_as_much_as_counted(
    pair: tuple[str, str], heard: Callable[[int], Heards]
) -> None:
    (peak,) = heard(2)[0][PAIRS.index(pair)].notes
    assert int(peak) == pytest.approx(peak_of(case_of(*pair, 2)), rel=0.005)


@pytest.mark.repeats
@pytest.mark.parametrize("trainer", ["standard", "dpsgd_ghost"])
def test_shards_of_tensors_with_data_take_as_much(trainer: str) -> None:
    """Compare loosely: gloo's threads free gathered tensors at varying times."""
    case, alive = case_of(trainer), Alive()
    with (
        freeze_existing_objects(),
        one_rank.fake_process_group(case.gpus),
        alive,
        track_resizing(alive.memory),
    ):
        taught, batches = build(case, torch.device("cpu"), 2)
        for batch in batches:
            gc.collect()
            alive.memory.peak = alive.memory.now
            taught.train_step(batch)
    assert alive.memory.peak == pytest.approx(peak_of(case), rel=0.005)


def padded(shapes: list[torch.Size], ranks: int) -> int:
    """Bytes of float32 parameters, padded to equal numbers of rows per rank."""
    return sum(-(-shape[0] // ranks) * ranks * shape[1:].numel() * F32 for shape in shapes)


@pytest.mark.parametrize(
    ("size", "ranks"), [("small", 64), pytest.param("1b", 1024, marks=pytest.mark.slow)]
)
def test_fsdp_sends_what_arithmetic_says_of_any_number_of_ranks(size: str, ranks: int) -> None:
    with torch.device("meta"):
        model = SimpleBigModel(MODEL_SIZES[size])
    every = [parameter.shape for parameter in model.parameters()]
    blocks = [parameter.shape for parameter in model.blocks.parameters()]
    started = time.process_time()
    outcome = count(case_of(model_size=size, gpus=ranks, batch_size=4 * ranks, seq_len=256))
    assert time.process_time() - started < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8e9
    moved = Counter[tuple[str, str]]()
    for each in outcome.operators:
        moved[each.phase, each.operator] += each.collective_bytes
    gathered, again = (moved[phase, "c10d._allgather_base_"] for phase in ("forward", "backward"))
    reduced = moved["backward", "c10d._reduce_scatter_base_"]
    assert gathered == reduced == padded(every, ranks) * (ranks - 1) // ranks
    assert again == padded(blocks, ranks) * (ranks - 1) // ranks


def test_an_optimizer_passes_over_the_rank_s_part_only() -> None:
    with one_rank.fake_process_group(64), without_data() as counter:
        layer = nn.Linear(64, 64, bias=False)
        fully_shard(layer, mesh=init_device_mesh("cpu", (64,)))
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        layer(torch.empty(2, 64)).sum().backward()
        with observed_step(counter):  # the first: DTensor propagates shapes
            optimizer.step()
    moved = [(each.read_bytes, each.write_bytes) for each in counter.operators]
    assert moved == [(2 * 64 * F32, 64 * F32)]


class Normed(nn.Module):
    """A model with buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def test_buffers_are_sent_before_each_forward() -> None:
    with one_rank.fake_process_group(2), without_data() as counter:
        model = nn.parallel.DistributedDataParallel(Normed())
        with observed_step(counter):
            model(torch.empty(3, 6))
            with model.no_sync():
                model(torch.empty(3, 6)).sum().backward()
    moved = {each.operator: each for each in counter.operators}
    assert moved["c10d.broadcast_"].calls == 2
    assert moved["c10d.broadcast_"].collective_bytes == 2 * 4 * F32 + 8
    assert "c10d.allreduce_" not in moved


class Unused(Normed):
    """A model with an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def test_a_gradient_for_which_ddp_would_wait_is_named() -> None:
    with one_rank.fake_process_group(2), without_data():
        model = nn.parallel.DistributedDataParallel(Unused())
        with pytest.raises(one_rank.UnsupportedOperation, match=r"waits for .* spare\.bias, but"):
            model(torch.empty(3, 6)).sum().backward()


def test_a_layer_is_copied_with_its_shards() -> None:
    """Opacus deep-copies layers that it has no rule for, such as GPT-2's."""
    pytest.importorskip("transformers")
    sizes = "n_layer=2,n_embd=30,n_head=2,vocab_size=101,n_positions=16,seq_len=8"
    case = Case("dpsgd_ghost", 6, workload="hf-causal-lm", set=sizes, parallel="fsdp2", gpus=3)
    phases = sent(count(case))
    # Three gloo ranks send the same.
    assert (phases["forward"], phases["backward"], phases[STEP]) == (77600, 251360, 328960)


PEERS = """
import torch
from torch import distributed, nn

distributed.init_process_group("gloo")
rank, layer = distributed.get_rank(), nn.Linear(2, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(1, 2)).sum().backward()
    one, ten, hundred, thousand, more = (torch.zeros(10**n) for n in range(5))
    if rank == 0:
        distributed.send(one, 1)
    elif rank == 1:
        distributed.recv(one, 0)
    distributed.broadcast(ten, 0)
    distributed.reduce(hundred, 0)
    distributed.gather(thousand, [torch.zeros(1000) for _ in range(3)] if rank == 0 else None)
    distributed.scatter(more, [torch.zeros(10**4) for _ in range(3)] if rank == 0 else None)
    optimizer.step()
"""


@pytest.mark.slow
def test_each_rank_of_a_script_has_what_it_sends_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a send, broadcast, reduction, gather and scatter with root 0, 10 elements each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("peers.py").write_text(PEERS)
    python = [sys.executable, "-m"]
    ranks = [*python, "torch.distributed.run", "--nproc-per-node=3", "--no-python", "--standalone"]
    how = ["--instrument=logical", "--skip=1", "--steps=1", "--json=run.json"]
    command = [*ranks, *python, "dpbench", "exec", *how, "peers.py"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    elements = {
        row["rank"]: row["value"] / F32
        for row in parsed(Path("run.json").read_bytes())["rows"]
        if (row["metric"], row["phase"]) == ("collective_bytes", STEP)
    }
    assert elements == {0: 1 + 10 + 2 * 10**4, 1: 10 + 100 + 1000, 2: 100 + 1000}


@pytest.mark.repeats
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_who_sends_reads_and_who_receives_writes(rank: int) -> None:
    """Bytes that a rank of three reads and writes for 100 elements; the first rank is the root."""
    store = fake_pg.FakeStore()
    distributed.init_process_group("fake", store=store, rank=rank, world_size=3)
    x = torch.zeros(100)
    moved = {}
    try:
        for name, work in {
            "send": lambda: distributed.send(x, 1 - min(rank, 1)),
            "recv_": lambda: distributed.recv(x, 1 - min(rank, 1)),
            "broadcast_": lambda: distributed.broadcast(x, 0),
            "reduce_": lambda: distributed.reduce(x, 0),
        }.items():
            counter = RealTensorCounter()
            with counter, observed_step(counter):
                work()
            count = totals(counter)["outside", f"c10d.{name}"]
            moved[name] = (count["read_bytes"], count["write_bytes"])
    finally:
        distributed.destroy_process_group()
    size = 100 * F32
    assert moved == {
        "send": (size, 0),
        "recv_": (0, size),
        "broadcast_": (size, 0) if rank == 0 else (0, size),
        "reduce_": (size, size) if rank == 0 else (size, 0),
    }


def test_options_of_ddp_that_move_other_bytes_are_refused() -> None:
    with (
        one_rank.fake_process_group(2),
        pytest.raises(one_rank.UnsupportedOperation, match="gradient_as_bucket_view"),
    ):
        nn.parallel.DistributedDataParallel(Normed(), gradient_as_bucket_view=True)


def test_objects_of_ranks_that_are_not_there_are_refused() -> None:
    with one_rank.fake_process_group(2), without_data():
        distributed.broadcast_object_list([{"step": 1}])
        with pytest.raises(one_rank.UnsupportedOperation, match="all_gather_object"):
            distributed.all_gather_object([None, None], {"step": 1})


# --- what is left of it ----------------------------------------------------------------------


def test_nothing_is_left_of_the_process_group() -> None:
    count(case_of())
    assert not distributed.is_initialized()
    with pytest.raises(ConfigurationError, match="does not train under"):
        Logical().count(case_of("dpsgd", "fsdp2"))
    assert not distributed.is_initialized()


def test_a_process_group_of_the_callers_stays() -> None:
    expected = count(case_of())
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        running = Logical().start(case_of())
        assert not isinstance(running, Counting)
        outcome = running.outcome()
        assert (outcome.rows, outcome.notes) == (expected.rows, expected.notes)
        assert distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()
    assert "counted: one rank of 4" in expected.notes


# --- parts of torch that are its own ---------------------------------------------------------


def test_torch_has_no_collective_that_is_not_known() -> None:
    spaces = tuple(f"{space}::" for space in rules.BETWEEN_RANKS)
    every = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    there = {name for name in every if name.startswith(spaces)}
    kinds = (
        rules.REDUCE_TO_ALL,
        rules.SHARE_WITH_ALL,
        rules.PASS_ON,
        rules.BY_ROOT,
    )
    known = {name: sum(1 for kind in kinds if kind.search(name)) for name in there}
    known |= {name: 1 for name in there if rules.SEND_NOTHING.search(name)}
    unknown = {name for name, number in known.items() if number != 1}
    assert unknown <= {"_c10d_functional::batch_p2p_ops"}, f"in torch {torch.__version__}"


# --- the gate --------------------------------------------------------------------------------


@cache
def counted_as_noisy(trainer: type) -> Outcome:
    for each in (Noisy, trainer):
        TRAINERS.register(each.__name__, each)
    counted, noisy = Logical().count(case_of(trainer.__name__)), case_of(Noisy.__name__)
    rows = tuple(replace(row, case=noisy) for row in counted.rows)
    return replace(counted, case=noisy, rows=rows)


@pytest.mark.parametrize(
    ("trainer", "limit", "operator"),
    [
        (DrawsAll, "logical_write_bytes@noise:1%", "aten.randn"),
        pytest.param(
            *(ReducesTwice, "collective_bytes:1%", "c10d.allreduce_"), marks=pytest.mark.slow
        ),
    ],
)
def test_a_limit_finds_what_is_done_too_often(trainer: type, limit: str, operator: str) -> None:
    before, good, bad = (
        Run.of(name, [counted_as_noisy(each)])
        for name, each in (("before", Noisy), ("good", Noisy), ("bad", trainer))
    )
    limits = [Limit.parse(limit)]
    assert not failures(Gate(before, good).compare(limits))
    (regression,) = Gate(before, bad).compare(limits).regressions
    assert regression["largest_changes"][0]["name"] == operator


# --- the table -------------------------------------------------------------------------------


@pytest.mark.parametrize(("axes", "alone"), [({}, False), ({"gpus": 1, "parallel": "none"}, True)])
def test_a_table_says_that_it_is_of_one_rank(axes: dict[str, Any], alone: bool) -> None:
    table, *_ = tables_of(count(case_of(**axes)).rows)
    assert ("sent by\na rank" in table.headers) is not alone
    assert any("no number is a sum over ranks" in note for note in table.notes) is not alone


@pytest.mark.slow
def test_fused_keeps_shards_alone_between_steps() -> None:
    def peak(trainer: str) -> float:
        case = case_of(trainer, "fsdp2", model_size="64x128x4x4", batch_size=4, seq_len=8)
        rows = Logical().count(case).rows
        return max(row.value for row in rows if row.metric == "peak_memory_bytes")

    assert peak("fused") < 1.25 * peak("standard")
