"""Reads ``.ncu-rep`` files, of ranges or of kernels; needs neither a GPU nor ncu itself.

NVIDIA's library takes 0.8 ms for each action, and 0.35 MB that it never frees.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.child.messages import NVTX_DOMAIN, NVTX_END
from dpbench.core.case import ALL_PHASES, OUTSIDE
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import write_text
from dpbench.core.gpu import chip_of
from dpbench.core.metrics import Counters, Metric
from dpbench.core.subject import Script, Subject, subject_from
from dpbench.instruments.counters.errors import CounterUnknown
from dpbench.instruments.counters.libraries import load_helpers_first
from dpbench.instruments.counters.metrics import available, counters, on_chip
from dpbench.results.kernels import KernelCount
from dpbench.results.rows import STEP, Measurement

REPORT_MAGIC = b"NVR\0"
"""How a ``.ncu-rep`` file begins. The library reads other files as empty reports."""

DEVICE = "device__attribute_display_name"  # the name of the GPU
CAPABILITY = "device__attribute_compute_capability"
KERNELS = "kernels"
"""The folder of reports of kernels, beside the reports of ranges."""

DRAM = ("dram_read_bytes", "dram_write_bytes")
L2 = "lts__t_bytes.sum"
"""The DRAM metrics and the L2 counter from which the bytes of a `KernelCount` are taken."""

TIME = "gpu__time_duration.sum"  # duration of an action, ns


class ReportUnreadable(InstrumentError):
    """A report file is missing, truncated, or no report."""

    remedy = "measure the case again"


class ForeignReport(InstrumentError):
    """A report that dpbench did not make."""

    remedy = "dpbench reads complete reports of its own `--ncu` and `dpbench run`"


class NothingProfiled(InstrumentError):
    """A report without a range or kernel, for which ncu itself reports no error."""

    remedy = (
        "a step must run its work inside `trainer.train_step`, and ncu must follow that process"
    )


def read(
    path: Path, case: Subject, metrics: Iterable[Metric] | None = None, *, tool: str = "ncu"
) -> list[Measurement]:
    """The rows of a case's report of ranges: each metric by phase, and of the whole step.

    Args:
        path: the report.
        case: whose report it is.
        metrics: by default every byte metric of which the report has all counters.
        tool: what the rows say as ``tool``.
    """
    ranges = list(_ranges(path))
    first = ranges[0][2]
    there = available({*first}.issuperset, chip=_chip(first)).values()
    metrics = list(there if metrics is None else metrics)
    device = str(counter(first, DEVICE, path).value())
    # A phase may be entered more than once in a step: its ranges add up.
    sums: dict[tuple[int, str, Metric], float] = defaultdict(float)
    for step, phase, action in ranges:
        counted = {name: counter(action, name, path).value() for name in counters(metrics)}
        for metric in metrics:
            value = metric.value(counted)
            if not math.isfinite(value):  # JSON cannot hold it
                raise CounterUnknown(f"{path}: {metric.name} of {step}.{phase} is {value}")
            sums[step, phase, metric] += value
            sums[step, STEP, metric] += value
    units = {
        metric: counter(first, metric.name, path).unit() if "__" in metric.name else metric.unit
        for metric in metrics
    }
    return [
        Measurement(case, "ncu", phase, metric.name, value, units[metric], step, device, tool)
        for (step, phase, metric), value in sums.items()
    ]


def write_description(report: Path, case: Subject, settings: Mapping[str, Any]) -> None:
    """Write a JSON file beside a report, with its case and settings."""
    write_text(report.with_suffix(".json"), json.dumps({"case": {**case.columns}, **settings}))


def case_of(path: Path) -> Subject:
    """The case in the file beside a report; without such a file, a script named like the report."""
    description = path.with_suffix(".json")
    try:
        if not description.exists():
            return Script(str(path))
        return subject_from(json.loads(description.read_text(encoding="utf-8"))["case"])
    except (ConfigurationError, KeyError, OSError, TypeError, ValueError) as error:
        raise ForeignReport(f"{description} says no case ({error})") from error


def _ranges(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Step number, phase and ncu action object of each range that dpbench marked."""
    actions = load_actions(path)
    if actions and is_kernel(actions[0]):
        raise ForeignReport(f"{path}: it holds kernels, not ranges")
    labels = [label(action) for action in actions]
    if None in labels:
        raise ForeignReport(f"{path}: it holds a range without dpbench's mark")
    if actions and labels[-1] != NVTX_END:
        raise ReportUnreadable(
            f"{path}: the report of ranges is incomplete, its last range is missing"
        )
    if len(actions) < 2:
        raise NothingProfiled(f"{path}: the report holds no range")
    for action, name in zip(actions[:-1], labels[:-1], strict=True):
        yield *phase_of(name), action


