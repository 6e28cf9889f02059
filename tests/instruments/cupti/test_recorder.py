"""Steps of a script by CUPTI, against a library that counts what the test says the GPU did."""

from __future__ import annotations

import pytest

from dpbench.core.errors import InstrumentError
from dpbench.core.subject import Script
from dpbench.instruments.cupti.ranges import Target
from dpbench.instruments.cupti.recorder import CuptiRecorder
from dpbench.training.phases import observed_step, phase
from tests.instruments.cupti.fake import FakeCupti, target

GB = 1e9


def recorded(monkeypatch: pytest.MonkeyPatch, scales: list[float]) -> CuptiRecorder:
    """A recorder that was to time two steps, and heard as many as there are scales."""
    cupti = FakeCupti()
    monkeypatch.setattr(Target, "of_torch", lambda: target(cupti))
    recorder = CuptiRecorder(2)
    for scale in scales:
        with observed_step(recorder), phase("backward"):
            cupti.work(scale * GB)
    return recorder


def test_unlike_steps_are_timed_and_then_counted_by_phase_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = recorded(monkeypatch, [1, 1, 2, 3, 4, 6])
    monkeypatch.setattr("dpbench.instruments.cupti.recorder.on_cuda", lambda: True)
    rows = recorder.rows(Script("mine"))
    recorder.close()
    assert recorder.finished
    assert {row.instrument for row in rows} == {"cupti"}
    found = {(row.metric, row.phase, row.repeat): row.value for row in rows}
    assert [found["dram_read_bytes", "backward", i] for i in (0, 1)] == [2 * GB, 3 * GB]
    assert [found["dram_read_bytes", "step", i] for i in (0, 1)] == [4 * GB, 6 * GB]
    times = {key[1:] for key in found if key[0] == "step_time_seconds"}
    assert times == {(name, i) for name in ("backward", "outside", "step") for i in (0, 1)}


def test_what_was_counted_until_the_script_ended_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = recorded(monkeypatch, [1, 1, 2])
    monkeypatch.setattr("dpbench.instruments.cupti.recorder.on_cuda", lambda: True)
    found = {(row.metric, row.phase): row.value for row in recorder.rows(Script("mine"))}
    recorder.close()
    assert found["dram_read_bytes", "backward"] == 2 * GB
    assert not recorder.finished
    assert ("dram_read_bytes", "step") not in found


def test_steps_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch, [1, 1])
    with pytest.raises(InstrumentError, match="the steps ran on the CPU"):
        recorder.rows(Script("mine"))
