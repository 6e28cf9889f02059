"""README: its blocks say where they run, and what it has for a laptop works there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpbench.cli import main
from tests.commands.test_exec import ProcessHere
from tests.plugin import conftest as sessions
from tests.test_docs import ROOT, Block, assert_printed, block_with, blocks

imports = sessions.imports  # a fixture: what a session imported stays

LAPTOP, GPU_BOX = "**Laptop.**", "**GPU box.**"
"""What README says before a block: where it runs."""

SETS_UP = "python3 -m venv .venv"
"""How blocks begin that make the environment of this very test, and run the whole suite."""

HEREDOC = re.compile(r"^cat > (\S+) << 'EOF'\n(.*?)^EOF$", re.M | re.S)


@pytest.mark.parametrize("block", blocks("README.md"), ids=str)
def test_each_block_of_the_readme_to_paste_says_where_it_runs(block: Block) -> None:
    said = [block.before.count(where) for where in (LAPTOP, GPU_BOX)]
    assert sorted(said) == ([0, 1] if block.language else [0, 0])


@pytest.fixture
def laptop(
    pytester: pytest.Pytester, imports: sessions.Imports, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Paste a block into a checkout's directory; its commands run in this process."""
    monkeypatch.setattr(
        "dpbench.instruments.script_process.subprocess", SimpleNamespace(Popen=ProcessHere)
    )
    (pytester.path / "docs").symlink_to(ROOT / "docs")

    def paste(text: str) -> None:
        for name, content in HEREDOC.findall(text):
            Path(name).write_text(content, encoding="utf-8")
        for line in HEREDOC.sub("", text).splitlines():
            if line.startswith("dpbench "):
                assert main(shlex.split(line)[1:]) == 0
            elif line:
                program, *arguments = shlex.split(line)
                assert program == "pytest"
                asked = [*sessions.WITHOUT, *arguments]
                assert sessions.in_this_process(pytester, asked, imports).ret == 0

    return paste


@pytest.mark.usefixtures("counted_once")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_what_the_readme_has_for_a_laptop_works_in_order_and_prints_what_it_shows(
    laptop: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    to_paste = [block.text for block in blocks("README.md") if LAPTOP in block.before]
    assert to_paste[0].startswith(SETS_UP)
    for text in to_paste:
        if not text.startswith(SETS_UP):
            laptop(text)
    assert Path("report.html").stat().st_size > 10**6
    shown = capfd.readouterr().out
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (ratio,) = re.findall(r"moves ([\d.]+) times the bytes", readme)
    assert f" {ratio} " in shown
    assert_printed(block_with("README.md", "68.29"), shown)

    ((line,),) = [re.findall(r"`(kept = [^`]+)`", " ".join(readme.split()))]
    script = Path("train.py").read_text(encoding="utf-8")
    step = "    optimizer.step()\n"
    Path("train.py").write_text(script.replace(step, f"    {line}\n{step}"), encoding="utf-8")
    (gate,) = [text for text in to_paste if "--compare-fail" in text]
    assert main(shlex.split(gate)[1:]) == 1
    assert_printed(block_with("README.md", "1% exceeded"), capfd.readouterr().out)
