"""A process that has imported what every case needs, and forks one process a case.

`dpbench.launch.forked` starts it and asks it for forks. It has run no operator and has not opened
a GPU, so a fork can do all that a new process can; it imports none of the user's code.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from select import select
from typing import Any

from dpbench.child.program import end
from dpbench.core.registry import INSTRUMENTS, TRAINERS
from dpbench.launch.forked import BEGUN, GO

IMPORTED = (
    "dpbench.commands.cli",
    "dpbench.commands.step",
    "dpbench.child.step",
    "dpbench.instruments.logical.counter",
    "dpbench.workloads.transformer",
    "torch._dynamo",  # which the first optimizer imports
    "pynvml",
)

REQUEST_BYTES = 1 << 17  # of which a socket takes 200 KB at once


def prepare() -> None:
    """Import what every case needs; fails if that opened a GPU or left threads running."""
    gc.disable()  # a quarter of the time of imports is the collector's, which finds next to nothing
    postpone("opacus")
    for name in IMPORTED:
        import_module(name)
    for built_in in (TRAINERS, INSTRUMENTS):
        for name in built_in:
            built_in[name]  # is imported
    gc.freeze()  # a fork's collector leaves these objects alone, and their memory shared
    gc.enable()
    if (process_id := os.fork()) == 0:  # the first fork ends the threads of OpenBLAS
        os._exit(0)
    os.waitpid(process_id, 0)
    threads = [*Path("/proc/self/task").iterdir()]
    files = [path.resolve() for path in Path("/proc/self/fd").iterdir()]
    if len(threads) > 1 or any(file.match("/dev/nvidia*") for file in files):
        raise RuntimeError(f"imports left {len(threads)} threads, and these files open: {files}")


def postpone(name: str) -> None:
    """Import a package itself on first use of it; its modules can be imported before.

    Opacus imports its accountants, and these SciPy: a quarter of all that there is to import, and
    no trainer of dpbench needs it.
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


def serve(requests: socket.socket) -> socket.socket | None:
    """Fork once for each request, until nobody can ask any more.

    A request is two file descriptors: a socket, and what shall be the fork's output.

    Returns:
        In a fork, its socket; in the server, None.
    """
    running: dict[int, socket.socket] = {}
    awake, wakes = socket.socketpair()  # a signal writes to it, so that none is missed
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        if awake in select([requests, awake], [], [])[0]:
            awake.recv(1024)
            report_exits(running)
            continue
        said, received, *_ = socket.recv_fds(requests, 1, 2)
        if not said:
            return None
        channel, output = socket.socket(fileno=received[0]), received[1]
        try:
            process_id = os.fork()
        except OSError:  # no memory, or too many processes
            channel.close()
        else:
            if process_id == 0:
                for other in (requests, awake, wakes, *running.values()):
                    other.close()
                take_over(output)
                return channel
            running[process_id] = channel
        os.close(output)


def report_exits(running: dict[int, socket.socket]) -> None:
    """Say the exit codes of forks that have ended, each to its socket."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with running.pop(ended[0]) as channel, suppress(OSError):
                channel.send(b"%d" % os.waitstatus_to_exitcode(ended[1]))


def take_over(output: int) -> None:
    """Make a fork of the server a process of its own, which writes to this file descriptor."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def become(request: dict[str, Any]) -> None:
    """Take over the arguments, directory, environment and path of imports that are asked for."""
    sys.argv[1:] = request["arguments"]
    os.chdir(request["directory"])
    before = folders_of_python_path()
    for name, value in request["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    after = folders_of_python_path()
    if after != before:
        sys.path[:] = [*after, *(folder for folder in sys.path if folder not in before)]
    for folder in {*after} - {*before}:
        if name := shadowed_in(folder):
            raise ValueError(f"{folder} has another {name} than has been imported")


def folders_of_python_path() -> list[str]:
    """The folders of ``PYTHONPATH``, as `sys.path` has them."""
    python_path = os.environ.get("PYTHONPATH", "")
    return [str(Path(entry).absolute()) for entry in python_path.split(os.pathsep) if entry]


def shadowed_in(folder: str) -> str | None:
    """A module that this folder would have had imported instead of the one that has been."""
    for name in ("sitecustomize", "usercustomize", *sys.modules):
        file = getattr(sys.modules.get(name), "__file__", "")
        if "." not in name and file is not None:
            spec = PathFinder.find_spec(name, [folder])
            if spec and spec.origin and os.path.realpath(spec.origin) != os.path.realpath(file):
                return name
    return None


def main() -> None:
    """Serve; a fork runs the ``dpbench`` command that is asked for."""
    requests = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    prepare()
    channel = serve(requests)
    if channel is None:
        os._exit(0)
    with channel:
        try:
            become(json.loads(channel.recv(REQUEST_BYTES)))
            channel.send(b"%s %d" % (BEGUN, os.getpid()))
            if channel.recv(len(GO)) != GO:
                raise ValueError("nobody waits for this fork any more")
        except (OSError, ValueError):
            os._exit(1)  # without a word in the log: a new process will write to it
    import_module("numpy").random.seed()  # as in a new process; Python's own is seeded by a fork
    end(import_module("dpbench.commands.cli").main())


if __name__ == "__main__":
    main()
