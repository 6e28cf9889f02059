"""Reports where a hanging process was when it was ended, from Python's faulthandler."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

STACK = "stack"  # the name of the file with these frames

STACK_SIGNAL = "SIGURG"
"""The signal that asks ranks to write their stacks; ignored by default. SIGTERM cannot be used: the
launcher sends it as well, and the second would interrupt the writing."""

COLLECTIVES = ("autograd", "cuda", "distributed", "nn/parallel")
"""Parts of PyTorch in which a process waits for other ranks, or for a GPU that waits for them."""

RANK_MESSAGES = str(Path(__file__).with_name("rank_messages.py"))
"""The file in which ranks wait for each other between steps."""

WAITED = "waited for others"

FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def where_stuck(stack: str) -> tuple[bool, str]:
    """Whether a rank waited for others in a collective, and the place in its main thread.

    A rank that was not asked, or had no time to answer, leaves no stack.
    """
    frames = FRAME.findall(stack.rpartition("(most recent call first)")[2])
    if not frames:
        return True, "left no stack"
    if any(file == RANK_MESSAGES for file, *_ in frames):
        return False, "had taken its steps"
    of_torch = str(Path(str(getattr(find_spec("torch"), "origin", ""))).parent)
    waited = frames[0][0].startswith(tuple(f"{of_torch}/{part}" for part in COLLECTIVES))
    others = (of_torch, str(Path(__file__).parent))  # the step finder wraps calls of PyTorch
    own = (frame for frame in frames if not frame[0].startswith(others))
    file, line, name = next(own, frames[-1])
    return waited, f"{WAITED if waited else 'was'} in {name} ({Path(file).name}:{line})"
