"""The logical instrument: whole cases, phases, peak memory, and what it leaves untouched."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench import phase
from dpbench.case import PHASES, Case, ModelSize
from dpbench.errors import ConfigurationError
from dpbench.instruments.base import CaseFailed
from dpbench.instruments.logical import DEVICE, Logical, LogicalResult, alive, growth
from dpbench.instruments.logical_counter import ALLOCATION_BYTES, ByteCounter, without_data
from dpbench.registry import MODELS, TRAINERS
from dpbench.results.rows import STEP
from dpbench.training.base import Batch, mean_cross_entropy
from dpbench.training.build import build
from dpbench.training.dpsgd import DPSGDTrainer
from dpbench.training.phases import observed_step
from dpbench.training.standard import StandardTrainer

DP_TRAINERS = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
ALL_TRAINERS = ("standard", *DP_TRAINERS)

H200 = {  # DRAM GB of a step and peak GB: ncu, 1b, batch 8 × sequence 256, fp32 without TF32
    "standard": (91.3, 13.0),
    "dpsgd": (411.9, 59.6),
    "dpsgd_ghost": (229.6, 18.3),
    "dpsgd_fgc": (446.7, 21.8),
}


@pytest.fixture(autouse=True)
def own_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers and models that a test registers are gone after it."""
    for registry in (TRAINERS, MODELS):
        monkeypatch.setattr(registry, "_targets", dict(registry._targets))


def tiny(
    trainer: str | type = "standard",
    *,
    model: str | type = "simple",
    batch_size: int = 4,
    seq_len: int = 16,
    **options: Any,
) -> Case:
    """A case of one layer; a trainer or model that is a class is registered first."""
    for registry, chosen in ((TRAINERS, trainer), (MODELS, model)):
        if isinstance(chosen, type):
            registry.register(chosen.__name__, chosen)
    names = [chosen if isinstance(chosen, str) else chosen.__name__ for chosen in (trainer, model)]
    return Case(names[0], batch_size, seq_len, "200x32x1x2", model=names[1], **options)


@cache
def count(case: Case) -> LogicalResult:
    """Counts do not change (a test says so), so tests may share them."""
    return Logical().count(case)


def parameters(case: Case) -> list[int]:
    """The sizes of a case's parameters, in elements."""
    with torch.device("meta"):
        model = MODELS[case.model](case.size, attention=case.attention)
    return [parameter.numel() for parameter in model.parameters()]


def values(result: LogicalResult) -> dict[tuple[str, str], float]:
    return {(row.phase, row.metric): row.value for row in result.rows}


def moved(result: LogicalResult, where: str) -> tuple[float, float]:
    found = values(result)
    return found[where, "logical_read_bytes"], found[where, "logical_write_bytes"]


class TestAgainstHardware:
    @pytest.mark.parametrize("trainer", ALL_TRAINERS)
    def test_1b_comes_close_to_what_an_h200_measured(self, trainer: str) -> None:
        found = values(count(Case(trainer, 8, 256)))
        total = found[STEP, "logical_read_bytes"] + found[STEP, "logical_write_bytes"]
        peak = found[STEP, "peak_memory_bytes"]
        dram_gb, peak_gb = H200[trainer]
        # matrix products with 2048 rows read their operands again: the floor is below DRAM
        lowest = 0.91 if trainer == "standard" else 0.95
        assert lowest <= total / dram_gb / 1e9 <= 1.05
        assert peak / 1e9 == pytest.approx(peak_gb, rel=0.05)


class TestRows:
    def test_every_phase_and_the_step_have_every_metric(self) -> None:
        rows = count(tiny("dpsgd")).rows
        metrics = {"logical_read_bytes", "logical_write_bytes", "flops", "peak_memory_bytes"}
        assert {(row.phase, row.metric) for row in rows} == {
            (phase, metric) for phase in (*PHASES, "outside", STEP) for metric in metrics
        }

    def test_rows_say_that_no_hardware_was_involved(self) -> None:
        case = tiny()
        for row in Logical().measure(case):
            assert (row.case, row.instrument, row.repeat) == (case, "logical", 0)
            assert (row.device, row.tool) == (DEVICE, f"torch {torch.__version__}")
            assert row.unit == ("1" if row.metric == "flops" else "B")

    @pytest.mark.parametrize("metric", ["logical_read_bytes", "logical_write_bytes", "flops"])
    def test_phases_add_up_to_the_step(self, metric: str) -> None:
        found = values(count(tiny("dpsgd_ghost")))
        by_phase = [value for (where, name), value in found.items() if name == metric]
        assert sum(by_phase) == 2 * found[STEP, metric]

    def test_the_steps_peak_is_the_largest_of_its_phases(self) -> None:
        found = values(count(tiny("dpsgd")))
        peaks = {where: v for (where, name), v in found.items() if name == "peak_memory_bytes"}
        assert peaks.pop(STEP) == max(peaks.values())

    def test_the_operators_add_up_to_the_phases(self) -> None:
        result = count(tiny("dpsgd_fgc"))
        table = pd.DataFrame(asdict(count) for count in result.operators)
        sums = table.groupby("phase")[["read_bytes", "write_bytes", "flops"]].sum()
        for name, row in sums.iterrows():
            assert (row.read_bytes, row.write_bytes) == moved(result, str(name))
            assert row.flops == values(result)[str(name), "flops"]

    @pytest.mark.parametrize("trainer", ALL_TRAINERS)
    def test_every_operator_of_the_built_in_trainers_has_a_reviewed_rule(
        self, trainer: str
    ) -> None:
        for attention in ("sdpa", "dp_mha"):
            assert count(tiny(trainer, attention=attention)).general_rule_operators == ()


