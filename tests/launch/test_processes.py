"""A program ends with whoever started it, wherever Ctrl-C stops that."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_endings import PATIENCE

INTERRUPTED = """
import itertools, os, signal, sys
from dpbench.launch.processes import ProcessGroup

def start_and_end(instruction):
    '''Press Ctrl-C before an instruction of all that this does; returns how many there were.'''
    counted = itertools.count(1)
    done = 0

    def trace(frame, event, argument):
        nonlocal done
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and (done := next(counted)) == instruction:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        group = ProcessGroup(["sleep", "1000"], pass_fds=[int(sys.argv[1])])
        try:
            group.process.poll()
        finally:
            group.end()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return done

every = start_and_end(0)
for instruction in range(1, every, every // int(sys.argv[2])):
    if not (fork := os.fork()):  # with nothing left of the instruction before
        start_and_end(instruction)
        os._exit(0)
    os.waitpid(fork, 0)
"""


@pytest.mark.parametrize("points", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_wherever_ctrl_c_comes_the_program_ends_and_nobody_waits_for_ever(
    points: int, tmp_path: Path
) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    alive, programs = os.pipe()  # whose other end each program holds open
    subprocess.run(
        [sys.executable, script, str(programs), str(points)],
        pass_fds=[programs],
        check=True,
        timeout=PATIENCE,
    )
    os.close(programs)
    assert select.select([alive], [], [], PATIENCE)[0], "a program goes on"
    os.close(alive)
