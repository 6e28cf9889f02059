"""Counting steps and blocks, against a library that counts what the test says the GPU did."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from dpbench.core.case import OUTSIDE
from dpbench.core.metrics import METRICS
from dpbench.instruments.counters import CountersBusy, CounterUnknown, ProfilerNotLoaded
from dpbench.instruments.cupti import chip
from dpbench.instruments.cupti.chip import LINKS
from dpbench.instruments.cupti.library import CountersDoNotCombine, RangesLost, StepsDiffer
from dpbench.instruments.cupti.ranges import (
    ALL_LINKS,
    FIELDS,
    RECEIVED,
    SENT,
    StepCounter,
    count_ranges,
    payload_of,
)
from dpbench.results.rows import STEP
from dpbench.training.phases import observed_step, phase
from tests.instruments.cupti.fake import ALL, OF_LINKS, FakeCupti, target

GB = 1e9


def step(cupti: FakeCupti, scale: float = 1.0) -> None:
    """A training step: 1 GB outside, 2 forward, 4 backward, 8 outside again."""
    cupti.work(scale * GB)
    with phase("forward"):
        cupti.work(2 * scale * GB)
    with phase("backward"):
        cupti.work(4 * scale * GB)
    cupti.work(8 * scale * GB)


def count_steps(
    cupti: FakeCupti, scales: Iterable[float], names: Iterable[str] | None = None, **options: Any
) -> StepCounter:
    with closing(StepCounter(names, target(cupti), **options)) as counter:
        for scale in scales:
            with observed_step(counter):
                step(cupti, scale)
    return counter


def read_bytes(counter: StepCounter) -> list[dict[str, float]]:
    return [
        {phase: values["dram_read_bytes"] for phase, values in counts.items()}
        for counts in counter.rounds()
    ]


def test_a_step_is_counted_by_phase_and_once_more_as_a_whole() -> None:
    cupti = FakeCupti()
    counter = count_steps(cupti, [1, 1])
    assert (counter.passes, counter.steps) == (1, 2)
    assert read_bytes(counter) == [
        {OUTSIDE: 9 * GB, "forward": 2 * GB, "backward": 4 * GB},
        {STEP: 15 * GB},
    ]
    assert cupti.calls.count("RangeProfiler_PushRange") == 5 + 1


def test_the_calls_come_in_the_order_that_cupti_wants() -> None:
    cupti = FakeCupti()
    count_steps(cupti, [1], [], rounds=[False])
    once = list(dict.fromkeys(cupti.calls))
    assert once[:3] == [
        "Profiler_Initialize",
        "Device_GetChipName",
        "Profiler_GetCounterAvailability",
    ]
    assert once[-13:] == [
        "RangeProfiler_Enable",
        "RangeProfiler_GetCounterDataSize",
        "RangeProfiler_CounterDataImage_Initialize",
        "RangeProfiler_SetConfig",
        "RangeProfiler_Start",
        "RangeProfiler_PushRange",
        "RangeProfiler_PopRange",
        "RangeProfiler_Stop",
        "RangeProfiler_DecodeData",
        "RangeProfiler_GetCounterDataInfo",
        "RangeProfiler_CounterData_GetRangeInfo",
        "Profiler_Host_EvaluateToGpuValues",
        "RangeProfiler_Disable",
    ]
    assert (cupti.state, cupti.hosts) == ("initialized", {})


def test_the_gpu_is_synchronized_before_each_border() -> None:
    cupti = FakeCupti()

    def synchronize() -> None:
        cupti.calls.append("synchronize")

    with count_ranges(target=target(cupti, synchronize)), phase("forward"):
        pass
    pushed, popped = "RangeProfiler_PushRange", "RangeProfiler_PopRange"
    first = cupti.calls.index(pushed)
    last = len(cupti.calls) - cupti.calls[::-1].index(popped)
    end = ["synchronize", popped]
    assert "synchronize" in cupti.calls[:first]
    assert cupti.calls[first:last] == [pushed, *end, pushed, *end, pushed, *end]


def test_several_passes_are_spread_over_steps() -> None:
    cupti = FakeCupti(a_pass=12)
    counter = count_steps(cupti, [1, 1, 1, 1])
    assert (counter.passes, counter.steps) == (2, 4)
    assert cupti.calls.count("RangeProfiler_Enable") == 2
    by_phase, whole = counter.rounds()
    names = {metric.name for metric in METRICS.counted("cupti")}
    assert by_phase["forward"].keys() == names - {*LINKS}
    assert by_phase["forward"]["global_store_bytes"] == 2 * GB
    assert whole[STEP]["global_store_bytes"] == 15 * GB


@pytest.mark.parametrize(
    ("rounds", "starts"), [([True, False, False], 1), ([True, True, False, False], 2)]
)
def test_it_is_started_once_for_a_step_by_phase_and_the_whole_ones_after_it(
    rounds: list[bool], starts: int
) -> None:
    cupti = FakeCupti(a_pass=12)
    scales = [1.0, 1.001, 1.002, 1.003][: len(rounds)]
    counter = count_steps(cupti, scales * 2, rounds=rounds)
    assert cupti.calls.count("RangeProfiler_Start") == 2 * starts
    whole = [sum(counted.values()) for counted in read_bytes(counter)]
    assert whole == pytest.approx([15 * GB * scale for scale in scales])


def test_steps_are_read_before_as_many_as_there_may_be() -> None:
    cupti = FakeCupti()
    with closing(StepCounter(None, target(cupti), [True, False, False])) as counter:
        for scale in (1, 2):
            with observed_step(counter):
                step(cupti, scale)
        assert [sum(each.values()) for each in read_bytes(counter)] == [15 * GB, 30 * GB]
    assert cupti.state == "initialized"


@pytest.mark.parametrize("linked", [True, False])
def test_bytes_between_gpus_come_from_one_step_more_or_are_absent(linked: bool) -> None:
    absent = [] if linked else [counter for counter in OF_LINKS if counter.startswith("nvl")]
    cupti = FakeCupti(counters=(*ALL, *OF_LINKS), silent=absent)
    with closing(StepCounter(None, target(cupti, peers=True), [True])) as counter:
        assert counter.steps == 2
        for _ in range(2):
            with observed_step(counter), phase("backward"):
                cupti.work(GB, (*ALL, *OF_LINKS))
    [by_phase] = counter.rounds()
    backward = by_phase["backward"]
    assert backward["dram_read_bytes"] == backward["pcie_read_bytes"] == GB
    assert backward.get("nvlink_sent_bytes") == (GB if linked else None)


def test_the_payload_of_nvlink_is_read_at_each_border_in_any_pass() -> None:
    cupti, sent = FakeCupti(), [7.0]  # what had crossed before is not counted
    gpu = target(cupti, peers=True, payload=lambda: {SENT: sent[0], RECEIVED: 2 * sent[0]})
    with closing(StepCounter([], gpu, [True, False])) as counter:
        for _ in range(counter.steps):
            with observed_step(counter):
                for name, size in (("forward", 0), ("backward", 3), ("clip", 1), ("backward", 4)):
                    with phase(name):
                        sent[0] += size * GB
    by_phase, whole = counter.rounds()
    assert {name: values[SENT] / GB for name, values in by_phase.items()} == {
        OUTSIDE: 0,
        "forward": 0,
        "backward": 7,
        "clip": 1,
    }
    assert whole[STEP][RECEIVED] == 16 * GB


def test_what_another_rank_sends_at_a_border_is_in_one_of_the_phases() -> None:
    crossed = count(step=3.0)  # it sends all the time
    gpu = target(
        FakeCupti(), peers=True, payload=lambda: dict.fromkeys((SENT, RECEIVED), next(crossed))
    )
    with closing(StepCounter([], gpu, [True])) as counter, observed_step(counter):
        for name in ("forward", "backward"):
            with phase(name):
                pass
    [by_phase] = counter.rounds()
    assert sum(values[RECEIVED] for values in by_phase.values()) == next(crossed) - 3.0


def test_links_are_counted_though_a_virtual_machine_calls_their_counters_unavailable() -> None:
    gpu = target(FakeCupti(counters=(*ALL, *OF_LINKS), hidden=OF_LINKS), peers=True)
    for names in (None, LINKS):
        with closing(StepCounter(names, gpu)) as counter:
            assert {*LINKS} <= {metric.name for metric in counter.metrics}


def test_other_counters_that_a_machine_calls_unavailable_are_named() -> None:
    gpu = target(FakeCupti(hidden=["dram__bytes_read.sum"]))
    with pytest.raises(CounterUnknown, match=r"^dram__bytes_read\.sum on GH100: this mach"):
        StepCounter(None, gpu)


@pytest.mark.parametrize("scales", [[1, 1.01, 1, 1], [1, 1, 1, 0.99]])
def test_steps_that_move_other_bytes_are_refused(scales: list[float]) -> None:
    counter = count_steps(FakeCupti(a_pass=12), scales)
    with pytest.raises(StepsDiffer, match=r"DRAM bytes: .*30\.000.* GB; run more warm-up"):
        counter.rounds()


def test_what_the_cache_keeps_makes_no_difference() -> None:
    by_phase, whole = read_bytes(count_steps(FakeCupti(a_pass=12), [0.001, 0.002, 0.002, 0.001]))
    assert (by_phase["forward"], whole[STEP]) == (0.002 * GB, 0.03 * GB)


def test_steps_of_different_phases_are_refused() -> None:
    cupti = FakeCupti(a_pass=12)
    with closing(StepCounter(None, target(cupti), [True])) as counter:
        for name in ("forward", "clip"):
            with observed_step(counter), phase(name):
                cupti.work(GB)
    with pytest.raises(StepsDiffer, match="different phases"):
        counter.rounds()


@pytest.mark.parametrize(("a_pass", "over"), [(99, [1, 2]), (12, [0, 0, 1, 2])])
def test_a_round_is_over_with_its_last_pass(a_pass: int, over: list[int]) -> None:
    for heard, rounds in enumerate(over, 1):
        assert len(count_steps(FakeCupti(a_pass=a_pass), [1] * heard).rounds()) == rounds


def test_a_lost_range_is_an_error_and_not_a_zero() -> None:
    cupti = FakeCupti(drops=[1])
    with pytest.raises(RangesLost, match="CUPTI lost 1 of 6 ranges"):
        count_steps(cupti, [1, 1])
    assert cupti.state == "initialized"


def test_more_ranges_than_there_is_room_for_are_an_error() -> None:
    cupti = FakeCupti()
    with pytest.raises(RangesLost, match="more than 4 ranges"):
        count_steps(cupti, [1], max_ranges=3)
    assert cupti.state == "initialized"


def test_a_counter_without_a_value_is_an_error_and_not_a_zero() -> None:
    silent = FakeCupti(silent=["lts__t_sectors.sum"])
    with pytest.raises(CounterUnknown, match=r"no value for lts__t_sectors\.sum on GH100"):
        count_steps(silent, [1, 1])


@pytest.mark.parametrize("function", ["Enable", "GetCounterDataSize", "Start"])
def test_counters_in_use_are_an_error_that_leaves_nothing_open(function: str) -> None:
    cupti = FakeCupti(fails={f"cuptiRangeProfiler{function}": 26})
    with pytest.raises(CountersBusy, match="dcgmi profile --pause"):
        count_steps(cupti, [1])
    assert (cupti.state, cupti.hosts) == ("initialized", {})


def test_counters_that_become_free_within_seconds_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nsight Compute holds them for a moment longer than the lock of the GPU is held."""
    cupti = FakeCupti(fails={"cuptiProfilerGetCounterAvailability": 26})
    monkeypatch.setattr(chip.time, "sleep", lambda seconds: cupti.fails.clear())
    assert read_bytes(count_steps(cupti, [1, 1]))[1] == {STEP: 15 * GB}
    busy = FakeCupti(fails={"cuptiProfilerGetCounterAvailability": 26})
    monkeypatch.setattr(chip, "BUSY_SECONDS", -1.0)
    with pytest.raises(CountersBusy, match="dcgmi profile --pause"):
        count_steps(busy, [1])


