"""Metric names: ours, nvprof's, and counters."""

from __future__ import annotations

import pytest

from dpbench import ConfigurationError
from dpbench.core.metrics import METRICS
from dpbench.instruments.counters import available, counters, on_chip, resolve


@pytest.mark.parametrize(
    ("nvprof", "counter"),
    [
        ("dram_read_throughput", "dram__bytes_read.sum"),
        ("l2_read_throughput", "lts__t_sectors_srcunit_tex_op_read.sum"),
        ("gst_throughput", "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum"),
    ],
)
def test_nvprof_names_are_understood(nvprof: str, counter: str) -> None:
    assert counter in counters(resolve([nvprof], "GH100"))


def test_a_counter_keeps_its_own_name() -> None:
    metric = resolve(["sm__cycles_active.sum"])[-1]
    assert (metric.name, metric.counters) == ("sm__cycles_active.sum", ("sm__cycles_active.sum",))


@pytest.mark.parametrize(
    "name",
    ["dram__bytes_read.sum.per_second", "device__attribute_l2_cache_size"],
)
def test_what_does_not_add_up_over_ranges_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name} cannot be added up over the ranges"):
        resolve([name])


def test_each_counter_is_asked_for_once() -> None:
    asked = counters(
        resolve(["l2_sm_read_bytes", "l2_read_throughput", "dram_read_bytes"], "GH100")
    )
    assert len(asked) == len(set(asked))


def test_an_unknown_metric_is_answered_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(["dram_bytez"])
    assert "'dram_bytez'" in str(caught.value)
    for name in (*on_chip(), "gld_throughput", "dram_read_throughput"):
        assert name in str(caught.value)


def test_what_the_l2_served_is_all_sectors_less_those_that_crossed() -> None:
    """A copy of 4.295 GB, as measured on an NVIDIA H200."""
    sectors, crossings = 13.15e9 / 32, 4.35e9 / 32
    fabric = "lts__t_sectors_srcunit_ltcfabric.sum"
    counted = {"lts__t_sectors.sum": sectors, fabric: crossings}
    there = on_chip("GH100")
    assert there["l2_served_bytes"].value(counted) == pytest.approx(8.80e9)
    assert there["l2_crossing_bytes"].value(counted) == pytest.approx(4.35e9)
    undivided = on_chip("AD102")
    assert undivided["l2_served_bytes"].value(counted) == pytest.approx(13.15e9)
    assert "l2_crossing_bytes" not in undivided


def test_a_report_without_crossings_says_nothing_of_what_the_l2_served() -> None:
    without = {*counters(resolve()), "lts__t_sectors.sum"}
    found = available(without.issuperset, chip="GH100")
    assert "l2_atomic_bytes" in found
    assert not {"l2_served_bytes", "l2_sm_read_bytes", "l2_crossing_bytes"} & {*found}


def test_everything_is_counted_unless_names_are_given() -> None:
    assert counters(resolve()) == [
        "dram__bytes_read.sum",
        "dram__bytes_write.sum",
        "lts__t_sectors_op_atom.sum",
        "lts__t_sectors_op_red.sum",
        "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum",
        "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum",
    ]


# --- chips that name counters in another way, or lack them ---------------------------------------

DRAM = ["dram_read_bytes", "dram_write_bytes"]


@pytest.mark.parametrize(
    ("chip", "read"),
    [
        ("", ("dram__bytes_read.sum",)),
        ("GH100", ("dram__bytes_read.sum",)),
        ("GB100", ("dram__bytes_read.sum",)),
        ("GB202", ("dram__bytes_op_read.sum",)),
        ("gb203", ("dram__bytes_op_read.sum",)),
        ("GB10B", ()),
    ],
)
def test_chip_has_counters_of_its_own(chip: str, read: tuple[str, ...]) -> None:
    assert METRICS["dram_read_bytes"].on(chip) == read


def test_what_a_chip_lacks_is_left_out_or_refused_by_name() -> None:
    here = [m for m in on_chip("AD102") if m not in DRAM]
    assert [m.name for m in resolve(None, "GB10B")] == here
    assert [m.name for m in resolve(["l2_served_bytes"], "GB10B")] == ["l2_served_bytes"]
    with pytest.raises(ConfigurationError, match="GB10B has no counters for dram_read_throughput"):
        resolve(["dram_read_throughput"], "GB10B")
