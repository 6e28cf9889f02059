"""Output that nobody reads to its end, as with ``| head``, or that cannot be written at all."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dpbench.commands.cli import PIPE_CLOSED, main
from dpbench.results.storage import Storage

GRID1 = Path(__file__).parents[1] / "data/saved/grid1.json"


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
    assert [run.status for run in Storage(Path(".dpbench")).listing()[0]] == ["complete"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full, redirect_stdout(full):
        assert main(["show", str(GRID1)]) == 1
        print("the interpreter's last flush is quiet")
    said = "dpbench show: [Errno 28] No space left on device\n"
    assert capsys.readouterr().err == said


def test_output_without_unicode_has_escapes() -> None:
    raw = io.BytesIO()
    with redirect_stdout(io.TextIOWrapper(raw, "ascii")):
        assert main(["show", str(GRID1)]) == 0
        assert b"\\xf7 std" in raw.getvalue()


def test_interrupt_while_commands_are_imported_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "dpbench.commands.cli.build_parser", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    assert main(["list"]) == 130
    assert capsys.readouterr().err == "dpbench: interrupted\n"


@pytest.mark.parametrize(
    ("before", "during"),
    [(signal.SIG_DFL, signal.default_int_handler), (signal.SIG_IGN, signal.SIG_IGN)],
)
def test_hangup_ends_a_command_unless_it_is_to_be_ignored(
    before: signal.Handlers, during: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ``nohup``."""
    heard: list[object] = []
    monkeypatch.setattr(
        "dpbench.commands.list.run",
        lambda options: heard.append(signal.getsignal(signal.SIGHUP)) or 0,
    )
    usual = signal.signal(signal.SIGHUP, before)
    try:
        assert main(["list"]) == 0
        assert (heard, signal.getsignal(signal.SIGHUP)) == ([during], before)
    finally:
        signal.signal(signal.SIGHUP, usual)
