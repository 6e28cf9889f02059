"""The fused trainer on a GPU: its graphs, and the memory that these keep."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench import TRAINERS, Case, SimpleBigModel, get_random_dataloader
from dpbench.child.build import build
from dpbench.child.case import held_by_graphs, peak_memory
from dpbench.core.case import ModelSize
from dpbench.core.errors import ConfigurationError
from dpbench.instruments.logical.counter import RealTensorCounter
from dpbench.training.base import Batch, Momentum
from dpbench.training.clipped_sums import Sums
from dpbench.training.phases import observed_step
from dpbench.workloads.axes import checkpoint_blocks, choose_trainable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("alone_on_the_gpu")]

PLAIN = "fused:graphs=false,kernels=false"
SIZE = ModelSize(500, 64, 2, 4)


@pytest.fixture(autouse=True)
def ieee() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def made(trainer: str, size: ModelSize = SIZE, **options: Any) -> Any:
    torch.manual_seed(0)
    model = SimpleBigModel(size, max_seq_len=700).to("cuda")
    fixed = {"noise_multiplier": 0.0, "learning_rate": 1.0, "max_grad_norm": 0.5}
    return TRAINERS[trainer](model, batch_size=6, **fixed | options)


def batches_of(tokens: int, number: int = 1) -> list[Batch]:
    loader = get_random_dataloader(batch_size=6, seq_len=tokens, vocab_size=500, device="cuda")
    return list(loader)[:number]


def parameters(trainer: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).double()


def moved(train: Callable[[Any], object], trainer: Any) -> Tensor:
    before = parameters(trainer)
    train(trainer)
    return parameters(trainer) - before


def train_several_shapes_and_rates(trainer: Any) -> None:
    for tokens, rate in ((40, 0.5), (40, 0.2), (256, 0.5), (40, 0.3), (600, 0.5)):
        trainer.plain_optimizer.param_groups[0]["lr"] = rate
        for batch in batches_of(tokens):
            trainer.train_step(batch)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": Momentum},
        {"optimizer": partial(torch.optim.AdamW, eps=1e-2)},
        {"optimizer": partial(torch.optim.RMSprop, eps=1e-2)},
        {"micro_batches": 3},
        {"micro_batches": 2, "optimizer": Momentum},
        {"autocast": torch.bfloat16},
    ],
    ids=str,
)
def test_steps_of_several_shapes_and_rates_are_those_of_opacus(options: dict[str, Any]) -> None:
    reference = moved(train_several_shapes_and_rates, made("dpsgd", **options))
    tolerance = 3e-2 if "autocast" in options else 1e-4
    for name in (PLAIN, "fused"):
        trainer = made(name, **options)
        update = moved(train_several_shapes_and_rates, trainer)
        assert (update - reference).norm() < tolerance * reference.norm(), name
    assert [*trainer._graphs.phases] == ["forward", "backward", "clip"]


def adapted(trainer: str, **options: Any) -> Any:
    """A trainer of low-rank adapters, neither of which is zero."""
    torch.manual_seed(0)
    model = SimpleBigModel(SIZE, max_seq_len=700).to("cuda")
    choose_trainable(model, "lora:4")
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    fixed = {"noise_multiplier": 0.0, "optimizer": partial(torch.optim.AdamW, eps=1e-2)}
    return TRAINERS[trainer](model, batch_size=6, **fixed | options)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("made_by", [made, adapted])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_adapters_and_recomputed_activations_are_recorded(
    made_by: Callable[..., Any], checkpointing: bool, micro_batches: int
) -> None:
    updates = []
    for name in ("fused", PLAIN):
        trainer = made_by(name, micro_batches=micro_batches)
        if checkpointing:
            checkpoint_blocks(trainer.workload, trainer.model)
        updates.append(moved(train_several_shapes_and_rates, trainer))
        if name == "fused":
            assert [*trainer._graphs.phases] == ["forward", "backward", "clip"]
    assert (updates[0] - updates[1]).norm() < 1e-3 * updates[1].norm()


@pytest.mark.parametrize("sizes", [(6, 3, 0, 9, 1, 13), (0, 5, 6)], ids=str)
def test_poisson_batches_of_every_size_are_those_without_kernels(sizes: tuple[int, ...]) -> None:
    batch = tuple(torch.cat(each) for each in zip(*batches_of(40, 3), strict=True))
    trainers = [made(name, sampling="poisson") for name in ("fused", PLAIN)]
    for size in sizes:
        part = tuple(tensor[-size or len(tensor) :] for tensor in batch)
        losses = [float(trainer.train_step(part)) for trainer in trainers]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5, nan_ok=True)
        ours, theirs = map(parameters, trainers)
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert [*trainers[0]._graphs.phases] == ["forward", "backward", "clip"]


def test_an_empty_poisson_batch_draws_noise() -> None:
    batch = batches_of(40)[0]
    trainer = made("fused", sampling="poisson", noise_multiplier=1.0)
    for size in (6, 0):
        before = parameters(trainer)
        trainer.train_step(tuple(tensor[:size] for tensor in batch))
        noise = (parameters(trainer) - before) * 6 / 0.5
    assert abs(noise.std() - 1) < 5 / (2 * len(noise)) ** 0.5


class Reads(SimpleBigModel):
    """A model that Python reads from."""

    def forward(self, tokens: Tensor) -> Tensor:
        assert tokens.sum().item() >= 0
        logits: Tensor = super().forward(tokens)
        return logits


class Waits(SimpleBigModel):
    """A model that waits for the GPU, which ends a capture."""

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = super().forward(tokens)
        torch.cuda.synchronize()
        return logits


@pytest.mark.parametrize("kind", [Reads, Waits])
def test_what_cannot_be_recorded_says_why_once_and_trains_without_graphs(
    kind: type[SimpleBigModel],
) -> None:
    def train(trainer: Any) -> None:
        for batch in batches_of(40, 3):
            trainer.train_step(batch)

    def built(kind: type[SimpleBigModel], trainer: str) -> Any:
        torch.manual_seed(0)
        model = kind(SIZE, max_seq_len=700).to("cuda")
        return TRAINERS[trainer](model, batch_size=6, noise_multiplier=0.0)

    gc.collect()
    torch.cuda.empty_cache()
    before = held_by_graphs(torch.cuda.memory_snapshot(), 0)
    trainer = built(kind, "fused")
    with pytest.warns(UserWarning, match=r"without CUDA graphs, because .*test_fused.py") as caught:
        update = moved(train, trainer)  # three batches, in which `Reads` reads three numbers
    assert len([each for each in caught if "CUDA graphs" in str(each.message)]) == 1
    assert trainer._graphs is None
    expected = moved(train, built(SimpleBigModel, PLAIN))
    assert (update - expected).norm() < 1e-4 * expected.norm()
    assert F.dropout(torch.ones(9, device="cuda"), 0.5).isfinite().all()
    assert held_by_graphs(torch.cuda.memory_snapshot(), 0) <= before
    trainer = built(SimpleBigModel, "fused")  # others are recorded afterwards
    train(trainer)
    assert trainer._graphs is not None


def test_recomputed_dropout_is_not_recorded() -> None:
    torch.manual_seed(0)
    model = SimpleBigModel(SIZE, max_seq_len=700).to("cuda")
    for block in model.blocks:
        block.forward = with_dropout(block.forward)
    trainer = TRAINERS["fused"](model, batch_size=6)
    checkpoint_blocks(trainer.workload, model)
    with pytest.warns(UserWarning, match="checkpointing must draw the same random numbers twice"):
        trainer.train_step(batches_of(40)[0])


def with_dropout(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: F.dropout(forward(*given), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("examples", "tokens", "trainable"), [(1, 600, "all"), (2, 600, "all"), (6, 256, "lora:4")]
)
def test_graphs_with_kept_gradients_take_the_steps_of_a_loop_over_examples(
    examples: int, tokens: int, trainable: str, dtype: torch.dtype
) -> None:
    def update(name: str) -> Tensor:
        torch.manual_seed(0)
        model = SimpleBigModel(SIZE, max_seq_len=700).to("cuda")
        choose_trainable(model, trainable)
        trainer = TRAINERS[name](
            model.to(dtype), batch_size=examples,
            noise_multiplier=0.0, learning_rate=1.0, max_grad_norm=0.5,
        )  # fmt: skip
        before = parameters(trainer)
        for batch in batches_of(tokens, 3):
            trainer.train_step(tuple(tensor[:examples] for tensor in batch))
        if name == "fused":
            assert [*trainer._graphs.phases] == ["forward", "backward", "clip"]
            assert {w for n, w in trainer.ways.items() if "embedding" not in n} == {"kept"}
        return parameters(trainer) - before

    reference = update("micro_batch")
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert (update("fused") - reference).norm() < tolerance * reference.norm()


def test_the_first_step_makes_the_graphs_and_returns_the_loss_of_its_own_batch() -> None:
    trainer, plain = made("fused"), made(PLAIN)
    for number, batch in enumerate(batches_of(40, 3)):
        losses = [float(each.train_step(batch)) for each in (trainer, plain)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        assert [*trainer._graphs.phases] == ["forward", "backward", "clip"], number
    with pytest.raises(ValueError, match="built for batches of 6 examples, and this batch has 5"):
        trainer.train_step(tuple(tensor[:5] for tensor in batches_of(40)[0]))


def test_dropout_ends_with_eval_and_begins_again_with_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SimpleBigModel(SIZE, max_seq_len=700), nn.Dropout(0.9)).to("cuda")
    trainer = TRAINERS["fused"](model, batch_size=6, noise_multiplier=0.0, learning_rate=0.0)
    [batch] = batches_of(40)
    first, second = (float(trainer.train_step(batch)) for _ in range(2))
    assert [*trainer._graphs.phases] == ["forward", "backward", "clip"]
    assert first != second
    model.eval()
    expected = float(trainer.mean_loss(model, batch).detach())
    assert [float(trainer.train_step(batch)) for _ in range(2)] == pytest.approx([expected] * 2)
    model.train()
    assert abs(float(trainer.train_step(batch)) - expected) > 0.1 * expected


def test_a_parameter_that_moved_or_froze_is_refused_before_a_graph_trains() -> None:
    [batch] = batches_of(40)
    for change in (
        lambda weight: setattr(weight, "data", weight.data.clone()),
        lambda weight: weight.requires_grad_(False),
    ):
        trainer = made("fused")
        trainer.train_step(batch)
        change(trainer.model.head.weight)
        before = parameters(trainer)
        with pytest.raises(ConfigurationError, match=r"parameter head.weight was"):
            trainer.train_step(batch)
        assert torch.equal(parameters(trainer), before)


def test_a_step_whose_operators_are_counted_runs_them() -> None:
    trainer = made("fused")
    [batch] = batches_of(40)
    trainer.train_step(batch)
    with RealTensorCounter() as counter:
        with observed_step(counter):
            trainer.train_step(batch)
        operators = {count.operator for count in counter.operators}
    assert operators >= {"dpbench.gram_norms", "dpbench.noisy_update", "aten.mm"}


def trained(kind: type[SimpleBigModel], trainer: str, batches: list[Batch]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = kind(SIZE, max_seq_len=700).to("cuda")
    built = TRAINERS[trainer](model, batch_size=6, noise_multiplier=0.0, learning_rate=1.0)

    def train(built: Any) -> None:
        for batch in batches:
            built.train_step(batch)

    return built, moved(train, built)


def test_a_model_is_captured_as_it_runs_without_a_capture() -> None:
    class Asks(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(tokens)
            return logits.relu() if torch.cuda.is_current_stream_capturing() else logits

    trainer, update = trained(Asks, "fused", batches := batches_of(40, 3))
    assert trainer.replays
    expected = trained(SimpleBigModel, PLAIN, batches)[1]
    assert (update - expected).norm() < 1e-4 * expected.norm()


def test_a_step_that_would_run_other_operators_in_a_graph_is_not_captured() -> None:
    class Notices(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(tokens)
            return logits * 0.5 if torch._C._cuda_isCurrentStreamCapturing() else logits

    with pytest.warns(
        UserWarning, match=r"captured forward would run other operators: aten.mul\(.* instead of"
    ):
        trainer, _ = trained(Notices, "fused", batches_of(40))
    assert not trainer.replays


def test_a_number_that_python_read_is_compared_in_each_replay() -> None:
    class Masks(SimpleBigModel):
        """Does other work where a token is 0, as models do whose masks have holes."""

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = super().forward(tokens)
            return logits if (tokens > 0).all() else logits * (tokens > 0)[..., None]

    whole = [(tokens.clamp(min=1), labels) for tokens, labels in batches_of(40, 4)]
    holes = whole[1][0].clone()
    holes[2, :7] = 0
    batches = [*whole[:2], (holes, whole[1][1]), *whole[2:]]
    trainer, update = trained(Masks, "fused", batches)
    assert trainer.replays
    assert trainer._graphs._misfits == 1
    expected = trained(Masks, PLAIN, batches)[1]
    assert (update - expected).norm() < 1e-4 * expected.norm()


def test_garbage_that_holds_graphs_does_not_end_a_capture() -> None:
    """A trainer and the hooks of its layers refer to each other, so only a collection frees it."""

    class Collects(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            garbage = [[object()] for _ in range(100_000)]  # usually begins a collection
            logits: Tensor = super().forward(tokens)
            return logits[: len(garbage)]

    batches = batches_of(40)
    for _ in range(3):  # each leaves graphs behind
        trainer, _ = trained(Collects, "fused", batches)
        assert trainer.replays


def test_a_changed_threshold_is_an_input_of_the_graph_and_a_changed_dropout_is_not() -> None:
    def train(trainer: Any) -> None:
        for batch, threshold in zip(batches_of(40, 3), (0.5, 0.1, 2.0), strict=True):
            trainer.max_grad_norm = threshold
            trainer.train_step(batch)

    trainers = made("fused"), made(PLAIN)
    updates = [moved(train, trainer) for trainer in trainers]
    assert trainers[0].replays
    assert (updates[0] - updates[1]).norm() < 1e-4 * updates[1].norm()

    torch.manual_seed(0)
    model = nn.Sequential(SimpleBigModel(SIZE, max_seq_len=700), nn.Dropout(0.0)).to("cuda")
    trainer = TRAINERS["fused"](model, batch_size=6, learning_rate=0.0)
    [batch] = batches_of(40)
    first = float(trainer.train_step(batch))
    assert trainer.replays
    model[1].p = 0.9
    assert abs(float(trainer.train_step(batch)) - first) > 0.1 * first
    assert not trainer.replays


def test_a_warning_of_the_first_forward_is_shown_and_debugging_stays_as_it_was() -> None:
    class Warns(SimpleBigModel):
        def forward(self, tokens: Tensor) -> Tensor:
            warnings.warn("of the model", stacklevel=1)
            logits: Tensor = super().forward(tokens)
            return logits

    trainer = TRAINERS["fused"](Warns(SIZE, max_seq_len=700).to("cuda"), batch_size=6)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with pytest.warns(UserWarning, match="of the model"):
            trainer.train_step(batches_of(40)[0])
        assert torch.cuda.get_sync_debug_mode() == 1
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_has_what_graphs_keep() -> None:
    [batch] = batches_of(600)

    def peaks(*, graphs: bool) -> tuple[int, int]:
        gc.collect()  # a trainer and the hooks of its layers refer to each other
        torch.cuda.empty_cache()
        others = torch.cuda.memory_allocated()
        before = peak_memory() - torch.cuda.max_memory_allocated()  # what others' graphs keep
        trainer = made("fused", ModelSize(8000, 256, 4, 8))
        if not graphs:
            trainer._is_first = False  # as after a first step without them
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step(batch)
        return torch.cuda.max_memory_allocated() - others, peak_memory() - before - others

    allocated, without = peaks(graphs=False)
    assert without == allocated
    shown, kept = peaks(graphs=True)
    assert shown < 0.7 * without, "the allocator counts it itself: take what it says"
    assert 0.9 * without < kept < 1.25 * without, "the pool has few gaps"


def test_at_bf16_a_token_that_is_everywhere_counts_each_time() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16, device="cuda"))
    sums = Sums([[weight]])
    tokens = torch.ones(1000, dtype=torch.long, device="cuda")
    sums.add_rows(weight, tokens, torch.ones(1000, 2, dtype=torch.bfloat16, device="cuda"))
    [buffer] = sums.finish()
    assert buffer.places[weight].tolist() == [[0, 0], [1000, 1000], [0, 0]]


def test_micro_batches_are_held_to_their_size_where_they_are_recorded() -> None:
    case = Case("fused", 6, 16, "tiny", micro_batches=3)
    trainer, batches = build(case, torch.device("cuda"), 3)
    for batch in batches:
        trainer.train_step(batch)
    assert trainer.replays
