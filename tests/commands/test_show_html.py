"""``dpbench show --html``: saved runs in, one page out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.case import Case
from dpbench.core.files import write_text
from dpbench.results.conditions import environment
from dpbench.results.outcome import Outcome, document, document_text
from dpbench.results.rows import Measurement

GRID1 = Path(__file__).parents[1] / "data/saved/grid1.json"


def write_run(path: Path, trainer: str = "standard") -> Path:
    """A run of one tiny case, measured on an H200."""
    case = Case(trainer, batch_size=2, seq_len=16, model_size="tiny")
    rows = tuple(
        Measurement(case, "ncu", phase, metric, 1e6, "B", 0, "NVIDIA H200", "ncu 2025.3.1")
        for phase in ("step", "forward")
        for metric in ("dram_read_bytes", "dram_write_bytes")
    )
    write_text(path, document_text(document([Outcome(case, rows, 1.0)], environment())))
    return path


def test_page_has_the_runs_under_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write_run(tmp_path / "before.json")
    after = write_run(tmp_path / "after.json")
    page = tmp_path / "new folder" / "report.html"
    assert main(["show", str(before), str(after), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<title>dpbench: before, after</title>" in text
    assert "tiny fp32, before, batch 2 × sequence 16" in text
    assert "tiny fp32, after, batch 2 × sequence 16" in text
    assert capsys.readouterr().out.startswith(str(page))


def test_a_document_without_a_case_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = Path(__file__).parents[2] / "docs/results/h200-ceilings.json"
    assert main(["show", str(ceilings), "--html", str(tmp_path / "report.html")]) == 2
    assert "h200-ceilings.json has no case, so there is nothing to draw" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "no run file"), ('{"schema": 99}', "schema 99")],
)
def test_run_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, problem: str
) -> None:
    run = tmp_path / "bad.json"
    if content is not None:
        run.write_text(content)
    assert main(["show", str(run), "--html", str(tmp_path / "report.html")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "bad.json" in line
    assert problem in line
    assert not (tmp_path / "report.html").exists()


def test_missing_library_is_said_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "dpbench.show.html.page", raising=False)
    assert main(["show", "absent.json", "--html", "page.html"]) == 2
    assert "pip install plotly jinja2" in capsys.readouterr().err
