"""Tests that commands in the documents exist, code runs, and printed text is printed.

Commands that need a GPU are not run. `test_docs_readme.py` runs README's commands for a laptop.
tests/bench checks generated tables.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import dpbench
import dpbench.private  # before pytester restores modules: operators are registered only once
from bench.runs import printed
from dpbench import TRAINERS, Case
from dpbench.commands.cli import build_parser, main
from tests.logical.layers import count_by_layers
from tests.plugin import conftest as sessions
from tests.recorded import unpacked

imports = sessions.imports  # a fixture

ROOT = Path(__file__).parents[1]
UPSTREAM = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs/upstream").glob("*.md"))
RESULTS = "docs/results/README.md"
RANKS = "docs/several-gpus.md"
REFERENCE = "docs/reference.md"
TRAIN = "docs/train.md"
PAGES = ("docs/guide.md", "docs/findings.md", TRAIN, REFERENCE, RANKS, RESULTS)
DOCUMENTS = ("README.md", *PAGES, *UPSTREAM)
WITHOUT_GPU = ("show", "compare")
"""Commands that only read files. They are run if the repository has these files."""

PRINTED_AGAIN = (
    "(no hardware)",
    "68.29",
    "(train.py:8)",
    "aten.clone",
    "logical_bytes",
    "padding_idx",
    "channels_last",
    "Opacus takes",
    "256 float32",
)
"""Text of blocks that other tests print again."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str
    before: str
    """The text between the previous block and this block."""

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> Iterator[list[str]]:
        """Yield the commands of a shell block or of a transcript as argument lists."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if self.language == "bash" or line.startswith("$ "):
                line = line.removeprefix("$ ").partition(";")[0]
                words = shlex.split(line, comments=True)
                if words:
                    yield words


@cache
def blocks(document: str) -> tuple[Block, ...]:
    """Return the fenced blocks of a document, which may be indented in a list."""
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    found, start, end = [], None, -1
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        indent = len(line) - len(line.lstrip())
        text = "\n".join(inner[indent:] for inner in lines[start + 1 : number])
        before = "\n".join(lines[end + 1 : start])
        found.append(Block(document, start + 1, lines[start].strip(" `"), text, before))
        start, end = None, number
    return tuple(found)


def block_with(document: str, words: str) -> str:
    """Return the text of the one block of a document that contains these words."""
    (text,) = [block.text for block in blocks(document) if words in block.text]
    return text


def commands(program: str) -> list[tuple[str, list[str]]]:
    """Return place and arguments of each command of a program, without repetitions."""
    found = {
        shlex.join(words): (str(block), words[1:])
        for document in DOCUMENTS
        for block in blocks(document)
        for words in block.commands
        if words[0] == program and "…" not in words
    }
    return list(found.values())


def flat(text: str) -> str:
    """Remove dates, times, and characters in which Markdown tables differ from terminal tables."""
    return " ".join(re.sub(r"[|#]|\d{4}-\d\d-\d\d \d\d:\d\d|in \d+\.\d+s", " ", text).split())


def lines_with_numbers(text: str) -> list[str]:
    """Return the lines that contain a number. Rules and heads of columns contain none."""
    return [
        flat(line)
        for line in text.splitlines()
        if re.search(r"(?<![A-Za-z\d])\d", line) and not line.startswith("$ ")
    ]


def assert_printed(block: str, printed: str) -> None:
    """Check that each line with a number in a document's block was printed."""
    shown = flat(printed)
    assert [line for line in lines_with_numbers(block) if line not in shown] == []


def test_commands_of_the_documents_are_understood(pytester: pytest.Pytester) -> None:
    for where, arguments in commands("dpbench"):
        try:
            build_parser(arguments[0]).parse_args(arguments)
        except SystemExit:
            pytest.fail(f"{where}: {shlex.join(arguments)}")
    for _, arguments in commands("pytest"):
        files = ("tests/", "test_")
        pytester.parseconfig(*(each for each in arguments if not each.startswith(files)))


def reading_files() -> Iterator[tuple[str, list[str]]]:
    """Yield the commands that read only files of this repository."""
    for where, arguments in commands("dpbench"):
        files = [word for word in arguments[1:] if "/" in word]
        reads = arguments[0] in WITHOUT_GPU and not {"counted.json", "--html"} & {*arguments}
        if reads and files and all(any(ROOT.glob(f)) for f in files):
            yield where, arguments


def test_commands_that_read_committed_files_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    for where, arguments in reading_files():
        expanded = [
            str(path)
            for word in arguments
            for path in (
                [p.relative_to(ROOT) for p in sorted(ROOT.glob(word))] if "*" in word else [word]
            )
        ]
        assert main(expanded) == 0, f"{where}: {capsys.readouterr().err}"
        assert lines_with_numbers(capsys.readouterr().out), where


def test_the_recorded_kernels_are_shown_as_the_guide_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (arguments,) = [
        words for _, words in commands("dpbench") if words[0] == "show" and "--phase" in words
    ]
    report = unpacked(arguments[1].partition("tiny-fp32/")[2], tmp_path)
    assert main(["show", str(report), *arguments[2:]]) == 0
    assert "gemv" in capsys.readouterr().out


