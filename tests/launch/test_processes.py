"""A program ends with whoever started it, wherever Ctrl-C stops that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.launch.processes import ctrl_c_later
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
            group.poll()
        finally:
            group.end()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return done

every = start_and_end(0)
for instruction in range(1, every, every // 50):
    start_and_end(instruction)
"""


def test_wherever_ctrl_c_comes_the_program_ends_and_nobody_waits_for_ever(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    alive, programs = os.pipe()  # whose other end each program holds open
    subprocess.run(
        [sys.executable, script, str(programs)], pass_fds=[programs], check=True, timeout=PATIENCE
    )
    os.close(programs)
    assert select.select([alive], [], [], PATIENCE)[0], "a program goes on"
    os.close(alive)


def test_ctrl_c_comes_after_what_must_not_be_stopped_half_way() -> None:
    done = []

    def whole() -> None:
        with ctrl_c_later():
            signal.raise_signal(signal.SIGINT)
            done.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        whole()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ctrl_c_later():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
