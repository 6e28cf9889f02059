"""Which code of a process is digested: what is no installed package's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dpbench.child.imported import digest, imported_files


def test_files_of_own_modules_are_known_by_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed = tmp_path / "site-packages"
    installed.mkdir()
    monkeypatch.syspath_prepend(installed)
    files = {name: tmp_path / f"{name}.py" for name in ("mine_a", "mine_b")}
    for path in (*files.values(), installed / "theirs_a.py"):
        path.write_text("N = 1\n")
    monkeypatch.setitem(sys.modules, "written_by_a_compiler", ModuleType("written_by_a_compiler"))
    for name in (*files, "theirs_a"):
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    found = imported_files()
    assert {Path(name).name for name in found} >= {"mine_a.py", "mine_b.py", Path(__file__).name}
    own = {name: value for name, value in found.items() if Path(name).parent == tmp_path}
    assert own == {str(path): digest(path) for path in files.values()}
    assert not any("site-packages" in name or "/dpbench/child/" in name for name in found)
    files["mine_a"].write_text("N = 2\n")
    assert own[str(files["mine_a"])] != digest(files["mine_a"])
    files["mine_a"].unlink()
    assert digest(files["mine_a"]) == ""


HEARS = """
import threading
from pathlib import Path
from dpbench.child.imported import heard, listen
listen()
try:
    open("a\\0b")
except ValueError:
    pass
thread = threading.Thread(target=Path("config").read_text)
thread.start()
thread.join()
print(*heard())
"""


def test_files_are_heard_after_a_refused_name_and_in_other_threads(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("4")
    done = subprocess.run(
        [sys.executable, "-c", HEARS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert str(tmp_path / "config") in done.stdout.split()


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert [digest(path) for path in (tmp_path / "pipe", Path("/dev/zero"))] == ["", ""]
