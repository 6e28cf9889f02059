"""Reading ``.ncu-rep`` files into rows; needs neither a GPU nor Nsight Compute itself."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dpbench.case import ATTENTIONS, Case
from dpbench.errors import ConfigurationError
from dpbench.gpu import NVTX_DOMAIN, NVTX_END
from dpbench.instruments.base import InstrumentError
from dpbench.instruments.ncu_metrics import BYTE_METRICS, NcuMetric, counters
from dpbench.registry import MODELS, TRAINERS
from dpbench.results.rows import STEP, Measurement

REPORT_MAGIC = b"NVR\0"
"""The first bytes of every ``.ncu-rep`` file seen; the library reads other files as empty."""


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
    """A counter is not in the report."""

    remedy = (
        "ncu drops a counter that it does not know without a word, so check the name with "
        "ncu --query-metrics; if it is right, measure again with it in --ncu-metrics"
    )


def read(
    path: Path,
    case: Case,
    metrics: Iterable[NcuMetric] | None = None,
    *,
    tool: str = "ncu",
) -> list[Measurement]:
    """The rows of one report: each metric by phase and step, and for the whole step.

    Args:
        path: an ``.ncu-rep`` file.
        case: which case it measured.
        metrics: what to read; by default every byte metric of which the report holds all
            counters.
        tool: what made the report, for the rows.

    Raises:
        ReportUnreadable, ForeignReport, NothingProfiled, MetricMissing: what the name says.
    """
    ranges = list(_ranges(path))
    first = ranges[0][2]
    if metrics is None:
        present = set(first)
        metrics = [m for m in BYTE_METRICS.values() if present.issuperset(m.counters)]
    metrics = list(metrics)
    # A phase may be entered more than once in a step: its ranges add up.
    sums: dict[tuple[int, str, NcuMetric], float] = defaultdict(float)
    for step, phase, action in ranges:
        counted = {name: _counter(action, name, path).value() for name in counters(metrics)}
        for metric in metrics:
            value = metric.value(counted)
            sums[step, phase, metric] += value
            sums[step, STEP, metric] += value
    return [
        Measurement(
            case=case,
            instrument="ncu",
            phase=phase,
            metric=metric.name,
            value=value,
            unit=metric.unit or _counter(first, metric.name, path).unit(),
            repeat=step,
            device=str(_counter(first, "device__attribute_display_name", path).value()),
            tool=tool,
        )
        for (step, phase, metric), value in sums.items()
    ]


def case_of(path: Path) -> Case:
    """The case that a report's path names: ``SIZE-PRECISION…/report_TRAINER_bsB_seqT.ncu-rep``.

    Raises:
        ForeignReport: the path has another form.
    """
    name = re.fullmatch(r"report_(?P<trainer>\w+)_bs(?P<bs>\d+)_seq(?P<seq>\d+)", path.stem)
    folder = path.resolve().parent.name.split("-")
    if name is None or len(folder) < 2:
        raise ForeignReport(f"{path}: expected .../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep")
    rest = {part in ATTENTIONS: part for part in folder[2:]}
    attention, model = rest.get(True, "sdpa"), MODELS.admit(rest.get(False, "simple"))
    trainer = TRAINERS.admit(name["trainer"])
    try:
        return Case(
            trainer, int(name["bs"]), int(name["seq"]), folder[0], folder[1], attention, model
        )
    except ConfigurationError as error:
        raise ForeignReport(f"{path}: {error}") from error


def _ranges(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Step number, phase and ncu's action object of each range that dpbench marked."""
    import ncu_report

    if not path.is_file():
        raise ReportUnreadable(f"{path}: no such file")
    if path.read_bytes()[:4] != REPORT_MAGIC:
        raise ReportUnreadable(f"{path}: not an Nsight Compute report")
    try:
        context = ncu_report.load_report(str(path))
        actions = [action for profiled in context for action in profiled]
    except Exception as error:  # the library raises bare RuntimeError and more
        raise ReportUnreadable(f"{path}: not a readable report ({error})") from error
    labels = [_label(action) for action in actions]
    if None in labels:
        raise ForeignReport(f"{path}: it holds a range without dpbench's mark")
    # The library reads a truncated file as a report with fewer ranges, without an error.
    if actions and labels[-1] != NVTX_END:
        raise ReportUnreadable(f"{path}: the report is incomplete, its last range is missing")
    if len(actions) < 2:
        raise NothingProfiled(f"{path}: the report holds no range, or is cut off")
    for action, label in zip(actions[:-1], labels[:-1], strict=True):
        step, _, phase = str(label).partition(".")
        yield int(step), phase, action


def _label(action: Any) -> str | None:
    """The name ``STEP.PHASE`` of the dpbench range around an action."""
    state = action.nvtx_state()
    for identifier in state.domains() if state else ():
        domain = state.domain_by_id(identifier)
        if domain.name() == NVTX_DOMAIN:
            for name in domain.start_end_ranges():
                return str(name)
    return None


def _counter(action: Any, name: str, path: Path) -> Any:
    metric = action.metric_by_name(name)
    if metric is None:
        raise MetricMissing(f"{path}: the report has no {name}")
    return metric
