"""Runs a program in this process as the Python interpreter would, and ends the process.

This module imports nothing slow, because a script's process begins with `add_to`.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn


def add_to(guard: str) -> None:
    """Add this process to a `dpbench.launch.processes.Guard`. End it if the parent has died."""
    try:
        with Path(guard).open("w") as pipe:
            pipe.write(f"{os.getpid()}\n")
    except FileNotFoundError:
        os._exit(1)


def run_program(program: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module given by name, with its arguments."""
    sys.argv = list(program)
    path = Path(program[0]).resolve()
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd() if is_module else path.parent))
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    # runpy would delete this module at the end, but exit handlers may pickle its classes.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))


def print_error(error: BaseException) -> None:
    """Print a script's traceback without the frames of dpbench."""
    ours = (str(Path(__file__).parents[1]), "<frozen runpy>")
    shown = traceback.TracebackException.from_exception(error)
    stack = [frame for frame in shown.stack if not frame.filename.startswith(ours)]
    shown.stack = traceback.StackSummary.from_list(stack)
    shown.print()


def exit_process(code: int, *, wait: bool = True) -> NoReturn:
    """End the process as `multiprocessing` does, without finalizing the interpreter.

    Args:
        code: exit status.
        wait: whether to wait first for the process's threads.
    """
    if wait:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
