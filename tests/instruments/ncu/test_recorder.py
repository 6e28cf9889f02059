"""What hears a script's steps for a tool that has the numbers."""

from __future__ import annotations

import pytest

from dpbench.instruments.ncu import ncu
from dpbench.training.phases import observed_step, phase


class Said(ncu.NvtxRanges):
    """Ranges that begin and end in a list, without a GPU."""

    said: list[str]

    def __init__(self) -> None:
        self.step = -1

    def start_step(self) -> None:
        self.step += 1
        self._start(f"{self.step}.outside")

    def end_step(self) -> None:
        self.said.append(f"/{self.range}")

    def _start(self, name: str) -> None:
        self.range = name
        self.said.append(name)


@pytest.mark.parametrize("ends", [True, False], ids=["after", "in"])
def test_no_range_is_open_when_the_last_one_begins(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(ncu, "NvtxRanges", Said)
    monkeypatch.setattr(Said, "said", [], raising=False)
    recorder = ncu.NvtxRecorder(2)
    with observed_step(recorder), phase("forward"):
        pass
    recorder.start_step()
    if ends:
        recorder.end_step()
    recorder.close()
    first = ["0.outside", "/0.outside", "0.forward", "/0.forward", "0.outside", "/0.outside"]
    assert Said.said == [*first, "1.outside", "/1.outside", "end", "/end"]
    assert recorder.observed == 1 + ends
