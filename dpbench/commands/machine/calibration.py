"""Findings of doctor's checks, and the calibration of counters by work of known size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dpbench.child.messages import Steps
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError, InstrumentError
from dpbench.core.gpu import visible_gpus
from dpbench.instruments.cupti.ranges import RECEIVED, SENT
from dpbench.show.layout import ABSENT, Table, gigabytes

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Diagnosis:
    """The result of a check. ``counted`` has rows for the calibration table, see `judge`."""

    check: str
    status: str
    detail: str
    remedy: str = ""
    counted: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def from_error(cls, check: str, error: Exception) -> Diagnosis:
        """Make the finding of a check that raised an error."""
        if isinstance(error, InstrumentError):
            log = f" (log: {error.log})" if error.log else ""
            return cls(check, FAILED, f"{error.args[0]}{log}", error.remedy)
        kind = "" if isinstance(error, DpbenchError) else f"{type(error).__name__}: "
        return cls(check, FAILED, f"{kind}{error}")


TRAINER = "dpbench.commands.machine.known_work:KnownWork"

STEPS = Steps(warmup=1, active=1)  # the warm-up step loads the kernels

EXAMPLE_BYTES = 2**24
"""Number of bytes that are copied, filled and read for each example of the batch."""

SMALLEST, DRAM_SIZED, LARGEST = 4, 256, 512
"""Numbers of examples. `DRAM_SIZED` (4.3 GB) is the smallest number that calibrates DRAM counters,
because an L2 cache holds only about `TOLERANCE` of so many bytes. `LARGEST` is 8.6 GB."""

TOLERANCE = 0.01
"""Largest allowed difference between counted and known bytes, relative to the size of the work."""

WORK = {"forward": ("copy", 1, 1), "backward": ("fill", 0, 1), "clip": ("read", 1, 0)}
"""For each phase, the name of the work, and how often the work reads and writes the data."""

IDLE_PHASE = "noise"
"""Phase in which the GPU is idle."""

MESSAGE = "dpbench.commands.machine.known_work:KnownMessage"

MESSAGE_PHASE = "optimizer"
"""Phase in which the first of two ranks sends a message to the second."""

MESSAGE_EXAMPLES = 64
"""Size of the message, in units of `EXAMPLE_BYTES` (1.07 GB in total)."""

SENDER_NOT_JUDGED = ("nvlink_sent_bytes", "pcie_write_bytes")
"""Metrics of the sender that are not judged. Both include packet headers, and the message takes
only one of the two ways, NVLink or PCIe."""

READ = ("dram_read_bytes", "l2_sm_read_bytes", "global_load_bytes")
WRITTEN = ("dram_write_bytes", "l2_sm_write_bytes", "global_store_bytes")
BOTH = ("l2_served_bytes",)
"""Metrics of bytes that are read, of bytes that are written, and of both together. The metrics in
`BOTH` include other traffic, so they are not judged."""


def work_that_fits() -> Case:
    """Return a case with the largest work whose source and copy fit into half of the free memory.

    The number of examples is at least `SMALLEST` and at most `LARGEST`. If the free memory is
    unknown, the number is `DRAM_SIZED`.
    """
    free = visible_gpus()[0].free_bytes
    examples = (
        DRAM_SIZED if free is None else max(SMALLEST, min(LARGEST, free // 4 // EXAMPLE_BYTES))
    )
    return Case(TRAINER, examples, 1, "tiny")


def judge(instrument: str, examples: int, counted: Mapping[str, Mapping[str, float]]) -> Diagnosis:
    """Judge whether each metric, except those in `BOTH`, counted the work within `TOLERANCE`.

    Args:
        instrument: the name of the instrument.
        examples: the size of the work, in units of `EXAMPLE_BYTES`.
        counted: the counted metrics by phase, see `WORK`.
    """
    check, size = f"{instrument} calibration", examples * EXAMPLE_BYTES
    lines = tuple(_compared(instrument, size, counted))
    judged = [line for line in lines if line["metric"] not in BOTH]
    if not judged:
        return Diagnosis(check, WARNING, "not checked: this GPU counts none of the bytes")
    work = f"a copy, a fill and a read of {gigabytes(size)} GB"
    wrong = [line for line in judged if abs(line["off"]) > TOLERANCE]
    if not wrong:
        most = max(abs(line["off"]) for line in judged)
        names = ", ".join(dict.fromkeys(line["metric"] for line in judged))
        return Diagnosis(check, OK, f"{work}: at most {most:.2%} off in {names}", counted=lines)
    differences = "; ".join(
        f"{line['metric']} of the {line['work']} {gigabytes(line['counted'])} GB, "
        f"{line['off']:+.2%}"
        for line in wrong
    )
    if examples < DRAM_SIZED and all(line["metric"].startswith("dram_") for line in wrong):
        remedy = "free the GPU's memory: small data partly stays in the L2 cache"
        return Diagnosis(check, WARNING, f"{work}: {differences}", remedy, lines)
    remedy = (
        "end everything else that uses the GPU and try again; if the difference remains, do not "
        "trust these bytes on this card"
    )
    return Diagnosis(check, FAILED, f"{work}: {differences}", remedy, lines)


def _compared(
    instrument: str, size: int, counted: Mapping[str, Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    for phase, (work, read, written) in WORK.items():
        expected = dict.fromkeys(READ, read) | dict.fromkeys(WRITTEN, written)
        for metric, times in (expected | dict.fromkeys(BOTH, read + written)).items():
            if (value := counted.get(phase, {}).get(metric)) is not None:
                yield _line(work, metric, instrument, size, value, times)


def _line(
    work: str, metric: str, instrument: str, size: int, counted: float, times: int
) -> dict[str, Any]:
    return {
        "work": work,
        "metric": metric,
        "instrument": instrument,
        "expected": times * size,
        "counted": counted,
        "off": counted / size - times,
    }


def judge_message(sender: Mapping[str, float], receiver: Mapping[str, float]) -> Diagnosis:
    """Judge whether NVML counted a message on NVLink, using the metrics of both GPUs."""
    size = MESSAGE_EXAMPLES * EXAMPLE_BYTES
    known = {SENT: sender, RECEIVED: receiver, **dict.fromkeys(SENDER_NOT_JUDGED, sender)}
    lines = tuple(
        _line("message", metric, "cupti", size, values[metric], 1)
        for metric, values in known.items()
        if metric in values
    )
    work = f"a message of {gigabytes(size)} GB from one GPU to another"
    bytes_text = ", ".join(f"{line['metric']} {gigabytes(line['counted'])} GB" for line in lines)
    judged = [line["off"] for line in lines if line["metric"] not in SENDER_NOT_JUDGED]
    if not judged:
        return Diagnosis("links", WARNING, f"{work}: {bytes_text}", counted=lines)
    if max(map(abs, judged)) <= TOLERANCE:
        return Diagnosis("links", OK, f"{work}: {bytes_text}", counted=lines)
    remedy = (
        "if these GPUs exchange data by PCIe, nothing crosses NVLink; otherwise end everything "
        "else that uses these GPUs"
    )
    return Diagnosis("links", WARNING, f"{work}: {bytes_text}", remedy, lines)


def table(findings: Iterable[Diagnosis]) -> Table | None:
    """Make a table of known bytes and the bytes that each instrument counted."""
    counted: dict[tuple[str, str, float], dict[str, tuple[str, str]]] = defaultdict(dict)
    for line in (line for finding in findings for line in finding.counted):
        texts = gigabytes(line["counted"]), f"{line['off']:+.2%}"
        counted[line["work"], line["metric"], line["expected"]][line["instrument"]] = texts
    names = sorted({name for by in counted.values() for name in by})
    cells = [
        [*key[:2], gigabytes(key[2]), *chain(*(by.get(name, (ABSENT, ABSENT)) for name in names))]
        for key, by in sorted(counted.items())
    ]
    headers = ["work", "metric", "known\nGB"]
    headers += [f"{name}\n{what}" for name in names for what in ("GB", "off")]
    off = f"Off is relative to the size of the work. More than {TOLERANCE:.0%} fails."
    unjudged = (
        f"{', '.join(BOTH)} is not judged, because it includes traffic that no SM requested. "
        f"{' and '.join(SENDER_NOT_JUDGED)} are not judged, because they include packet headers."
    )
    return Table("Bytes of known work", headers, cells, (off, unjudged)) if cells else None
