"""Starts processes of cases in an instant: as forks of a server that has imported torch already.

A fork does what a new process would do. Where it could not, because a variable differs that Python
or a library reads when it is loaded, or because there is no server, nothing is forked.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from dpbench.child.messages import RECORDS
from dpbench.core.gpu import child_environment

COMMAND = [sys.executable, "-P", "-m", "dpbench"]  # -P: without the current directory
"""What the commands begin with that can be forked; others start a program first."""

PER_FORK_ENV = {
    *(RECORDS, "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "COLUMNS", "LINES"),
    "CUDA_VISIBLE_DEVICES",  # read when a GPU is opened, which the server never does
}
"""Variables that may differ from the server's: a fork is told them, or they are read late."""

BEGUN = b"begun"
"""What a fork says of itself before its process id; the server only ever says an exit code."""

GO = b"go"
"""What a fork waits for, so that none runs which nobody would end."""

UNKNOWN = -signal.NSIG
"""The exit code of a process whose server was killed before it ended; no signal has the number."""

PATIENCE_SECONDS = 60.0  # for the server's imports, which take about 5


class Forked:
    """A process that the server has forked, with the part of `subprocess.Popen` that is needed."""

    stdout = None

    def __init__(self, process_id: int, channel: socket.socket) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self._channel = channel

    def poll(self) -> int | None:
        """The exit code, as `subprocess.Popen` has it; None if the process has not ended."""
        with suppress(BlockingIOError):
            return self._receive(wait=False)
        return None

    def wait(self) -> int:
        """Wait for the exit code."""
        return self._receive(wait=True)

    def _receive(self, *, wait: bool) -> int:
        if self.returncode is None:
            self._channel.setblocking(wait)
            code = self._channel.recv(16)
            self._channel.close()
            self.returncode = int(code) if code else UNKNOWN
        return self.returncode


class ForkServer:
    """The server of this process; it ends when this process does, or closes it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._owner = os.getpid()
        self._requests, requests = socket.socketpair()
        self._requests.settimeout(PATIENCE_SECONDS)
        with requests:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dpbench.launch.fork_server"],
                stdin=requests.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(
        self,
        arguments: Sequence[str],
        output: IO[str],
        environment: Mapping[str, str],
        announce: Callable[[int], None],
    ) -> Forked | None:
        """Run ``dpbench`` with these arguments in a fork; None if that must be a new process."""
        names = {*environment, *self._environment}
        differ = {n for n in names if environment.get(n) != self._environment.get(n)}
        if not differ <= PER_FORK_ENV:
            return None
        request = {
            "arguments": [*arguments],
            "directory": str(Path.cwd()),
            "environment": {name: environment.get(name) for name in PER_FORK_ENV},
        }
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with ExitStack() as failing, suppress(OSError):  # no server any more, or it does not answer
            failing.callback(ours.close)  # a fork that was to be ends when it finds this closed
            with theirs:
                socket.send_fds(self._requests, [b"."], [theirs.fileno(), output.fileno()])
            ours.settimeout(PATIENCE_SECONDS)
            ours.send(json.dumps(request).encode())
            said, _, process_id = ours.recv(32).partition(b" ")
            if said == BEGUN:
                announce(int(process_id))
                ours.send(GO)
                failing.pop_all()
                return Forked(int(process_id), ours)
        return None

    def close(self) -> None:
        """End the server, which does nothing by itself. Its forks go on."""
        if os.getpid() == self._owner:
            self.process.kill()
            self.process.wait()
        self._requests.close()


def environment_of_cases() -> dict[str, str]:
    """The environment of a case's process: this one's, without what pytest says in its own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return inherited | child_environment()


@cache
def fork_server() -> ForkServer | None:
    """The server, which is started by the first call; None where processes are not forked."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError):
        return ForkServer(environment_of_cases())
    return None


def fork(
    command: Sequence[str], options: Mapping[str, Any], announce: Callable[[int], None]
) -> Forked | None:
    """Start a command of ``dpbench`` as a fork; None if it must be started as a new process.

    Args:
        command: an argument list.
        options: of `subprocess.Popen`: ``env``, and ``stdout``, where its errors go as well.
        announce: is told the process id before the fork does anything.
    """
    program, arguments = [*command[: len(COMMAND)]], command[len(COMMAND) :]
    if program != COMMAND or (server := fork_server()) is None:
        return None
    return server.fork(arguments, options["stdout"], options["env"], announce)
