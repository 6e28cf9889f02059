"""A script or module that runs in this process, as Python itself would run it."""

from __future__ import annotations

import builtins
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


def run_program(program: Sequence[str], *, is_module: bool) -> None:
    """Run a script, or a module by its name, with its arguments as Python itself would."""
    sys.argv = list(program)
    if is_module:  # whose directory, the current one, ``python -m`` has put on the path
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        return
    path = Path(program[0]).resolve()
    sys.path[0] = str(path.parent)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(main))


def print_error(error: BaseException) -> None:
    """Print a script's traceback as it would be without us."""
    ours = (str(Path(__file__).parents[1]), "<frozen runpy>")
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    pending = [shown]
    while pending:
        if (part := pending.pop()) is not None:
            stack = [frame for frame in part.stack if not frame.filename.startswith(ours)]
            part.stack = traceback.StackSummary.from_list(stack)
            pending += [part.__cause__, part.__context__]
    assert shown
    print("".join(shown.format()), end="", file=sys.stderr, flush=True)
