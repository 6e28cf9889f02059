"""The server of `dpbench.launch.fork_server`, which forks the processes of cases."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

from dpbench.child.program import exit_process
from dpbench.commands import cli
from dpbench.core.registry import INSTRUMENTS, TRAINERS
from dpbench.launch.fork_server import postpone

MESSAGE_BYTES = 1 << 17  # less than a socket accepts at once, which is about 200 KB


def import_packages() -> None:
    """Import the modules that every case needs.

    Raise an error if an import opened a GPU or left threads running.
    """
    gc.disable()  # garbage collection would slow the imports down and free little
    postpone("opacus")
    import pynvml  # noqa: F401
    import torch._dynamo  # noqa: F401  (the first optimizer would import it)

    import dpbench.child.case
    import dpbench.commands.step
    import dpbench.instruments.logical.counter
    import dpbench.workloads.transformer  # noqa: F401

    for built_in in (TRAINERS, INSTRUMENTS):
        for name in built_in:
            built_in[name]  # imports the class
    gc.freeze()  # forks do not collect these objects, so the memory stays shared
    gc.enable()
    if (process_id := os.fork()) == 0:  # OpenBLAS ends its threads at the first fork
        os._exit(0)
    os.waitpid(process_id, 0)
    threads = [*Path("/proc/self/task").iterdir()]
    files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    if len(threads) > 1 or any(file.match("/dev/nvidia*") for file in files):
        raise RuntimeError(f"imports left {len(threads)} threads, and these files open: {files}")


def next_request(requests: socket.socket) -> tuple[dict[str, Any], socket.socket, int, int]:
    """Fork for each request, until no client is left. Only the forks return from this function.

    Returns:
        The request, the client's socket, and the descriptors of the output and of the pipe that
        receives the process id.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps forks
    while True:
        data, (*files,), *_ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            channel, output, guard = files
            return json.loads(data), socket.socket(fileno=channel), output, guard
        for descriptor in files:
            os.close(descriptor)


def apply_request(request: Mapping[str, Any]) -> None:
    """Set the requested arguments, working directory, environment and import path.

    Raise an error if a folder in the requested ``PYTHONPATH`` has another file for a module that is
    already imported.
    """
    sys.argv[1:] = request["arguments"]
    os.chdir(request["directory"])
    for name, value in request["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(Path(entry).absolute()) for entry in entries if entry]
    sys.path[:] = dict.fromkeys([*folders, *sys.path])
    for name in ("sitecustomize", "usercustomize", *sys.modules):
        file = getattr(sys.modules.get(name), "__file__", "")
        if "." not in name and file is not None:
            spec = PathFinder.find_spec(name, folders)
            if spec and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(file):
                raise ValueError(f"PYTHONPATH has {name} at {spec.origin}, but {file} is imported")


def main() -> NoReturn:
    """Serve requests, with two forks for each request.

    The second fork runs the case. The first fork waits for the second, and sends the case's exit
    code to the client. The first fork also sends the case's process group to the guard (see
    `dpbench.launch.processes`). So the guard knows the process group even if the client is
    interrupted.
    """
    requests = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    import_packages()
    request, channel, output, guard = next_request(requests)
    apply_request(request)  # if this raises, nothing is sent, and the client starts a new process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    case = os.fork()
    with suppress(OSError):  # both processes call setpgid; the second call may fail
        os.setpgid(case, case)
    if case:
        os.write(guard, b"-%d\n" % case)
        os.close(guard)
        with suppress(OSError):  # the client may have ended
            channel.send(b"%d" % case)
            channel.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(case, 0)[1]))
        os._exit(0)
    channel.close()
    os.dup2(output, 1)
    os.dup2(output, 2)
    for descriptor in (output, guard):
        os.close(descriptor)
    import numpy as np

    np.random.seed()  # a fork reseeds only Python's own generator
    exit_process(cli.main())


if __name__ == "__main__":
    main()
