"""Checks of what is installed and attached, none of which runs anything on a GPU."""

from __future__ import annotations

import platform
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from dpbench.case import Case
from dpbench.doctor.findings import FAILED, OK, WARNING, Finding, Setup
from dpbench.files import check_writable
from dpbench.gpu import in_use, visible_gpus, why_no_gpu
from dpbench.instruments.ncu.program import find_ncu, ncu_version
from dpbench.results.rows import STEP
from dpbench.show.layout import gigabytes

COUNTED = Case("dpsgd", batch_size=4, seq_len=16, model_size="tiny")


def packages(setup: Setup) -> Iterator[Finding]:
    """Everything that dpbench requires is installed, in versions that fit."""
    from packaging.requirements import Requirement

    found = [f"python {platform.python_version()}", f"dpbench {metadata.version('dpbench')}"]
    for package in map(Requirement, metadata.requires("dpbench") or ()):
        if package.marker and not package.marker.evaluate({"extra": ""}):
            continue
        asked, version = f"{package.name}{package.specifier}", "missing"
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(package.name)
        if version != "missing" and package.specifier.contains(version, prereleases=True):
            found.append(f"{package.name} {version}")
            continue
        detail, remedy = f"{package.name} is {version}, not {asked}", f"pip install '{asked}'"
        yield Finding("packages", FAILED, detail, remedy)
    yield Finding("packages", OK, ", ".join(found))


def logical_counting(setup: Setup) -> Iterator[Finding]:
    """Logical bytes can be counted: what works without a GPU too."""
    from dpbench.instruments.logical.instrument import Logical

    rows = {(row.phase, row.metric): row.value for row in Logical().count(COUNTED).rows}
    moved = rows[STEP, "logical_read_bytes"] + rows[STEP, "logical_write_bytes"]
    yield Finding("logical counting", OK, f"{COUNTED.id}: {gigabytes(moved)} GB a step")


def directories(setup: Setup) -> Iterator[Finding]:
    """Where reports, logs and the lock of each GPU lie can be written; nothing is made."""
    place = setup.directory.absolute()
    check_writable(next(path for path in (place, *place.parents) if path.exists()))
    check_writable(Path(tempfile.gettempdir()))
    yield Finding("directories", OK, f"{setup.directory} and {tempfile.gettempdir()}")


def gpu(setup: Setup) -> Iterator[Finding]:
    """There is a GPU, and nothing else uses it."""
    if not visible_gpus():
        remedy = "see that nvidia-smi lists one; logical bytes can be counted without it"
        yield Finding("gpu", FAILED, why_no_gpu(), remedy)
    for card in visible_gpus():
        size = "" if card.memory_bytes is None else f", {gigabytes(card.memory_bytes)} GB"
        yield Finding("gpu", OK, f"{card.name}{size}, driver {card.driver}, {card.uuid}")
        if others := ", ".join(map(str, in_use(card).processes)):
            remedy = "end it: counters are device-wide, and its bytes would be counted too"
            yield Finding("gpu", WARNING, f"{card.uuid} is used by process {others}", remedy)


def torch(setup: Setup) -> Iterator[Finding]:
    """PyTorch can use the GPU, if there is one."""
    import torch

    build = torch.version.cuda
    detail = f"torch {torch.__version__}, " + (f"CUDA {build}" if build else "a build without CUDA")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable or not visible_gpus():
        yield Finding("torch", OK, detail)
        return
    reasons = [str(warning.message).partition("\n")[0] for warning in said]
    detail = "; ".join([f"{detail}, cannot use the GPU", *reasons])
    remedy = "install a build of torch for a CUDA version that the driver serves"
    yield Finding("torch", FAILED, detail, f"{remedy} (nvidia-smi shows it)")


def ncu(setup: Setup) -> Iterator[Finding]:
    """Nsight Compute is there, and the library that reads its reports is no older."""
    path = find_ncu(setup.ncu_path)
    version, reader = ncu_version(path), metadata.version("ncu-report")
    detail = f"{version}, {path}"
    if version == "unknown":
        remedy = "name Nsight Compute's ncu with --ncu-path"
        yield Finding("ncu", FAILED, f"{path} does not say which version it is", remedy)
    elif _release(version) > _release(reader):
        older = f"{detail}; its reports are read by ncu-report {reader}, which is older"
        yield Finding("ncu", WARNING, older, "pip install --upgrade ncu-report")
    else:
        yield Finding("ncu", OK, detail)


def _release(version: str) -> list[int]:
    """Year and release, which say what a report may hold."""
    return [int(part) for part in version.split(".")[:2]]
