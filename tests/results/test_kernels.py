"""Launches folded to kernels: nothing is lost, and what launched them is kept."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from dpbench.core.case import PHASES, Case
from dpbench.core.metrics import METRICS
from dpbench.results.kernels import (
    KernelCount,
    fold,
    kernel_rows,
)
from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import dram_bytes_of_step
from tests.results.figures import summarised

CASE = Case("dpsgd", 8, 256)
FILL = "void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<float>>(int)"
NORM = "void at::native::reduce_kernel<(int)512, at::native::ReduceOp<at::native::NormTwoOps>>(T3)"
STRANGE = "my_kernel(float *)"

amounts = st.integers(0, 2**40).map(float)
launches = st.lists(
    st.builds(
        KernelCount,
        repeat=st.integers(0, 1),
        phase=st.sampled_from(PHASES),
        name=st.sampled_from([FILL, NORM, STRANGE]),
        launches=st.just(1),
        read_bytes=amounts,
        write_bytes=amounts,
        l2_bytes=amounts,
        seconds=st.integers(0, 2**20).map(float),
    )
)


def launch(name: str = FILL, phase: str = "clip", **numbers: float) -> KernelCount:
    values = {"read_bytes": 1e9, "write_bytes": 5e8, "l2_bytes": 3e9, "seconds": 1e-3, **numbers}
    return KernelCount(0, phase, name, 1, **values)


@given(launches)
def test_folding_loses_no_launch_and_no_byte(found: list[KernelCount]) -> None:
    counts = fold(found)
    assert sum(count.launches for count in counts) == len(found)
    assert sum(count.read_bytes for count in counts) == sum(each.read_bytes for each in found)
    assert len({(c.repeat, c.phase, c.name) for c in counts}) == len(counts)
    assert [c.dram_bytes for c in counts] == sorted((c.dram_bytes for c in counts), reverse=True)


@given(launches)
def test_phases_add_up_to_the_step_in_rows(found: list[KernelCount]) -> None:
    rows = kernel_rows(CASE, "ncu_kernels", fold(found), "x", "y", whole=True)
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for row in rows:
        if row.phase != STEP:
            sums[row.repeat, row.metric] += row.value
    assert {(r.repeat, r.metric): r.value for r in rows if r.phase == STEP} == sums
    assert {row.metric for row in rows} <= {metric.name for metric in METRICS.had_by("ncu_kernels")}


def test_kernels_of_some_phases_are_not_called_the_step() -> None:
    rows = kernel_rows(CASE, "ncu_kernels", fold([launch()]), "x", "y", whole=False)
    assert {row.phase for row in rows} == {"clip"}


def test_reads_alone_are_not_the_bytes_of_a_step() -> None:
    read, write = (
        Measurement(CASE, "ncu", STEP, f"dram_{way}_bytes", 2e9, "B", 0, "x", "y")
        for way in ("read", "write")
    )
    assert dram_bytes_of_step(summarised([read, write])) == 4e9
    assert dram_bytes_of_step(summarised([read])) is None
