"""Optimizer, micro-batches, checkpointing and the like: part of a case, right in every trainer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench import TRAINERS, SimpleBigModel, get_random_dataloader
from dpbench.child.build import build
from dpbench.child.task import Task
from dpbench.core.case import Case, ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.core.grid import Grid
from dpbench.core.registry import resolve
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.timing import Timing
from dpbench.training.base import Batch, mean_cross_entropy
from dpbench.training.refusals import CannotTrain
from dpbench.training.standard import StandardTrainer
from dpbench.workloads.axes import checkpoint_blocks, choose_trainable
from dpbench.workloads.transformer import Transformer

ALL_TRAINERS = tuple(TRAINERS)
SOME = [
    name if name in ("dpsgd", "fused") else pytest.param(name, marks=pytest.mark.slow)
    for name in ALL_TRAINERS
]
"""All trainers, of which two are tried by default."""
SIZE = ModelSize(50, 16, 1, 2)
CPU = torch.device("cpu")
HEARD_TWICE = "Opacus cannot train .* pass use_reentrant=True to checkpointing"


def small(trainable: str = "all", *, checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = SimpleBigModel(SIZE, max_seq_len=8)
    choose_trainable(model, trainable)
    if checkpoints:
        checkpoint_blocks(Transformer(), model)
    if trainable.startswith("lora"):  # at first only one of each pair has a gradient
        for name, parameter in model.named_parameters():
            if name.endswith("up.weight"):
                nn.init.normal_(parameter)
    return model


def batch_of(size: int) -> Batch:
    return next(iter(get_random_dataloader(batch_size=size, seq_len=8, vocab_size=50)))


def update_of(
    trainer: str, trainable: str = "all", *, checkpoints: bool = False, **options: object
) -> Tensor:
    """New minus old parameters of a step that clips about half of six examples, without noise."""
    model = small(trainable, checkpoints=checkpoints)
    before = torch.cat([p.detach().clone().reshape(-1) for p in model.parameters()])
    threshold = {"all": 2.1, "*.bias": 0.5}.get(trainable, 0.5)
    fixed = {"noise_multiplier": 0.0, "max_grad_norm": threshold, "learning_rate": 1.0}
    made = TRAINERS[trainer](model, batch_size=6, **fixed, **options)
    made.train_step(batch_of(6))
    return torch.cat([p.detach().reshape(-1) for p in made.model.parameters()]) - before


def same(one: Tensor, other: Tensor, tolerance: float = 1e-4) -> bool:
    return bool((one - other).norm() < tolerance * other.norm()) and bool(other.norm() > 0)


@pytest.mark.parametrize("trainer", ALL_TRAINERS)
def test_steps_of_micro_batches_are_those_of_whole_batches(trainer: str) -> None:
    def two_steps(**options: int) -> Tensor:
        fixed = {"noise_multiplier": 0.0, "learning_rate": 0.1}
        made = TRAINERS[trainer](small(), batch_size=6, **fixed, **options)
        for _ in range(2):
            made.train_step(batch_of(6))
        return torch.cat([p.detach().reshape(-1) for p in made.model.parameters()])

    torch.testing.assert_close(two_steps(micro_batches=2), two_steps(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trainable", ["all", "*.bias", "lora:2"])
@pytest.mark.parametrize("trainer", SOME)
def test_checkpointing_changes_no_bit_of_the_update(trainer: str, trainable: str) -> None:
    update = update_of(trainer, trainable, checkpoints=True, micro_batches=2)
    assert torch.equal(update, update_of(trainer, trainable, micro_batches=2))
    assert update.any()


@pytest.mark.parametrize("options", [{}, {"micro_batches": 3, "checkpoints": True}], ids=str)
@pytest.mark.parametrize("trainer", SOME)
def test_autocast_updates_as_single_precision_does(trainer: str, options: dict[str, int]) -> None:
    update = update_of(trainer, autocast=torch.bfloat16, **options)
    assert same(update, update_of(trainer), 1e-2)
    assert not same(update, update_of(trainer)), "nothing was computed in 16 bits"


def test_opacus_clips_what_a_scaler_has_scaled() -> None:
    """Why float16 is refused: below the threshold, examples are clipped all the same."""
    model, scale = small(), 2.0**7
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = DPOptimizer(
        optimizer, noise_multiplier=0.0, max_grad_norm=100.0, expected_batch_size=6
    )
    module, batch = GradSampleModule(model), batch_of(6)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(mean_cross_entropy(module(batch[0]), batch[1])).backward()
    unclipped = torch.cat([p.grad.reshape(-1) for p in model.parameters()]) / scale
    scaler.unscale_(private)
    private.pre_step()
    clipped = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert clipped.norm() > 2 * unclipped.norm(), "a scaler's step would now be right: allow it"


@pytest.mark.parametrize("trainer", ["dpsgd", "dpsgd_ghost", "dpsgd_fgc"])
def test_opacus_fails_where_checkpointing_is_not_reentrant(trainer: str) -> None:
    model = small()
    block = model.blocks[0]
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    made = TRAINERS[trainer](model, batch_size=6)
    with pytest.raises(CannotTrain, match=HEARD_TWICE):
        made.train_step(batch_of(6))


@pytest.mark.parametrize("trainable", ["*.bias", "lora:2"])
def test_private_trainers_agree_on_what_alone_is_trained(trainable: str) -> None:
    updates = [update_of(trainer, trainable) for trainer in ALL_TRAINERS]
    assert all(same(update, updates[1]) for update in updates[2:])
    moved = [update != 0 for update in updates]
    frozen = torch.cat(
        [torch.full((p.numel(),), not p.requires_grad) for p in small(trainable).parameters()]
    )
    assert not any((each & frozen).any() for each in moved)
    assert all(each.any() for each in moved)


def test_the_axes_choose_the_optimizer_and_the_parameters() -> None:
    case = Case("dpsgd", 4, 8, "50x16x1x2", optimizer="momentum", trainable="blocks.*")
    trainer, _ = build(case, CPU, 1)
    assert trainer.plain_optimizer.defaults["momentum"] == 0.9
    [group] = trainer.plain_optimizer.param_groups
    names = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert len(group["params"]) == len(names)
    assert all(name.startswith("blocks.") for name in names)


def test_a_fused_update_reads_and_writes_each_number_once() -> None:
    case = resolve(Case("dpsgd", 2, 8, "50x16x1x2", optimizer="adamw:fused=true"))
    made, _ = build(case, CPU, 1)
    size = 4 * sum(p.numel() for p in made.model.parameters())
    assert case.baseline.optimizer == "adamw:fused=true"
    update = {r.metric: r.value for r in Logical().count(case).rows if r.phase == "optimizer"}
    assert update["logical_read_bytes"] == pytest.approx(4 * size, rel=0.01)
    assert update["logical_write_bytes"] == pytest.approx(3 * size, rel=0.01)


def test_micro_batches_hold_fewer_examples_gradients() -> None:
    def peak(parts: int) -> float:
        rows = Logical().count(Case("dpsgd", 8, 8, "50x16x1x2", micro_batches=parts)).rows
        return max(r.value for r in rows if r.metric == "peak_memory_bytes")

    assert peak(4) < 0.6 * peak(1)


def test_checkpointing_keeps_less_and_computes_the_blocks_again() -> None:
    def count(kept: str) -> dict[tuple[str, str], float]:
        case = Case("standard", 4, 32, "50x16x6x2", activation_checkpointing=kept)
        return {(row.phase, row.metric): row.value for row in Logical().count(case).rows}

    on, off = count("on"), count("off")
    assert on["step", "peak_memory_bytes"] < 0.6 * off["step", "peak_memory_bytes"]
    again = on["backward", "flops"] - off["backward", "flops"]
    head = 2 * 4 * 32 * 16 * 50
    assert again == off["forward", "flops"] - head


# --- as part of a case --------------------------------------------------------------------------


@pytest.mark.parametrize("trainable", ["all", "lora:8", "*.bias", "a-b/c?"])
def test_axes_are_part_of_id_report_and_command_line(trainable: str) -> None:
    axes = {"optimizer": "adamw", "micro_batches": 4, "activation_checkpointing": "on"}
    case = Case("dpsgd", 8, 16, "tiny", "bf16-amp", trainable=trainable, **axes)  # type: ignore[arg-type]
    assert case.id.startswith("dpsgd-bs8-seq16-tiny-bf16-amp-optimizer=adamw-micro_batches=4")
    assert case.id.endswith("-activation_checkpointing=on")
    assert len(case.report_path.parts) == 2
    task = Task(case, Timing(Path())).as_json()
    assert Task.from_json(json.loads(json.dumps(task))).case == case
    assert {**vars(case.baseline), "trainer": "dpsgd"} == vars(case)


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (
            lambda: Case("dpsgd", 8, 16, micro_batches=3),
            "batch size 8 cannot be divided into 3 equal parts",
        ),
        (lambda: Case("dpsgd", 8, 16, micro_batches=0), "micro-batches must be a positive integer"),
        (lambda: Case("dpsgd", 8, 16, trainable="lora:x"), "write lora:RANK, such as lora:8"),
        (lambda: Case("dpsgd", 8, 16, trainable="lora:0"), "rank must be a positive integer"),
        (lambda: resolve(Case("dpsgd", 8, 16, optimizer="lion")), "unknown optimizer 'lion'"),
        (
            lambda: Case("dpsgd", 8, 16, activation_checkpointing="yes"),
            "unknown activation checkpointing 'yes'; choose from off, on",
        ),
        (
            lambda: StandardTrainer(small(), batch_size=8, autocast=torch.float16),
            "float16 needs a GradScaler, which would scale gradients before they are clipped: use "
            "torch.bfloat16",
        ),
        (
            lambda: build(
                Case("dpsgd", 2, workload="layer", activation_checkpointing="on"), CPU, 1
            ),
            "activation checkpointing and parallel=fsdp2 need the blocks of the model: define "
            "Layer.blocks(model)",
        ),
        (
            lambda: build(Case("dpsgd", 8, 16, "tiny", trainable="*.gain"), CPU, 1),
            "the model has no parameter like *.gain; its first parameter is token_embedding",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused(attempt: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        attempt()
    assert said in str(caught.value)


def test_own_optimizer_is_named_by_target() -> None:
    grid = Grid.named("grid1").with_axes(optimizer=["torch.optim:Adagrad", "torch.optim:AdamW"])
    assert grid.values("optimizer") == ("Adagrad", "adamw")
    task = Task(grid.cases()[0], Timing(Path())).as_json()
    assert task["case"]["optimizer"] == "Adagrad=torch.optim:Adagrad"
