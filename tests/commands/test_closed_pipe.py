"""Output that nobody reads to its end, as with ``| head``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dpbench.cli import PIPE_CLOSED, main
from dpbench.results.storage import Storage


@contextmanager
def nobody_reading(errors: Path) -> Iterator[None]:
    """Standard output is a pipe without a reader, standard error a file."""
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "w") as stdout,
        errors.open("w") as stderr,
        redirect_stdout(stdout),
        redirect_stderr(stderr),
    ):
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", [["list"], ["list", "--help"]])
def test_closed_pipe_ends_a_command_without_a_word(arguments: list[str], tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    with nobody_reading(said):
        assert main(arguments) == PIPE_CLOSED
    assert said.read_text() == ""


def test_run_that_nobody_reads_is_saved_all_the_same(tmp_path: Path) -> None:
    cell = ["--model-size", "tiny", "--batch-size", "2", "--seq-len", "8"]
    run = ["run", "--instrument", "logical", "--trainer", "standard", *cell]
    said = tmp_path / "said.txt"
    with nobody_reading(said):
        assert main([*run, "--save", "unread"]) == PIPE_CLOSED
    assert "saved .dpbench/cpu-logical/0001_unread.json" in said.read_text()
    assert [run.status for run in Storage(Path(".dpbench")).listing().runs] == ["complete"]