class TestPhases:
    """Closed forms: P parameters, B examples, four bytes an element."""

    def test_sgd_reads_parameters_and_gradients(self) -> None:
        case = tiny()
        p = 4 * sum(parameters(case))
        assert moved(count(case), "optimizer") == (2 * p, p)

    @pytest.mark.parametrize("trainer", DP_TRAINERS)
    def test_noise_is_made_added_and_scaled_beside_zeros_that_nobody_reads(
        self, trainer: str
    ) -> None:
        case = tiny(trainer)
        p = 4 * sum(parameters(case))
        # read: gradient and noise, their sum; written: zeros, noise, sum, mean
        assert moved(count(case), "noise") == (3 * p, 4 * p)

    def test_clipping_reads_all_per_sample_gradients_twice(self) -> None:
        case = tiny("dpsgd", batch_size=6)
        sizes, b = parameters(case), 6
        n, p = len(sizes), sum(sizes)
        norms = 2 * n * b + (n + 1) * b  # each parameter's norm; stacked; normed together
        read, write = moved(count(case), "clip")
        factors = read - 4 * (2 * b * p + n * b + n * b + n * b)
        assert 0 <= factors <= 4 * 8 * b, "a few operators on B numbers"
        assert 0 <= write - 4 * (p + norms - n * b) <= 4 * 8 * b

    @pytest.mark.parametrize("trainer", ["dpsgd_ghost", "dpsgd_fgc"])
    def test_two_pass_trainers_copy_the_gradient_instead(self, trainer: str) -> None:
        case = tiny(trainer)
        p = 4 * sum(parameters(case))
        assert moved(count(case), "clip") == (p, p)

    def test_dpsgd_backward_writes_per_sample_gradients_three_times(self) -> None:
        small, large = (count(tiny("dpsgd", batch_size=b)) for b in (4, 8))
        p = 4 * sum(parameters(tiny("dpsgd")))
        for operator, reads, writes in (("aten.copy_", 1, 1), ("aten.linalg_vector_norm", 1, 0)):
            more = [c for c in growth(small, large) if c.operator == operator]
            assert sum(c.read_bytes for c in more) == pytest.approx(4 * p * reads, abs=4 * p * 0.01)
            assert sum(c.write_bytes for c in more) == pytest.approx(
                4 * p * writes, abs=4 * p * 0.01
            )

    def test_flops_of_linear_layers_are_six_per_parameter_and_token(self) -> None:
        case = tiny(batch_size=2, seq_len=8)
        size = case.size
        weights = size.layers * 12 * size.hidden**2 + size.hidden * size.vocabulary
        attention = size.layers * 2 * 8 * 8 * size.hidden * (2 * 2 + 5 * 2)  # 2 products, then 5
        assert values(count(case))[STEP, "flops"] == 6 * weights * 16 + attention

    def test_bf16_moves_half_the_bytes_of_its_parameters(self) -> None:
        full, half = (count(tiny("dpsgd", precision=p)) for p in ("fp32", "bf16"))
        assert moved(half, "optimizer") == tuple(v / 2 for v in moved(full, "optimizer"))
        ratio = sum(moved(half, STEP)) / sum(moved(full, STEP))
        assert 0.5 <= ratio < 0.52  # token ids stay 64 bits wide

    def test_tf32_moves_what_fp32_moves(self) -> None:
        fp32, tf32 = (count(tiny("dpsgd", precision=p)) for p in ("fp32", "tf32"))
        assert tf32.operators == fp32.operators


