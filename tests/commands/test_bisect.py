"""``dpbench bisect``: the commit or version that made a metric worse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.results.run import Run
from tests.commands.seeded import LIMIT, Repository, numbers, run_of, tried


@pytest.mark.repeats
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))]
)
def test_the_first_bad_of_a_hundred_commits_is_named(
    seed: int, repository: Repository, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    moved, bad = numbers(seed)
    commits = repository.commit_all(moved)
    (repository.folder / "moved").write_text("1e12")  # what is not committed does not count
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", *repository.writes]) == 0
    out = capsys.readouterr().out
    assert f"\nfirst bad: {commits[bad]}  2023-11-14 " in out
    assert f"  Change number {bad}\n" in out
    assert len(tried(out)) <= 2 + 7
    verdicts = {line[0]: line[5] for line in tried(out)}
    assert verdicts[commits[bad][:9]] == "bad"
    assert verdicts[commits[bad - 1][:9]] == "good"
    assert repository.worktrees == 1
    assert not list((tmp_path / "temporary").iterdir())


def test_values_and_ratios_of_each_commit_are_printed(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 1e6, 1.5e6])
    assert main(["bisect", LIMIT, f"{commits[0]}..", "--", *repository.writes]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"measuring {commits[0][:9]} and {commits[2][:9]} first",
        "following dpsgd-bs4-seq64-tiny-fp32 by logical, limit peak_memory_bytes:2%",
        f"{commits[0][:9]}     1.00 MB  × 1.0000  good  2023-11-14 22:13  Change number 0",
        f"{commits[2][:9]}     1.50 MB  × 1.5000  bad   2023-11-14 22:13  Change number 2",
        f"{commits[1][:9]}     1.00 MB  × 1.0000  good  2023-11-14 22:13  Change number 1",
        "",
        f"first bad: {commits[2]}  2023-11-14 22:13  Change number 2",
        "1.00 MB -> 1.50 MB",
        "",
    ]


def test_a_fall_is_found_by_a_limit_on_both_sides(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 1e6, 1e6, 0.9e6, 0.9e6])
    command = [f"{commits[0]}..main", "--", *repository.writes]
    assert main(["bisect", "peak_memory_bytes:2%", *command]) == 2
    assert main(["bisect", "peak_memory_bytes:±2%", *command]) == 0
    assert f"first bad: {commits[3]}" in capsys.readouterr().out


def test_a_commit_of_a_merged_branch_is_named(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    first = repository.commit(moved="1000000")
    repository.git("switch", "--quiet", "--create", "side")
    repository.commit(other="1")
    bad = repository.commit(moved="2000000")
    repository.commit(other="2")
    repository.git("switch", "--quiet", "main")
    repository.commit(third="3")
    repository.git("merge", "--quiet", "side", "--message=merge")
    assert main(["bisect", LIMIT, f"{first}..main", "--", *repository.writes]) == 0
    assert f"first bad: {bad}" in capsys.readouterr().out


def test_commits_whose_command_fails_are_skipped(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = range(10, 14)
    moved = [None if n in broken else 1e6 if n < 16 else 2e6 for n in range(22)]
    commits = repository.commit_all(moved)
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", *repository.writes]) == 0
    out = capsys.readouterr().out
    assert f"{commits[10][:9]} wrote no run (exit code 1): " in out
    assert f"first bad: {commits[16]}" in out


def test_no_commit_is_named_if_it_may_be_one_of_those_skipped(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([1e6, 1e6, None, None, 2e6, 2e6])
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", *repository.writes]) == 2
    out = capsys.readouterr().out
    assert "first bad:" not in out
    rest = out.partition("the first bad one is one of these; all but the last were skipped:\n")[2]
    assert {line.split()[0] for line in rest.splitlines()} == {*commits[2:5]}


def test_the_number_that_grew_most_is_followed(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = [repository.commit(run__json=run_of([1e6], trainers=["standard", "dpsgd"]))]
    for more in (1.0, 1.5):
        changed = run_of([1e6 * more], trainers=["dpsgd"])
        commits.append(
            repository.commit(run__json=merged(changed, run_of([1.1e6], trainers=["standard"])))
        )
    assert main(["bisect", LIMIT, f"{commits[0]}..main", "--", "cp", "run.json", "{json}"]) == 0
    out = capsys.readouterr().out
    assert "following dpsgd-bs4-seq64-tiny-fp32 by logical" in out
    assert f"first bad: {commits[2]}" in out


def merged(*texts: str) -> str:
    """The document of several runs in one."""
    return Run.merge([Run.parse(text.encode(), Path("part")) for text in texts]).text


def test_a_command_runs_in_the_same_folder_of_each_worktree_and_no_hook_does(
    repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = repository.folder / "inside"
    commits = list[str]()
    for value in (1e6, 2e6):
        inside.mkdir(exist_ok=True)
        (inside / "run.json").write_text(run_of([value]))
        commits.append(repository.commit())
    hook = repository.folder / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch '{repository.folder}/ran'\n")
    hook.chmod(0o755)
    monkeypatch.chdir(inside)
    assert main(["bisect", LIMIT, f"{commits[0]}..", "--", "cp", "run.json", "{json}"]) == 0
    assert f"first bad: {commits[1]}" in capsys.readouterr().out
    assert not (repository.folder / "ran").exists()


@pytest.mark.slow
def test_a_real_count_names_the_commit_and_the_operator(
    repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    commits = list[str]()
    for copies in (1, 3):
        (repository.folder / "src").mkdir(exist_ok=True)
        (repository.folder / "src" / "mine.py").write_text(
            "from dpbench import StandardTrainer\n\n\n"
            "class Mine(StandardTrainer):\n"
            "    def train_step(self, batch):\n"
            f"        for _ in range({copies}):\n"
            "            kept = [p.clone() for p in self.model.parameters()]\n"
            "        return super().train_step(batch)\n"
        )
        commits.append(repository.commit(count=str(len(commits))))
    cell = ["--trainer=mine:Mine", "--batch-size=2", "--seq-len=8", "--model-size=100x8x1x2"]
    command = [sys.executable, "-m", "dpbench", "run", "--instrument=logical", *cell]
    assert main(["bisect", "logical_bytes:1%", f"{commits[0]}..main", "--", *command]) == 0
    out = capsys.readouterr().out
    assert f"first bad: {commits[1]}" in out
    assert "What changed most:\n  Mine outside: aten.clone +" in out


# --- times ------------------------------------------------------------------------------------


@pytest.mark.repeats
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_a_time_is_measured_until_the_limit_is_certainly_exceeded(
    seed: int, repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    moved, bad = numbers(seed, commits=20, rise=1.2)
    commits = repository.commit_all([value / 1e9 for value in moved])
    command = [f"{commits[0]}..main", "--", *repository.varies(0.01)]
    assert main(["bisect", "step_time_seconds:8%", *command]) == 0
    out = capsys.readouterr().out
    assert f"first bad: {commits[bad]}" in out
    assert " runs  2023-" in out


def test_a_time_that_cannot_be_told_is_ambiguous(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = repository.commit_all([0.1, 0.1, 0.105, 0.105])
    words = ["step_time_seconds:5%", f"{commits[0]}..main", "--", *repository.varies(0.03)]
    assert main(["bisect", "--repeat=3", *words]) == 2
    out = capsys.readouterr().out
    assert f"{commits[3][:9]}" in out
    assert "ambiguous in 3 runs" in out
    assert "\nambiguous: × 0." in out
    assert "first bad" not in out
