"""``dpbench history``: a number over saved or committed runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.conditions import code_state
from dpbench.results.storage import Storage
from tests.commands.seeded import Repository, run_of
from tests.results.figures import timed_run

CASE = "dpsgd-bs4-seq64-tiny-fp32"


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.chdir(tmp_path)
    return Storage(tmp_path / ".dpbench")


def save(storage: Storage, *values: float, name: str = "run", **how: object) -> None:
    storage.allocate(name, None, run_of(values, **how))  # type: ignore[arg-type]


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The cells of each line of a table with one word a cell, without its headers."""
    out = capsys.readouterr().out.splitlines()
    return [line.split() for line in out if line[:4].isdigit() and ":" not in line[:12]]


def test_each_run_has_a_line_and_a_change_of_bytes_is_marked(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = {"torch": "2.12.0", "transformers": "4.57.0"}
    save(storage, 1e6, name="first", started="2026-01-02T03:04:05+00:00", versions=versions)
    save(storage, 1.004e6, name="second", versions=versions | {"torch": "2.13.0"})
    save(storage, 1.5e6, name="third", versions=versions | {"transformers": "5.0.0"})
    save(storage, 1.5e6, name="fourth", versions=versions | {"transformers": "5.0.0"})
    assert main(["history", "peak_memory_bytes"]) == 0
    title, _, headers, _, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{CASE}: peak_memory_bytes, logical on logical (no hardware)"
    assert headers.split() == ["number", "name", "date", "commit", "value", "change", "verdict"]
    assert [" ".join(row.split()) for row in rows] == [
        "0001 first 2026-01-02 03:04 - 1.00 MB +0.00% -",
        "0002 second - 1.00 MB +0.40% -",
        "0003 third - 1.50 MB +50.00% changed",
        "0004 fourth - 1.50 MB +0.00% -",
        "0002: torch 2.12.0 -> 2.13.0",
        "0003: torch 2.13.0 -> 2.12.0; transformers 4.57.0 -> 5.0.0",
    ]


@pytest.mark.parametrize(
    ("values", "tolerance", "verdicts"),
    [
        ([1e6, 1.004e6, 1.008e6, 1.008e6], "0.5%", ["-", "-", "changed", "-"]),
        ([1e6, 0.9e6, 0.9e6], "0.5%", ["-", "changed", "-"]),
        ([1e6, 1.3e6], "0.2MB", ["-", "changed"]),
        ([0, 1e6, 1e6], "0.5%", ["-", "changed", "-"]),
    ],
    ids=["drift", "fall", "beyond an amount", "from zero"],
)
def test_a_change_is_one_since_the_last_that_is_marked(
    storage: Storage,
    values: Sequence[float],
    tolerance: str,
    verdicts: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        save(storage, value)
    assert main(["history", "peak_memory_bytes", f"--tolerance={tolerance}"]) == 0
    assert [line[-1] for line in lines(capsys)] == verdicts


def test_a_time_has_changed_if_its_steps_do_not_overlap(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (
        [0.100, 0.101, 0.102],
        [0.100, 0.101, 0.102],
        [0.101, 0.104, 0.106],
        [0.120, 0.121, 0.122],
        [0.121],
        [0.140],
    ):
        save(storage, *steps, metric="step_time_seconds")
    assert main(["history", "step_time_seconds"]) == 0
    verdicts = ["-", "-", "ambiguous", "changed", "-", "ambiguous"]
    assert [line[-1] for line in lines(capsys)] == verdicts


def test_a_time_at_lowered_clocks_has_a_note(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in (timed_run(1.98e9, 0), timed_run(1.2e9, 0x20)):
        storage.allocate("run", None, run.text)
    assert main(["history", "step_time_seconds"]) == 0
    note = "0002: lowered clocks: no -> thermal slowdown in 1 of 1 steps; SM clock 1.98 -> 1.20 GHz"
    assert capsys.readouterr().out.splitlines()[-1] == note


def test_each_case_has_a_table(storage: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    for value in (1e6, 2e6):
        save(storage, value, trainers=["standard", "dpsgd", "dpsgd_ghost"])
    assert main(["history", "peak_memory_bytes"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if " on " in line]
    assert [title.partition("-")[0] for title in titles] == ["standard", "dpsgd", "dpsgd_ghost"]


def test_a_ratio_is_listed_without_the_baselines_own(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    save(storage, 1e6, trainers=["standard", "dpsgd"])
    assert main(["history", "peak_memory_ratio"]) == 0
    assert capsys.readouterr().out.count("peak_memory_ratio") == 1


def test_the_first_usual_metric_is_listed_by_default(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    save(storage, 0.1, metric="step_time_seconds")
    assert main(["history"]) == 0
    assert f"{CASE}: step_time_seconds, timing on cpu" in capsys.readouterr().out


# --- committed runs -------------------------------------------------------------------------------


def test_runs_are_read_from_the_commits_that_change_them(
    repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = repository.commit(run__json=run_of([1e6]))
    repository.commit(other="1")
    second = repository.commit(run__json=run_of([2e6]))
    repository.commit(run__json=None)
    damaged = repository.commit(run__json="{")
    (repository.folder / "inside").mkdir()
    monkeypatch.chdir(repository.folder / "inside")
    command = ["history", "peak_memory_bytes", f"--commits={first}..", "--file=../run.json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    table = [line.split() for line in captured.out.splitlines()[4:6]]
    assert [(line[0], line[-1]) for line in table] == [(first[:9], "-"), (second[:9], "changed")]
    assert "change it" in captured.out
    assert f"skipped: run file {damaged} cannot be read" in captured.err


SIGNED = """tree {tree}
parent {parent}
author Ada <ada@example.org> 1700000000 +0000
committer Ada <ada@example.org> 1700000000 +0000
gpgsig -----BEGIN PGP SIGNATURE-----
 iQ
 -----END PGP SIGNATURE-----

signed
"""


def test_git_runs_no_program_that_its_configuration_names(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit(run__json=run_of([1e6]), __gitattributes="*.json diff=mine\n")
    first = repository.commit(moved="1")
    (repository.folder / "run.json").write_text(run_of([2e6]))
    repository.git("add", "--all")
    signed = SIGNED.format(tree=repository.git("write-tree"), parent=first)
    name = repository.git("hash-object", "-t", "commit", "-w", "--stdin", data=signed)
    repository.git("reset", "--quiet", "--hard", name)
    absent = repository.git("rev-parse", "HEAD:moved")
    ran = repository.folder.with_name("ran")
    program = repository.folder / ".git" / "program"
    program.write_text(f'#!/bin/sh\necho "$0 $@" >> "{ran}"\necho gpg: good >&2\n')
    program.chmod(0o755)
    (repository.folder / ".git" / "hooks" / "post-checkout").symlink_to(program)
    for setting, value in {
        "gpg.program": str(program),
        "log.showSignature": "true",
        "core.fsmonitor": str(program),
        "core.pager": str(program),
        "core.sshCommand": str(program),
        "diff.external": str(program),
        "diff.mine.textconv": str(program),
        "diff.mine.command": str(program),
        "extensions.partialClone": "origin",
        "remote.origin.url": "ssh://example.invalid/it",
        "remote.origin.promisor": "true",
        "core.repositoryFormatVersion": "1",
    }.items():
        repository.git("config", setting, value)
    ran.unlink(missing_ok=True)
    command = ["history", "peak_memory_bytes", f"--commits={first}..main", "--file=run.json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()[4:6]]
    assert [(line[0], line[-1]) for line in lines] == [(first[:9], "-"), (name[:9], "changed")]
    assert "signed  2023-11-14 22:13" in captured.out
    (repository.folder / "run.json").write_text("{}")
    state = code_state(repository.folder)
    assert state is not None
    assert state["dirty"]
    stored = repository.folder / ".git" / "objects" / absent[:2] / absent[2:]
    stored.unlink()  # as in a partial clone, which would fetch it
    assert main([*command[:3], "--file=moved"]) == 2
    assert not ran.exists(), ran.read_text()


# --- what cannot be listed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["flops"], ".dpbench has no flops@step"),
        (["peak"], "unknown metric 'peak'; choose from"),
        (["peak_memory_bytes", "--tolerance=much"], "write METRIC[@PHASE]:5%"),
        (["--commits=a..b"], "--commits needs --file, and --file needs --commits"),
        (["--commits=a..b", "--file=run.json"], "git finds no range 'a..b' here"),
    ],
)
def test_bad_input_gets_one_line(
    storage: Storage, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(storage, 1e6)
    assert main(["history", *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("dpbench history: ")
    assert words in line


def test_a_folder_without_runs_is_said_to_have_none(
    storage: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "--storage=absent"]) == 2
    assert capsys.readouterr().err == "dpbench history: no runs in absent\n"