def load_actions(path: Path) -> list[Any]:
    """The ncu action objects (ranges or kernels) of a report, in the order in which they ran."""
    actions = list(_actions(path))
    # The library reads a truncated report as a shorter one that ends in a kernel without metrics.
    if actions and actions[-1].metric_by_name(DEVICE) is None:
        raise ReportUnreadable(f"{path}: the report is incomplete, it was cut off")
    return actions


def holds_kernels(path: Path) -> bool:
    """Whether the first action of a report is a kernel, not a range."""
    return any(map(is_kernel, islice(_actions(path), 1)))


def _actions(path: Path) -> Iterator[Any]:
    import ncu_report

    try:
        if not path.is_file():
            raise ReportUnreadable(f"{path}: {'a folder' if path.is_dir() else 'no such file'}")
        with path.open("rb") as stream:
            magic = stream.read(len(REPORT_MAGIC))
    except OSError as error:
        raise ReportUnreadable(f"{path}: {error.strerror}") from error
    if magic != REPORT_MAGIC:
        raise ReportUnreadable(f"{path}: not an Nsight Compute report")
    load_helpers_first()
    try:
        for of_process in ncu_report.load_report(str(path)):
            yield from of_process
    except Exception as error:  # the library raises bare RuntimeError and more
        raise ReportUnreadable(f"{path}: not a readable report ({error})") from error


def is_kernel(action: Any) -> bool:
    """Whether an action is one kernel launch, not a range."""
    return bool(action.workload_type() == action.WorkloadType_KERNEL)


def label(action: Any) -> str | None:
    """The name ``STEP.PHASE`` of the dpbench range around an action."""
    state = action.nvtx_state()
    for identifier in state.domains() if state else ():
        domain = state.domain_by_id(identifier)
        if domain.name() == NVTX_DOMAIN:
            for name in domain.start_end_ranges():
                return str(name)
    return None


def counter(action: Any, name: str, path: Path) -> Any:
    """A counter of an action; raises if the report lacks it."""
    metric = action.metric_by_name(name)
    if metric is None:
        raise CounterUnknown(f"{path}: the report has no {name}")
    return metric


def _chip(action: Any) -> str:
    """The chip that an action ran on, as `chip_of` names it."""
    parts = (action.metric_by_name(f"{CAPABILITY}_{part}") for part in ("major", "minor"))
    return chip_of(*(part.value() if part else 0 for part in parts))


def launches_by_phase(path: Path) -> Counter[str]:
    """How many kernels each phase of the first step launched, from a report of ranges."""
    counts: Counter[str] = Counter()
    for step, phase, action in _ranges(path):
        names = action.metric_by_name("launch__kernel_name")
        if names and step == 0:
            counts[phase] += names.num_instances()
    return counts


# --- kernels ------------------------------------------------------------------------------------


def kernel_metrics(chip: str = "") -> tuple[Metric, ...]:
    """The metrics of each kernel on a chip: one pass on GH100, so that no kernel runs twice."""
    there = on_chip(chip)
    if lacking := [metric for metric in DRAM if metric not in there]:
        raise ConfigurationError(
            f"{chip} has no counters for {', '.join(lacking)} of kernels; measure without --kernels"
        )
    others = (Metric(name, how=Counters((name,))) for name in (L2, TIME))
    return (*(there[metric] for metric in DRAM), *others)


@dataclass(frozen=True)
class KernelReport:
    """The name of the GPU, and its kernel launches in order."""

    device: str
    launches: tuple[KernelCount, ...]


def read_kernels(path: Path) -> KernelReport:
    """Read a report of kernels, of any program. A kernel outside every phase is `OUTSIDE`."""
    if actions := load_actions(path):
        return kernels_of(actions, path)
    raise NothingProfiled(f"{path}: the report holds no kernel")


def kernels_of(actions: Sequence[Any], path: Path) -> KernelReport:
    """The launches that the actions of a report are."""
    spelled = on_chip() | available(lambda names: all(map(actions[0].metric_by_name, names)))
    of_counters = [*(spelled[name].counters for name in DRAM), (L2,)]
    launches: list[KernelCount] = []
    for action in actions:
        if not is_kernel(action):
            raise ForeignReport(f"{path}: it holds ranges, not kernels")
        read, written, l2 = (
            float(sum(counter(action, name, path).value() for name in of)) for of in of_counters
        )
        repeat, phase = phase_of(label(action))
        name = str(action.name(action.NameBase_DEMANGLED))
        seconds = 1e-9 * counter(action, TIME, path).value()
        launches.append(KernelCount(repeat, phase, name, 1, read, written, l2, seconds))
    return KernelReport(str(counter(actions[0], DEVICE, path).value()), tuple(launches))


def phase_of(name: str | None) -> tuple[int, str]:
    """Step number and phase of a range named ``STEP.PHASE``; (0, `OUTSIDE`) for other names."""
    step, _, phase = (name or "").partition(".")
    if step.isdecimal() and phase in ALL_PHASES:
        return int(step), phase
    return 0, OUTSIDE
