"""How many files a reader must open to follow a limit from its option to the test that fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

import pytest

import dpbench
from tests.plugin.conftest import RunSuite

PACKAGE = Path(dpbench.__file__).parent

COUNTED = """
def test_counted(logical_io):
    logical_io("standard", batch_size=2, workload="layer", set="width=8,length=2")
"""


def entered(project: RunSuite, *options: str) -> set[tuple[str, str]]:
    """The functions of dpbench that a session enters, each with its file."""
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            name = str(Path(code.co_filename).relative_to(PACKAGE))
            found.add((name, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        project("-n0", *options, replayed=False)
    finally:
        sys.setprofile(before)
    return found


def test_a_limit_enters_at_most_twelve_files_from_its_option_to_the_failure(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=COUNTED)
    project("-n0", "--dpbench-save=good", replayed=False)
    [path] = (pytester.path / ".dpbench").glob("*/0001_good.json")
    good = json.loads(path.read_text())
    for row in good["rows"]:
        row["value"] //= 2
    path.write_text(json.dumps(good))
    without = entered(project)
    limited = entered(project, "--dpbench-compare-fail=logical_bytes:1%")
    files = {name for name, _ in limited - without}
    assert {"session.py", "results/gate.py", "plugin/each_test.py"} < files
    assert len(files) <= 12, sorted(files)
