"""How many files a reader must open to follow a limit from its option to the judgement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST_FILES, MOST_CHANGES = 40, 1500
"""The most files of dpbench that a session with one test and one limit may enter, and how often its
calls may change from one file to another."""

COUNTED = """
from dpbench.training.standard import StandardTrainer

class Own(StandardTrainer):  # counted in a process of its own
    pass

def test_counted(logical_io):
    logical_io("test_it:Own", batch_size=2, seq_len=8, model_size="100x16x1x2")
"""

TRACED = """
import inspect, json, pathlib, sys
import dpbench, pytest

PACKAGE = str(pathlib.Path(dpbench.__file__).parent)
found = []

def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # not a module or class that is loaded
    if event == "call" and is_function and code.co_filename.startswith(PACKAGE):
        found.append(code.co_filename.removeprefix(PACKAGE + "/"))

options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
pytest.main([*options, "--dpbench-save=good"])  # which loads all modules, too
sys.setprofile(note)
code = pytest.main([*options, "--dpbench-compare-fail=logical_bytes:1%"])
sys.setprofile(None)
pathlib.Path("found.json").write_text(json.dumps(found))
sys.exit(code)
"""


def test_a_limit_enters_few_files_from_its_option_to_the_judgement(
    tmp_path: Path,
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(COUNTED)
    assert subprocess.run([sys.executable, "-c", TRACED], cwd=tmp_path).returncode == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {"session.py", "results/gate.py", "plugin/each_test.py"} < {*found}
    assert len({*found}) <= MOST_FILES, sorted({*found})
    # A process is asked again and again whether it has ended.
    own = [file for file in found if not file.startswith(("launch/", "child/"))]
    changes = sum(one != other for one, other in zip(own[1:], own, strict=False))
    assert changes <= MOST_CHANGES
