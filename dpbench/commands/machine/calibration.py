"""Findings of checks, and the calibration of counters by work and a message of known size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dpbench.child.failures import InstrumentError
from dpbench.child.messages import Steps
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError
from dpbench.core.gpu import visible_gpus
from dpbench.instruments.cupti.target import RECEIVED, SENT
from dpbench.show.layout import ABSENT, Table, gigabytes

OK, WARNING, FAILED = "ok", "warning", "failed"


@dataclass(frozen=True)
class Finding:
    """What a check found: the check's name, a status, a detail and a remedy.

    ``counted`` are its lines for the calibration's table, see `judge`.
    """

    check: str
    status: str
    detail: str
    remedy: str = ""
    counted: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of_error(cls, check: str, error: Exception) -> Finding:
        """A failed check, from the error that it raised."""
        if isinstance(error, InstrumentError):
            log = f" (log: {error.log})" if error.log else ""
            return cls(check, FAILED, f"{error.args[0]}{log}", error.remedy)
        kind = "" if isinstance(error, DpbenchError) else f"{type(error).__name__}: "
        return cls(check, FAILED, f"{kind}{error}")


TRAINER = "dpbench.commands.machine.known_work:KnownWork"

STEPS = Steps(warmup=1, active=1)  # the first loads the kernels

EXAMPLE_BYTES = 2**24
"""Bytes that the trainer copies, fills and reads for each example of its batch."""

FEW, ENOUGH, MOST = 4, 256, 512
"""Numbers of examples: the smallest work; the smallest that proves something of DRAM, because an L2
cache holds only about `TOLERANCE` of it (4.3 GB); and the largest (8.6 GB)."""

TOLERANCE = 0.01
"""The allowed difference of counted from known bytes, relative to the work's size."""

WORK = {"forward": ("copy", 1, 1), "backward": ("fill", 0, 1), "clip": ("read", 1, 0)}
"""The work of each phase: its name, and how many times its size is read and written."""

REST = "noise"
"""The phase in which the GPU does nothing."""

MESSAGE = "dpbench.commands.machine.known_work:KnownMessage"

SENT_IN = "optimizer"
"""The phase in which the first of two ranks sends the other a message."""

MESSAGE_EXAMPLES = 64
"""The size of the message, in `EXAMPLE_BYTES` (1.07 GB)."""

WITH_PROTOCOL = ("nvlink_sent_bytes", "pcie_write_bytes")
"""Metrics of the sender that are not judged: headers are in them, and the message takes one way."""

READ = ("dram_read_bytes", "l2_sm_read_bytes", "global_load_bytes")
WRITTEN = ("dram_write_bytes", "l2_sm_write_bytes", "global_store_bytes")
BOTH = ("l2_served_bytes",)
"""Metrics of bytes read, written, and both. The last includes other traffic and is not judged."""


def largest_work() -> Case:
    """The largest work of which source and copy take at most half of the free memory."""
    free = visible_gpus()[0].free_bytes
    examples = ENOUGH if free is None else max(FEW, min(MOST, free // 4 // EXAMPLE_BYTES))
    return Case(TRAINER, examples, 1, "tiny")


def judge(instrument: str, examples: int, counted: Mapping[str, Mapping[str, float]]) -> Finding:
    """Find whether each metric counted the bytes of the work, within `TOLERANCE` of its size.

    Args:
        instrument: the name of the one that counted.
        examples: the work's size, in `EXAMPLE_BYTES`.
        counted: metrics by phase, see `WORK`.
    """
    check, size = f"{instrument} calibration", examples * EXAMPLE_BYTES
    lines = tuple(_compared(instrument, size, counted))
    judged = [line for line in lines if line["metric"] not in BOTH]
    if not judged:
        return Finding(check, WARNING, "not tried: this GPU counts none of the bytes")
    of = f"a copy, a fill and a read of {gigabytes(size)} GB"
    wrong = [line for line in judged if abs(line["off"]) > TOLERANCE]
    if not wrong:
        most = max(abs(line["off"]) for line in judged)
        names = ", ".join(dict.fromkeys(line["metric"] for line in judged))
        return Finding(check, OK, f"{of}: at most {most:.2%} off in {names}", counted=lines)
    said = "; ".join(
        f"{line['metric']} of the {line['work']} {gigabytes(line['counted'])} GB, "
        f"{line['off']:+.2%}"
        for line in wrong
    )
    if examples < ENOUGH and all(line["metric"].startswith("dram_") for line in wrong):
        remedy = "free the GPU's memory: data this small partly stays in the L2 cache"
        return Finding(check, WARNING, f"{of}: {said}", remedy, lines)
    remedy = (
        "end everything else that uses the GPU and try again; if it stays, these bytes are not to "
        "be trusted on this card"
    )
    return Finding(check, FAILED, f"{of}: {said}", remedy, lines)


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


def judge_message(sender: Mapping[str, float], receiver: Mapping[str, float]) -> Finding:
    """Find whether NVML counted a message on NVLink, by the metrics of its two ends."""
    size = MESSAGE_EXAMPLES * EXAMPLE_BYTES
    known = {SENT: sender, RECEIVED: receiver, **dict.fromkeys(WITH_PROTOCOL, sender)}
    lines = tuple(
        _line("message", metric, "cupti", size, values[metric], 1)
        for metric, values in known.items()
        if metric in values
    )
    of = f"a message of {gigabytes(size)} GB from one GPU to another"
    said = ", ".join(f"{line['metric']} {gigabytes(line['counted'])} GB" for line in lines)
    judged = [line["off"] for line in lines if line["metric"] not in WITH_PROTOCOL]
    if not judged:
        return Finding("links", WARNING, f"{of}: {said}", counted=lines)
    if max(map(abs, judged)) <= TOLERANCE:
        return Finding("links", OK, f"{of}: {said}", counted=lines)
    remedy = "where GPUs exchange data by PCIe nothing crosses NVLink; else end what uses them"
    return Finding("links", WARNING, f"{of}: {said}", remedy, lines)


def table(findings: Iterable[Finding]) -> Table | None:
    """A table of the bytes that each instrument counted, beside the known ones."""
    counted: dict[tuple[str, str, float], dict[str, tuple[str, str]]] = defaultdict(dict)
    for line in (line for finding in findings for line in finding.counted):
        said = gigabytes(line["counted"]), f"{line['off']:+.2%}"
        counted[line["work"], line["metric"], line["expected"]][line["instrument"]] = said
    names = sorted({name for by in counted.values() for name in by})
    cells = [
        [*key[:2], gigabytes(key[2]), *chain(*(by.get(name, (ABSENT, ABSENT)) for name in names))]
        for key, by in sorted(counted.items())
    ]
    headers = ["work", "metric", "known\nGB"]
    headers += [f"{name}\n{what}" for name in names for what in ("GB", "off")]
    off = f"Off: relative to the work's size; more than {TOLERANCE:.0%} fails."
    unjudged = (
        f"Not judged: {', '.join(BOTH)}, which includes traffic that no SM asked for, and of the "
        f"message {' and '.join(WITH_PROTOCOL)}, which include headers of packets."
    )
    return Table("Bytes of known work", headers, cells, (off, unjudged)) if cells else None
