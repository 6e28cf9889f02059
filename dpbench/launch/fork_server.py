"""Starts the processes of cases quickly, as forks of a server that has imported torch.

The server has run no operator, has opened no GPU and imports no user code. So a fork can do
everything that a new process can. A new process is started instead if a fork is not possible.
For example, an environment variable that Python reads when it starts may have changed. The code of
the server is in `dpbench.commands.fork_server`.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

from dpbench.child.messages import RECORDS
from dpbench.core.gpu import child_environment

COMMAND = [sys.executable, "-P", "-m", "dpbench"]  # -P keeps the current directory out of sys.path
"""First arguments of a command that can be forked. Other commands start a profiler first."""

PER_FORK_ENV = {
    *(RECORDS, "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "COLUMNS", "LINES"),
    "CUDA_VISIBLE_DEVICES",  # read when a GPU is opened, and the server opens none
}
"""Environment variables that a fork can set to other values than the server has. Each request
contains these variables."""

ANSWER_SECONDS = 60.0  # limit for the server's imports, which take about 5 s


class ForkedProcess:
    """A process that the server has forked. It offers some methods of `subprocess.Popen`."""

    stdout = None

    def __init__(self, process_id: int, channel: socket.socket) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self._channel = channel

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None while the process runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(timeout=0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raise `subprocess.TimeoutExpired` after ``timeout`` seconds."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                code = self._channel.recv(16)
            except (BlockingIOError, TimeoutError) as error:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0) from error
            self._channel.close()
            self.returncode = int(code or -signal.SIGKILL)
        return self.returncode


class ForkServer:
    """The server that starts forks for this process. It ends with this process or by `close`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._requests, requests = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._requests.settimeout(ANSWER_SECONDS)
        with requests:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dpbench.commands.fork_server"],
                stdin=requests.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,
            )
        atexit.register(self.close)

    def fork(self, command: Sequence[str], options: Mapping[str, Any]) -> ForkedProcess | None:
        """Fork a process for a command. Return None if the command needs a new process instead."""
        environment = options["env"]
        names = {*environment, *self._environment}
        differ = {n for n in names if environment.get(n) != self._environment.get(n)}
        if not differ <= PER_FORK_ENV:
            return None
        request = {
            "arguments": command[len(COMMAND) :],
            "directory": str(Path.cwd()),
            "environment": {name: environment.get(name) for name in PER_FORK_ENV},
        }
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with ExitStack() as failing, suppress(OSError):  # the server has ended or does not answer
            failing.callback(ours.close)
            files = [theirs.fileno(), *(options[name].fileno() for name in ("stdout", "stdin"))]
            with theirs:
                socket.send_fds(self._requests, [json.dumps(request).encode()], files)
            ours.settimeout(ANSWER_SECONDS)
            if process_id := ours.recv(16):
                ours.settimeout(None)
                failing.pop_all()
                return ForkedProcess(int(process_id), ours)
        return None

    def close(self) -> None:
        """End the server. Its forks continue."""
        self.process.kill()
        self.process.wait()
        self._requests.close()


def environment_of_cases() -> dict[str, str]:
    """Return the environment of this process, without pytest's variables, for a case's process."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return inherited | child_environment()


@cache
def fork_server() -> ForkServer | None:
    """Return the server, or None if it cannot start. The first call starts the server."""
    with suppress(OSError):
        return ForkServer(environment_of_cases())
    return None


def fork(command: Sequence[str], options: Mapping[str, Any]) -> ForkedProcess | None:
    """Start a command of ``dpbench`` as a fork.

    Return None if the command must be started as a new process.

    Args:
        command: an argument list.
        options: arguments of `subprocess.Popen`. ``env`` is the environment. ``stdout`` receives
            the output and the errors. ``stdin`` is a pipe that receives the id of the group. With
            ``cwd``, nothing is forked.
    """
    can_fork = [*command[: len(COMMAND)]] == COMMAND and "cwd" not in options
    if not can_fork or (server := fork_server()) is None:
        return None
    return server.fork(command, options)


def postpone(name: str) -> None:
    """Postpone running a package's ``__init__`` until an attribute of the package is first used.

    Modules of the package can be imported before that. Opacus's ``__init__`` imports SciPy for its
    accountants. Importing SciPy is slow, and no trainer of dpbench needs SciPy.
    """
    if name in sys.modules or (spec := find_spec(name)) is None or spec.loader is None:
        return
    package, execute = module_from_spec(spec), spec.loader.exec_module

    def first_use(attribute: str) -> Any:
        del vars(package)["__getattr__"]
        execute(package)
        return getattr(package, attribute)

    vars(package)["__getattr__"] = first_use
    sys.modules[name] = package
