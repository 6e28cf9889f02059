"""The ranks of a case: processes of one GPU each, started by PyTorch's launcher.

The launcher (``torch.distributed.launcher``, which ``torchrun`` uses as well) ends all ranks when
one fails. Ranks that are asked say where they are.
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
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dpbench.child.agreement import FOR_EVER, all_gather
from dpbench.child.build import pick_device
from dpbench.child.hang_report import ASKED, STACK, place
from dpbench.child.messages import LOST
from dpbench.child.step import alone
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError, DpbenchError, OutOfMemory

NOTICED_SECONDS = 2.0
"""A launcher that looks ten times a second has seen by then that a rank died."""

Record = dict[str, Any]
Observe = Callable[[Case], Record]


class RankFailed(DpbenchError):
    """A rank died, or raised what is no error of dpbench."""


def observe_all(observe: Observe, case: Case, device_name: str) -> Record:
    """Take the steps of a case in as many processes as it has GPUs.

    Returns:
        The record of rank 0, and those of all under ``ranks``; in a rank that the user has started,
        its own.

    Raises:
        ConfigurationError: there are fewer GPUs, no library for collectives, or a rank refused.
        OutOfMemory: a rank ran out of GPU memory.
        RankFailed: a rank failed otherwise, or all were ended by a signal to this process.
    """
    device = pick_device(device_name)
    check_backend(device)
    if distributed.is_torchelastic_launched():  # the user has started the ranks
        with alone(device, case.id, 0 if int(os.environ["LOCAL_RANK"]) else case.gpus):
            return _as_rank(observe, case, device)
    with alone(device, case.id, case.gpus):
        records = _launch(observe, case, device)
    return {**records[0], "ranks": [records[rank] for rank in range(case.gpus)]}


def check_backend(device: torch.device) -> str:
    """The library for collectives on a device; refused if PyTorch was built without it."""
    name = "nccl" if device.type == "cuda" else "gloo"
    if not distributed.is_backend_available(name):
        raise ConfigurationError(
            f"several ranks on {device.type} need {name}, without which this torch "
            f"{torch.__version__} was built: install a build with it"
        )
    return name


def _launch(observe: Observe, case: Case, device: torch.device) -> Mapping[int, Record]:
    forks = sys.platform == "linux" and _forks_can_use_cuda()
    with _process_kept(), tempfile.TemporaryDirectory(prefix="dpbench-") as folder:
        # On a free port. The rendezvous that waits for other machines takes longer than all else.
        store = TCPStore("localhost", 0, is_master=True, multi_tenant=True)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=case.gpus,
            logs_specs=DefaultLogsSpecs(folder),
            rdzv_backend="static",
            rdzv_endpoint=f"{store.host}:{store.port}",  # a multi-tenant store is found again
            rdzv_configs={"rank": 0},
            run_id=str(os.getpid()),
            max_restarts=0,
            start_method="fork" if forks else "spawn",
        )
        try:
            records: Mapping[int, Record] = elastic_launch(config, _started)(observe, case, device)
        except ChildFailedError as error:
            raise _explained(*error.get_first_failure()) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RankFailed(_where_ranks_were(Path(folder))) from None
    return records


def _forks_can_use_cuda() -> bool:
    """Whether a fork of this process can: not once it has asked CUDA whether there is a GPU."""
    if not (fork := os.fork()):  # only a fork can tell
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(fork, 0)[1] == 0


@contextmanager
def _process_kept() -> Iterator[None]:
    """Undo what the launcher does to this process, which may be a session of pytest."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with ExitStack() as held:
        # Otherwise the launcher has CUDA count the GPUs, which no fork of it could use then.
        held.enter_context(patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"))
        for name in ("multiprocessing.api", "agent.server.api"):  # whose tracebacks hide the rank's
            logger = logging.getLogger(f"torch.distributed.elastic.{name}")
            held.enter_context(patch.object(logger, "disabled", True))
        try:
            yield
        finally:
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def _started(observe: Observe, case: Case, device: torch.device) -> Record:
    """Run as a rank that a signal ends at once, even within a collective."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    stack = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name(STACK).open("w")
    faulthandler.register(signal.Signals[ASKED], file=stack, all_threads=False)
    try:
        return _as_rank(observe, case, device)
    except Exception as error:
        if LOST.search(f"{type(error).__name__}: {error}"):
            time.sleep(NOTICED_SECONDS)  # the launcher names the rank that ended first
        elif not isinstance(error, ConfigurationError):  # whose line says all
            print(traceback.format_exc(), end="", file=sys.stderr, flush=True)
        raise
    except SystemExit as error:
        raise RankFailed(f"the trainer ended it with exit status {error.code}") from error


def _as_rank(observe: Observe, case: Case, device: torch.device) -> Record:
    """Run as the rank that the environment describes."""
    with in_group(device):
        record = observe(case)
        all_gather("done")  # a rank that left the group earlier would break it for the others
        return record


@contextmanager
def in_group(device: torch.device) -> Iterator[None]:
    """Join the process group of all ranks, on the GPU of this one.

    Collectives wait for as long as it takes: whoever has started the ranks ends them. After an
    error the group stays, because leaving it could wait for the others.
    """
    # As under torchrun. A fork has none of the threads that operators have started before it, and
    # would wait for them.
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(check_backend(device), timeout=FOR_EVER)
    yield
    distributed.destroy_process_group()


def _explained(rank: int, failure: ProcessFailure) -> DpbenchError:
    """The error of the rank that failed first; the launcher knows its class by name alone."""
    if failure.exitcode < 0:
        return RankFailed(f"rank {rank}: killed by {failure.signal_name()}")
    if not isinstance(failure.message, dict):
        return RankFailed(f"rank {rank}: ended with exit code {failure.exitcode}")
    words = str(failure.message["message"]).partition("\n")[0]
    if LOST.search(words):
        words = f"no connection to another rank ({words})"
    for kind in (ConfigurationError, OutOfMemory):
        if words.startswith(prefix := f"{kind.__name__}: "):
            return kind(f"rank {rank}: {words.removeprefix(prefix)}")
    return RankFailed(f"rank {rank}: {words.removeprefix(f'{RankFailed.__name__}: ')}")


def _where_ranks_were(folder: Path) -> str:
    """One line about the frames that ranks have left, those first that waited for no other."""
    stacks = {int(path.parent.name): path.read_text() for path in folder.rglob(STACK)}
    for rank, stack in sorted(stacks.items()):
        print(f"rank {rank}: {stack}", end="", file=sys.stderr)
    places = sorted((*place(stack), rank) for rank, stack in stacks.items())
    return "; ".join(f"rank {rank} {place}" for _, place, rank in places) or "no rank had begun"
