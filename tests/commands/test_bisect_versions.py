"""``dpbench bisect --package``: the version of a package that made a metric worse."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from tests.commands.seeded import LIMIT, run_of, tried, wheel


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A package whose fourth version moves more; the command writes what a version moves."""
    if not find_spec("pip"):
        pytest.skip("needs pip")
    index = tmp_path / "index"
    index.mkdir()
    for version, moved in (("1.0", 1e6), ("1.9", 1e6), ("1.10", 1e6), ("2.0", 3e6), ("2.1", 3e6)):
        wheel(index, "tinymover", version, moved, f"tinyneed=={version[0]}.*")
    for version in ("1.5", "2.5"):
        wheel(index, "tinyneed", version, 0)
    (tmp_path / "template.json").write_text(run_of([123456789.0]))
    (tmp_path / "measure.py").write_text(
        "import sys, tinymover\nfrom pathlib import Path\n"
        "text = Path('template.json').read_text()\n"
        "Path(sys.argv[1]).write_text(text.replace('123456789.0', repr(tinymover.MOVED)))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return ["--", sys.executable, "measure.py", "{json}"]


def test_the_first_bad_version_is_named_with_what_it_needs(
    released: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", LIMIT, "--package=tinymover==1.5..2.1", *released]) == 0
    out = capsys.readouterr().out
    assert [line[0] for line in tried(out)] == ["1.9", "2.1", "1.10", "2.0"]
    assert "first bad: 2.0  tinymover==2.0 tinyneed==2.5\n1.00 MB -> 3.00 MB\n" in out
    about = [" ".join(line[6:]) for line in tried(out)]
    assert about[0] == "tinymover==1.9 tinyneed==1.5"
    assert about[2] == "tinymover==1.10"  # needs what the good one does
    assert find_spec("tinymover") is None


@pytest.mark.parametrize(
    ("package", "words"),
    [
        (
            "tinymover==2.1..3",
            "'tinymover==2.1..3' must contain at least two of the releases 1.0, 1.9, 1.10, 2",
        ),
        ("tinymover==1.0", "must contain at least two of the releases"),
        ("tinymover==a..b", "package 'tinymover==a..b': write NAME==LOW..HIGH"),
        ("nothing==1..2", "pip index: ERROR: No matching distribution found for nothing"),
    ],
)
def test_a_range_of_versions_that_is_none_gets_one_line(
    released: list[str], package: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", LIMIT, "--package", package, *released]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