class ClonesGradients(DPSGDTrainer):
    """As `DPSGDTrainer`, but copies every per-sample gradient once more before it clips."""

    def train_step(self, batch: Batch) -> Tensor:
        input_ids, labels = self.unpack(batch)
        with phase("forward"):
            loss = mean_cross_entropy(self.grad_sample_module(input_ids), labels)
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            for parameter in self.model.parameters():
                parameter.grad_sample = parameter.grad_sample.clone()
        with phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def test_one_more_copy_of_the_gradients_shows_as_exactly_that() -> None:
    case = tiny("dpsgd", batch_size=4)
    sizes = parameters(case)
    before = count(case)
    after = count(tiny(ClonesGradients, batch_size=4))
    (clone,) = growth(before, after)
    assert (clone.phase, clone.operator, clone.calls) == ("clip", "aten.clone", len(sizes))
    assert clone.read_bytes == clone.write_bytes == 4 * sum(sizes) * 4
    assert clone.total_bytes == 2 * 4 * sum(sizes) * 4
    assert growth(after, after) == []


class Momentum(StandardTrainer):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        def sgd(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

        super().__init__(model, optimizer=sgd, **options)


class Adam(StandardTrainer):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, optimizer=torch.optim.Adam, **options)


class TestSteadyStep:
    @pytest.mark.parametrize("trainer", ALL_TRAINERS)
    def test_the_second_step_of_the_built_in_trainers_repeats_the_first(self, trainer: str) -> None:
        with without_data() as counter:
            built, batches = build(tiny(trainer), torch.device("cpu"), 2)
            steps = []
            for batch in batches:
                with observed_step(counter):
                    built.train_step(batch)
                alive(counter)
                steps.append(counter.counts)
        assert steps[0] == steps[1]

    def test_momentum_is_counted_once_its_buffer_exists(self) -> None:
        case = tiny(Momentum)
        p = 4 * sum(parameters(case))
        assert moved(count(case), "optimizer") == (5 * p, 3 * p)

    def test_adam_is_counted_as_foreach_once_its_moments_exist(self) -> None:
        case = tiny(Adam)
        sizes = parameters(case)
        result = count(case)
        read, write = moved(result, "optimizer")
        step_numbers = 4 * len(sizes)
        assert write == 4 * 7 * sum(sizes) + step_numbers
        assert 4 * 11 * sum(sizes) < read <= 4 * 11 * sum(sizes) + 4 * step_numbers
        in_optimizer = {c.operator for c in result.operators if c.phase == "optimizer"}
        assert "aten._foreach_addcdiv_" in in_optimizer

    def test_a_trainer_that_never_settles_is_counted_with_a_note(self) -> None:
        result = count(tiny(Hoards))
        assert any("step 3 still added" in note for note in result.notes)

    def test_two_counts_are_equal(self) -> None:
        case = tiny("dpsgd_ghost")
        assert Logical().count(case) == Logical().count(case)


