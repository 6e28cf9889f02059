"""Pictures of ratios, as SVG."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.renew import PICTURE, picture
from dpbench.commands.cli import main
from dpbench.core.errors import ConfigurationError
from dpbench.results.run import Run
from dpbench.show.view import TableOptions

GRID1 = Path(__file__).parents[1] / "data/saved/grid1.json"
pytestmark = pytest.mark.skipif(not find_spec("matplotlib"), reason="matplotlib is not installed")
HOSTILE = "</svg><script>alert(1)</script>"


def svg(run: Run) -> str:
    from dpbench.show.picture import svg  # imports Matplotlib, which each worker would wait for

    return svg([run], TableOptions())


@cache
def grid1() -> tuple[Run, str]:
    """A recorded run and its picture."""
    run = Run.load(GRID1)
    return run, svg(run)


def texts(of: str) -> list[str]:
    return [
        text for each in ElementTree.fromstring(of).iter() if (text := (each.text or "").strip())
    ]


def lengths(of: str) -> list[float]:
    """The lengths of the bars, from the left edge of each."""
    path = r'd="M ([\d.]+) [\d.]+ \nL ([\d.]+) [\d.]+ \nL \2 [\d.]+ \nL \1 [\d.]+ \nz\n" clip-path'
    return [float(end) - float(start) for start, end in re.findall(path, of)]


def test_bars_are_as_long_as_their_numbers_say() -> None:
    run, made = grid1()
    ratios = run.summary[(run.summary.phase == "step") & (run.summary.trainer != "standard")]
    names = ["dram_bytes", "step_time_seconds", "peak_memory_bytes"]
    expected = ratios[ratios.metric.isin(names) & ratios.preferred].ratio
    assert {f"{ratio:.2f}" for ratio in expected} <= {*texts(made)}
    cell = ratios[(ratios.batch_size == 8) & (ratios.seq_len == 256)]
    known = cell.set_index(["metric", "trainer"]).ratio
    trainers = ("dpsgd", "dpsgd_ghost", "dpsgd_fgc")
    sizes = [known[name, trainer] for name in names for trainer in trainers]
    drawn = lengths(made)[: len(sizes)]
    scale = drawn[0] / sizes[0]
    assert drawn == pytest.approx([ratio * scale for ratio in sizes], rel=1e-3)


def test_the_same_runs_make_the_same_picture() -> None:
    assert svg(Run.load(GRID1)) == grid1()[1]


def test_it_has_colours_for_light_and_dark_pages() -> None:
    _, made = grid1()
    assert "prefers-color-scheme: dark" in made
    assert "fill: var(--text)" in made
    assert "#010203" not in made


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    document = GRID1.read_text().replace('"dpsgd"', f'"{HOSTILE}"')
    (tmp_path / "hostile.json").write_text(document)
    made = svg(Run.load(tmp_path / "hostile.json"))
    assert "<script" not in made
    ElementTree.fromstring(made)


def test_without_a_ratio_it_says_what_can_be_drawn() -> None:
    run, _ = grid1()
    alone = Run.of("alone", [each for each in run.outcomes if each.case.trainer == "standard"])
    with pytest.raises(ConfigurationError, match="alone: no ratio to draw"):
        svg(alone)


def test_the_command_writes_it(tmp_path: Path) -> None:
    assert main(["show", str(GRID1), "--output", str(tmp_path / "ratios.svg")]) == 0
    assert (tmp_path / "ratios.svg").read_text().startswith("<?xml")


def test_without_matplotlib_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "dpbench.show.picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["show", str(GRID1), "--output", str(tmp_path / "ratios.svg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "ratios.svg").exists()


def test_the_readmes_picture_is_what_the_committed_run_says() -> None:
    drawn, committed = picture(), PICTURE.read_text(encoding="utf-8")
    version = r"Matplotlib v[\d.]+"
    if re.findall(version, drawn) != re.findall(version, committed):
        assert texts(drawn)[1:] == texts(committed)[1:]
    else:
        assert drawn == committed
