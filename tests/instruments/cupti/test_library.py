"""Finding libcupti, and what its codes mean."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.core.errors import InstrumentError
from dpbench.instruments.counters.errors import (
    CountersBusy,
    CountersForbidden,
    CounterUnknown,
    ProfilerNotLoaded,
)
from dpbench.instruments.counters.libraries import Driver, candidate_folders, loaded_folders
from dpbench.instruments.cupti.library import (
    CountersUnsupported,
    CuptiError,
    CuptiUnusable,
    Library,
    call_error,
    open_in,
)
from tests.instruments.cupti.fake import FakeCuda, FakeCupti, library
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
    [(24, (12, 6)), (26, (12, 8)), (28, (12, 9)), (130001, (13, 0)), (130401, (13, 4))],
)
def test_the_version_of_cuda_is_known(version: int, cuda: tuple[int, int]) -> None:
    assert library(FakeCupti(version)).cuda_version == cuda


def test_a_failed_call_is_an_error() -> None:
    with pytest.raises(CountersForbidden):
        library(FakeCupti(fails={"cuptiProfilerInitialize": 35})).initialize()


def test_the_profiler_is_initialized_once() -> None:
    cupti = FakeCupti()
    opened = library(cupti)
    opened.initialize()
    opened.initialize()
    assert cupti.calls == ["Profiler_Initialize"]


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
from dpbench.instruments.counters import libraries
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
