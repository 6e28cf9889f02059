"""Check what works on this machine, before you spend time on measuring.

doctor checks packages, counting and directories. If there is a GPU, doctor also checks the GPU and
Nsight Compute, and reads counters with Nsight Compute and CUPTI. To calibrate the counters, it
copies, fills and reads data of known size. The counted bytes of DRAM, of L2 and of global loads and
stores must be within 1 %, and a table shows them. Each line is ok, warning or failed, and a second
line often names a remedy. The exit code is 1 if a check failed. Reports and logs of the measured
processes stay in the folder doctor of --ncu-dir.

With --chip, doctor only lists the metrics that CUPTI counts on a chip, the counters behind them,
and the number of steps that they need.

Examples:
  dpbench doctor
  dpbench doctor --chip GA100
  dpbench doctor --json
  dpbench doctor --ncu-path /opt/nvidia/nsight-compute/2025.3.1/ncu
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from dpbench.child.messages import Steps
from dpbench.core.case import Case
from dpbench.core.errors import DpbenchError, InstrumentError
from dpbench.core.files import check_writable
from dpbench.core.gpu import chip_here, visible_gpus, why_no_gpu
from dpbench.core.metrics import METRICS
from dpbench.core.settings import Settings, declare, own_values
from dpbench.instruments import declare_built_in
from dpbench.instruments.counters import ALWAYS, CounterOptions, on_chip
from dpbench.instruments.cupti.chip import describe
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.cupti.library import load_library
from dpbench.instruments.cupti.ranges import RECEIVED, SENT
from dpbench.instruments.logical.logical import Logical
from dpbench.instruments.ncu.ncu import Ncu, NcuNotFound, find_ncu
from dpbench.launch.processes import version_of
from dpbench.results.rows import STEP
from dpbench.show.layout import ABSENT, Table, gigabytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    declare_built_in(parser.add_argument, "ncu_path")
    declare(parser.add_argument, "ncu_dir")
    declare(parser.add_argument, "timeout", default=120)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--chip",
        metavar="NAME",
        help="list what CUPTI counts on a chip such as GA100, without a GPU",
    )


def run(options: argparse.Namespace) -> int:
    """Print each finding as soon as a check has made it."""
    if options.chip:
        print(describe(load_library(), options.chip))
        return 0
    settings = Settings(ncu_dir=options.ncu_dir, timeout=options.timeout, own=own_values(options))
    findings = []
    for finding in examine(settings):
        findings.append(finding)
        if not options.json:
            print(as_line(finding), flush=True)
    failed = any(finding.status == FAILED for finding in findings)
    if options.json:
        print(json.dumps({"ok": not failed, "findings": [vars(f) for f in findings]}, indent=1))
    elif calibration := table(findings):
        print(f"\n{calibration.as_text()}")
    return 1 if failed else 0


def as_line(finding: Diagnosis) -> str:
    """Format a finding for a terminal, with its remedy on a second line."""
    start = f"{finding.status:8}{finding.check:21}"
    remedy = f"\n{'> ':>{len(start)}}{finding.remedy}" if finding.remedy else ""
    return f"{start}{finding.detail}{remedy}"


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


# --- calibration by known work ---------------------------------------------------------------

TRAINER = "dpbench.commands.known_work:KnownWork"

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

MESSAGE = "dpbench.commands.known_work:KnownMessage"

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


# --- checks -----------------------------------------------------------------------------------

SMALL_CASE = Case("dpsgd", batch_size=4, seq_len=16, model_size="tiny")


def packages(settings: Settings) -> Iterator[Diagnosis]:
    """Check that all required packages are installed in an allowed version."""
    installed = [
        f"python {platform.python_version()}",
        f"dpbench {metadata.version('pytest-dpbench')}",
    ]
    for package in map(Requirement, metadata.requires("pytest-dpbench") or ()):
        if package.marker and not package.marker.evaluate({"extra": ""}):
            continue
        required, version = f"{package.name}{package.specifier}", "missing"
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(package.name)
        if version != "missing" and package.specifier.contains(version, prereleases=True):
            installed.append(f"{package.name} {version}")
            continue
        detail = f"{package.name} is {version}, but {required} is required"
        remedy = f"pip install '{required}'"
        yield Diagnosis("packages", FAILED, detail, remedy)
    yield Diagnosis("packages", OK, ", ".join(installed))


def logical_counting(settings: Settings) -> Iterator[Diagnosis]:
    """Check that logical bytes can be counted, which needs no GPU."""
    rows = {(row.phase, row.metric): row.value for row in Logical().count(SMALL_CASE).rows}
    moved = rows[STEP, "logical_read_bytes"] + rows[STEP, "logical_write_bytes"]
    yield Diagnosis("logical counting", OK, f"{SMALL_CASE.id}: {moved / 1e6:.1f} MB a step")


def directories(settings: Settings) -> Iterator[Diagnosis]:
    """Check that the folders of reports, logs and locks are writable, without creating them."""
    place = settings.ncu_dir.absolute()
    check_writable(next(path for path in (place, *place.parents) if path.exists()))
    check_writable(Path(tempfile.gettempdir()))
    yield Diagnosis("directories", OK, f"{settings.ncu_dir} and {tempfile.gettempdir()}")


def gpu(settings: Settings) -> Iterator[Diagnosis]:
    """Check that this machine has a GPU, and that no process uses a visible GPU."""
    if not visible_gpus():
        remedy = (
            "without a GPU, bytes, arithmetic and peak memory are counted; with a GPU, they and "
            "times are also measured; if this machine has one, check that nvidia-smi lists it"
        )
        yield Diagnosis("gpu", WARNING, f"none: {why_no_gpu()}", remedy)
    for found in visible_gpus():
        size = "" if found.memory_bytes is None else f", {gigabytes(found.memory_bytes)} GB"
        yield Diagnosis("gpu", OK, f"{found.name}{size}, driver {found.driver}, {found.uuid}")
        if others := ", ".join(map(str, found.processes)):
            remedy = "end other processes: counters are device-wide and would include their bytes"
            yield Diagnosis("gpu", WARNING, f"{found.uuid} is used by process {others}", remedy)


def torch(settings: Settings) -> Iterator[Diagnosis]:
    """Check that PyTorch can use the GPU, if this machine has one."""
    import torch

    build = torch.version.cuda
    detail = f"torch {torch.__version__}, " + (f"CUDA {build}" if build else "a build without CUDA")
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable or not visible_gpus():
        yield Diagnosis("torch", OK, detail)
        return
    reasons = [str(warning.message).partition("\n")[0] for warning in recorded]
    detail = "; ".join([f"{detail}, cannot use the GPU", *reasons])
    remedy = "install a build of torch for a CUDA version that the driver supports"
    yield Diagnosis("torch", FAILED, detail, f"{remedy} (nvidia-smi shows this version)")


def ncu(settings: Settings) -> Iterator[Diagnosis]:
    """Check that Nsight Compute is installed and not newer than ncu-report, if there is a GPU."""
    if not visible_gpus():
        return
    path = find_ncu(settings.of(CounterOptions).ncu_path)
    version, reader = version_of(path), metadata.version("ncu-report")
    detail = f"{version}, {path}"
    if version == "unknown":
        remedy = "name the ncu of Nsight Compute with --ncu-path"
        yield Diagnosis("ncu", FAILED, f"the version of {path} is unknown", remedy)
    elif Version(version).release[:2] > Version(reader).release[:2]:  # year and release
        older = f"{detail}; the package ncu-report {reader}, which reads the reports, is older"
        yield Diagnosis("ncu", WARNING, older, "pip install --upgrade ncu-report")
    else:
        yield Diagnosis("ncu", OK, detail)


def counters(settings: Settings) -> Iterator[Diagnosis]:
    """Check that ncu can read counters, and that the counters count known work correctly."""
    if not visible_gpus():
        return
    try:
        path = find_ncu(settings.of(CounterOptions).ncu_path)
    except NcuNotFound:
        yield Diagnosis("counters", WARNING, "not checked: this machine has no ncu")
        return
    case, chip = work_that_fits(), chip_here()
    metrics, folder = on_chip(chip), settings.ncu_dir / "doctor"
    counted_metrics = tuple(metrics.values())
    instrument = Ncu(
        folder, steps=STEPS, timeout=settings.timeout, path=path, metrics=counted_metrics
    )
    instrument.check()
    rows = instrument.measure(case).rows
    without = ", ".join(m.name for m in METRICS.counted("ncu") if m.name not in metrics)
    which = f"; {chip or 'this GPU'} has no {without}" if without else ""
    yield Diagnosis("counters", OK, f"readable: {', '.join(metrics)}{which}")
    counted: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        counted[row.phase][row.metric] = row.value
    yield judge("ncu", case.batch_size, counted)


def cupti(settings: Settings) -> Iterator[Diagnosis]:
    """Check that CUPTI counts known bytes correctly, and almost none while the GPU is idle."""
    if not visible_gpus():
        return
    case = work_that_fits()
    instrument = Cupti(settings.ncu_dir / "doctor", steps=STEPS, timeout=settings.timeout)
    instrument.check()
    record = instrument.measure(case).details
    chip, passes = record["chip"], record["passes"]
    names = dict.fromkeys(name for names in record["counters"].values() for name in names)
    yield Diagnosis(
        "cupti",
        OK,
        f"libcupti {record['cupti']} counts everything on {chip} in {passes} "
        f"step{'s' if passes > 1 else ''} by phase: {', '.join(names)}",
    )
    counted = record["counted"][0]
    finding = judge(Cupti.name, case.batch_size, counted)
    resting = sum(counted.get(IDLE_PHASE, {}).get(metric, 0.0) for metric in ALWAYS)
    finding = replace(
        finding, detail=f"{finding.detail}; {gigabytes(resting)} GB while the GPU was idle"
    )
    if finding.status == OK and resting > TOLERANCE * 2 * case.batch_size * EXAMPLE_BYTES:
        remedy = (
            "end everything else that uses the GPU: counters include the bytes of all processes"
        )
        finding = replace(finding, status=FAILED, remedy=remedy)
    yield finding


def launches(settings: Settings) -> Iterator[Diagnosis]:
    """Tell the CPU time for an operator, from which ``dpbench advise`` predicts times here."""
    from dpbench.advice.predict import measured_operator_seconds  # imports torch

    if seconds := measured_operator_seconds(settings.ncu_dir / "doctor"):
        yield Diagnosis("launches", OK, f"{seconds * 1e6:.0f} µs of CPU time for a small operator")


def links(settings: Settings) -> Iterator[Diagnosis]:
    """Check that NVML counts a message to another GPU correctly, if there is another GPU."""
    if len(visible_gpus()) < 2:
        return
    case = Case(MESSAGE, 2 * MESSAGE_EXAMPLES, 1, "tiny", parallel="ddp", gpus=2)
    instrument = Cupti(settings.ncu_dir / "doctor", steps=STEPS, timeout=settings.timeout)
    outcome = instrument.measure(case)
    sender, receiver = (rank["counted"][0] for rank in outcome.details["ranks"])
    # NCCL may send part of the message before the receiver enters the phase, so all phases count.
    received = Counter[str]()
    for values in receiver.values():
        received.update(values)
    finding = judge_message(sender.get(MESSAGE_PHASE, {}), received)
    why = "".join(f"; {note}" for note in outcome.notes)
    yield replace(finding, detail=f"{finding.detail}{why}")


Check = Callable[[Settings], Iterable[Diagnosis]]

CHECKS: tuple[Check, ...] = (
    packages,
    logical_counting,
    directories,
    gpu,
    torch,
    ncu,
    counters,
    cupti,
    launches,
    links,
)
"""All checks, in the order in which they run. A check follows the checks on which it depends."""


def examine(settings: Settings, checks: Iterable[Check] = CHECKS) -> Iterator[Diagnosis]:
    """Yield findings one by one. An error in one check does not stop the other checks."""
    for check in checks:
        try:
            yield from check(settings)
        except Exception as error:  # on a broken machine, any error is possible
            yield Diagnosis.from_error(check.__name__.replace("_", " "), error)
