"""The account of a step: kernels and copies against ranges."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench import Case
from dpbench.core.metrics import METRICS
from dpbench.results.account import ACCOUNT_COLUMNS, reconcile_kernels
from dpbench.results.kernels import KernelCount
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.results.summary import summary, to_frame
from dpbench.show.kernels import account_table, case_kernel_tables

CASE = Case("dpsgd", 8, 256)
BYTES = st.integers(0, 10**12).map(float)
PARTS_OF_A_PHASE = st.fixed_dictionaries(
    {
        (METRICS[metric].by[0], metric): BYTES
        for metrics in ACCOUNT_COLUMNS.values()
        for metric in metrics
    }
)


def frame(phases: dict[str, dict[tuple[str, str], float]]) -> pd.DataFrame:
    """The long table of a step with these numbers by phase; its rows for the step are sums."""
    rows = []
    for key in {key for values in phases.values() for key in values}:
        by_phase = {phase: values[key] for phase, values in phases.items() if key in values}
        for phase, value in {**by_phase, STEP: sum(by_phase.values())}.items():
            instrument, metric = key
            rows.append(
                Measurement(CASE, instrument, phase, metric, value, "B", 0, "NVIDIA H200", "x")
            )
    return to_frame(rows)


def accounted(rows: pd.DataFrame) -> pd.DataFrame:
    """The account of rows that have all its numbers."""
    found = reconcile_kernels(summary(rows))
    assert found is not None
    return found


def phase(**bytes_of: float) -> dict[tuple[str, str], float]:
    """All numbers of a phase, those that are not named zero."""
    names = [name for metrics in ACCOUNT_COLUMNS.values() for name in metrics]
    return {(METRICS[name].by[0], name): bytes_of.get(name, 0.0) for name in names}


def test_a_copy_on_the_device_is_read_and_written() -> None:
    found = accounted(
        frame({"clip": phase(memcpy_device_to_device_bytes=7e9, dram_read_bytes=1.0)})
    )
    assert found.copies_read["clip"] == found.copies_written["clip"] == 7e9


def test_copies_from_and_to_the_host_and_memsets_count_once() -> None:
    values = phase(
        memcpy_host_to_device_bytes=1.0,
        memcpy_device_to_host_bytes=2.0,
        memset_bytes=4.0,
        dram_read_bytes=10.0,
    )
    found = accounted(frame({"forward": values}))
    assert found.copies_read["forward"] == 2.0
    assert found.copies_written["forward"] == 5.0


@settings(max_examples=4, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["forward", "backward", "clip"]), PARTS_OF_A_PHASE, min_size=1)
)
def test_remainders_of_phases_add_up_to_that_of_the_step(
    phases: dict[str, dict[tuple[str, str], float]],
) -> None:
    found = accounted(frame(phases))
    by_phase = found.drop(index=STEP)
    assert by_phase.remainder.sum() == pytest.approx(found.remainder[STEP], abs=1e-3)
    for name, line in by_phase.iterrows():
        assert line.remainder == pytest.approx(
            line.range_read
            + line.range_written
            - line.kernels_read
            - line.kernels_written
            - line.copies_read
            - line.copies_written,
            abs=1e-3,
        ), name


def test_a_phase_without_kernels_is_one_with_none() -> None:
    """``clip`` of ghost clipping has copies alone."""
    kernels = phase(kernel_dram_read_bytes=5e9, dram_read_bytes=5e9)
    copies = {
        key: value
        for key, value in phase(
            memcpy_device_to_device_bytes=1e9, dram_read_bytes=1e9, dram_write_bytes=1e9
        ).items()
        if key[0] != "ncu_kernels"
    }
    found = accounted(frame({"backward": kernels, "clip": copies}))
    assert found.kernels_read["clip"] == 0
    assert found.remainder[STEP] == 0
    assert list(found.index) == ["backward", "clip", STEP]


@pytest.mark.parametrize(
    "missing",
    [
        {"instrument": "ncu"},
        {"instrument": "ncu_kernels"},
        {"instrument": "torch_profiler"},
        {"metric": "kernel_dram_write_bytes", "phase": "clip"},
        {"metric": "memset_bytes", "phase": "clip"},
        {"metric": "dram_read_bytes", "phase": "clip"},
    ],
)
def test_without_one_of_its_numbers_there_is_no_account(missing: dict[str, str]) -> None:
    whole = frame({"forward": phase(dram_read_bytes=1.0), "clip": phase(dram_read_bytes=1.0)})
    lacking = whole[~(whole[list(missing)] == pd.Series(missing)).all(axis="columns")]
    assert len(lacking) < len(whole)
    assert reconcile_kernels(summary(whole)) is not None
    assert reconcile_kernels(summary(lacking)) is None


def test_rows_of_two_devices_have_none() -> None:
    whole = frame({"forward": phase(dram_read_bytes=1.0)})
    on_cpu = whole.device.where(whole.instrument != "torch_profiler", "cpu")
    assert reconcile_kernels(summary(whole.assign(device=on_cpu))) is None


@pytest.mark.parametrize(
    ("kernels", "step", "bad", "words"),
    [
        (99.5e9, 100e9, False, "0.50%"),
        (98e9, 100e9, True, "WARNING: more than 1% of the step"),
        (102e9, 100e9, True, "WARNING: more than 1% of the step"),
        (98e6, 100e6, False, "WARNING: at this size copies stay in the L2 cache"),
    ],
)
def test_more_than_a_hundredth_left_over_is_said(
    kernels: float, step: float, bad: bool, words: str
) -> None:
    values = phase(kernel_dram_read_bytes=kernels, dram_read_bytes=step)
    found = accounted(frame({"forward": values}))
    text = account_table("dpsgd", found).as_text()
    assert words in text
    assert ("is not accounted for" in text) is bad


def test_a_case_with_ranges_kernels_and_copies_is_accounted_for_in_its_tables() -> None:
    rows = frame({"forward": phase(kernel_dram_read_bytes=7e9, dram_read_bytes=8e9)})
    kernel = KernelCount(0, "forward", "void norm()", 1, 7e9, 0.0, 0.0, 0.5)
    outcome = Outcome(CASE, tuple(map(Measurement.from_row, rows.to_dict("records"))), 1.0)
    with_kernels = replace(outcome, kernels=(kernel,))
    assert next(table.title for table in case_kernel_tables(with_kernels, summary(rows), 10)) == (
        "dpsgd-bs8-seq256-1b-fp32: DRAM GB per step"
    )
    assert case_kernel_tables(outcome, summary(rows), 10) == []
