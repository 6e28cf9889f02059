"""What is counted, and how shares are worked out."""

from __future__ import annotations

import pytest

from dpbench.errors import ConfigurationError
from dpbench.instruments.cupti.metrics import METRICS, SHARES, counters_of, resolve_metrics
from dpbench.instruments.ncu.metrics import BYTE_METRICS


def test_all_bytes_of_ncu_are_counted_by_the_same_names() -> None:
    for name, metric in BYTE_METRICS.items():
        assert METRICS[name].counters == metric.counters
        assert (METRICS[name].scale, METRICS[name].unit) == (metric.scale, metric.unit)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("dram_read_bytes", []),
        ("l2_read_bytes", ["l2_read_bytes"]),
        ("gld_throughput", ["global_load_bytes"]),
        ("gpu_busy_share", ["gpu_busy_cycles", "gpu_elapsed_cycles"]),
        ("range_time_seconds", ["range_time_seconds"]),
        ("sm__inst_executed.sum", ["sm__inst_executed.sum"]),
    ],
)
def test_a_name_stands_for_metrics_and_dram_bytes_come_first(name: str, metrics: list[str]) -> None:
    resolved = [metric.name for metric in resolve_metrics([name])]
    assert resolved == ["dram_read_bytes", "dram_write_bytes", *metrics]


@pytest.mark.parametrize("name", ["busy", "sm__throughput.avg.pct_of_peak_sustained_elapsed"])
def test_what_is_unknown_or_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        resolve_metrics([name])


def test_a_metric_is_its_counters_times_its_scale() -> None:
    assert METRICS["range_time_seconds"].value({"gpu__time_duration.sum": 2e9}) == 2.0
    atomics = {"lts__t_sectors_op_atom.sum": 2.0, "lts__t_sectors_op_red.sum": 1.0}
    assert METRICS["l2_atomic_bytes"].value(atomics) == 96


def test_the_share_of_two_ranges_is_that_of_their_sums() -> None:
    first = {"gpu_busy_cycles": 90.0, "gpu_elapsed_cycles": 100.0}
    second = {"gpu_busy_cycles": 10.0, "gpu_elapsed_cycles": 900.0}
    both = {name: first[name] + second[name] for name in first}
    assert SHARES["gpu_busy_share"].of(both) == pytest.approx(0.1)


def test_every_counter_adds_up_over_ranges_and_is_asked_for_once() -> None:
    counters = counters_of(METRICS.values())
    assert len(counters) == len(set(counters)) == 18
    assert all(c.endswith((".sum", ".sum.peak_sustained_elapsed")) for c in counters)
