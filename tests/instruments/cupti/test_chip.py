"""Counters and passes of chips: of a fake library, and of NVIDIA's where a wheel has it."""

from __future__ import annotations

import pytest

from dpbench.core.errors import ConfigurationError
from dpbench.core.gpu import chip_of
from dpbench.instruments import counters as ncu
from dpbench.instruments.counters import CounterUnknown, available, counters, on_chip
from dpbench.instruments.cupti.chip import (
    BASIC,
    LINKS,
    Chip,
    Configuration,
    chosen,
    describe,
    known_chips,
)
from dpbench.instruments.cupti.library import CountersDoNotCombine, Library
from dpbench.instruments.cupti.ranges import with_derived
from tests.instruments.cupti.fake import ALL, OF_LINKS, FakeCupti, library
from tests.instruments.cupti.wheels import usable_library

DRAM = list(ALL[:2])


@pytest.fixture(scope="module")
def nvidia() -> Library:
    found = usable_library()
    if found is None:
        pytest.skip("no libcupti of CUDA 12.6 to 13.1, nor a newer one with a driver")
    return found


@pytest.mark.parametrize(
    ("name", "passes", "dram"),
    [
        ("GH100", 1, "dram__bytes_read.sum"),
        ("GB100", 1, "dram__bytes_read.sum"),
        ("GA100", 2, "dram__bytes_read.sum"),
        ("AD102", 2, "dram__bytes_read.sum"),
        ("GB202", 2, "dram__bytes_op_read.sum"),
    ],
)
def test_a_chip_needs_so_many_passes(nvidia: Library, name: str, passes: int, dram: str) -> None:
    if name not in known_chips(nvidia):
        pytest.skip(f"libcupti {nvidia.version} does not know {name}")
    chip = Chip(nvidia, name)
    everything = counters(chosen(chip))
    groups = chip.spread(everything, everything[:2])
    assert chip.passes(everything) == passes == len(groups)
    assert chip.passes(counters(chosen(chip, []))) == 1
    assert [metric.name for metric in chosen(chip, [])] == list(BASIC)
    assert {counter for group in groups for counter in group} == set(everything)
    assert all(group[:2] == everything[:2] for group in groups)
    assert all(chip.passes(group) == 1 for group in groups)
    if nvidia.version >= 28:  # before, GB202's went by the usual name
        assert everything[0] == dram


def test_counters_that_do_not_go_together_are_spread(nvidia: Library) -> None:
    if nvidia.version < 26:
        pytest.skip("CUDA 12.6 says nothing against it")
    chip = Chip(nvidia, "GH100")
    with pytest.raises(CountersDoNotCombine, match=r"nvlrx__bytes\.sum on GH100"):
        chip.passes([*DRAM, "nvlrx__bytes.sum"])
    assert chip.spread([*DRAM, "nvlrx__bytes.sum", "sm__cycles_active.sum"], DRAM) == [
        [*DRAM, "sm__cycles_active.sum"],
        ["nvlrx__bytes.sum"],
    ]


@pytest.mark.parametrize("counter", ["cake__bytes.sum", "dram__bytes_read.cake"])
def test_a_counter_that_does_not_exist_is_named_with_the_chip(
    nvidia: Library, counter: str
) -> None:
    with pytest.raises(
        CounterUnknown, match=rf"{counter}.* GH100.*; choose other counters with --ncu"
    ):
        Chip(nvidia, "GH100").passes([counter])


def test_a_chip_that_does_not_exist_is_answered_with_those_that_do(nvidia: Library) -> None:
    with pytest.raises(ConfigurationError, match=r"unknown chip 'GX100'; choose from .*GH100"):
        Chip(nvidia, "GX100")


def test_l2_is_counted_by_what_sms_ask_and_what_crosses(nvidia: Library) -> None:
    sectors, tex = "lts__t_sectors", "lts__t_sectors_srcunit_tex_op"
    for name in {"GH100", "GA100", "AD102", "GB202", "GV100"} & {*known_chips(nvidia)}:
        chip = Chip(nvidia, name)
        counted = {metric.name: metric.formula for metric in chosen(chip)}
        assert counted["l2_sm_read_bytes"] == f"{tex}_read.sum"
        assert counted["l2_sm_write_bytes"] == f"{tex}_write.sum"
        crossings = f"{sectors}_srcunit_ltcfabric.sum"
        divided = chip.has([crossings])
        assert counted.get("l2_crossing_bytes") == (crossings if divided else None)
        less = f" - {crossings}" if divided else ""
        assert counted["l2_served_bytes"] == f"{sectors}.sum{less}"
        assert divided == (name in ("GH100", "GA100"))


def test_every_counter_that_ncu_is_asked_for_is_known_to_cupti(nvidia: Library) -> None:
    for capability in ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        if (name := chip_of(*capability)) in known_chips(nvidia):
            assert Chip(nvidia, name).has(counters(on_chip(name).values())) == (
                name != "GB202" or nvidia.version >= 28
            )


@pytest.mark.parametrize(("a_pass", "sizes"), [(19, [19]), (12, [12, 9]), (7, [7, 7, 7, 4])])
def test_groups_are_of_one_pass_and_each_has_dram_bytes(a_pass: int, sizes: list[int]) -> None:
    groups = Chip(library(FakeCupti(a_pass=a_pass)), "GH100").spread(ALL, DRAM)
    assert [len(group) for group in groups] == sizes
    assert all(group[:2] == DRAM for group in groups)


def test_a_counter_of_several_passes_cannot_be_counted() -> None:
    chip = Chip(library(FakeCupti(a_pass=0.5)), "GH100")
    with pytest.raises(
        CounterUnknown, match=r"lts__t_sectors_srcunit_tex_op_read\.sum needs several passes"
    ):
        chip.spread(ALL, DRAM)


def test_chips_that_call_dram_bytes_otherwise_are_asked_in_their_words() -> None:
    cupti = FakeCupti(counters=["dram__bytes_op_read.sum", "dram__bytes_op_write.sum"])
    found = available(Chip(library(cupti), "GH100").has, "cupti")
    assert {name: metric.counters for name, metric in found.items()} == {
        "dram_read_bytes": ("dram__bytes_op_read.sum",),
        "dram_write_bytes": ("dram__bytes_op_write.sum",),
    }


def test_nothing_stays_open_where_a_configuration_fails() -> None:
    cupti = FakeCupti(fails={"cuptiProfilerHostGetNumOfPasses": 27})
    with pytest.raises(Exception, match="GetNumOfPasses returned 27"):
        Configuration(Chip(library(cupti), "GH100"), DRAM)
    assert cupti.hosts == {}


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


def test_sums_and_shares_follow_from_their_parts() -> None:
    values = {"gpu_busy_cycles": 100.0, "gpu_elapsed_cycles": 1000.0, "dram_read_bytes": 1.0}
    assert with_derived(values) == {**values, "gpu_busy_share": 0.1}
    assert with_derived({"dram_read_bytes": 1.0, "dram_write_bytes": 2.0})["dram_bytes"] == 3.0
