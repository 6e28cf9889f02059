"""Which GPUs a process sees, and who may use one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, locked
from dpbench.core.gpu import (
    Gpu,
    chip_of,
    clock_reader,
    limited_by,
    lock_gpu,
    lock_gpus,
    require_gpu,
    select,
    visible_gpus,
    visible_to_case,
)

GPUS = [Gpu(f"GPU-{i}d7c-{i}", f"card {i}", 10**9, "580.0") for i in range(4)]

EVERY = "GPU-0,GPU-1,GPU-2"


@pytest.mark.parametrize(
    ("number", "own", "every", "seen"),
    [
        (1, "GPU-1", EVERY, None),
        (2, "GPU-2", EVERY, "GPU-2,GPU-0"),
        (4, "GPU-1", EVERY, "GPU-1,GPU-2,GPU-0"),
        (2, "GPU-7", EVERY, None),  # chosen in the test, by its own right
        (2, "GPU-0,GPU-1", "", None),
        (2, None, "", None),
    ],
)
def test_a_process_of_several_gpus_sees_more_than_its_workers(
    number: int, own: str | None, every: str, seen: str | None
) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": own, "DPBENCH_GPUS": every}
    given = {name: value for name, value in environment.items() if value is not None}
    assert visible_to_case(number, given) == ({"CUDA_VISIBLE_DEVICES": seen} if seen else {})


quickly = settings(deadline=None, max_examples=50)


@pytest.mark.parametrize(
    ("visible", "indexes"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        (" 1 , 3 ", [1, 3]),
        ("NoDevFiles", []),
        ("1,card 2,3", [1]),
    ],
)
def test_visible_devices_are_those_that_cuda_would_number(
    visible: str | None, indexes: list[int]
) -> None:
    assert select(GPUS, visible) == [GPUS[i] for i in indexes]


CHOSEN = st.lists(st.sampled_from(range(4)), unique=True)
INVALID = st.sampled_from(["4", "-1", "", "GPU-9", "GPU-", "x", "1.0", "MIG-0"])


@quickly
@given(CHOSEN, INVALID, CHOSEN, st.sampled_from(["{}", "GPU-{}", "GPU-{}d7c"]))
def test_everything_before_the_first_invalid_entry_is_visible(
    before: list[int], invalid: str, after: list[int], spelling: str
) -> None:
    entries = [*map(spelling.format, before), invalid, *map(spelling.format, after)]
    assert select(GPUS, ",".join(entries)) == [GPUS[i] for i in before]


def test_mig_slice_counts_as_the_gpu_that_it_is_cut_from() -> None:
    slices = {"MIG-a": GPUS[1], "MIG-b": GPUS[1]}
    assert select(GPUS, "MIG-a", slices) == [GPUS[1]]
    assert select(GPUS, "MIG-c", slices) == []


# --- one measurement at a time ---------------------------------------------------------------


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which GPUs are locked, for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("locks")
def test_gpu_is_free_again_after_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt), lock_gpu(GPUS[0]):
        raise KeyboardInterrupt
    with lock_gpu(GPUS[0]):
        pass


HOLDER = """
from dpbench.core.gpu import Gpu, lock_gpu
with lock_gpu(Gpu({uuid!r}, "", 0, "")):
    print("held", flush=True)
    input()
