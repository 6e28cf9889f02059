"""Reads ``.ncu-rep`` files, which contain ranges or kernels.

Reading a report needs neither a GPU nor the program ncu. In NVIDIA's library, an action is one
range or one kernel launch. For each action the library takes 0.8 ms, and allocates 0.35 MB that it
never frees.
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

from dpbench.child.messages import NVTX_DOMAIN, NVTX_END
from dpbench.core.case import ALL_PHASES, OUTSIDE
from dpbench.core.errors import ConfigurationError, InstrumentError
from dpbench.core.files import write_text
from dpbench.core.gpu import chip_of
from dpbench.core.metrics import Counters, Metric
from dpbench.core.subject import Script, Subject, subject_from
from dpbench.instruments.counters import (
    ALWAYS,
    CounterUnknown,
    available,
    counters,
    load_helpers_first,
    on_chip,
)
from dpbench.results.kernels import KernelCount
from dpbench.results.rows import STEP, Measurement

REPORT_MAGIC = b"NVR\0"
"""First bytes of a ``.ncu-rep`` file. NVIDIA's library reads other files as empty reports."""

DEVICE = "device__attribute_display_name"  # name of the GPU
CAPABILITY = "device__attribute_compute_capability"
KERNELS = "kernels"
"""Name of the subfolder for kernel reports, in the folder of the range reports."""

L2 = "lts__t_bytes.sum"
"""The L2 counter that a `KernelCount` contains, besides the metrics in `ALWAYS`."""

TIME = "gpu__time_duration.sum"  # duration of an action in ns


class ReportUnreadable(InstrumentError):
    """A report file is missing, truncated, or not a report."""

    remedy = "measure the case again"


class ForeignReport(InstrumentError):
    """A report was not made by dpbench, or does not contain the required ranges or kernels."""

    remedy = "pass a complete report that `pytest --ncu` or `dpbench run` has written"


class NothingProfiled(InstrumentError):
    """Nsight Compute profiled no range and no kernel, or wrote no report."""

    remedy = (
        "run the work of a step inside `trainer.train_step`, in the process that ncu profiles or "
        "in its children"
    )


def read(
    path: Path, case: Subject, metrics: Iterable[Metric] | None = None, *, tool: str = "ncu"
) -> list[Measurement]:
    """Return the rows of a report of ranges, for each phase and for the whole step.

    Args:
        path: path of the report.
        case: the case or script that was measured.
        metrics: metrics to read. If None, all metrics whose counters the report contains are read.
        tool: value of the column ``tool``.
    """
    ranges = list(_ranges(path))
    first = ranges[0][2]
    there = available({*first}.issuperset, chip=_chip(first)).values()
    metrics = list(there if metrics is None else metrics)
    device = str(counter(first, DEVICE, path).value())
    # A step may enter a phase several times. The values of these ranges are added up.
    sums: dict[tuple[int, str, Metric], float] = defaultdict(float)
    for step, phase, action in ranges:
        counted = {name: counter(action, name, path).value() for name in counters(metrics)}
        for metric in metrics:
            value = metric.value(counted)
            if not math.isfinite(value):  # JSON cannot represent the value
                raise CounterUnknown(
                    f"{path}: {metric.name} of step {step}, phase {phase}, is {value}, not a "
                    f"finite number"
                )
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
    """Write the case and the settings of a report to a JSON file in the same folder."""
    write_text(report.with_suffix(".json"), json.dumps({"case": {**case.columns}, **settings}))


def case_of(path: Path) -> Subject:
    """Return the case of a report, which a JSON file in the same folder describes.

    If the JSON file does not exist, returns a `Script` with the path of the report as its name.
    """
    description = path.with_suffix(".json")
    try:
        if not description.exists():
            return Script(str(path))
        return subject_from(json.loads(description.read_text(encoding="utf-8"))["case"])
    except (ConfigurationError, KeyError, OSError, TypeError, ValueError) as error:
        raise ForeignReport(f"{description} does not describe a case ({error})") from error


