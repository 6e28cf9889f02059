"""The logical instrument on whole cases: phases, steady steps, peak memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from dpbench import phase
from dpbench.child.build import build
from dpbench.core.case import PHASES
from dpbench.instruments.logical.case_count import live_bytes
from dpbench.instruments.logical.counter import without_data
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.logical.memory import ALLOCATION_BYTES
from dpbench.instruments.logical.recorder import freeze_existing_objects
from dpbench.results.outcome import Outcome
from dpbench.results.rows import NO_HARDWARE, STEP
from dpbench.training.base import Batch, mean_cross_entropy
from dpbench.training.dpsgd import DPSGDTrainer
from dpbench.training.phases import observed_step
from dpbench.training.standard import StandardTrainer
from tests.instruments.logical.cases import (
    ALL_TRAINERS,
    DP_TRAINERS,
    count,
    guessed,
    moved,
    parameters,
    tiny,
    totals,
    values,
)


class TestRows:
    def test_every_phase_and_the_step_have_every_metric(self) -> None:
        rows = count(tiny("dpsgd")).rows
        metrics = {"logical_read_bytes", "logical_write_bytes", "flops", "peak_memory_bytes"}
        assert {(row.phase, row.metric) for row in rows} == {
            *((phase, metric) for phase in (*PHASES, "outside", STEP) for metric in metrics),
            (STEP, "largest_tensor_bytes"),
        }

    def test_rows_say_that_no_hardware_was_involved(self) -> None:
        case = tiny()
        for row in Logical().measure(case).rows:
            assert (row.case, row.instrument, row.repeat) == (case, "logical", 0)
            assert (row.device, row.tool) == (NO_HARDWARE, f"torch {torch.__version__}")
            assert row.unit == ("1" if row.metric == "flops" else "B")

    def test_phases_add_up_to_the_step(self) -> None:
        found = values(count(tiny("dpsgd_ghost")))
        for metric in ("logical_read_bytes", "logical_write_bytes", "flops"):
            by_phase = [value for (where, name), value in found.items() if name == metric]
            assert sum(by_phase) == 2 * found[STEP, metric]

    def test_the_operators_add_up_to_the_phases(self) -> None:
        result = count(tiny("dpsgd_ghost"))
        table = pd.DataFrame(asdict(count) for count in result.operators)
        sums = table.groupby("phase")[["read_bytes", "write_bytes", "flops"]].sum()
        for name, row in sums.iterrows():
            assert (row.read_bytes, row.write_bytes) == moved(result, str(name))
            assert row.flops == values(result)[str(name), "flops"]

    @pytest.mark.repeats
    @pytest.mark.parametrize("trainer", ALL_TRAINERS[::-1])
    def test_no_bytes_of_the_built_in_trainers_are_a_guess(self, trainer: str) -> None:
        for attention in ("sdpa", "dp_mha"):
            assert not guessed(count(tiny(trainer, attention=attention)))


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


def growth(before: Outcome, after: Outcome, operator: str) -> dict[str, int]:
    """The additional bytes of an operator."""
    return {
        name: sum(
            sign * getattr(each, name)
            for sign, count in ((1, after), (-1, before))
            for each in count.operators
            if each.operator == operator
        )
        for name in ("calls", "read_bytes", "write_bytes")
    }


class ClonesGradients(DPSGDTrainer):
    """`DPSGDTrainer` with one more copy of each per-sample gradient before clipping."""

    def train_step(self, batch: Batch) -> Tensor:
        input_ids, labels = batch
        with phase("forward"):
            loss = mean_cross_entropy(self.grad_sample_module(input_ids), labels)
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            for parameter in self.optimizer.params:
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
    size = 4 * sum(sizes) * 4
    more = {"calls": len(sizes), "read_bytes": size, "write_bytes": size}
    assert growth(before, after, "aten.clone") == more
    [changed] = (each for each in {*after.operators} - {*before.operators} if each.phase == "clip")
    assert changed.operator == "aten.clone"
    assert "test_logical.py:" in changed.line
    assert changed.line.endswith(" train_step")


class Momentum(StandardTrainer):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        def sgd(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

        super().__init__(model, optimizer=sgd, **options)


class Adam(StandardTrainer):
    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, optimizer=torch.optim.Adam, **options)


class TestSteadyStep:
    @pytest.mark.repeats
    @pytest.mark.parametrize("trainer", ALL_TRAINERS[::-1])
    def test_the_second_step_of_the_built_in_trainers_repeats_the_first(self, trainer: str) -> None:
        with freeze_existing_objects(), without_data() as counter:
            built, batches = build(tiny(trainer), torch.device("cpu"), 2)
            steps = []
            for batch in batches:
                with observed_step(counter):
                    built.train_step(batch)
                live_bytes(counter)
                steps.append(totals(counter))
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
        assert any("no step was steady: step 3 added" in note for note in result.notes)


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

    def test_a_phases_peak_forgets_earlier_phases(self) -> None:
        with without_data() as counter, observed_step(counter):
            with phase("forward"):
                torch.ones(100 * ALLOCATION_BYTES, dtype=torch.uint8)
            with phase("backward"):
                torch.ones(ALLOCATION_BYTES, dtype=torch.uint8)
        assert counter.peaks["forward"] == 100 * ALLOCATION_BYTES
        assert counter.peaks["backward"] == ALLOCATION_BYTES


@pytest.mark.parametrize("trainer", ALL_TRAINERS)
def test_the_optimizer_only_updates(trainer: str) -> None:
    """Opacus's mean of the losses counts in forward too."""
    operators = [each for each in count(tiny(trainer)).operators if each.phase == "optimizer"]
    assert [each.operator for each in operators] == ["aten._foreach_add_"]
