"""Tests that README's commands for a laptop work and print the text in README."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpbench.commands.cli import main
from tests.commands.test_exec import ProcessHere
from tests.plugin import conftest as sessions
from tests.test_docs import ROOT, assert_printed, block_with, blocks

imports = sessions.imports  # a fixture

SETS_UP = "python3 -m venv .venv"
"""First words of the three blocks that install. `.ci/run` runs all but that of PyTorch for CPUs."""

README = (ROOT / "README.md").read_text(encoding="utf-8")

HEREDOC = re.compile(r"^cat > (\S+) << 'EOF'\n(.*?)^EOF$", re.M | re.S)


@pytest.mark.parametrize("marker", ["<!-- the main command -->", "<!-- the test command -->"])
def test_two_commands_set_everything_up(marker: str) -> None:
    [block] = [block for block in blocks("README.md") if block.before.rstrip().endswith(marker)]
    [line] = block.text.splitlines()
    assert line.startswith(SETS_UP)
    assert "pip install" in line


@pytest.mark.slow
def test_the_main_command_counts_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Run the command with a small model; `.ci/run` runs it unchanged."""
    monkeypatch.chdir(tmp_path)
    command = block_with("README.md", "&& dpbench run").rpartition("&& dpbench ")[2]
    assert main([*shlex.split(command), "--model-size", "tiny"]) == 0
    printed = capsys.readouterr()
    assert "logical (no hardware): MB per step" in printed.out
    assert "fused" in printed.out


@pytest.fixture
def laptop(
    pytester: pytest.Pytester, imports: sessions.Imports, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Return a function that runs the commands of a block in this process."""
    monkeypatch.setattr("dpbench.instruments.script.subprocess", SimpleNamespace(Popen=ProcessHere))

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
def test_the_commands_for_a_laptop_work_in_order_and_print_the_text_in_readme(
    laptop: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    commands = [block for block in blocks("README.md") if block.language == "bash"]
    to_paste = [block.text for block in commands if not block.text.startswith(SETS_UP)]
    assert len(to_paste) == len(commands) - 3
    for text in to_paste:
        laptop(text)
    shown = capfd.readouterr().out
    assert_printed(block_with("README.md", "68.29"), shown)

    ((line,),) = [re.findall(r"`(kept = [^`]+)`", " ".join(README.split()))]
    script = Path("train.py").read_text(encoding="utf-8")
    step = "    optimizer.step()\n"
    Path("train.py").write_text(script.replace(step, f"    {line}\n{step}"), encoding="utf-8")
    (gate,) = re.findall(r"^dpbench .*--compare-fail.*", "\n".join(to_paste), re.M)
    assert main(shlex.split(gate)[1:]) == 1
    assert_printed(block_with("README.md", "1% exceeded"), capfd.readouterr().out)

    (private,) = [block.text for block in blocks("README.md") if block.language == "python"]
    private = private.replace("**target)", "seed=1, **target)")  # draws the same batches each time
    Path("train.py").write_text(f"{script.partition('if ')[0]}{private}", encoding="utf-8")
    (against,) = re.findall(r"`(dpbench exec [^`]+--baseline [^`]+)`", README)
    assert main(shlex.split(against)[1:]) == 0
    (ratio,) = re.findall(r"^train +(\d+\.\d+) .*\nplain +1\.00", capfd.readouterr().out, re.M)
    assert f"about {float(ratio):.1f} times the bytes" in README


@pytest.mark.filterwarnings("ignore")
def test_the_script_trains_privately_with_the_lines_of_readme(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (script,) = [text for name, text in HEREDOC.findall(README) if name == "train.py"]
    (private,) = [block.text for block in blocks("README.md") if block.language == "python"]
    exec(f"{script.partition('if ')[0]}{private}", {"__name__": "private"})
    assert f"`{capsys.readouterr().out.strip()}`" in README