"""


def test_gpu_is_held_across_processes_and_free_when_the_holder_is_killed(locks: Path) -> None:
    script = HOLDER.format(uuid=GPUS[0].uuid)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            [path] = locks.iterdir()
            assert not _is_free(path)
        finally:
            holder.kill()
    assert _is_free(path)
    with lock_gpu(GPUS[0]):
        assert not _is_free(path)


@pytest.mark.usefixtures("locks")
def test_whoever_waits_is_told_who_holds_the_gpu_for_what_and_since_when() -> None:
    told: list[str] = []
    with ThreadPoolExecutor() as pool:
        with lock_gpu(GPUS[0], "dpsgd-bs8"):
            waiting = pool.submit(_wait_for, GPUS[0], told)
            while not told:
                time.sleep(0.01)
        waiting.result(timeout=20)
    [line] = told
    assert re.fullmatch(rf"process {os.getpid()} \(dpsgd-bs8\) since \d\d:\d\d:\d\d", line)


def _wait_for(gpu: Gpu, told: list[str]) -> None:
    with lock_gpu(gpu, waiting=told.append):
        pass


def test_a_folder_that_cannot_hold_the_lock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with (
        pytest.raises(ConfigurationError, match="set TMPDIR to another folder"),
        lock_gpu(GPUS[0]),
    ):
        pass


def test_what_the_driver_says_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlSystemGetDriverVersion": "580",
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetName": "NVIDIA GeForce RTX 5090",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=32, free=8),
        "nvmlDeviceGetCudaComputeCapability": (12, 0),
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=17)],
        "nvmlDeviceGetMaxMigDeviceCount": 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    [found] = visible_gpus()
    assert astuple(found) == ("GPU-0", "NVIDIA GeForce RTX 5090", 32, "580", "GB202", 8, (17,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus() == []


@pytest.mark.parametrize(
    ("visible", "memory"), [(None, 10), ("0", 10), ("GPU-0", 10), ("MIG-1", 20), ("MIG-0", 10)]
)
def test_a_slice_has_the_memory_of_the_slice(
    visible: str | None, memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One GPU of 80 bytes in two slices; without a name CUDA takes the first."""
    memories = {"GPU-0": 80, "MIG-0": 10, "MIG-1": 20}

    def slice_of(handle: str, number: int) -> str:
        if number > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"MIG-{number}"

    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: "580",
        "nvmlDeviceGetHandleByIndex": "GPU-{}".format,
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetName": lambda handle: "NVIDIA A100",
        "nvmlDeviceGetMemoryInfo": lambda of: SimpleNamespace(total=memories[of], free=1),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": slice_of,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    [found] = visible_gpus()
    assert (found.uuid, found.memory_bytes) == ("GPU-0", memory)


def test_two_slices_of_a_gpu_lock_it_once(locks: Path) -> None:
    slices = [Gpu("GPU-0", "NVIDIA A100", memory, "580") for memory in (10, 20)]
    with lock_gpus(slices, "two", lambda gpu, holder: pytest.fail("it waits for itself")):
        assert [path.name for path in locks.iterdir()] == ["dpbench-GPU-0.lock"]


def test_a_gpus_lock_that_is_a_link_is_an_error_and_truncates_nothing(locks: Path) -> None:
    (locks / "victim").write_text("content")
    (locks / "dpbench-GPU-0.lock").symlink_to(locks / "victim")
    with pytest.raises(ConfigurationError, match="cannot be locked"), lock_gpu(whole_card()):
        pass
    assert (locks / "victim").read_text() == "content"


def whole_card() -> Gpu:
    return Gpu("GPU-0", "NVIDIA A100", 80, "580")


@pytest.mark.parametrize("failing", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_a_driver_that_answers_with_an_error_is_one_line(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that has fallen off the bus, say; what needs no GPU goes on."""

    def fails(*arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    for name in ("nvmlInit", "nvmlDeviceGetHandleByIndex", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda *arguments: 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580")
    monkeypatch.setattr(pynvml, failing, fails)
    assert visible_gpus() == []
    with pytest.raises(ConfigurationError, match="no CUDA GPU is visible here: NVML says 'GPU is"):
        require_gpu()


def _is_free(path: Path) -> bool:
    try:
        with locked(path, wait=False):
            return True
    except Locked:
        return False


@pytest.mark.parametrize(
    ("capability", "chip"),
    [((9, 0), "GH100"), ((12, 0), "GB202"), ((11, 0), "GB10B"), ((99, 0), "")],
)
def test_chip_with_counters_of_its_own_is_named(capability: tuple[int, int], chip: str) -> None:
    assert chip_of(*capability) == chip


# --- clocks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reasons", "metrics"),
    [
        (pynvml.nvmlClocksEventReasonNone, []),
        (pynvml.nvmlClocksEventReasonGpuIdle, []),
        (pynvml.nvmlClocksEventReasonSwPowerCap, ["power_cap"]),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, ["thermal_slowdown"]),
        (0x8 | 0x40, ["thermal_slowdown", "hardware_slowdown"]),
        (pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown, ["power_brake"]),
        (pynvml.nvmlClocksEventReasonApplicationsClocksSetting, ["clock_setting"]),
        (pynvml.nvmlClocksEventReasonDisplayClockSetting, ["clock_setting"]),
    ],
)
def test_nvmls_reasons_are_metrics(reasons: int, metrics: list[str]) -> None:
    assert [name for name, present in limited_by(reasons).items() if present] == metrics


def test_clocks_that_nvml_refuses_are_left_out() -> None:
    assert clock_reader("GPU-none")() == {}
