"""Finding Nsight Systems, and what its programs say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.instruments import processes
from dpbench.instruments.nsys import nsys
from dpbench.instruments.nsys.nsys import ExportFailed, ImporterMissing, NsysNotFound
from tests.programs import program

WRITES = """
import sys; from pathlib import Path
Path(sys.argv[sys.argv.index({option!r}) + 1]).write_text(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that is all of ``PATH``, on a machine without NVIDIA's programs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nsys, "INSTALLED", ())
    return tmp_path


def collector(root: Path) -> Path:
    """An ``nsys`` where Nsight Compute has its own."""
    python = "print('NVIDIA Nsight Systems version 2025.3.1.90-x')"
    folder = root / "host" / "target-linux-x64"
    folder.mkdir(parents=True)
    return program(folder / "nsys", python)


def test_the_nsys_on_path_comes_first(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsys, "INSTALLED", (f"{nowhere}/*/host/target-linux-*/nsys",))
    found = collector(nowhere / "2025.1")
    assert nsys.find_nsys() == str(found)
    newer = collector(nowhere / "2025.3")
    assert nsys.find_nsys() == str(newer)
    on_path = program(nowhere / "nsys", "")
    assert nsys.find_nsys() == str(on_path)


def test_the_collector_of_nsight_compute_will_do(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(nowhere / "ncu", "")
    found = collector(nowhere)
    assert nsys.find_nsys() == str(found)


def test_without_any_the_error_says_what_to_install(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NsysNotFound, match=r"\(nsys\) was not found; install Nsight Systems"):
        nsys.find_nsys()


def test_its_version_is_what_it_says(tmp_path: Path) -> None:
    assert processes.version_of(str(collector(tmp_path))) == "2025.3.1"
    assert processes.version_of(str(program(tmp_path / "mute", "raise SystemExit(1)"))) == "unknown"


def test_what_a_collector_left_is_imported_by_the_importer_beside_it(tmp_path: Path) -> None:
    path = collector(tmp_path)
    importer = tmp_path / "host" / "linux-desktop-glibc_2_11_3-x64" / "QdstrmImporter"
    importer.parent.mkdir()
    program(importer, WRITES.format(option="--output-file"))
    (raw := tmp_path / "a.qdstrm").touch()
    report = nsys.imported(str(path), raw, timeout=60)
    assert report == tmp_path / "a.nsys-rep"
    assert report.read_text() == f"--force-overwrite --input-file {raw} --output-file {report}"
    assert not raw.exists()


def test_without_an_importer_the_error_names_what_is_missing(tmp_path: Path) -> None:
    (raw := tmp_path / "a.qdstrm").touch()
    path = str(collector(tmp_path))
    with pytest.raises(ImporterMissing, match=r"no QdstrmImporter beside it; .*libdw1, libelf1"):
        nsys.imported(path, raw, timeout=60)
    said = "libdw.so.1: cannot open shared object file"
    (importer := tmp_path / "host" / "linux-desktop-x64" / "QdstrmImporter").parent.mkdir()
    program(importer, f"raise SystemExit({said!r})")
    with pytest.raises(ImporterMissing, match=said):
        nsys.imported(path, raw, timeout=60)
    assert raw.exists()


def test_a_report_is_exported(tmp_path: Path) -> None:
    path = program(tmp_path / "nsys", WRITES.format(option="--output"))
    (target := tmp_path / "a.sqlite").write_text("old")
    assert nsys.exported(str(path), tmp_path / "a.nsys-rep", target, timeout=60) == target
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
        nsys.exported(str(path), tmp_path / "a.nsys-rep", target, timeout=1)
    assert not target.exists()


@pytest.mark.skipif(shutil.which("nsys") is None, reason="no Nsight Systems here")
def test_a_real_nsys_takes_the_arguments_and_records_nothing_where_nothing_is_marked(
    tmp_path: Path,
) -> None:
    from dpbench.instruments.nsys.nsys import Nsys
    from tests.instruments.nsys.test_recorder import CASE

    instrument = Nsys(tmp_path, path=nsys.find_nsys())
    command = instrument.command(CASE)
    profile = command[: command.index(sys.executable)]
    instrument.report(CASE).parent.mkdir(parents=True)
    profile += [sys.executable, "-c", "print('ran')"]
    done = subprocess.run(profile, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ran" in done.stdout
    assert not list(tmp_path.rglob("*.nsys-rep"))