class Hoards(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        self.__dict__.setdefault("hoard", []).append(torch.ones(1_000_000))
        return super().train_step(batch)


class TestPeakMemory:
    def test_memory_lives_from_its_operator_until_nothing_refers_to_it(self) -> None:
        unit = 256 * ALLOCATION_BYTES
        with without_data() as counter:
            x = torch.empty(unit, dtype=torch.uint8)
            view = x[10:]
            assert counter.memory.now == unit
            del x
            assert counter.memory.now == unit, "the view keeps it"
            y = view.clone()
            del view
            assert (counter.memory.now, counter.memory.peak) == (unit, 2 * unit)
            del y
        assert counter.memory.now == 0

    def test_sizes_are_rounded_as_cudas_allocator_does(self) -> None:
        with without_data() as counter:
            scalar = torch.ones(())
            assert counter.memory.now == ALLOCATION_BYTES
            del scalar

    def test_resizing_counts(self) -> None:
        with without_data() as counter:
            x = torch.empty(ALLOCATION_BYTES, dtype=torch.uint8)
            x.resize_(3 * ALLOCATION_BYTES)
            assert counter.memory.now == 3 * ALLOCATION_BYTES

    def test_a_phases_peak_forgets_earlier_phases(self) -> None:
        with without_data() as counter, observed_step(counter):
            with phase("forward"):
                torch.ones(100 * ALLOCATION_BYTES, dtype=torch.uint8)
            with phase("backward"):
                torch.ones(ALLOCATION_BYTES, dtype=torch.uint8)
        assert counter.peaks["forward"] == 100 * ALLOCATION_BYTES
        assert counter.peaks["backward"] == ALLOCATION_BYTES

    def test_per_sample_gradients_live_until_the_step_ends(self) -> None:
        small, large = (
            values(count(tiny("dpsgd", batch_size=b)))["noise", "peak_memory_bytes"] for b in (4, 8)
        )
        p = 4 * sum(parameters(tiny("dpsgd")))
        assert large - small == pytest.approx(4 * p, rel=0.01)


class AsksForValues(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        with phase("optimizer"):
            if not torch.isfinite(loss) or loss.item() < 0:
                raise ValueError("diverged")
        return loss


class CountsTokens(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        tokens, _ = batch
        with phase("noise"):
            torch.unique(tokens, return_inverse=True, return_counts=True)
            torch.unique(tokens, dim=0)
            torch.unique_consecutive(tokens.flatten())
            (tokens > 3).nonzero()
            tokens.masked_select(tokens > 3)
            tokens[tokens > 3]
        return super().train_step(batch)


class TestValuesThatDoNotExist:
    def test_a_value_that_python_asks_for_is_one_and_noted(self) -> None:
        result = count(tiny(AsksForValues))
        assert result.notes == (
            "aten._local_scalar_dense: a value that Python asked for was taken to be 1 (2×)",
        )

    def test_the_ghost_sampler_of_embeddings_gets_a_stated_bound(self) -> None:
        result = count(tiny("dpsgd_ghost", batch_size=4, seq_len=16))
        assert result.notes == ("aten.unique_dim: all 64 rows were taken to be distinct (2×)",)

    def test_other_results_of_unknown_shape_are_bounded_too(self) -> None:
        result = count(tiny(CountsTokens, batch_size=4, seq_len=16))
        assert [note.partition(":")[0] for note in result.notes] == [
            "aten._unique2",
            "aten.index",
            "aten.masked_select",
            "aten.nonzero",
            "aten.unique_consecutive",
            "aten.unique_dim",
        ]

    def test_without_a_bound_the_case_fails_and_names_the_operator(self) -> None:
        with pytest.raises(CaseFailed, match=r"aten\.equal returns depends on data"):
            count(tiny(Compares))


class Compares(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        torch.equal(*batch)
        return super().train_step(batch)


class NamesCuda(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        torch.zeros(3, device="cuda")
        return super().train_step(batch)


class ChangesEverything(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(1234)
        torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
        loss = super().train_step(batch)
        torch.set_grad_enabled(False)
        if loss.dtype is torch.float32:
            raise RuntimeError("on purpose")
        return loss


class ScaledEmbedding(nn.Module):
    """A model with a layer that Opacus has no sampler for, and with dropout."""

    def __init__(self, size: ModelSize, *, attention: str, max_seq_len: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.scale = Scale(size.hidden)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(size.hidden, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(F.relu(self.scale(self.embedding(tokens)))))
        return logits


class Scale(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class TestOutsideCode:
    @pytest.mark.parametrize("trainer", ALL_TRAINERS)
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_outside_models_are_counted(self, trainer: str, precision: str) -> None:
        result = count(tiny(trainer, model=ScaledEmbedding, precision=precision))
        assert sum(moved(result, STEP)) > 0
        assert result.general_rule_operators == ()

    def test_a_step_that_names_a_device_fails_with_advice(self) -> None:
        with pytest.raises(CaseFailed, match="take the device from the batch"):
            count(tiny(NamesCuda))

    def test_a_step_that_raises_is_a_failed_case(self) -> None:
        with pytest.raises(CaseFailed, match="RuntimeError: on purpose"):
            count(tiny(ChangesEverything))


class TestNothingLeaks:
    def state(self) -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        )

    @pytest.mark.parametrize("trainer", [*ALL_TRAINERS, ChangesEverything])
    def test_global_state_is_as_before(self, trainer: str | type) -> None:
        before = self.state()
        try:
            Logical().measure(tiny(trainer))
        except CaseFailed:
            assert trainer is ChangesEverything
        assert self.state() == before

    def test_surroundings_do_not_matter(self) -> None:
        case = tiny("dpsgd")
        expected = Logical().count(case)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.inference_mode(), torch.device("meta"):
                assert Logical().count(case) == expected
        finally:
            torch.set_default_dtype(torch.float32)

    def test_no_tensor_outlives_the_count(self) -> None:
        Logical().count(tiny("dpsgd"))
        gc.collect()
        fake = [o for o in gc.get_objects() if type(o).__name__ == "FakeTensor"]
        assert not fake

    def test_tensors_have_data_again_afterwards(self) -> None:
        Logical().count(tiny())
        assert float(torch.ones(3).sum()) == 3.0


def test_counting_needs_a_step() -> None:
    with pytest.raises(ConfigurationError, match="at least one step"):
        Logical(most_steps=0)


def test_check_asks_for_nothing() -> None:
    Logical().check()


def test_a_counter_hears_nothing_of_phases_between_steps() -> None:
    with without_data() as counter:
        torch.ones(3)
    assert isinstance(counter, ByteCounter)
    assert not counter.counts
