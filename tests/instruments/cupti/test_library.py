"""Finding libcupti, and what its codes mean."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    Driver,
    ProfilerNotLoaded,
    candidate_folders,
    loaded_folders,
)
from dpbench.instruments.cupti.library import (
    COUNTER,
    NAMES,
    USER_RANGE,
    USER_REPLAY,
    CountersUnsupported,
    CuptiError,
    CuptiUnusable,
    Library,
    c_function,
    c_structure,
    call_error,
    open_in,
    struct_size,
    structure,
)
from tests.instruments.cupti.fake import FakeCuda, FakeCupti, library
from tests.instruments.cupti.wheels import HEADERS
from tests.recorded import unpacked

NO_DRIVER = Driver()


@pytest.mark.parametrize(
    ("function", "code", "kind", "help"),
    [
        ("cuptiRangeProfilerEnable", 35, CountersForbidden, "NVreg_RestrictProfilingToAdminUsers"),
        ("cuptiRangeProfilerStart", 26, CountersBusy, "dcgmi profile --pause"),
        ("cuptiRangeProfilerEnable", 39, CountersBusy, "nsys"),
        ("cuptiRangeProfilerEnable", 33, CountersUnsupported, "split with MIG"),
        ("cuptiProfilerInitialize", 999, ProfilerNotLoaded, "nvidia-smi"),
        ("cuptiProfilerInitialize", 15, CuptiUnusable, "nvidia-cuda-cupti"),
        ("cuptiProfilerHostConfigAddMetrics", 1, CounterUnknown, "doctor"),
        ("cuptiProfilerHostInitialize", 46, CuptiUnusable, "must be 12.6.2 or newer"),
        ("cuptiRangeProfilerStart", 7, CuptiError, "returned 7"),
    ],
)
def test_a_code_becomes_an_error_that_says_what_would_help(
    function: str, code: int, kind: type[InstrumentError], help: str
) -> None:
    error = call_error(function, code, library=(13, 0), driver=(13, 0))
    assert type(error) is kind
    assert help in str(error)
    assert f"{function} returned {code}" in str(error)


@pytest.mark.parametrize(("code", "kind"), [(999, CuptiUnusable), (35, CountersForbidden)])
def test_an_older_driver_is_named_where_nothing_else_explains_a_failure(
    code: int, kind: type[InstrumentError]
) -> None:
    error = call_error("cuptiProfilerInitialize", code, library=(13, 4), driver=(12, 8))
    assert type(error) is kind
    assert ("libcupti of CUDA 13.4 is newer than CUDA 12.8" in str(error)) == (
        kind is CuptiUnusable
    )


@pytest.mark.parametrize(
    ("version", "cuda"),
    [(24, (12, 6)), (28, (12, 9)), (130401, (13, 4))],
)
def test_the_version_of_cuda_is_known(version: int, cuda: tuple[int, int]) -> None:
    assert library(FakeCupti(version)).cuda_version == cuda


def test_a_library_from_before_the_range_profiler_is_too_old() -> None:
    with pytest.raises(CuptiUnusable, match=r"must be 12\.6\.2 or newer"):
        library(FakeCupti(lacks=["cuptiRangeProfilerEnable"]))


class FromThirteenTwo(FakeCupti):
    """It would crash at its first call where there is no driver."""

    cuptiProfilerHostGetSinglePassSets = None  # noqa: N815


def test_a_library_that_would_crash_without_a_driver_is_not_called() -> None:
    with pytest.raises(ProfilerNotLoaded, match=r"13\.2 or newer and needs a driver"):
        Library(FromThirteenTwo(130202), NO_DRIVER)
    assert library(FromThirteenTwo(130202)).version == 130202


def test_a_thread_that_never_used_the_gpu_has_no_context() -> None:
    with pytest.raises(InstrumentError, match="run an operation on the GPU"):
        Driver(FakeCuda(context=None)).current_context()
    with pytest.raises(ProfilerNotLoaded):
        NO_DRIVER.current_context()


def test_what_lies_beside_torch_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    (tmp_path / "nvidia/cu13/lib").mkdir(parents=True)
    assert list(candidate_folders(["", str(tmp_path)])) == [
        tmp_path / "nvidia/cu13/lib",
        tmp_path / "nvidia/cuda_cupti/lib",
        Path("/toolkit/extras/CUPTI/lib64"),
    ]


def test_a_library_that_torch_has_loaded_is_found(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0000 08:01 1  /venv/my site/nvidia/cu13/lib/libcupti.so.13\n"
        "7f01-7f02 r--p 1000 08:01 1  /venv/my site/nvidia/cu13/lib/libcupti.so.13\n"
        "7f03-7f04 r-xp 0000 08:01 2  /usr/lib/libc.so.6\n"
    )
    assert loaded_folders(maps) == [Path("/venv/my site/nvidia/cu13/lib")]
    assert loaded_folders(tmp_path / "none") == []


def test_a_folder_without_a_usable_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(CuptiUnusable, match=rf"no libcupti\.so in {tmp_path}; install a build"):
        open_in(tmp_path, NO_DRIVER)
    (tmp_path / "libcupti.so.13").touch()
    with pytest.raises(CuptiUnusable, match=r"libcupti\.so\.13 cannot be loaded: .*libnvperf_host"):
        open_in(tmp_path, NO_DRIVER)


READS_A_REPORT_FIRST = """
import sys
from pathlib import Path
from dpbench.instruments import counters as libraries
from dpbench.instruments.cupti import library
from dpbench.instruments.ncu.report import holds_kernels

class Cuda:
    def cuDriverGetVersion(self, version):
        version._obj.value = 13000

report, folder = Path(sys.argv[1]), Path(sys.argv[2])
there, none = map(libraries.Driver, (Cuda(), None))
libraries.Driver.load = classmethod(lambda cls: there if sys.argv[3] == "driver" else none)
libraries.loaded_folders = lambda: [folder]
library.Library = lambda *loaded: None  # without a real driver, CUDA 13.2's first call is its last
assert holds_kernels(report)
try:
    library.open_in(folder, there)
except library.InstrumentError as error:
    print(error)
"""


@pytest.mark.parametrize(("machine", "clash"), [("driver", False), ("no driver", True)])
def test_a_report_that_was_read_before_takes_nothing_from_libcupti(
    machine: str, clash: bool, tmp_path: Path
) -> None:
    pytest.importorskip("ncu_report")
    folder = next((f for f in candidate_folders() if any(f.glob("libcupti.so*"))), None)
    if folder is None:
        pytest.skip("no libcupti here")
    report = unpacked("kernels/report_dpsgd_bs4_seq64.ncu-rep", tmp_path)
    program = [sys.executable, "-c", READS_A_REPORT_FIRST, str(report), str(folder), machine]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ("cannot be used with the libnvperf_host.so" in done.stdout) == clash


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
