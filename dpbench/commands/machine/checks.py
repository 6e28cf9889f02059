"""Checks of packages, directories, GPU, Nsight Compute and CUPTI."""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from dpbench.commands.machine.calibration import (
    EXAMPLE_BYTES,
    FAILED,
    IDLE_PHASE,
    MESSAGE,
    MESSAGE_EXAMPLES,
    MESSAGE_PHASE,
    OK,
    STEPS,
    TOLERANCE,
    WARNING,
    Diagnosis,
    judge,
    judge_message,
    work_that_fits,
)
from dpbench.core.case import Case
from dpbench.core.files import check_writable
from dpbench.core.gpu import chip_here, visible_gpus, why_no_gpu
from dpbench.core.metrics import METRICS
from dpbench.core.settings import Settings
from dpbench.instruments.counters import ALWAYS, CounterOptions, on_chip
from dpbench.instruments.cupti.cupti import Cupti
from dpbench.instruments.ncu.ncu import Ncu, NcuNotFound, find_ncu
from dpbench.launch.processes import version_of
from dpbench.results.rows import STEP
from dpbench.show.layout import gigabytes

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
    from dpbench.instruments.logical.logical import Logical

    rows = {(row.phase, row.metric): row.value for row in Logical().count(SMALL_CASE).rows}
    moved = rows[STEP, "logical_read_bytes"] + rows[STEP, "logical_write_bytes"]
    yield Diagnosis("logical counting", OK, f"{SMALL_CASE.id}: {gigabytes(moved)} GB a step")


def directories(settings: Settings) -> Iterator[Diagnosis]:
    """Check that the folders of reports, logs and locks are writable, without creating them."""
    place = settings.ncu_dir.absolute()
    check_writable(next(path for path in (place, *place.parents) if path.exists()))
    check_writable(Path(tempfile.gettempdir()))
    yield Diagnosis("directories", OK, f"{settings.ncu_dir} and {tempfile.gettempdir()}")


def gpu(settings: Settings) -> Iterator[Diagnosis]:
    """Check that this machine has a GPU, and that no process uses a visible GPU."""
    if not visible_gpus():
        remedy = "check that nvidia-smi lists a GPU; logical bytes can be counted without one"
        yield Diagnosis("gpu", FAILED, why_no_gpu(), remedy)
    for card in visible_gpus():
        size = "" if card.memory_bytes is None else f", {gigabytes(card.memory_bytes)} GB"
        yield Diagnosis("gpu", OK, f"{card.name}{size}, driver {card.driver}, {card.uuid}")
        if others := ", ".join(map(str, card.processes)):
            remedy = "end other processes: counters are device-wide and would include their bytes"
            yield Diagnosis("gpu", WARNING, f"{card.uuid} is used by process {others}", remedy)


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
    """Check that Nsight Compute is installed, and that the package ncu-report is not older."""
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
    try:
        path = find_ncu(settings.of(CounterOptions).ncu_path)
    except NcuNotFound:
        path = ""
    if not path or not visible_gpus():
        reason = f"not checked: this machine has no {'ncu' if visible_gpus() else 'GPU'}"
        yield from (Diagnosis(c, WARNING, reason) for c in ("counters", "ncu calibration"))
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
        reason = "not checked: this machine has no GPU"
        yield from (Diagnosis(c, WARNING, reason) for c in ("cupti", "cupti calibration"))
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
