"""What the recorded process marks, on the CPU beside a stand-in for torch.cuda."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpbench import Case
from dpbench.child import recorder as recorders
from dpbench.child.case import run_case
from dpbench.instruments.nsys.nsys import NsysRecorder, PhaseRanges
from dpbench.results.outcome import Outcome

CASE = Case("dpsgd", 2, 16, "tiny")


class FakeCuda:
    """Notes what is called, ranges by their names."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.names: dict[int, str] = {}
        self.nvtx = SimpleNamespace(range_start=self.start, range_end=self.end)
        self.profiler = SimpleNamespace(
            start=lambda: self.said.append("record"), stop=lambda: self.said.append("stop")
        )

    def synchronize(self) -> None:
        self.said.append("sync")

    def start(self, name: str) -> int:
        number = len(self.names) + 1
        self.names[number] = name
        self.said.append(f"+{name}")
        return number

    def end(self, number: int) -> None:
        self.said.append(f"-{self.names[number]}")


def traced_case(cuda: FakeCuda, *, warmup: int, active: int) -> Outcome:
    recorder = NsysRecorder(active)
    recorder.cuda = cuda
    return run_case(CASE, recorder, device="cpu", warmup=warmup, active=active)


@pytest.fixture(scope="module")
def traced() -> tuple[FakeCuda, Outcome]:
    cuda = FakeCuda()
    return cuda, traced_case(cuda, warmup=1, active=2)


def test_only_steps_after_the_timed_ones_are_recorded(
    traced: tuple[FakeCuda, Outcome],
) -> None:
    cuda, outcome = traced
    assert cuda.said[:2] == ["sync", "record"]
    assert cuda.said[-2:] == ["sync", "stop"]
    assert outcome.details["untraced_seconds"] > 0


def test_each_phase_of_the_first_step_waits_for_the_gpu(
    traced: tuple[FakeCuda, Outcome],
) -> None:
    said = traced[0].said
    first = said[said.index("+dpbench:0.outside") - 1 : said.index("+dpbench:1.step") - 1]
    assert first[:5] == [
        "sync",
        "+dpbench:0.outside",
        "sync",
        "-dpbench:0.outside",
        "+dpbench:0.forward",
    ]
    assert {word.partition(".")[2] for word in first if word[0] == "+"} == {
        *("outside", "forward", "backward", "optimizer", "clip", "noise")
    }
    assert first.count("sync") == sum(word[0] == "+" for word in first) + 1
    assert first[-1][0] == "-"


def test_in_whole_steps_the_cpu_runs_ahead(traced: tuple[FakeCuda, Outcome]) -> None:
    said = traced[0].said
    for step in (1, 2, 3):
        begin, end = said.index(f"+dpbench:{step}.step"), said.index(f"-dpbench:{step}.step")
        inside = said[begin + 1 : end]
        assert said[begin - 1] == "sync"
        assert inside[0] == f"+dpbench:{step}.outside"
        assert inside[-2:] == ["sync", f"-dpbench:{step}.outside"]
        assert inside.count("sync") == 1
    assert "+dpbench:4.step" not in said


def test_a_long_step_is_recorded_once_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "SHORT_SECONDS", 0.0)
    cuda = FakeCuda()
    traced_case(cuda, warmup=0, active=1)
    assert [name for name in cuda.names.values() if name.endswith(".step")] == ["dpbench:1.step"]


def test_the_recording_ends_with_a_step_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(PhaseRanges, "start_step", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        traced_case(cuda, warmup=0, active=1)
    assert cuda.said[-1] == "stop"
