"""Finds in a Python stack where a process hung."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

STACK = "stack"
"""Name of the file to which Python's faulthandler writes the stack."""

STACK_SIGNAL = "SIGURG"
"""The signal that asks ranks to write their stacks. By default a process ignores this signal.
SIGTERM cannot be used: the launcher also sends SIGTERM, which would interrupt the writing."""

COLLECTIVES = ("autograd", "cuda", "distributed", "nn/parallel")
"""Folders of PyTorch whose functions wait for other ranks, directly or through the GPU."""

BETWEEN_STEPS = str(Path(__file__).parents[1] / "training/parallel.py"), "all_gather"
"""File and name of the function in which ranks wait for each other between steps."""

WAITED = "waited for other ranks"

FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def where_stuck(stack: str) -> tuple[bool, str]:
    """Return whether a rank waited for other ranks in a collective, and where the rank was.

    The stack is empty if the rank was not asked for its stack, or was ended before it wrote the
    stack. A rank without a stack counts as waiting.
    """
    frames = FRAME.findall(stack.rpartition("(most recent call first)")[2])
    if not frames:
        return True, "left no stack"
    if any((file, name) == BETWEEN_STEPS for file, _, name in frames):
        return False, "had finished its steps"
    of_torch = str(Path(str(getattr(find_spec("torch"), "origin", ""))).parent)
    waited = frames[0][0].startswith(tuple(f"{of_torch}/{part}" for part in COLLECTIVES))
    others = (of_torch, str(Path(__file__).parent))  # dpbench's step finder wraps PyTorch's calls
    own = (frame for frame in frames if not frame[0].startswith(others))
    file, line, name = next(own, frames[-1])
    return waited, f"{WAITED if waited else 'was'} in {name} ({Path(file).name}:{line})"
