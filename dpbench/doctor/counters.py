"""Checks that run a process under Nsight Compute: counters can be read, and are right."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from dpbench.case import Case
from dpbench.doctor import FAILED, OK, WARNING, Finding, Setup
from dpbench.errors import DpbenchError
from dpbench.gpu import Use, in_use, visible_gpus
from dpbench.instruments.ncu.metrics import ALWAYS, NcuMetric, lacking, on_chip
from dpbench.instruments.ncu.program import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    NcuNotFound,
    find_ncu,
    known_counters,
)
from dpbench.instruments.ncu.range_report import MetricMissing, read
from dpbench.instruments.ncu.ranges import Ncu
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
)
"""Which check an error fails; every other error fails ``profiling``."""


class CannotTry(Exception):
    """There is nothing to profile with, or on; the message says what is missing."""


def counters(setup: Setup) -> Iterator[Finding]:
    """Run a small copy with every byte metric, as a case would be run."""
    metrics = on_chip(_chip())
    goods = {
        "profiling": "a process ran under ncu, and its report was read",
        "permission": "performance counters may be read",
        "other profiler": "none holds the counters",
        "metrics": _counted_in_words(metrics),
    }
    try:
        instrument = _instrument(setup, tuple(metrics.values()))
    except CannotTry as error:
        yield from (Finding(check, WARNING, f"not tried: {error}") for check in goods)
        return
    findings = {check: Finding(check, OK, good) for check, good in goods.items()}
    if missing := not_there(instrument.metrics, known_counters(instrument.path)):
        remedy = "measure the others with --ncu-metrics; what it has may go by another name"
        findings["metrics"] = Finding("metrics", FAILED, missing, remedy)
        # Whether the others can be read is worth knowing all the same.
        there = (m for m in instrument.metrics if not _missing(m, known_counters(instrument.path)))
        instrument = replace(instrument, metrics=tuple(there))
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
        blamed = next((name for kind, name in _BLAME if isinstance(error, kind)), "profiling")
        unknown = f"unknown, because {blamed} failed"
        lacks = {check: f for check, f in findings.items() if f.status == FAILED}
        findings = {check: Finding(check, WARNING, unknown) for check in goods} | lacks
        findings[blamed] = Finding.of_error(blamed, error)
    yield from findings.values()


def calibration(setup: Setup) -> Iterator[Finding]:
    """A copy of known size must read and write as many DRAM bytes."""
    known = on_chip(_chip())
    if without := [name for name in ALWAYS if name not in known]:
        yield Finding("calibration", WARNING, f"not tried: {_chip()} has no {', '.join(without)}")
        return
    metrics = tuple(known[name] for name in ALWAYS)
    try:
        instrument = _instrument(setup, metrics)
    except CannotTry as error:
        yield Finding("calibration", WARNING, f"not tried: {error}")
        return
    if missing := not_there(metrics, known_counters(instrument.path)):
        yield Finding("calibration", WARNING, f"not tried: {missing}")
        return
    case = Case(COPIES, examples_that_fit(in_use(visible_gpus()[0])), 1, "tiny")
    instrument.check()
    rows = instrument.measure(case)
    counted = {row.metric: row.value for row in rows if row.phase == "forward"}
    yield judge(case.batch_size, counted)


def not_there(metrics: Iterable[NcuMetric], known: Collection[str]) -> str:
    """Which metrics a GPU has no counters for, and what else it counts there; empty if none.

    Args:
        metrics: what would be measured.
        known: the GPU's counters, without ``.sum``; none if ncu does not say.
    """
    missing = [metric for metric in metrics if known and _missing(metric, known)]
    if not missing:
        return ""
    units = dict.fromkeys(c.partition("__")[0] for m in missing for c in _missing(m, known))
    there = []
    for unit in units:
        bytes_of_unit = sorted(c for c in known if c.startswith(f"{unit}__") and "bytes" in c)
        there.append(", ".join(bytes_of_unit[:6]) or f"no {unit}__*bytes*")
    names = ", ".join(metric.name for metric in missing)
    return f"this GPU lacks the counters of {names}; it has {'; '.join(there)}"


def _missing(metric: NcuMetric, known: Collection[str]) -> list[str]:
    return [name for name in metric.counters if name.removesuffix(".sum") not in known]


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


def _chip() -> str:
    return next((gpu.chip for gpu in visible_gpus()), "")


def _counted_in_words(metrics: Iterable[str]) -> str:
    without = f", which is all that {_chip()} has: no {', '.join(lacking(_chip()))}"
    return f"this GPU has all of {', '.join(metrics)}" + (without if lacking(_chip()) else "")


def _instrument(setup: Setup, metrics: tuple[NcuMetric, ...]) -> Ncu:
    if not visible_gpus():
        raise CannotTry("there is no GPU")
    try:
        path = find_ncu(setup.ncu_path)
    except NcuNotFound as error:
        raise CannotTry("there is no ncu") from error
    steps = Steps(warmup=1, active=1)  # the first copy leaves the cache as the second finds it
    return Ncu(setup.directory / "doctor", path, steps, setup.timeout, metrics)
