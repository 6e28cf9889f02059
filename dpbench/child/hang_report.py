"""Reports where a process was when it was ended, from the frames of Python's faulthandler."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

STACK = "stack"  # the name of the file with these frames

ASKED = "SIGURG"
"""The signal that asks ranks for their frames; ignored by default. The signal that ends ranks comes
twice, also from their launcher, and the second would cut the frames off."""

COLLECTIVES = ("autograd", "cuda", "distributed", "nn/parallel")
"""The parts of PyTorch in which a process waits for others, or for a GPU that does."""

AGREEMENT = str(Path(__file__).with_name("agreement.py"))
"""Where ranks wait for each other between steps."""

WAITED = "waited for others"

FRAME = re.compile(r'File "(.+)", line (\d+) in (.+)')


def place(stack: str) -> tuple[bool, str]:
    """Whether a rank waited for others in a collective, and where it was in its main thread.

    A rank that was not asked, or had no time to answer, leaves no frames.
    """
    frames = FRAME.findall(stack.rpartition("(most recent call first)")[2])
    if not frames:
        return True, "left no word of where it was"
    if any(file == AGREEMENT for file, *_ in frames):
        return False, "had taken its steps"
    of_torch = str(Path(str(getattr(find_spec("torch"), "origin", ""))).parent)
    waited = frames[0][0].startswith(tuple(f"{of_torch}/{part}" for part in COLLECTIVES))
    others = (of_torch, str(Path(__file__).parent))  # the step finder calls PyTorch for a script
    own = (frame for frame in frames if not frame[0].startswith(others))
    file, line, name = next(own, frames[-1])
    return waited, f"{WAITED if waited else 'was'} in {name} ({Path(file).name}:{line})"
