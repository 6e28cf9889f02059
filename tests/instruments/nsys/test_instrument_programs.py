"""Finding Nsight Systems, and what its programs say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.instruments.nsys import nsys
from dpbench.instruments.nsys.nsys import STATISTICS, ExportFailed, NsysNotFound
from dpbench.launch import processes
from tests.programs import program

WRITES = """
import sys; from pathlib import Path
Path(sys.argv[sys.argv.index({option!r}) + 1]).write_text(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all of ``PATH``."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("nowhere")
def test_without_one_the_error_says_what_to_install() -> None:
    with pytest.raises(NsysNotFound, match=r"not found; install the package .* nsys to PATH"):
        nsys.find_nsys()


def test_a_report_is_exported(tmp_path: Path) -> None:
    path = program(tmp_path / "nsys", WRITES.format(option="--output"))
    (target := tmp_path / "a.sqlite").write_text("old")
    assert nsys.export_to_sqlite(str(path), tmp_path / "a.nsys-rep", target, timeout=60) == target
    assert target.read_text() == (
        "export --type sqlite --force-overwrite true --quiet true "
        f"--output {target} {tmp_path / 'a.nsys-rep'}"
    )


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("print('...'); raise SystemExit('unknown command export')", "unknown command export"),
        ("", "exit code 0"),
        ("import time; time.sleep(60)", "took longer than 1 s"),
    ],
)
def test_a_version_that_exports_nothing_says_so(
    python: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ANSWER_SECONDS", 1.0)
    path = program(tmp_path / "nsys", python)
    (target := tmp_path / "a.sqlite").write_text("old")
    with pytest.raises(ExportFailed, match=why):
        nsys.export_to_sqlite(str(path), tmp_path / "a.nsys-rep", target, timeout=1)
    assert not target.exists()


def test_statistics_are_the_reports_that_nsys_could_make(tmp_path: Path) -> None:
    says = """
import sys; from pathlib import Path
command, *arguments = sys.argv[1:]
assert (command, arguments[-1]) == ("stats", "a.sqlite"), sys.argv
reports = [after for name, after in zip(arguments, arguments[1:]) if name == "--report"]
output = arguments[arguments.index("--output") + 1]
for report in reports[:2]:
    Path(f"{output}_{report}.{arguments[arguments.index('--format') + 1]}").write_text(report)
"""
    path = program(tmp_path / "nsys", says)
    found = nsys.statistics(str(path), Path("a.sqlite"), tmp_path)
    assert found == {name: name for name in STATISTICS[:2]}


@pytest.mark.skipif(shutil.which("nsys") is None, reason="no Nsight Systems here")
def test_a_real_nsys_takes_the_arguments_and_records_nothing_where_nothing_is_marked(
    tmp_path: Path,
) -> None:
    from dpbench.instruments.nsys.nsys import Nsys
    from tests.instruments.nsys.test_recorder import CASE

    instrument = Nsys(tmp_path, path=nsys.find_nsys())
    profile = instrument.profiler_command(CASE)
    instrument.report(CASE).parent.mkdir(parents=True)
    profile += [sys.executable, "-c", "print('ran')"]
    done = subprocess.run(profile, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout
    assert not list(tmp_path.rglob("*.nsys-rep"))
