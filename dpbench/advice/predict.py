"""Predicts the time of a step from the counted calls of operators.

In the roofline model, a call takes at least the time for its arithmetic, and at least the time for
its bytes, at the card's peak rates. The model ignores caches and the shapes of matrices. So the
prediction uses lower rates than the peak rates for bytes and for convolutions, and adds the CPU's
time for each call. The files that are named below are runs on an H200 in ``docs/results``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dpbench.advice.footprint import Counts, Footprint
from dpbench.core.case import ALL_PHASES, BASELINE_TRAINER, Case
from dpbench.core.gpu import visible_gpus
from dpbench.core.names import parted, read_parameters
from dpbench.instruments.timing import Timing
from dpbench.results.roofline import Roofs
from dpbench.results.rows import STEP

OPERATOR_SECONDS = 25e-6
"""CPU time of PyTorch, Opacus and Python for an operator, in seconds. In launch-bound phases, whose
busy share is below `dpbench.results.roofline.LAUNCH_BOUND`, measured times are 23 to 42 µs."""

LAUNCH_BOUND_CASE = Case(BASELINE_TRAINER, batch_size=4, seq_len=16, model_size="1024x64x8x4")
"""Case whose operators are so small that the GPU waits for their launches."""

KERNEL_SECONDS = 5e-6
"""Seconds that a kernel is assumed to take in addition to the time of the roofline model. The GPU
must start the kernel, and is not fully used at the kernel's beginning and end."""

BANDWIDTH_SHARE = 0.8
"""Assumed bandwidth of a kernel, divided by the bandwidth of a copy. In `h200-methods-1024`,
measured quotients are 0.70 to 0.89 for noise, clip and optimizer at fp32."""

CONVOLUTION_SHARE = 0.5
"""Operations per second in convolutions, divided by those in large matrix products. Measured for
fp32 in `h200-resnet-64`, and assumed for all precisions."""

DRAWN_OPERATIONS = 69
"""Time to draw a normal random number, divided by the time of a float32 operation in a large matrix
product. In `h200-banded-256`, the trainer ``fused`` draws 1.34e9 more numbers for each
further band of its noise, which takes 1.8 ms."""

TYPES = {"bfloat16": "bf16", "float16": "bf16"}
"""For each type of operand, the precision of matrix products. `_of_float32` decides for other
types."""


@dataclass(frozen=True)
class Seconds:
    """Times of a step.

    Args:
        roofline: the minimum time of each call by the roofline model, summed over calls.
        launches: the CPU time of all calls; 0 if steps run as CUDA graphs.
        predicted: the predicted time of the step, which is the sum of the predicted times of the
            phases. A phase takes the time of its kernels or its CPU time, whichever is longer. So
            the CPU is assumed to run ahead of the GPU only within a phase.
    """

    roofline: float
    launches: float
    predicted: float


def measured_operator_seconds(directory: Path) -> float | None:
    """Measure the CPU time for an operator on this host, in seconds. Return None without a GPU.

    This is the time of a step of `LAUNCH_BOUND_CASE` on the GPU, divided by the number of counted
    operators. A log stays in ``directory``.

    Raises:
        DpbenchError: the step cannot be measured.
    """
    if not visible_gpus():
        return None
    rows = Timing(directory).measure(LAUNCH_BOUND_CASE).rows
    steps = [r.value for r in rows if (r.metric, r.phase) == ("step_time_seconds", STEP)]
    counted = Footprint(LAUNCH_BOUND_CASE, [Counts().of_step(LAUNCH_BOUND_CASE)])
    return median(steps) / counted.totals(lambda *_: {"": 1})[""]


def predict(
    footprint: Footprint, card: Roofs, operator_seconds: float = OPERATOR_SECONDS
) -> Seconds:
    """Predict the times of a step on a card, from the CPU time for an operator.

    The time of collectives is ignored.
    """
    bands = read_parameters(parted(footprint.case.trainer)[1]).get("bands", 1)
    draws = int(bands) / 4  # random numbers to draw for each byte of a sum in float32

    def of_call(
        phase: str, operator: str, read: int, written: int, flops: int, sent: int, dtype: str
    ) -> Mapping[tuple[str, str], float]:
        precision = TYPES.get(dtype) or _of_float32(footprint, operator)
        share = CONVOLUTION_SHARE if "convolution" in operator else 1.0
        arithmetic = flops / card.flops[precision]
        if "noisy_" in operator:  # see `dpbench.training.noisy_updates`
            arithmetic = draws * (read - written or written) * DRAWN_OPERATIONS / card.flops["fp32"]
        moving = (read + written) / card.bandwidth
        return {
            ("roofline", phase): max(arithmetic, moving),
            ("kernels", phase): max(arithmetic / share, moving / BANDWIDTH_SHARE) + KERNEL_SECONDS,
            ("launches", phase): 0.0 if footprint.first.in_graphs else operator_seconds,
        }

    times = footprint.totals(of_call)

    def of(what: str) -> list[float]:
        return [times.get((what, phase), 0.0) for phase in ALL_PHASES]

    longer = map(max, of("kernels"), of("launches"))
    return Seconds(sum(of("roofline")), sum(of("launches")), sum(longer))


def _of_float32(footprint: Footprint, operator: str) -> str:
    """Return the precision in which an operator multiplies float32 matrices.

    Attention is assumed not to use TF32, as in the runs of `h200-methods-16x1024`.
    """
    is_tf32 = footprint.case.precision == "tf32" and "attention" not in operator
    return "tf32" if is_tf32 else "fp32"