def _ranges(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield the step number, phase and ncu action object of each range that dpbench marked."""
    actions = load_actions(path)
    if actions and is_kernel(actions[0]):
        raise ForeignReport(f"{path}: the report contains kernels, not ranges")
    labels = [label(action) for action in actions]
    if None in labels:
        raise ForeignReport(f"{path}: the report contains a range that dpbench did not mark")
    if actions and labels[-1] != NVTX_END:
        raise ReportUnreadable(f"{path}: the report is incomplete: its last range is missing")
    if len(actions) < 2:
        raise NothingProfiled(f"{path}: the report contains no range")
    for action, name in zip(actions[:-1], labels[:-1], strict=True):
        yield *phase_of(name), action


def load_actions(path: Path) -> list[Any]:
    """Return the ncu action objects (ranges or kernels) of a report, in the order of execution."""
    actions = list(_actions(path))
    # In a truncated report the library finds a last kernel without metrics.
    if actions and actions[-1].metric_by_name(DEVICE) is None:
        raise ReportUnreadable(f"{path}: the report is truncated")
    return actions


def holds_kernels(path: Path) -> bool:
    """Return True if the first action of a report is a kernel."""
    return any(map(is_kernel, islice(_actions(path), 1)))


def _actions(path: Path) -> Iterator[Any]:
    import ncu_report

    try:
        if not path.is_file():
            what = "a folder, not a report" if path.is_dir() else "no such file"
            raise ReportUnreadable(f"{path}: {what}")
        with path.open("rb") as stream:
            magic = stream.read(len(REPORT_MAGIC))
    except OSError as error:
        raise ReportUnreadable(f"{path}: {error.strerror}") from error
    if magic != REPORT_MAGIC:
        raise ReportUnreadable(f"{path} is not a report of Nsight Compute")
    load_helpers_first()
    try:
        for of_process in ncu_report.load_report(str(path)):
            yield from of_process
    except Exception as error:  # the library raises RuntimeError and other classes
        raise ReportUnreadable(f"{path} cannot be read as a report ({error})") from error


def is_kernel(action: Any) -> bool:
    """Return True if an action is a kernel launch, False if it is a range."""
    return bool(action.workload_type() == action.WorkloadType_KERNEL)


def label(action: Any) -> str | None:
    """Return the name of the dpbench range that contains an action, or None.

    The name is ``STEP.PHASE`` or `NVTX_END`.
    """
    state = action.nvtx_state()
    for identifier in state.domains() if state else ():
        domain = state.domain_by_id(identifier)
        if domain.name() == NVTX_DOMAIN:
            for name in domain.start_end_ranges():
                return str(name)
    return None


def counter(action: Any, name: str, path: Path) -> Any:
    """Return a counter of an action, as an object of ncu's library.

    Raises:
        CounterUnknown: the report does not contain the counter.
    """
    metric = action.metric_by_name(name)
    if metric is None:
        raise CounterUnknown(f"{path}: the report does not contain the counter {name}")
    return metric


def _chip(action: Any) -> str:
    """Return the name of the chip that ran an action, as `chip_of` spells it."""
    parts = (action.metric_by_name(f"{CAPABILITY}_{part}") for part in ("major", "minor"))
    return chip_of(*(part.value() if part else 0 for part in parts))


def launches_by_phase(path: Path) -> Counter[str]:
    """Return the number of kernels that each phase of the first step launched.

    ``path`` is a report of ranges.
    """
    counts: Counter[str] = Counter()
    for step, phase, action in _ranges(path):
        names = action.metric_by_name("launch__kernel_name")
        if names and step == 0:
            counts[phase] += names.num_instances()
    return counts


# --- kernels ------------------------------------------------------------------------------------


def kernel_metrics(chip: str = "") -> tuple[Metric, ...]:
    """Return the metrics to count for each kernel on a chip.

    The chip GH100 counts these metrics in one pass, so that each kernel runs only once.
    """
    there = on_chip(chip)
    if lacking := [metric for metric in ALWAYS if metric not in there]:
        raise ConfigurationError(
            f"{chip} has no counters for {', '.join(lacking)} of single kernels: leave out "
            f"--kernels (in pytest: --ncu-kernels)"
        )
    others = (Metric(name, how=Counters((name,))) for name in (L2, TIME))
    return (*(there[metric] for metric in ALWAYS), *others)


@dataclass(frozen=True)
class KernelReport:
    """The kernel launches of a report, in order, and the name of the GPU."""

    device: str
    launches: tuple[KernelCount, ...]


def read_kernels(path: Path) -> KernelReport:
    """Read a report of kernels of any program. A kernel in no phase gets the phase `OUTSIDE`."""
    if actions := load_actions(path):
        return kernels_of(actions, path)
    raise NothingProfiled(f"{path}: the report contains no kernel")


def kernels_of(actions: Sequence[Any], path: Path) -> KernelReport:
    """Return the kernel launches from the actions of a report.

    Raises:
        ForeignReport: an action is a range.
    """
    spelled = on_chip() | available(lambda names: all(map(actions[0].metric_by_name, names)))
    of_counters = [*(spelled[name].counters for name in ALWAYS), (L2,)]
    launches: list[KernelCount] = []
    for action in actions:
        if not is_kernel(action):
            raise ForeignReport(f"{path}: the report contains ranges, not kernels")
        read, written, l2 = (
            float(sum(counter(action, name, path).value() for name in of)) for of in of_counters
        )
        repeat, phase = phase_of(label(action))
        name = str(action.name(action.NameBase_DEMANGLED))
        seconds = 1e-9 * counter(action, TIME, path).value()
        launches.append(KernelCount(repeat, phase, name, 1, read, written, l2, seconds))
    return KernelReport(str(counter(actions[0], DEVICE, path).value()), tuple(launches))


def phase_of(name: str | None) -> tuple[int, str]:
    """Return the step number and phase from a range's name ``STEP.PHASE``.

    Returns (0, `OUTSIDE`) for other names.
    """
    step, _, phase = (name or "").partition(".")
    if step.isdecimal() and phase in ALL_PHASES:
        return int(step), phase
    return 0, OUTSIDE
