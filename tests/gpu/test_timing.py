"""Clocks of timed steps on a real GPU, and the time for launches on its host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpbench import Case, InProcessInstrument
from dpbench.commands import doctor
from dpbench.core.gpu import clock_reader
from dpbench.core.metrics import CLOCK_REASONS, SM_CLOCK
from dpbench.core.settings import Settings
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.timing import Timing, TimingRecorder
from dpbench.training.phases import observed_step

pytestmark = pytest.mark.gpu


@pytest.fixture
def readable() -> None:
    if not clock_reader(f"GPU-{torch.cuda.get_device_properties().uuid}")():
        pytest.skip("NVML does not tell the clocks of this GPU")


@pytest.mark.usefixtures("readable")
@pytest.mark.parametrize("kind", [Timing, Cupti])
def test_each_timed_step_has_its_clocks(kind: type[InProcessInstrument], tmp_path: Path) -> None:
    rows = kind(tmp_path).measure(Case("fused", 4, 64, "tiny")).rows
    for metric in (SM_CLOCK, *CLOCK_REASONS):
        assert [row.repeat for row in rows if row.metric == metric] == [*range(5)]
    assert all(0.1e9 < row.value < 5e9 for row in rows if row.metric == SM_CLOCK)
    assert {row.value for row in rows if row.metric in CLOCK_REASONS} <= {0.0, 1.0}


@pytest.mark.usefixtures("readable")
def test_steps_do_not_wait_for_their_clocks() -> None:
    recorder = TimingRecorder(3)
    torch.cuda.synchronize()
    for step in range(3):
        with observed_step(recorder):
            torch.cuda._sleep(10**8)  # cycles, about 50 ms
        assert len(recorder.clocks) == (3 if step == 2 else 0)
    assert len(recorder.details()["clocks"]) == 3


def test_an_operator_takes_microseconds_of_this_host(tmp_path: Path) -> None:
    [finding] = doctor.launches(Settings(ncu_dir=tmp_path))
    assert 3 < float(finding.detail.partition(" µs")[0]) < 200, finding
