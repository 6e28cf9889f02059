"""Which files of dpbench one opens to follow ``--dpbench-compare-fail`` from option to failure.

Three sessions of pytest run one test, whose step takes 20 % longer in the second and third than in
the first, which is saved. The third has the option, so its test fails. What it does until then, and
the second does not, are calls from one function of dpbench to another. The files of both ends of
these calls are the road, and those entered that name the option. This prints them, with the
functions at the ends; and how many files such a session enters at all, measuring and tables too.

    python bench/road.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import dpbench

PACKAGE = Path(dpbench.__file__).parent

PROJECT = {
    "meter.py": """
from pathlib import Path

from dpbench import Case, Instrument, Measurement, Running


class Meter(Instrument):
    name = "meter"

    def start(self, case: Case) -> Running:
        return Reading(case)


class Reading(Running):
    def __init__(self, case: Case) -> None:
        self.case = case

    def rows(self) -> list[Measurement]:
        seconds = float(Path("seconds").read_text())
        row = (self.case, "meter", "step", "step_time_seconds", seconds, "s", 0, "cpu", "1")
        return [Measurement(*row)]
""",
    "test_it.py": """
def test_it(ncu):
    ncu("standard", batch_size=4, seq_len=32, model_size="tiny")
""",
    "pytest.ini": "[pytest]\n",
}

SESSION = """
import json, sys, pytest

package, output, *arguments = sys.argv[1:]
calls, entered, failed = set(), set(), False

def note(frame, event, argument):
    global failed
    called = frame.f_code
    failed = failed or called.co_qualname in ("fail", "_Fail.__call__")  # pytest's
    if event != "call" or not called.co_filename.startswith(package):
        return
    caller = frame.f_back
    while caller and not caller.f_code.co_filename.startswith(package):
        caller = caller.f_back
    by = caller.f_code if caller else None
    if called.co_name == "<module>" or (by and by.co_name == "<module>"):
        return  # it is imported
    entered.add(called.co_filename)
    if not failed:
        ends = [(c.co_filename, c.co_qualname) if c else ("", "") for c in (by, called)]
        calls.add((*ends[0], *ends[1]))

sys.setprofile(note)
status = pytest.main(arguments)
sys.setprofile(None)
with open(output, "w") as file:
    json.dump([int(status), sorted(calls), sorted(entered)], file)
"""

LIMIT = "--dpbench-compare-fail=step_time_seconds:5%"


Calls = set[tuple[str, ...]]
"""Each as file and function of the caller, and of what it calls."""


def session(folder: Path, seconds: float, *options: str) -> tuple[int, Calls, list[str]]:
    """The exit status of pytest, the calls inside the package until a failure, what it enters."""
    (folder / "seconds").write_text(str(seconds))
    (folder / "calls.json").unlink(missing_ok=True)
    measured = ["-q", "-pno:xdist", "-pno:cacheprovider", "--dpbench-instrument=meter:Meter"]
    command = [sys.executable, "-c", SESSION, f"{PACKAGE}/", "calls.json", *measured, *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (folder / "calls.json").exists(), done.stdout + done.stderr
    status, calls, entered = json.loads((folder / "calls.json").read_text())
    return status, {tuple(call) for call in calls}, entered


def road() -> tuple[dict[str, set[str]], int]:
    """Each file of the road with its functions, and how many files the session enters."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in PROJECT.items():
            (folder / file).write_text(text)
        saves = session(folder, 5.0, "--dpbench-save=before")
        passes = session(folder, 6.0)
        fails = session(folder, 6.0, LIMIT)
    assert (saves[0], passes[0], fails[0]) == (0, 0, 1)
    files: dict[str, set[str]] = defaultdict(set)
    for caller, calls, called, function in fails[1] - passes[1]:
        files[called].add(function)
        if caller:
            files[caller].add(calls)
    for path in fails[2]:
        if "compare_fail" in Path(path).read_text(encoding="utf-8"):
            files[path].add("names the option")
    return {str(Path(path).relative_to(PACKAGE)): files[path] for path in files}, len(fails[2])


def main() -> None:
    """Print the road."""
    files, entered = road()
    for file, functions in sorted(files.items()):
        print(f"{file}: {', '.join(sorted(functions))}")
    print(f"{len(files)} files on the road, of {entered} that the session enters")


if __name__ == "__main__":
    main()
