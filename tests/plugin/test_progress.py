"""The progress bar of ``--ncu-kernels``: for a person at a terminal, whatever pytest captures."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.plugin.conftest import WITHOUT

pty = pytest.importorskip("pty", reason="needs pseudo-terminals")


@pytest.mark.usefixtures("project")
def test_kernels_are_counted_on_the_terminal_beside_captured_output(
    pytester: pytest.Pytester,
) -> None:
    reader, terminal = pty.openpty()
    options = ["--ncu", "--ncu-path=./ncu", "--dpbench-no-timing", "--dpbench-try-anyway"]
    options += ["--dpbench-grid=cell.toml", "--dpbench-trainer=dpsgd", "--ncu-set=detailed"]
    with os.fdopen(reader, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *WITHOUT, "-p", "no:xdist", "-k", "dram", *options],
            cwd=pytester.path,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        shown = everything_on(screen.fileno())
        assert process.wait() == 0, shown
    case = "dpsgd-bs4-seq64-tiny-fp32"
    assert re.search(rf"\r\n\r{case}: kernels: +0%.* 0/468 ", shown), shown  # the ranges hold 468
    assert f"\r{case}: Speed of Light: 0kernel [" in shown, "how many there will be is not known"
    assert "$ env" not in shown, "what was captured stays captured"


def everything_on(screen: int) -> str:
    """What is written to a pseudo-terminal until its last writer has gone."""
    parts = []
    while True:
        try:
            parts.append(os.read(screen, 65536))
        except OSError:  # EIO, Linux's word for the end
            break
        if not parts[-1]:
            break
    return b"".join(parts).decode()
