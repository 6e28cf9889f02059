"""Starts the ranks of a case with PyTorch's launcher. Each rank is a process with one GPU.

The launcher (``torch.distributed.launcher``, as in ``torchrun``) ends all ranks when one fails. A
rank writes its stack to a file when it receives the signal `STACK_SIGNAL`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dpbench.child.build import pick_device
from dpbench.child.case import with_gpus_locked
from dpbench.child.messages import LOST, STACK, STACK_SIGNAL, where_stuck
from dpbench.core.case import Case
from dpbench.core.errors import (
    CaseFailed,
    ConfigurationError,
    InstrumentError,
    as_instrument_error,
    error_named,
)
from dpbench.training.parallel import FOR_EVER, all_gather, leave_group

POLL_LIMIT_SECONDS = 2.0
"""Time in which the launcher should notice a dead rank. The launcher polls ten times a second."""

T = TypeVar("T")


def on_all_ranks(work: Callable[[Case], T], case: Case, device_name: str) -> list[T]:
    """Call ``work`` in one process per GPU of the case, and return the results of all ranks.

    If the user started this process as a rank, the result is only the result of this rank.

    Raises:
        ConfigurationError: the GPUs are too few, or a library for collectives is missing.
        InstrumentError: the error of the rank that failed first, or `CaseFailed` if a signal to
            this process ended all ranks.
    """
    device = pick_device(device_name)
    check_backend(device)
    if distributed.is_torchelastic_launched():  # the user has started the ranks
        with with_gpus_locked(device, case.id, 0 if int(os.environ["LOCAL_RANK"]) else case.gpus):
            return [_as_rank(work, case, device)]
    with with_gpus_locked(device, case.id, case.gpus):
        results = _launch(work, case, device)
    return [results[rank] for rank in range(case.gpus)]


def check_backend(device: torch.device) -> str:
    """Return the backend for collectives on a device. Raise an error if this torch lacks it."""
    name = "nccl" if device.type == "cuda" else "gloo"
    if not distributed.is_backend_available(name):
        raise ConfigurationError(
            f"several ranks on {device.type} need {name}, but torch {torch.__version__} was built "
            f"without {name}: install a build of torch that has it"
        )
    return name


def _launch(work: Callable[[Case], T], case: Case, device: torch.device) -> Mapping[int, T]:
    with _undo_launcher_changes(), tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
        # Use a store on a free port. A rendezvous for several machines would take seconds.
        store = TCPStore("localhost", 0, is_master=True, multi_tenant=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=case.gpus,
            logs_specs=DefaultLogsSpecs(folder),
            rdzv_backend="static",
            rdzv_endpoint=f"{store.host}:{store.port}",  # joins the store above
            rdzv_configs={"rank": 0},
            run_id=str(os.getpid()),
            max_restarts=0,
            start_method="fork" if _forks_can_use_cuda() else "spawn",
        )
        try:
            results: Mapping[int, T] = elastic_launch(config, _run_rank)(work, case, device)
        except ChildFailedError as error:
            raise _error_of_rank(*error.get_first_failure()) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise CaseFailed(_positions_of_ranks(Path(folder))) from None
    return results


def _forks_can_use_cuda() -> bool:
    """Return True if this process has not initialized CUDA, because then a fork can use CUDA."""
    if not (fork := os.fork()):  # PyTorch can test this only in a fork
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(fork, 0)[1] == 0


@contextmanager
def _undo_launcher_changes() -> Iterator[None]:
    """Undo the launcher's changes to this process, which may be a pytest session."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with ExitStack() as held:
        # Without this, the launcher initializes CUDA to count GPUs, and forks cannot use CUDA.
        held.enter_context(patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"))
        for name in (
            "multiprocessing.api",
            "agent.server.api",
        ):  # their tracebacks hide the rank's traceback
            logger = logging.getLogger(f"torch.distributed.elastic.{name}")
            held.enter_context(patch.object(logger, "disabled", True))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _run_rank(work: Callable[[Case], T], case: Case, device: torch.device) -> T:
    """Run as a rank of the launcher. Signals end the rank at once, even in a collective."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    stack = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(STACK).open("w")
    faulthandler.register(signal.Signals[STACK_SIGNAL], file=stack, all_threads=False)
    try:
        return _as_rank(work, case, device)
    except Exception as error:
        if LOST.search(f"{type(error).__name__}: {error}"):
            time.sleep(POLL_LIMIT_SECONDS)  # so that the launcher names the rank that failed first
        elif not isinstance(error, ConfigurationError):  # the message of a refusal is enough
            print(traceback.format_exc(), end="", file=sys.stderr, flush=True)
        raise as_instrument_error(error) from error
    except SystemExit as error:
        raise CaseFailed(f"the trainer exited with status {error.code}") from error


def _as_rank(work: Callable[[Case], T], case: Case, device: torch.device) -> T:
    """Run as the rank that the environment variables describe."""
    with in_group(device):
        result = work(case)
        all_gather("done")  # if this rank left earlier, the group would break for other ranks
        return result


@contextmanager
def in_group(device: torch.device) -> Iterator[None]:
    """Join the process group of all ranks, on this rank's GPU.

    Collectives have no timeout, because the parent ends hanging ranks. After an error the group is
    not destroyed, because destroying might wait for other ranks.
    """
    # Use one thread, as torchrun does. A fork would wait for threads that only its parent has.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(check_backend(device), timeout=FOR_EVER)
    yield
    leave_group()


def _error_of_rank(rank: int, failure: ProcessFailure) -> InstrumentError:
    """Return the error of the rank that failed first. The launcher has only the error's text."""
    if failure.exitcode < 0:
        return CaseFailed(f"rank {rank}: killed by {failure.signal_name()}")
    if not isinstance(failure.message, dict):
        return CaseFailed(f"rank {rank}: ended with exit code {failure.exitcode}")
    kind, _, text = str(failure.message["message"]).partition("\n")[0].partition(": ")
    if LOST.search(text):
        text = f"lost the connection to another rank ({text})"
    return error_named(kind)(f"rank {rank}: {text}")


def _positions_of_ranks(folder: Path) -> str:
    """Return all ranks' positions in one line, and print their stacks.

    Ranks that waited for other ranks come last in the line.
    """
    stacks = {int(path.parent.name): path.read_text() for path in folder.rglob(STACK)}
    for rank, stack in sorted(stacks.items()):
        print(f"rank {rank}: {stack}", end="", file=sys.stderr)
    places = sorted((*where_stuck(stack), rank) for rank, stack in stacks.items())
    return "; ".join(f"rank {rank} {line}" for _, line, rank in places) or "no rank had started"
