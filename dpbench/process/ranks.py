"""The ranks of a case: processes of one GPU each, started by PyTorch's launcher.

The launcher (``torch.distributed.launcher``, which ``torchrun`` uses as well) ends all ranks when
one fails. A rank that is ended from outside writes where it was to the log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dpbench.case import Case
from dpbench.errors import ConfigurationError, DpbenchError, OutOfMemory
from dpbench.process.build import pick_device
from dpbench.process.step import alone

RANK = "RANK"
"""The environment variable in which a launcher tells a process its number."""

Record = dict[str, Any]
Observe = Callable[[Case], Record]


class RankFailed(DpbenchError):
    """A rank died, or raised what is no error of dpbench."""


def observe_all(observe: Observe, case: Case, device_name: str) -> Record:
    """Take the steps of a case in as many processes as it has GPUs.

    Returns:
        The record of rank 0, and those of all under ``ranks``.
    """
    device = pick_device(device_name)
    if RANK in os.environ:  # the user has started the ranks
        return _as_rank(observe, case, device)
    with alone(device, case.id, case.gpus):
        records = _launch(observe, case, device)
    return {**records[0], "ranks": [records[rank] for rank in range(case.gpus)]}


def _launch(observe: Observe, case: Case, device: torch.device) -> Mapping[int, Record]:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=case.gpus,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=0,
        start_method="fork" if sys.platform == "linux" else "spawn",
    )
    try:
        records: Mapping[int, Record] = elastic_launch(config, _as_rank)(observe, case, device)
    except ChildFailedError as error:
        raise _explained(*error.get_first_failure()) from None
    return records


def _as_rank(observe: Observe, case: Case, device: torch.device) -> Record:
    """Be one of the ranks that the environment describes."""
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    with in_group(device, case.gpus):
        return observe(case)


@contextmanager
def in_group(device: torch.device, ranks: int) -> Iterator[None]:
    """Be in the process group of all ranks, on the GPU of this one."""
    with ExitStack() as ending:
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:  # else each rank would use all cores
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        ending.callback(distributed.destroy_process_group)
        yield


def _explained(rank: int, failure: ProcessFailure) -> DpbenchError:
    """The error of the rank that failed first; the launcher knows its class by name alone."""
    said = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    words = str(said).partition("\n")[0]
    for kind in (ConfigurationError, OutOfMemory):
        if words.startswith(prefix := f"{kind.__name__}: "):
            return kind(f"rank {rank}: {words.removeprefix(prefix)}")
    if failure.exitcode < 0:
        words = f"killed by {signal.Signals(-failure.exitcode).name}"
    return RankFailed(f"rank {rank}: {words}")
