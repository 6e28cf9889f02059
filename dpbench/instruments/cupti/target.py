"""The GPU whose work is counted, and NVML's counters of its NVLink payload.

NVML is NVIDIA's library for managing GPUs. NVML counts the payload of packets in KiB, without the
headers of the packets. These counters need no profiler.
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
"""NVML's field for each metric. A field counts KiB since the driver was loaded."""

ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVML field that selects the sum over all links of a GPU."""

Payload = Callable[[], dict[str, float]]
"""A function that returns the bytes that a GPU has sent and received so far, by metric."""


def payload_of(uuid: str) -> tuple[Payload, str]:
    """Return a function that reads the NVLink payload of a GPU, and a note.

    If NVML cannot count the payload, the function returns no metrics and the note says why. If
    NVML can count the payload, the note is empty.
    """

    def read() -> dict[str, float]:
        asked = [(field, ALL_LINKS) for field in FIELDS.values()]
        said = nvml.nvmlDeviceGetFieldValues(handle, asked)
        if refused := next((each.nvmlReturn for each in said if each.nvmlReturn), 0):
            raise nvml.NVMLError(refused)
        return {name: each.value.ullVal * 1024.0 for name, each in zip(FIELDS, said, strict=True)}

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        read()
    except nvml.NVMLError as error:
        return dict, f"NVLink payload is not counted: NVML reports {str(error)!r} for {uuid}"
    return read, ""


@dataclass(frozen=True)
class Target:
    """The GPU whose work is counted, and the CUDA context of this process.

    Attributes:
        library: the loaded libcupti.
        device: CUDA index of the GPU.
        context: handle of the CUDA context.
        synchronize: waits for all work on the GPU.
        peers: whether this process sees several GPUs.
        payload: reads the NVLink payload of the GPU. The default reads no metrics.
        note: the reason why NVML cannot count the NVLink payload, or "".
    """

    library: Library
    device: int
    context: int
    synchronize: Callable[[], None]
    peers: bool = False
    payload: Payload = dict
    note: str = ""

    @classmethod
    def of_torch(cls) -> Target:
        """Return the current GPU of torch in this thread."""
        import torch

        if not torch.cuda.is_available():
            raise ProfilerNotLoaded(f"torch {torch.__version__} finds no CUDA GPU")
        torch.cuda.synchronize()  # makes torch's CUDA context current in this thread
        library = load_library()
        context = library.driver.current_context()
        device, peers = torch.cuda.current_device(), torch.cuda.device_count() > 1
        uuid = torch.cuda.get_device_properties(device).uuid
        crossed = payload_of(f"GPU-{uuid}") if peers else ()
        return cls(library, device, context, torch.cuda.synchronize, peers, *crossed)
