"""A recording of Nsight Systems on a real GPU, beside the counters."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench import Case, CaseReport
from dpbench.core.case import PHASES
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.nsys.nsys import (
    Nsys,
    NsysNotFound,
    find_nsys,
    timeline_of,
)
from dpbench.show.profile import timeline_tables

pytestmark = pytest.mark.gpu


def test_busy_times_agree_with_the_counters_within_three_percent_of_a_step(tmp_path: Path) -> None:
    """Times: recording slows the process, which a GPU that waits for it has in its shares."""
    case = Case("dpsgd", 8, 256, "1b")
    try:
        instrument = Nsys(tmp_path, path=find_nsys())
        recorded = CaseReport.of(case, instrument.measure(case).rows)
    except NsysNotFound as error:
        pytest.skip(str(error))
    counted = CaseReport.of(case, Cupti(tmp_path).measure(case).rows)
    step = counted.value("step_time_seconds")
    busy = counted.value("gpu_busy_share") * step
    assert recorded.value("timeline_busy_seconds") == pytest.approx(busy, abs=0.03 * step)
    # The step by phase and the whole ones launch the same.
    launched = sum(recorded.value("timeline_launches", phase) for phase in (*PHASES, "outside"))
    assert launched == pytest.approx(recorded.value("timeline_launches"), rel=0.01)
    timeline, statistics = timeline_of(instrument.report(case).with_suffix(".sqlite"))
    assert timeline.whole_steps
    kernels, *_ = timeline_tables(timeline.usages(), statistics, "dpsgd")[1:]
    assert kernels.title == "dpsgd: cuda_gpu_kern_sum"
    assert {"Name", "Total Time (ns)", "Instances"} <= {*kernels.headers}
