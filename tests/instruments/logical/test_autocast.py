"""Autocast is counted as CUDA does it, whichever device the code names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpbench.core.case import Case
from dpbench.instruments.logical.as_on_cuda import LOWER, SUMS, WIDEST
from dpbench.instruments.logical.counter import OperatorCounter, without_data
from dpbench.instruments.logical.logical import Logical
from dpbench.results.rows import STEP
from dpbench.training.base import Batch
from dpbench.training.phases import observed_step
from dpbench.training.standard import StandardTrainer
from tests.instruments.logical.cases import count, tiny, totals
from tests.instruments.logical.cases import moved as moved_in
from tests.instruments.logical.test_rules import moved

B, I, O = 8, 32, 16  # noqa: E741  # examples, features in, features out
HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def listed(policy: str) -> set[str]:
    """The operators of a policy, in PyTorch's own header."""
    text = re.split(rf"#define AT_FORALL_{policy}\(_\)", HEADER.read_text())[1].split("\n\n")[0]
    return set(re.findall(r"_\((\w+)", text))


@pytest.mark.skipif(not HEADER.exists(), reason="this torch comes without its headers")
def test_lists_are_those_of_pytorch() -> None:
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert listed("LOWER_PRECISION_FP") | cudnn == LOWER
    assert listed("PROMOTE") == WIDEST
    assert listed("FP32_SET_OPT_DTYPE") == {*SUMS, "softmax", "log_softmax"}
    assert not listed("FP32") & (LOWER | WIDEST | {*SUMS})


def test_cuda_lists_no_operator_that_is_cast_by_the_cpu_alone() -> None:
    with without_data(), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.ones(2, 3, 4, 4, 4, dtype=torch.bfloat16)
        assert F.avg_pool3d(x, 2).dtype is torch.bfloat16  # on the CPU float32
        assert torch.stack([x[0], x[0].float()]).dtype is torch.float32


def test_operators_of_other_libraries_are_left_as_they_are() -> None:
    library = torch.library.Library("vision_of_this_test", "DEF")
    try:
        library.define("align(Tensor x) -> Tensor")
        library.impl("align", lambda x: x, "AutocastCUDA")
        with without_data(), torch.autocast("cuda", dtype=torch.bfloat16):
            assert F.linear(torch.ones(2, 3), torch.ones(4, 3)).dtype is torch.bfloat16
    finally:
        library._destroy()


def counted(step: object, *shapes: tuple[int, ...], dtype: torch.dtype) -> OperatorCounter:
    with without_data() as counter:
        tensors = [torch.empty(shape, requires_grad=True) for shape in shapes]
        with observed_step(counter), torch.autocast("cuda", dtype=dtype):
            step(*tensors)  # type: ignore[operator]
    return counter


def test_a_layer_reads_what_was_cast_and_each_weight_is_cast_once() -> None:
    def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = x * 1  # an activation is cast for each use
        return F.linear(y, w, b) + F.linear(y, w, b)

    counter = counted(twice, (B, I), (O, I), (O,), dtype=torch.bfloat16)
    cast = 2 * B * I + O * I + O
    assert moved(counter, "_to_copy") == (4 * cast, 2 * cast)
    assert moved(counter, "addmm") == (2 * 2 * (B * I + O * I + O), 2 * 2 * B * O)


def test_what_was_cast_is_forgotten_at_the_end_of_a_region() -> None:
    with without_data() as counter:
        weight = torch.empty(O, I, requires_grad=True)
        with observed_step(counter):
            for _ in range(3):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    weight @ weight.T
    assert totals(counter)["outside", "aten._to_copy"]["calls"] == 6  # weight.T is cast anew


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_and_losses_are_in_single_precision(dtype: torch.dtype) -> None:
    with without_data(), torch.autocast("cuda", dtype=dtype):
        x, target = torch.ones(B, I, dtype=dtype), torch.zeros(B, dtype=torch.int64)
        for made in (
            F.layer_norm(x, (I,)),
            F.softmax(x, dim=1),
            x.sum(),
            x.norm(),
            x.norm(dim=1),
            torch.linalg.vector_norm(x),
            F.cross_entropy(x, target),
            F.mse_loss(x, x),
            x.exp(),
            torch.addcmul(x, x, x.float(), value=1),
        ):
            assert made.dtype is torch.float32
        assert torch.addcmul(x, x, x).dtype is dtype
        assert F.softmax(x, dim=1, dtype=dtype).dtype is dtype
        assert (x.double() @ x.double().T).dtype is torch.float64


def test_float16_is_read_by_softmax_and_bfloat16_is_cast_before() -> None:
    def step(x: Tensor) -> Tensor:
        return F.log_softmax(x.detach().half() if half else x.detach().bfloat16(), dim=1)

    n = B * I
    half = True
    counter = counted(step, (B, I), dtype=torch.float16)
    assert moved(counter, "_log_softmax") == (2 * n, 4 * n)
    half = False
    counter = counted(step, (B, I), dtype=torch.bfloat16)
    assert moved(counter, "_log_softmax") == (4 * n, 4 * n)


class Autocasts(StandardTrainer):
    """A trainer with its own autocast region and gradient scaler, as on a GPU."""

    def train_step(self, batch: Batch) -> Tensor:
        scaler = torch.amp.GradScaler("cuda")
        with torch.autocast("cuda"):
            loss = self.mean_loss(self.model, batch)
        scaler.scale(loss).backward()
        scaler.step(self.plain_optimizer)
        scaler.update()
        return loss.detach()


def test_a_trainer_of_ones_own_is_counted_as_the_axis_is() -> None:
    def of(trainer: object, precision: str) -> dict[str, float]:
        result = count(tiny(trainer, precision=precision))
        names = ("aten.mm", "aten.addmm", "aten.native_layer_norm", "aten._foreach_add_")
        found = {o.operator: 0.0 for o in result.operators if o.operator in names}
        for o in result.operators:
            if o.operator in found:
                found[o.operator] += o.read_bytes + o.write_bytes
        return found

    assert of(Autocasts, "fp32") == of("standard", "bf16-amp")


def test_what_runs_again_in_backward_is_cast_as_before() -> None:
    def products(kept: str, phase: str) -> list[int]:
        case = Case("standard", 4, 64, "100x64x2x2", "bf16-amp", activation_checkpointing=kept)
        found = [o for o in Logical().count(case).operators if o.phase == phase]
        found = [o for o in found if o.operator == "aten.addmm"]
        sums = zip(*((o.calls, o.read_bytes, o.write_bytes) for o in found), strict=True)
        return [*map(sum, sums)]

    assert products("on", "backward") == products("off", "forward")
    assert not products("off", "backward")


def test_autocast_moves_less_than_single_precision_and_more_than_half() -> None:
    def moved_by(precision: str) -> float:
        return sum(moved_in(count(tiny("standard", precision=precision)), STEP))

    assert moved_by("bf16") < moved_by("bf16-amp") < moved_by("fp32")
