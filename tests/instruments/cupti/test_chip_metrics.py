"""What is counted, and how shares are worked out."""

from __future__ import annotations

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.instruments.counters import metrics as ncu
from dpbench.instruments.cupti.chip import BASIC, LINKS, Chip, chosen, describe
from dpbench.instruments.cupti.ranges import with_derived
from tests.instruments.cupti.fake import ALL, OF_LINKS, FakeCupti, library

CHIP = Chip(library(FakeCupti(counters=("sm__inst_executed.sum", *FakeCupti().base))), "GH100")
OURS = ncu.available(CHIP.has, "cupti", "GH100")


def test_all_that_ncu_counts_is_counted_by_the_same_names_and_counters() -> None:
    assert ncu.on_chip("GH100").items() <= OURS.items()
    assert list(OURS.values()) == chosen(CHIP)


def test_links_are_counted_in_a_step_of_their_own_where_there_are_peers() -> None:
    gpu = FakeCupti(counters=(*ALL, *OF_LINKS))
    chip = Chip(library(gpu), "GH100")
    assert [metric.name for metric in chosen(chip)] == list(OURS)
    assert [metric.name for metric in chosen(chip, peers=True)] == [*OURS, *LINKS]
    first, *lines = describe(library(gpu), "GH100").splitlines()
    assert first == (
        "GH100, libcupti 13.0: 1 step(s) count all metrics by phase, and 1 more with several GPUs"
    )
    assert [line.split()[:3] for line in lines[-4:]] == [[name, "step", "2"] for name in LINKS]


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("dram_read_bytes", []),
        ("dram_bytes", []),
        ("gpu_busy_share", []),
        ("l2_sm_read_bytes", ["l2_sm_read_bytes"]),
        ("gld_throughput", ["global_load_bytes"]),
        ("sm__inst_executed.sum", ["sm__inst_executed.sum"]),
    ],
)
def test_what_is_asked_for_comes_after_what_is_always_counted(
    name: str, metrics: list[str]
) -> None:
    assert [metric.name for metric in chosen(CHIP, [name])] == [*BASIC, *metrics]


@pytest.mark.parametrize("name", ["busy", "sm__throughput.avg.pct_of_peak_sustained_elapsed"])
def test_what_is_unknown_or_does_not_add_up_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        chosen(CHIP, [name])


def test_what_the_chip_lacks_is_refused_where_it_is_asked_for() -> None:
    chip = Chip(library(FakeCupti(counters=["gpu__time_duration.sum"])), "GH100")
    assert [metric.name for metric in chosen(chip)] == ["range_time_seconds"]
    with pytest.raises(ConfigurationError, match="GH100 has no counters for dram_read_bytes"):
        chosen(chip, ["dram_read_bytes"])


def test_a_chip_is_described_without_a_gpu() -> None:
    first, *lines = describe(library(FakeCupti(a_pass=12)), "GA100").splitlines()
    assert first == "GA100, libcupti 13.0: 2 step(s) count all metrics by phase"
    assert len(lines) == len(ncu.on_chip("GA100")) + 9
    assert lines[0].split() == ["dram_read_bytes", "step", "1,", "2", "dram__bytes_read.sum"]


def test_a_metric_is_its_counters_times_its_scale() -> None:
    assert OURS["range_time_seconds"].value({"gpu__time_duration.sum": 2e9}) == 2.0
    atomics = {"lts__t_sectors_op_atom.sum": 2.0, "lts__t_sectors_op_red.sum": 1.0}
    assert OURS["l2_atomic_bytes"].value(atomics) == 96


def test_sums_and_shares_follow_from_their_parts() -> None:
    values = {"gpu_busy_cycles": 100.0, "gpu_elapsed_cycles": 1000.0, "dram_read_bytes": 1.0}
    assert with_derived(values) == {**values, "gpu_busy_share": 0.1}
    assert with_derived({"dram_read_bytes": 1.0, "dram_write_bytes": 2.0})["dram_bytes"] == 3.0


def test_every_counter_adds_up_over_ranges_and_is_asked_for_once() -> None:
    counters = ncu.counters(OURS.values())
    assert len(counters) == len(set(counters)) == 19
    assert all(c.endswith((".sum", ".sum.peak_sustained_elapsed")) for c in counters)