def test_a_block_is_counted_by_phase_and_in_all() -> None:
    cupti = FakeCupti()
    with count_ranges(["global_load_bytes"], target=target(cupti)) as counts:
        step(cupti)
        assert counts == {}
    assert counts["backward"]["global_load_bytes"] == 4 * GB
    assert counts["backward"]["dram_bytes"] == 8 * GB
    assert counts[STEP]["range_time_seconds"] == pytest.approx(15.0)
    assert counts["forward"]["gpu_busy_share"] == 1.0
    assert counts[STEP]["warps_active_share"] == 1.0


def test_a_block_can_be_counted_as_one_range() -> None:
    cupti = FakeCupti()
    with count_ranges(by_phase=False, target=target(cupti)) as counts:
        step(cupti)
    assert counts.keys() == {STEP}
    assert cupti.calls.count("RangeProfiler_PushRange") == 1


def test_a_block_of_several_passes_is_refused_before_it_runs() -> None:
    cupti = FakeCupti(a_pass=12)
    with (
        pytest.raises(CountersDoNotCombine, match="need 2 passes on GH100, but a block runs only"),
        count_ranges(
            ["l2_served_bytes", "l2_sm_read_bytes", "l2_atomic_bytes"], target=target(cupti)
        ),
    ):
        pytest.fail("the block ran")
    assert cupti.state == "initialized"


