"""The logical instrument on outside code: values, models, global state."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpbench import phase
from dpbench.core.case import ModelSize
from dpbench.core.errors import CaseFailed
from dpbench.instruments.logical import stand_ins
from dpbench.instruments.logical.counter import without_data
from dpbench.instruments.logical.logical import Logical
from dpbench.results.rows import STEP
from dpbench.training.base import Batch
from dpbench.training.refusals import CannotTrain
from dpbench.training.standard import StandardTrainer
from tests.instruments.logical.cases import ALL_TRAINERS, count, guessed, moved, tiny
from tests.instruments.logical.outside import CountsTokens


class AsksForValues(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        loss = super().train_step(batch)
        with phase("optimizer"):
            if not torch.isfinite(loss) or loss.item() < 0:
                raise ValueError("diverged")
        return loss


class TestValuesThatDoNotExist:
    def test_a_value_that_python_asks_for_is_one_and_noted(self) -> None:
        result = count(tiny(AsksForValues))
        assert result.notes == ("counted as if values that code reads, as by loss.item(), were 1",)

    def test_the_ghost_sampler_of_embeddings_gets_a_stated_bound(self) -> None:
        result = count(tiny("dpsgd_ghost", batch_size=4, seq_len=16))
        assert result.notes == ("an upper bound: aten.unique_dim is counted as if all rows differ",)

    def test_other_results_of_unknown_shape_are_bounded_too(self) -> None:
        result = count(tiny(CountsTokens, batch_size=4, seq_len=16))
        assert [note.split()[3] for note in result.notes] == [
            "aten._unique2",
            "aten.index",
            "aten.masked_select",
            "aten.nonzero",
            "aten.unique_consecutive",
            "aten.unique_dim",
        ]

    def test_without_a_bound_the_case_fails_and_names_the_operator(self) -> None:
        with pytest.raises(CaseFailed, match=r"the result of aten\.equal depends on values"):
            count(tiny(Compares))

    def test_a_loop_that_waits_for_another_value_ends_and_names_its_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stand_ins, "MAX_QUESTIONS", 200)
        with pytest.raises(CaseFailed, match=r"does not end \(test_outside\.py:\d+: while \(tok"):
            count(tiny(WaitsForALargerValue))

    def test_initialisers_that_draw_until_all_is_well_come_to_an_end(self) -> None:
        assert count(tiny(model=DrawsItsWeights)).notes == ()

    def test_constants_that_a_model_is_built_from_are_known(self) -> None:
        with without_data():
            rates = torch.linspace(0, 0.5, 3)
            assert [float(rate) for rate in rates] == rates.tolist() == [0, 0.25, 0.5]
            assert torch.arange(4)[2].item() == 2
            rates.normal_()
            assert rates[1].item() == 1, "assumed, since something unknown was written"


class WaitsForALargerValue(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        tokens, _ = batch
        while (tokens.max() + 1).item() < 2:  # the assumed value is 1
            tokens = tokens + 1
        return super().train_step(batch)


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
        loss = super().train_step(batch)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cuda", True)
        if loss.dtype is torch.float32:
            raise RuntimeError("on purpose")
        return loss


class ScaledEmbedding(nn.Module):
    """A model with dropout and a layer without a grad sampler in Opacus."""

    def __init__(self, size: ModelSize, *, attention: str, max_seq_len: int = 1024) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.scale = Scale(size.hidden)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(size.hidden, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(F.relu(self.scale(self.embedding(tokens)))))
        return logits


class DrawsItsWeights(ScaledEmbedding):
    def __init__(self, size: ModelSize, **options: Any) -> None:
        super().__init__(size, **options)
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)
            while (parameter.data.abs() > 1).any():
                parameter.data.normal_()


class AddsInPlace(ScaledEmbedding):
    """A block like those of torchvision's ResNets, with group norms."""

    def __init__(self, size: ModelSize, **options: Any) -> None:
        super().__init__(size, **options)
        self.norm = nn.GroupNorm(2, size.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        y += x
        logits: Tensor = self.head(y)
        return logits


class Scale(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class TestOutsideCode:
    @pytest.mark.repeats
    @pytest.mark.parametrize(
        ("trainer", "precision"), [("dpsgd_ghost", "bf16"), *((n, "fp32") for n in ALL_TRAINERS)]
    )
    def test_outside_models_are_counted(self, trainer: str, precision: str) -> None:
        result = count(tiny(trainer, model=ScaledEmbedding, precision=precision))
        assert sum(moved(result, STEP)) > 0
        assert not guessed(result)

    @pytest.mark.parametrize("trainer", ["dpsgd", "dpsgd_ghost"])
    def test_what_opacus_refuses_is_told_in_one_line_with_the_models_own(
        self, trainer: str
    ) -> None:
        with pytest.raises(CannotTrain) as caught:
            count(tiny(trainer, model=AddsInPlace))
        message = str(caught.value)
        assert "write y = y + x instead of y += x" in message
        assert message.endswith(": y += x)")
        assert "\n" not in message

    def test_a_step_that_names_a_device_fails_with_advice(self) -> None:
        with pytest.raises(CaseFailed, match="use the device of the batch"):
            count(tiny(NamesCuda))


class TestNothingLeaks:
    def state(self) -> tuple[Any, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
        )

    def test_global_state_is_as_before(self) -> None:
        before = self.state()
        Logical().count(tiny("dpsgd_ghost"))
        assert self.state() == before
        with pytest.raises(CaseFailed, match="RuntimeError: on purpose"):
            Logical().count(tiny(ChangesEverything))
        assert self.state() == before

    def test_surroundings_do_not_matter(self) -> None:
        case = tiny("dpsgd")
        expected = Logical().count(case)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu"):
                assert Logical().count(case) == expected
        finally:
            torch.set_default_dtype(torch.float32)

    def test_no_tensor_outlives_the_count(self) -> None:
        gc.freeze()  # skip existing objects
        try:
            Logical().count(tiny("dpsgd"))
            gc.collect()
            assert not [one for one in gc.get_objects() if type(one).__name__ == "FakeTensor"]
        finally:
            gc.unfreeze()
