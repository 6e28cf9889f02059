"""Whether CUPTI counts in the process that trains, and counts rightly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dpbench.case import OUTSIDE, Case
from dpbench.doctor.counters import COPIES, EXAMPLE_BYTES, TOLERANCE, examples_that_fit, judge
from dpbench.doctor.findings import FAILED, OK, WARNING, Finding, Setup
from dpbench.gpu import in_use, visible_gpus
from dpbench.instruments.cupti.instrument import Cupti
from dpbench.instruments.ncu.metrics import ALWAYS
from dpbench.process.schedule import Steps
from dpbench.show.layout import gigabytes

CALIBRATION = "cupti calibration"


def cupti(setup: Setup) -> Iterator[Finding]:
    """Count a copy of known size, and the GPU doing nothing, as a case is counted."""
    if not visible_gpus():
        yield from (Finding(c, WARNING, "not tried: no GPU") for c in ("cupti", CALIBRATION))
        return
    case = Case(COPIES, examples_that_fit(in_use(visible_gpus()[0])), 1, "tiny")
    instrument = Cupti(setup.directory / "doctor", (), Steps(warmup=1, active=1), setup.timeout)
    instrument.check()
    record = instrument.start(case).record()
    chip, passes = record["chip"], record["passes"]
    counters = dict.fromkeys(name for names in record["counters"].values() for name in names)
    yield Finding(
        "cupti",
        OK,
        f"libcupti {record['cupti']} counts everything on {chip} in {passes} "
        f"step{'s' if passes > 1 else ''} by phase: {', '.join(counters)}",
    )
    copied, idle = (record["counted_phases"][phase] for phase in ("forward", OUTSIDE))
    if not {*ALWAYS} <= copied.keys():
        yield Finding(CALIBRATION, WARNING, f"not tried: {chip} does not count DRAM bytes")
        return
    found = judge(case.batch_size, copied)
    resting = sum(idle[metric] for metric in ALWAYS)
    detail = f"{found.detail}; {gigabytes(resting)} GB while the GPU did nothing"
    found = replace(found, check=CALIBRATION, detail=detail)
    if found.status == OK and resting > TOLERANCE * 2 * case.batch_size * EXAMPLE_BYTES:
        remedy = "end everything else that uses the GPU: its bytes are counted too"
        found = replace(found, status=FAILED, remedy=remedy)
    yield found
