"""The structures against NVIDIA's headers, compiled."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dpbench.instruments.cupti.structures import (
    COUNTER,
    NAMES,
    USER_RANGE,
    USER_REPLAY,
    c_function,
    c_structure,
    struct_size,
    structure,
)
from tests.instruments.cupti.wheels import HEADERS

CONSTANTS = {
    "CUPTI_UserRange": USER_RANGE,
    "CUPTI_UserReplay": USER_REPLAY,
    "CUPTI_METRIC_TYPE_COUNTER": COUNTER,
    "CUPTI_PROFILER_TYPE_RANGE_PROFILER": 0,
}

# What the headers want from outside the wheel; 13.0's includes <string> though it is C.
STAND_INS = {
    "cuda.h": "#include <stdbool.h>\ntypedef int CUdevice; typedef struct CUctx_st *CUcontext;\n",
    "string": "",
}


def ours(version: int) -> dict[str, int]:
    """What a program that includes the headers should print."""
    numbers = dict(CONSTANTS)
    for name in NAMES:
        made = structure(name, version)
        numbers[f"sizeof({c_structure(name)})"] = ctypes.sizeof(made)
        numbers[f"{c_structure(name)}_STRUCT_SIZE"] = struct_size(name, version)
        for field, *_ in made._fields_:
            place = getattr(made, field)
            numbers[f"offsetof({c_structure(name)}, {field})"] = place.offset
            numbers[f"sizeof((({c_structure(name)} *)0)->{field})"] = place.size
    return numbers


def c_program(expressions: list[str]) -> str:
    """Prints each expression and its value; compiles only if each function takes its structure."""
    headers = ("profiler_target", "profiler_host", "range_profiler", "target")
    lines = ["#include <stdio.h>", *(f"#include <cupti_{header}.h>" for header in headers)]
    for name in NAMES:
        lines.append(f"CUptiResult (*p_{name})({c_structure(name)} *) = {c_function(name)};")
    lines.append("int main(void) {")
    lines += [f'printf("%s\\t%ld\\n", "{text}", (long)({text}));' for text in expressions]
    return "\n".join([*lines, "return 0; }"])


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.skipif(not HEADERS, reason="no nvidia-cuda-cupti wheel")
@pytest.mark.parametrize("headers", HEADERS, ids=lambda folder: folder.parent.name)
def test_every_size_and_offset_is_that_of_the_headers(headers: Path, tmp_path: Path) -> None:
    text = (headers / "cupti_version.h").read_text(encoding="utf-8")
    [version] = re.findall(r"#define CUPTI_API_VERSION (\d+)", text)
    expected = ours(int(version))
    for name, content in STAND_INS.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "sizes.c").write_text(c_program(list(expected)), encoding="utf-8")
    # Compiled and linked without libcupti: its functions are only named, never called.
    link = ["-Wl,--unresolved-symbols=ignore-all", "-o", "sizes"]
    subprocess.run(
        ["cc", "-I.", f"-I{headers}", "sizes.c", *link], cwd=tmp_path, check=True, timeout=60
    )
    printed = subprocess.run(
        ["./sizes"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    ).stdout
    found = {name: int(value) for name, value in (row.split("\t") for row in printed.splitlines())}
    assert found == expected


def test_a_field_that_a_version_lacks_is_not_in_its_size() -> None:
    grown = {
        "Profiler_GetCounterAvailability": (130001, 130101),
        "Profiler_Host_Initialize": (130101, 130202),
        "RangeProfiler_Enable": (130301, 130401),
    }
    for name in NAMES:
        before, after = grown.get(name, (24, 24))
        assert struct_size(name, before) == struct_size(name, 24)
        assert (struct_size(name, after) > struct_size(name, before)) == (name in grown)
