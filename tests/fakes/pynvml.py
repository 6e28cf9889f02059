"""Stands in for NVML in processes that find it first: as many NVIDIA H200 as REPLAYED_GPUS says."""

import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit() -> None:
    if not count():
        raise NVMLError("no driver")


def nvmlShutdown() -> None:
    pass


def count() -> int:
    return int(os.environ.get("REPLAYED_GPUS", 1))


NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139


def nvmlDeviceGetFieldValues(handle: int, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
    raise NVMLError("Not Supported")


def nvmlDeviceGetMaxMigDeviceCount(handle: int) -> int:
    raise NVMLError("no MIG")


nvmlDeviceGetCount = count
nvmlSystemGetDriverVersion = lambda: "580.159.03"
nvmlDeviceGetHandleByIndex = int
nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
# Of no chip that is known: the recorded reports lack what is counted of an L2 since.
nvmlDeviceGetCudaComputeCapability = lambda handle: (0, 0)
nvmlDeviceGetName = lambda handle: "NVIDIA H200"
nvmlDeviceGetComputeRunningProcesses = lambda handle: []
nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=141 * 10**9, free=10**9)