def test_printed_blocks_of_the_documents_are_of_the_results() -> None:
    files = (ROOT / "docs/results").glob("*.txt")
    results = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for block in (block for document in DOCUMENTS for block in blocks(document)):
        if block.language == "" and not any(words in block.text for words in PRINTED_AGAIN):
            assert lines_with_numbers(block.text), str(block)
            assert_printed(block.text, results)


def test_examples_in_python_run() -> None:
    for block in (*blocks("docs/guide.md"), *blocks(REFERENCE)):
        if block.language == "python" and "def test_" not in block.text:
            exec(block.text, {"__name__": "example"})


@pytest.mark.filterwarnings("ignore")
def test_the_page_about_training_runs_in_its_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    for block in (block for block in blocks(TRAIN) if block.language == "python"):
        if "transformers" in block.text:
            pytest.importorskip("transformers")
            pytest.importorskip("peft")
        exec(block.text, names)


def test_the_trainer_of_the_documents_is_measured_and_passes_verify(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = block_with("CONTRIBUTING.md", "class LoopTrainer")
    assert trainer.count("\n") < 40
    (tmp_path / "mytrainers.py").write_text(trainer)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(TRAINERS, "_targets", dict(TRAINERS._targets))
    shown = (("CONTRIBUTING.md", "dpbench smoke"), ("docs/guide.md", "dpbench verify"))
    lines = "\n".join(block_with(*each) for each in shown).splitlines()
    lines = [line for line in lines if ":LoopTrainer" in line]
    assert [shlex.split(line)[1] for line in lines] == ["smoke", "step", *["verify"] * 3]
    for line in lines:
        status, shown = main(shlex.split(line)[1:]), capsys.readouterr()
        assert status == 0, shown
        unsaid = "poisson" in line or "verify" not in line
        assert ("not checked: Poisson samples" in shown.out) == (not unsaid)


def test_a_change_is_found_as_the_guide_shows(tmp_path: Path) -> None:
    """Paste the block in an empty folder, as a user does."""
    paste = block_with("docs/guide.md", "git init -q")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST", "COV"))}
    environment |= {"PATH": path, "COLUMNS": "80"}
    pasted = subprocess.run(
        ["bash"], cwd=tmp_path, env=environment, input=paste, capture_output=True, text=True
    )
    assert pasted.returncode == 1, pasted.stderr
    assert_printed(block_with("docs/guide.md", "(train.py:8)"), pasted.stdout)
    assert "(train.py:8)" in pasted.stdout
    (reference,) = tmp_path.glob("*.json")
    assert reference.stat().st_size < 7_000
    committed = ["git", "ls-files"]
    files = subprocess.run(committed, cwd=tmp_path, capture_output=True, text=True).stdout.split()
    assert files == ["bytes.json", "test_bytes.py", "train.py"]


def test_options_named_in_the_documents_exist(pytestconfig: pytest.Config) -> None:
    for document in ("README.md", "docs/guide.md", REFERENCE):
        text = (ROOT / document).read_text(encoding="utf-8")
        for name in {*re.findall(r"--(?:dpbench|ncu)-[a-z-]*[a-z]", text)}:
            pytestconfig.getoption(name)


def test_the_reference_lists_every_public_name() -> None:
    reference = (ROOT / REFERENCE).read_text(encoding="utf-8")
    table = reference.partition("## Names of the Python API")[2].partition("\n## ")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", table, re.M)))
    assert sorted(listed) == sorted(dpbench.__all__)


def test_opacus_moves_the_bytes_that_the_list_of_changes_prints() -> None:
    """Extrapolate the counts from models with one layer and with two."""
    for trainer in ("dpsgd", "dpsgd_ghost"):
        counted = count_by_layers(Case(trainer, batch_size=8, seq_len=256, model_size="1b"))
        _, said, _ = printed("upstream.txt", "Opacus", trainer)
        assert f"{counted.logical_bytes / 1e9:.1f}" == f"{said:.1f}"


def test_documents_stay_short() -> None:
    most = {"README.md": 120, "docs/guide.md": 300, "docs/findings.md": 200, REFERENCE: 300}
    most |= {RANKS: 160, TRAIN: 150}
    most |= {
        page: 135 if "```diff" in (ROOT / page).read_text("utf-8") else 85 for page in UPSTREAM
    }
    lines = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in most}
    assert {name: number for name, number in lines.items() if number > most[name]} == {}


def test_no_page_has_the_marks_of_a_merge() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").rglob("*.md")]
    marks = re.compile(r"^(?:<{7} |>{7} )", re.M)
    assert [page.name for page in pages if marks.search(page.read_text("utf-8"))] == []


@pytest.mark.filterwarnings("ignore")
def test_the_gradients_that_opacus_gets_wrong_are_as_far_off_as_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = "docs/upstream/gradients.md"
    exec(block_with(page, "def show"), {"__name__": "gradients"})
    assert capsys.readouterr().out == f"{block_with(page, 'reflect  ')}\n"


LINKING = (*DOCUMENTS, "CONTRIBUTING.md", "bench/peers/README.md")


def test_links_lead_to_existing_files_and_headings() -> None:
    for page in LINKING:
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text("utf-8")):
            path, _, heading = target.partition("#")
            there = ((ROOT / page).parent / path) if path else ROOT / page
            assert there.exists(), f"{page}: {target}"
            if heading:
                titles = re.findall(r"^#+ (.*)", there.read_text("utf-8"), re.M)
                slugs = [re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in titles]
                assert heading in slugs, f"{page}: {target}"
