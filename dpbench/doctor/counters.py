"""Checks that count: a copy of known size, as a case is counted, by Nsight Compute and by CUPTI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from dpbench.case import OUTSIDE, Case
from dpbench.doctor.findings import FAILED, OK, WARNING, Finding, Setup
from dpbench.gpu import Use, chip_here, in_use, visible_gpus
from dpbench.instruments.cupti.instrument import Cupti
from dpbench.instruments.ncu.instrument import Ncu
from dpbench.instruments.ncu.metrics import ALWAYS, lacking, on_chip
from dpbench.instruments.ncu.program import NcuNotFound, find_ncu, known_counters
from dpbench.process.schedule import Steps
from dpbench.show.layout import gigabytes

COPIES = "dpbench.doctor.copying:CopyTrainer"

STEPS = Steps(warmup=1, active=1)  # the first copy leaves the cache as the second finds it

EXAMPLE_BYTES = 2**24
"""What the trainer that copies moves for each example of its batch, B."""

FEW, ENOUGH, MOST = 4, 256, 512
"""Examples: of a copy that is quickly made; of one (4.3 GB) beside which what an L2 cache holds
is about `TOLERANCE`, so that a smaller one proves nothing; of the largest (8.6 GB)."""

TOLERANCE = 0.01
"""How far counted bytes may be from the bytes that were copied."""


def counters(setup: Setup) -> Iterator[Finding]:
    """Count a copy by every byte metric of ncu, and hold its DRAM bytes to its size."""
    if reason := _why_not_tried(setup):
        yield from (Finding(c, WARNING, reason) for c in ("counters", "calibration"))
        return
    chip, path = chip_here(), find_ncu(setup.ncu_path)
    metrics, known = on_chip(chip), known_counters(path)
    missing = [
        name
        for name, metric in metrics.items()
        if known and not known.issuperset(c.removesuffix(".sum") for c in metric.counters)
    ]
    if missing:
        units = dict.fromkeys(c.partition("__")[0] for m in missing for c in metrics[m].counters)
        there = [sorted(c for c in known if c.startswith(f"{u}__") and "bytes" in c) for u in units]
        listed = (", ".join(c[:6]) or f"no {u}__*bytes*" for u, c in zip(units, there, strict=True))
        detail = f"this GPU lacks the counters of {', '.join(missing)}; it has {'; '.join(listed)}"
        remedy = "measure the others with --ncu-metrics; what it has may go by another name"
        yield Finding("counters", FAILED, detail, remedy)
    # Whether the others can be read is worth knowing all the same.
    counted = tuple(metric for name, metric in metrics.items() if name not in missing)
    instrument = Ncu(setup.directory / "doctor", path, STEPS, setup.timeout, metrics=counted)
    case = Case(COPIES, _examples(), 1, "tiny")
    instrument.check()
    rows = instrument.measure(case)
    if not missing:
        without = ", ".join(lacking(chip))
        which = f", which is all that {chip} has: no {without}" if without else ""
        yield Finding("counters", OK, f"may be read: {', '.join(metrics)}{which}")
    copied = {row.metric: row.value for row in rows if row.phase == "forward"}
    if {*ALWAYS} <= copied.keys():
        yield judge("calibration", case.batch_size, copied)
    else:
        yield Finding("calibration", WARNING, "not tried: this GPU does not count DRAM bytes")


def cupti(setup: Setup) -> Iterator[Finding]:
    """Count a copy by CUPTI in the process that makes it, and the GPU doing nothing."""
    calibration = "cupti calibration"
    if not visible_gpus():
        yield from (Finding(c, WARNING, "not tried: no GPU") for c in ("cupti", calibration))
        return
    case = Case(COPIES, _examples(), 1, "tiny")
    instrument = Cupti(setup.directory / "doctor", (), STEPS, setup.timeout)
    instrument.check()
    record = instrument.start(case).record()
    chip, passes = record["chip"], record["passes"]
    names = dict.fromkeys(name for names in record["counters"].values() for name in names)
    yield Finding(
        "cupti",
        OK,
        f"libcupti {record['cupti']} counts everything on {chip} in {passes} "
        f"step{'s' if passes > 1 else ''} by phase: {', '.join(names)}",
    )
    copied, idle = (record["counted_phases"][phase] for phase in ("forward", OUTSIDE))
    if not {*ALWAYS} <= copied.keys():
        yield Finding(calibration, WARNING, f"not tried: {chip} does not count DRAM bytes")
        return
    found = judge(calibration, case.batch_size, copied)
    resting = sum(idle[metric] for metric in ALWAYS)
    found = replace(
        found, detail=f"{found.detail}; {gigabytes(resting)} GB while the GPU did nothing"
    )
    if found.status == OK and resting > TOLERANCE * 2 * case.batch_size * EXAMPLE_BYTES:
        remedy = "end everything else that uses the GPU: its bytes are counted too"
        found = replace(found, status=FAILED, remedy=remedy)
    yield found


def _why_not_tried(setup: Setup) -> str:
    """What is missing to profile with, or on; empty if nothing is."""
    if not visible_gpus():
        return "not tried: there is no GPU"
    try:
        find_ncu(setup.ncu_path)
    except NcuNotFound:
        return "not tried: there is no ncu"
    return ""


def judge(check: str, examples: int, counted: Mapping[str, float]) -> Finding:
    """Whether counted DRAM bytes are those of a copy, within `TOLERANCE`.

    Args:
        check: what the finding is called.
        examples: the copy moved as many times `EXAMPLE_BYTES`.
        counted: ``dram_read_bytes`` and ``dram_write_bytes``.
    """
    size = examples * EXAMPLE_BYTES
    read, written = counted["dram_read_bytes"], counted["dram_write_bytes"]
    off = (read + written) / (2 * size) - 1
    detail = (
        f"a copy of {gigabytes(size)} GB: {gigabytes(read)} GB read and {gigabytes(written)} GB "
        f"written by the counters, {off:+.2%}"
    )
    if abs(off) <= TOLERANCE:
        return Finding(check, OK, detail)
    if examples < ENOUGH:
        free = "free the GPU's memory: a copy this small partly stays in the L2 cache"
        return Finding(check, WARNING, detail, free)
    remedy = (
        "end everything else that uses the GPU and try again; if it stays, DRAM bytes of this "
        "card are not to be trusted"
    )
    return Finding(check, FAILED, detail, remedy)


def _examples() -> int:
    return examples_that_fit(in_use(visible_gpus()[0]))


def examples_that_fit(use: Use) -> int:
    """How much to copy: source and copy take at most half of the free memory."""
    if use.free_bytes is None:
        return ENOUGH
    return max(FEW, min(MOST, use.free_bytes // 4 // EXAMPLE_BYTES))
