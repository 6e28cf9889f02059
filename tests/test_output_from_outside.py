"""Tests of outputs from outside the package, which commands and pytest choose by file ending."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.registry import OUTPUTS
from dpbench.results.schema import parsed
from tests.plugin import conftest as sessions

imports = sessions.imports  # a fixture

LINES = """
def largest(runs, view):
    if view.sort == "trainer":
        raise LookupError("no trainer")
    rows = [row for run in runs for row in run.frame.to_dict("records") if row["phase"] == "step"]
    most = max(rows, key=lambda row: row["value"])
    return f"{runs[-1].name}: {most['metric']} {most['value']:.0f}\\n"

def packed(runs, view):
    return bytes([len(runs), 0, 255])
"""
RUN = [
    *("run", "--instrument=logical", "--trainer=standard"),
    *("--batch-size=4", "--seq-len=16", "--model-size=tiny"),
]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a package with two outputs and its metadata, as pip installs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(OUTPUTS, "_targets", dict(OUTPUTS._targets))
    (tmp_path / "ownoutputs.py").write_text(LINES)
    folder = tmp_path / "ownoutputs-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ownoutputs\nVersion: 1\n")
    names = "[dpbench.outputs]\ntxt = ownoutputs:largest\nbin = ownoutputs:packed\n"
    (folder / "entry_points.txt").write_text(names)
    yield tmp_path
    sys.modules.pop("ownoutputs", None)


def test_run_and_show_write_installed_and_built_in_outputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = [f"--output=out/run.{ending}" for ending in ("txt", "bin", "json", "csv", "md", "html")]
    assert main([*RUN, *files]) == 0
    assert Path("out/run.bin").read_bytes() == b"\1\0\xff"
    with Path("out/run.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    document = parsed(Path("out/run.json").read_bytes())
    assert [float(row["value"]) for row in rows] == [row["value"] for row in document["rows"]]
    largest = max((row for row in rows if row["phase"] == "step"), key=lambda r: float(r["value"]))
    said = f"{largest['metric']} {float(largest['value']):.0f}\n"
    assert Path("out/run.txt").read_text() == f"run: {said}"
    assert "### tiny fp32, batch 4, sequence 16" in Path("out/run.md").read_text()
    assert "1 case counted without hardware." in Path("out/run.html").read_text(encoding="utf-8")

    capsys.readouterr()
    assert main(["show", "out/run.json", "--output=again.txt", "--output=again.csv"]) == 0
    assert capsys.readouterr().out.startswith("again.txt: ")
    assert Path("again.txt").read_text() == f"run: {said}"
    assert Path("again.csv").read_bytes() == Path("out/run.csv").read_bytes()


def test_pytest_writes_an_output_that_a_conftest_registers(
    pytester: pytest.Pytester, installed: Path, imports: sessions.Imports
) -> None:
    pytester.makeconftest(
        """
        from dpbench import OUTPUTS

        OUTPUTS.register("largest", "ownoutputs:largest")
        """
    )
    pytester.makepyfile(
        """
        def test_counts(logical_io):
            logical_io("standard", batch_size=4, seq_len=16, model_size="tiny")
        """
    )
    files = ["--dpbench-output=a.largest", "--dpbench-output=b.json"]
    result = sessions.in_this_process(pytester, [*sessions.WITHOUT, *files], imports)
    assert result.ret == pytest.ExitCode.OK
    assert (pytester.path / "a.largest").read_text().startswith("a: flops ")
    assert parsed((pytester.path / "b.json").read_bytes())["rows"]


def test_a_failing_output_prints_one_line_and_other_outputs_are_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RUN, "--sort=trainer", "--output=run.txt", "--output=run.csv"]) == 1
    said = capsys.readouterr().err
    assert (
        "ERROR: run.txt: the output 'txt' failed: LookupError: no trainer (ownoutputs.py:" in said
    )
    assert Path("run.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*RUN, "--output=run.pdf"],
            "unknown file extension '.pdf'; choose from .json, .md, .csv, .html",
        ),
        ([*RUN, "--output=run"], "unknown file extension ''; choose from .json, .md, .csv, .html"),
        ([*RUN, "--csv=a.md", "--output=a.md"], "--csv and --output a.md name the same file"),
        (["show", "run.json", "--output=run.json"], "name the same file, 'run.json'"),
    ],
)
def test_an_impossible_output_is_refused_before_anything_runs(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
