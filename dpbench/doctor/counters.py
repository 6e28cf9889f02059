"""Checks that run a process under Nsight Compute: counters can be read, and are right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from dpbench.case import Case
from dpbench.doctor.findings import FAILED, OK, WARNING, Finding, Setup
from dpbench.errors import DpbenchError
from dpbench.gpu import Use, chip_here, in_use, visible_gpus
from dpbench.instruments.errors import CountersBusy, CountersForbidden, CounterUnknown
from dpbench.instruments.ncu.instrument import Ncu
from dpbench.instruments.ncu.metrics import ALWAYS, NcuMetric, lacking, on_chip
from dpbench.instruments.ncu.program import NcuNotFound, find_ncu, known_counters
from dpbench.instruments.ncu.range_report import MetricMissing, read
from dpbench.process.schedule import Steps
from dpbench.show.layout import gigabytes

COPIES = "dpbench.doctor.copying:CopyTrainer"

EXAMPLE_BYTES = 2**24
"""What the trainer that copies moves for each example of its batch, B."""

FEW, ENOUGH, MOST = 4, 256, 512
"""Examples: of a copy that is quickly made; of one (4.3 GB) beside which what an L2 cache holds
is about `TOLERANCE`, so that a smaller one proves nothing; of the largest (8.6 GB)."""

TOLERANCE = 0.01
"""How far counted bytes may be from the bytes that were copied."""

_BLAME: tuple[tuple[type[DpbenchError], str], ...] = (
    (CountersForbidden, "permission"),
    (CountersBusy, "other profiler"),
    (CounterUnknown, "metrics"),
    (DpbenchError, "profiling"),
)
"""Which check an error fails."""


def counters(setup: Setup) -> Iterator[Finding]:
    """Run a small copy with every byte metric, as a case would be run."""
    metrics = on_chip(chip_here())
    goods = {
        "profiling": "a process ran under ncu, and its report was read",
        "permission": "performance counters may be read",
        "other profiler": "none holds the counters",
        "metrics": _counted_in_words(metrics),
    }
    if reason := why_not_tried(setup):
        yield from (Finding(check, WARNING, reason) for check in goods)
        return
    findings = {check: Finding(check, OK, good) for check, good in goods.items()}
    instrument = _instrument(setup, metrics.values())
    known = known_counters(instrument.path)
    if missing := not_there(instrument.metrics, known):
        remedy = "measure the others with --ncu-metrics; what it has may go by another name"
        findings["metrics"] = Finding("metrics", FAILED, missing_in_words(missing, known), remedy)
        # Whether the others can be read is worth knowing all the same.
        instrument = _instrument(setup, (m for m in instrument.metrics if m.name not in missing))
    case = Case(COPIES, FEW, 1, "tiny")
    try:
        instrument.check()
        instrument.measure(case)
    except MetricMissing as error:  # then everything before it went well
        present = {row.metric for row in read(instrument.directory / case.report_path, case)}
        absent = ", ".join(name for name in metrics if name not in present)
        text = f"this GPU lacks the counters of {absent}"
        findings["metrics"] = Finding("metrics", FAILED, text, error.remedy)
    except DpbenchError as error:
        blamed = next(check for kind, check in _BLAME if isinstance(error, kind))
        for check, finding in findings.items():
            if finding.status == OK:
                findings[check] = Finding(check, WARNING, f"unknown, because {blamed} failed")
        findings[blamed] = Finding.of_error(blamed, error)
    yield from findings.values()


def calibration(setup: Setup) -> Iterator[Finding]:
    """A copy of known size must read and write as many DRAM bytes."""
    chip = chip_here()
    if without := [name for name in ALWAYS if name in lacking(chip)]:
        reason = f"not tried: {chip} has no {', '.join(without)}"
    else:
        reason = why_not_tried(setup)
    if not reason:
        instrument = _instrument(setup, (on_chip(chip)[name] for name in ALWAYS))
        known = known_counters(instrument.path)
        if missing := not_there(instrument.metrics, known):
            reason = f"not tried: {missing_in_words(missing, known)}"
    if reason:
        yield Finding("calibration", WARNING, reason)
        return
    case = Case(COPIES, examples_that_fit(in_use(visible_gpus()[0])), 1, "tiny")
    instrument.check()
    rows = instrument.measure(case)
    yield judge(case.batch_size, {r.metric: r.value for r in rows if r.phase == "forward"})


def why_not_tried(setup: Setup) -> str:
    """What is missing to profile with, or on; empty if nothing is."""
    if not visible_gpus():
        return "not tried: there is no GPU"
    try:
        find_ncu(setup.ncu_path)
    except NcuNotFound:
        return "not tried: there is no ncu"
    return ""


def _instrument(setup: Setup, metrics: Iterable[NcuMetric]) -> Ncu:
    steps = Steps(warmup=1, active=1)  # the first copy leaves the cache as the second finds it
    path = find_ncu(setup.ncu_path)
    place = setup.directory / "doctor"
    return Ncu(place, path, steps, setup.timeout, metrics=tuple(metrics))


def not_there(metrics: Iterable[NcuMetric], known: Collection[str]) -> dict[str, list[str]]:
    """The counters that a GPU lacks, by metric; none if ncu does not say which ones it has."""
    missing = {
        metric.name: [name for name in metric.counters if name.removesuffix(".sum") not in known]
        for metric in metrics
    }
    return {name: counters for name, counters in missing.items() if known and counters}


def missing_in_words(missing: Mapping[str, list[str]], known: Collection[str]) -> str:
    """Which metrics a GPU has no counters for, and what else it counts there."""
    there = []
    for unit in dict.fromkeys(c.partition("__")[0] for names in missing.values() for c in names):
        bytes_of_unit = sorted(c for c in known if c.startswith(f"{unit}__") and "bytes" in c)
        there.append(", ".join(bytes_of_unit[:6]) or f"no {unit}__*bytes*")
    return f"this GPU lacks the counters of {', '.join(missing)}; it has {'; '.join(there)}"


def _counted_in_words(metrics: Iterable[str]) -> str:
    chip = chip_here()
    without = ", ".join(lacking(chip))
    text = f"this GPU has all of {', '.join(metrics)}"
    return f"{text}, which is all that {chip} has: no {without}" if without else text


def judge(examples: int, counted: Mapping[str, float]) -> Finding:
    """Whether counted DRAM bytes are those of a copy, within `TOLERANCE`.

    Args:
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
        return Finding("calibration", OK, detail)
    if examples < ENOUGH:
        free = "free the GPU's memory: a copy this small partly stays in the L2 cache"
        return Finding("calibration", WARNING, detail, free)
    remedy = (
        "end everything else that uses the GPU and try again; if it stays, DRAM bytes of this "
        "card are not to be trusted"
    )
    return Finding("calibration", FAILED, detail, remedy)


def examples_that_fit(use: Use) -> int:
    """How much to copy: source and copy take at most half of the free memory."""
    if use.free_bytes is None:
        return ENOUGH
    return max(FEW, min(MOST, use.free_bytes // 4 // EXAMPLE_BYTES))
