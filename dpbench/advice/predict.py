"""Predicts the time of a step from its calls.

By the roofline, a call takes at least the longer of its arithmetic and its bytes at the card's
rates. Python also needs some time for each call. Caches and the shapes of matrices are ignored. So
for kernels other than large products, lower rates than the roofline's are assumed. The constants
are from the runs in ``docs/results``, on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpbench.advice.footprint import Footprint
from dpbench.core.case import ALL_PHASES
from dpbench.core.names import parted, read_parameters
from dpbench.results.roofline import Roofs

OPERATOR_SECONDS = 25e-6
"""CPU time of PyTorch, Opacus and Python for an operator. In cells whose GPU is busy for less than
`LAUNCH_BOUND` of a step, an operator takes 23 to 42 µs."""

KERNEL_SECONDS = 5e-6
"""Time of a kernel beyond its roofline: to start, and to fill and drain the card."""

BANDWIDTH_SHARE = 0.8
"""The bandwidth that a kernel reaches ÷ a copy's: 0.70 to 0.89 in noise, clip and update of
`h200-methods-1024.json` at fp32."""

CONVOLUTION_SHARE = 0.5
"""The rate of fp32 convolutions ÷ that of large matrix products, from `h200-resnet-64.json`."""

DRAWN_OPERATIONS = 69
"""A normal number takes as long as so many float32 operations of large products: 1.8 ms for the
1.34e9 numbers of each further band of ``fused``, in `h200-banded-256.json`."""

TYPES = {"bfloat16": "bf16", "float16": "fp16-amp"}
"""The precision of products by their operands' type; other types multiply as float32 does."""


@dataclass(frozen=True)
class Seconds:
    """Times of a step.

    Args:
        roofline: the least time for bytes and arithmetic, call by call.
        launches: the CPU's time; 0 where steps are CUDA graphs.
        predicted: the predicted time, the sum over phases of the longer of the kernels' time and
            the CPU's time. It assumes that the CPU runs ahead of the GPU only within a phase.
    """

    roofline: float
    launches: float
    predicted: float


def predict(footprint: Footprint, card: Roofs) -> Seconds:
    """The times of a step on a card, without collectives."""
    bands = read_parameters(parted(footprint.case.trainer)[1]).get("bands", 1)
    draws = int(bands) / (2 if footprint.case.precision == "bf16" else 4)  # for a gradient's byte

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
            ("launches", phase): 0.0 if footprint.first.in_graphs else OPERATOR_SECONDS,
        }

    times = footprint.totals(of_call)

    def of(what: str) -> list[float]:
        return [times.get((what, phase), 0.0) for phase in ALL_PHASES]

    longer = map(max, of("kernels"), of("launches"))
    return Seconds(sum(of("roofline")), sum(of("launches")), sum(longer))


def _of_float32(footprint: Footprint, operator: str) -> str:
    """How float32 is multiplied: attention takes no TF32 (`h200-methods-16x1024.json`)."""
    is_tf32 = footprint.case.precision == "tf32" and "attention" not in operator
    return "tf32" if is_tf32 else "fp32"
