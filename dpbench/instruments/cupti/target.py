"""The GPU whose work is counted, and the payload that crosses its NVLink by NVML's counters.

NVML counts data without the headers of packets, in KiB, and needs neither a pass nor a profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pynvml as nvml

from dpbench.instruments.counters.errors import ProfilerNotLoaded
from dpbench.instruments.cupti.library import Library, load_library

SENT, RECEIVED = "nvlink_payload_sent_bytes", "nvlink_payload_received_bytes"

FIELDS = {
    SENT: nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    RECEIVED: nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
"""The field of NVML that counts each metric, in KiB since the driver was loaded."""

ALL_LINKS = 0xFFFFFFFF
"""The scope of a field that adds up the links of a GPU."""

Payload = Callable[[], dict[str, float]]
"""Reads the bytes that a GPU has sent and received so far, by metric."""


def payload_of(uuid: str) -> tuple[Payload, str]:
    """Return a reader of a GPU's payload and ""; or an empty reader, and why NVML cannot count."""

    def read() -> dict[str, float]:
        asked = [(field, ALL_LINKS) for field in FIELDS.values()]
        said = nvml.nvmlDeviceGetFieldValues(handle, asked)
        if refused := next((each.nvmlReturn for each in said if each.nvmlReturn), 0):
            raise nvml.NVMLError(refused)
        return {name: each.value.ullVal * 1024.0 for name, each in zip(FIELDS, said, strict=True)}

    try:
        nvml.nvmlInit()  # until this process ends
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read()
    except nvml.NVMLError as error:
        return dict, f"NVLink's payload is not counted: NVML says {str(error)!r} of {uuid}"
    return read, ""


@dataclass(frozen=True)
class Target:
    """The GPU whose work is counted: a CUDA context of this process."""

    library: Library
    device: int  # its CUDA index
    context: int  # the handle
    synchronize: Callable[[], None]  # waits for all work on the GPU
    peers: bool = False  # whether this process sees other GPUs
    payload: Payload = dict  # reads what has crossed NVLink; nothing where it is not counted
    note: str = ""  # why it is not, where there are peers

    @classmethod
    def of_torch(cls) -> Target:
        """The GPU that torch uses in this thread."""
        import torch

        if not torch.cuda.is_available():
            raise ProfilerNotLoaded(f"torch {torch.__version__} finds no CUDA GPU")
        torch.cuda.synchronize()  # makes its context this thread's
        library = load_library()
        context = library.driver.current_context()
        device, peers = torch.cuda.current_device(), torch.cuda.device_count() > 1
        uuid = torch.cuda.get_device_properties(device).uuid
        crossed = payload_of(f"GPU-{uuid}") if peers else ()
        return cls(library, device, context, torch.cuda.synchronize, peers, *crossed)
