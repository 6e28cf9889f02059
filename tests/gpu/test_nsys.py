"""A recording of Nsight Systems on a real GPU, beside the counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench import Case, CaseReport
from dpbench.case import PHASES
from dpbench.instruments.cupti.instrument import Cupti
from dpbench.instruments.nsys.instrument import (
    ImporterMissing,
    Nsys,
    NsysNotFound,
    find_nsys,
    timeline_of,
)

pytestmark = pytest.mark.gpu


def test_busy_shares_agree_with_the_counters_within_three_points(tmp_path: Path) -> None:
    """At fp32: at bf16 the share is the processor's, and three steps of a process are not alike."""
    case = Case("dpsgd", 8, 256, "1b")
    try:
        instrument = Nsys(tmp_path, path=find_nsys())
        recorded = CaseReport.of(case, instrument.measure(case))
    except (NsysNotFound, ImporterMissing) as error:
        pytest.skip(str(error))
    counted = CaseReport.of(case, Cupti(tmp_path).measure(case))
    share = recorded.value("timeline_busy_share")
    assert share == pytest.approx(counted.value("gpu_busy_share"), abs=0.03)
    timeline = timeline_of(instrument.report(case).with_suffix(".sqlite"))
    # The step by phase and the whole ones launch the same.
    launched = sum(recorded.value("timeline_launches", phase) for phase in (*PHASES, "outside"))
    assert launched == pytest.approx(recorded.value("timeline_launches"), rel=0.01)
    waited = timeline.gaps().seconds.sum() / len(timeline.whole_steps)
    idle = recorded.value("timeline_seconds") - recorded.value("timeline_busy_seconds")
    assert waited == pytest.approx(idle, rel=0.2)