def test_where_torch_has_no_gpu_the_block_does_not_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with (
        pytest.raises(ProfilerNotLoaded, match="finds no CUDA GPU; check that nvidia-smi shows"),
        count_ranges(),
    ):
        pytest.fail("the block ran")


def test_steps_that_ended_are_counted_where_no_more_come() -> None:
    cupti = FakeCupti()
    with closing(StepCounter([], target(cupti), [True, False, False])) as counter:
        for scale in (1, 2):
            with observed_step(counter):
                step(cupti, scale)
        counter.start_step()  # and it does not end
        cupti.work(GB)
        by_phase, whole = counter.rounds()
    assert by_phase["backward"]["dram_read_bytes"] == 4 * GB
    assert whole[STEP]["dram_read_bytes"] == 30 * GB
    assert cupti.state == "initialized"


UUID = "GPU-1"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What NVML answers by field: a number of KiB, or the code of an error."""
    answers: dict[int, Any] = {}

    def fields(handle: object, asked: list[tuple[int, int]]) -> list[SimpleNamespace]:
        assert handle == f"handle of {UUID}"
        assert {scope for _, scope in asked} == {ALL_LINKS}
        return [
            SimpleNamespace(
                nvmlReturn=answers.get("code", 0), value=SimpleNamespace(ullVal=answers[field])
            )
            for field, _ in asked
        ]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: f"handle of {uuid}")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", fields)
    return answers


def test_sent_and_received_are_fields_of_nvml_in_kib(said: dict[int, Any]) -> None:
    said |= {138: 10_485_764, 139: 4}
    read, note = payload_of(UUID)
    assert read() == {SENT: 10_485_764 * 1024, RECEIVED: 4096}
    said[138] += 1
    assert read()[SENT] == 10_485_765 * 1024
    assert note == ""
    assert [*FIELDS.values()] == [138, 139]


@pytest.mark.parametrize(
    ("code", "words"), [(3, "'Not Supported'"), (4, "'Insufficient Permissions'")]
)
def test_a_refusal_of_a_field_is_one_line(said: dict[Any, Any], code: int, words: str) -> None:
    said |= {138: 0, 139: 0, "code": code}
    read, note = payload_of(UUID)
    assert read() == {}
    assert note == f"NVLink payload is not counted: NVML reports {words} for {UUID}"
