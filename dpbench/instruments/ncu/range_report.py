"""Reading ``.ncu-rep`` files into rows; needs neither a GPU nor Nsight Compute itself."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpbench.case import Case
from dpbench.errors import ConfigurationError
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.cupti.library import load_helpers_first
from dpbench.instruments.ncu.metrics import counters, having
from dpbench.metrics import Metric
from dpbench.process.messages import NVTX_DOMAIN, NVTX_END
from dpbench.results.rows import STEP, Measurement

REPORT_MAGIC = b"NVR\0"
"""The first bytes of every ``.ncu-rep`` file seen; the library reads other files as empty."""

DEVICE = "device__attribute_display_name"  # what a report calls the name of the GPU
KERNELS = "kernels"
"""The folder beside the reports of ranges with those of each kernel."""


def report_path(case: Case, folder: str = "") -> Path:
    """Where a case's report lies below the report directory."""
    return case.report_path.parent / folder / case.report_path.name


class ReportUnreadable(InstrumentError):
    """A report file is missing, truncated, or not a report at all."""

    remedy = "measure the case again"


class ForeignReport(InstrumentError):
    """A report that dpbench did not make, or so short a part of one that it cannot be told."""

    remedy = "dpbench reads complete reports of its own `--ncu` and `dpbench run`"


class NothingProfiled(InstrumentError):
    """A report without a single range: ncu itself ends with exit code 0 then."""

    remedy = (
        "a step must run its work inside `trainer.train_step`, and ncu must follow that process"
    )


class MetricMissing(InstrumentError):
    """A counter is not in the report, or has no value there."""

    remedy = (
        "ncu drops a counter that it does not know without a word, so check the name with "
        "ncu --query-metrics; if it is right, measure again with it in --ncu-metrics"
    )


def read(
    path: Path, case: Case, metrics: Iterable[Metric] | None = None, *, tool: str = "ncu"
) -> list[Measurement]:
    """The rows of a case's report: each metric by phase and step, and for the whole step.

    By default every byte metric of which the report holds all counters.
    """
    ranges = list(_ranges(path))
    first = ranges[0][2]
    metrics = list(having({*first}.issuperset).values() if metrics is None else metrics)
    device = str(counter(first, DEVICE, path).value())
    # A phase may be entered more than once in a step: its ranges add up.
    sums: dict[tuple[int, str, Metric], float] = defaultdict(float)
    for step, phase, action in ranges:
        counted = {name: counter(action, name, path).value() for name in counters(metrics)}
        for metric in metrics:
            value = metric.value(counted)
            if not math.isfinite(value):  # no document could hold it
                raise MetricMissing(f"{path}: {metric.name} of {step}.{phase} is {value}")
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


def case_of(path: Path) -> Case:
    """The case that a report's path names: ``SIZE-PRECISION…/report_TRAINER_bsB_seqT.ncu-rep``.

    Reports of kernels lie one folder deeper; see `report_path`.
    """
    place = path.resolve()
    if place.parent.name == KERNELS:
        place = place.parent.with_name(place.name)
    try:
        return Case.from_report_path(place)
    except ConfigurationError as error:
        raise ForeignReport(f"{path}: {error}") from error


def _ranges(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Step number, phase and ncu's action object of each range that dpbench marked."""
    actions = load_actions(path)
    # Of a truncated file the library makes a kernel, even among ranges, of which nothing is known;
    # no error tells of what is missing behind it.
    if len(actions) == 1 and is_kernel(actions[0]) and not actions[0].metric_by_name(DEVICE):
        raise ReportUnreadable(f"{path}: the report is incomplete, too short to say of what")
    if actions and is_kernel(actions[0]):
        raise ForeignReport(f"{path}: it holds kernels, not ranges")
    labels = [label(action) for action in actions]
    if None in (labels[:-1] or labels):  # the last may be cut off
        raise ForeignReport(f"{path}: it holds a range without dpbench's mark")
    if actions and labels[-1] != NVTX_END:
        raise ReportUnreadable(
            f"{path}: the report of ranges is incomplete, its last range is missing"
        )
    if len(actions) < 2:
        raise NothingProfiled(f"{path}: the report holds no range, or is cut off")
    for action, name in zip(actions[:-1], labels[:-1], strict=True):
        step, _, phase = str(name).partition(".")
        yield int(step), phase, action


def load_actions(path: Path, part: int = 0, parts: int = 1) -> list[Any]:
    """The ncu action objects (ranges or kernels) of a report, or part of them, as they ran."""
    with _opened(path) as places:
        start, end = (len(places) * border // parts for border in (part, part + 1))
        return [profiled.action_by_idx(i) for profiled, i in places[start:end]]


def count_actions(path: Path) -> int:
    """How many ranges or kernels a report holds."""
    with _opened(path) as places:
        return len(places)


@contextmanager
def _opened(path: Path) -> Iterator[list[tuple[Any, int]]]:
    """The places of a report's actions: the library has a group of them for each process."""
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
        context = ncu_report.load_report(str(path))
        groups = map(context.range_by_idx, range(context.num_ranges()))
        yield [(group, i) for group in groups for i in range(group.num_actions())]
    except Exception as error:  # the library raises bare RuntimeError and more
        raise ReportUnreadable(f"{path}: not a readable report ({error})") from error


def holds_kernels(path: Path) -> bool:
    """Whether a report is one of kernels; a truncated one of ranges holds one of no device."""
    with _opened(path) as places:
        first = [profiled.action_by_idx(i) for profiled, i in places[:1]]
        return any(is_kernel(action) and action.metric_by_name(DEVICE) for action in first)


def is_kernel(action: Any) -> bool:
    """Whether an action is one launch of a kernel, and not a range of many."""
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
    """A counter of an action, which must be there."""
    metric = action.metric_by_name(name)
    if metric is None:
        raise MetricMissing(f"{path}: the report has no {name}")
    return metric


def launches_by_phase(path: Path) -> Counter[str]:
    """How many kernels each phase of the first step launched, from a report of ranges."""
    counts: Counter[str] = Counter()
    for step, phase, action in _ranges(path):
        names = action.metric_by_name("launch__kernel_name")
        if names and step == 0:
            counts[phase] += names.num_instances()
    return counts
