"""Tests of the outcomes that the processes of a session share."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dpbench.core.case import Case
from dpbench.core.subject import Script
from dpbench.results.outcome import Outcome
from dpbench.results.rows import STEP, Measurement
from dpbench.session_store import Request, SessionStore

CASE = Case("dpsgd", batch_size=8, seq_len=256)


def measured(case: Case) -> Outcome:
    row = Measurement(case, "ncu", STEP, "dram_read_bytes", 5.0, "B", 0, "H200", "ncu 2025.3")
    return Outcome(case, (row,), seconds=1.0)


def out_of_memory(case: Case) -> Outcome:
    return Outcome(case, (), 1.0, error="CaseOutOfMemory", message="too big", log_tail="…")


def never(case: Case) -> Outcome:
    raise AssertionError(f"{case.id} was measured again")


@pytest.mark.parametrize("measure", [measured, out_of_memory])
def test_case_is_measured_once_whether_it_succeeds_or_fails(
    tmp_path: Path, measure: Callable[[Case], Outcome]
) -> None:
    store = SessionStore(tmp_path)
    first = store.once(CASE, measure)
    assert first == measure(CASE)
    assert store.once(CASE, never) == first


@pytest.mark.parametrize(
    "other",
    [
        {"trainer": "standard"},
        {"batch_size": 16},
        {"seq_len": 512},
        {"precision": "bf16"},
        {"attention": "dp_mha"},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_cases_that_differ_in_one_axis_are_measured_separately(
    tmp_path: Path, other: dict[str, object]
) -> None:
    store = SessionStore(tmp_path)
    store.once(CASE, measured)
    different = replace(CASE, **other)  # type: ignore[arg-type]
    assert store.once(different, out_of_memory) == out_of_memory(different)
    assert store.once(CASE, never) == measured(CASE)


def test_similar_and_unusual_names_have_separate_outcomes(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    names = ["test_it[a/b]", "test_it[a_b]", "x" * 1000, f"{'x' * 1000}y", "\0", "../up"]
    cases = [Script(name) for name in names]
    assert [store.once(case, measured).case for case in cases] == cases
    assert {outcome.case for outcome in SessionStore(tmp_path).outcomes()} == {*cases}


def test_outcomes_of_different_instruments_are_separate(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.once(CASE, measured, by=("timing", "ncu"))
    assert store.once(CASE, out_of_memory, by=("logical",)) == out_of_memory(CASE)
    assert store.once(CASE, never, by=("timing", "ncu")) == measured(CASE)
    assert store.outcomes() == [measured(CASE), out_of_memory(CASE)]


def test_outcomes_survive_the_process_that_measured_them(tmp_path: Path) -> None:
    SessionStore(tmp_path).once(CASE, measured)
    later = SessionStore(tmp_path)
    assert later.outcomes() == [measured(CASE)]
    assert later.once(CASE, never) == measured(CASE)


def test_an_interrupted_case_is_measured_again(tmp_path: Path) -> None:
    def interrupted(case: Case) -> Outcome:
        raise KeyboardInterrupt

    store = SessionStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        store.once(CASE, interrupted)
    assert store.outcomes() == []
    assert store.once(CASE, measured) == measured(CASE)


def test_an_outcome_that_cannot_be_written_is_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    store = SessionStore(tmp_path)
    monkeypatch.setattr("dpbench.session_store.write_text", full)
    assert store.once(CASE, measured) == measured(CASE)
    assert store.once(CASE, never) == measured(CASE)
    assert store.outcomes() == [measured(CASE)]
    store.ask([Request("it", CASE)])
    assert store.requests == [Request("it", CASE)]
    monkeypatch.undo()
    other = SessionStore(tmp_path)
    other.take(store.unwritten)
    assert (other.unwritten, other.outcomes()) == ({}, store.outcomes())
    assert other.requests == [Request("it", CASE)]


def test_all_processes_know_the_requests_in_order(tmp_path: Path) -> None:
    one, other = SessionStore(tmp_path), SessionStore(tmp_path)
    known = Request("it", CASE, ("ncu",), limits=("dram_bytes:5%",))
    asks = replace(known, params={"size": "1"}, extra_info={"why": "size"})
    one.ask([known, Request("by name")])
    other.ask([asks])
    for each in (one, other):
        assert each.requests == [known, Request("by name"), asks]
        assert each.requests[0].asked == [(CASE, "ncu")]
        assert each.outcomes() == []
    one.once(CASE, measured, by=("ncu",))
    [outcome] = other.outcomes()
    assert outcome.tests == ()  # its instruments are not those of the requests


def test_an_outcome_lists_the_tests_that_requested_it(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.ask([Request("skipped", CASE, ("ncu",)), Request("it", CASE, ("ncu",), params={})])
    store.once(CASE, lambda case: replace(measured(case), instruments=("ncu",)), by=("ncu",))
    [outcome] = store.outcomes()
    assert outcome.tests == ({"test": "it", "params": {}},)


def test_outcomes_are_in_the_order_in_which_they_finished(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    cases = [replace(CASE, batch_size=batch_size) for batch_size in (8, 16, 4)]
    for second, case in enumerate(cases):
        there = {*tmp_path.iterdir()}
        store.once(case, measured)
        for path in {*tmp_path.iterdir()} - there:
            os.utime(path, (second, second))  # real cases take longer than a clock tick
    assert [outcome.case for outcome in store.outcomes()] == cases


def test_a_new_store_has_no_outcomes(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    with store.lock():
        assert store.outcomes() == []


def test_case_is_measured_once_among_threads(tmp_path: Path) -> None:
    made: list[Case] = []

    def count(case: Case) -> Outcome:
        made.append(case)
        return measured(case)

    cases = [CASE, replace(CASE, batch_size=16)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: SessionStore(tmp_path).once(case, count), cases * 4))
    assert sorted(made, key=lambda case: case.batch_size) == cases
    assert found == [measured(case) for case in cases * 4]


PROCESS = """
import os, pathlib, sys, time
from dpbench.core.case import Case
from dpbench.results.outcome import Outcome
from dpbench.session_store import SessionStore

directory = pathlib.Path(sys.argv[1])

def measure(case):
    with open(directory / "measured", "a") as stream:
        stream.write(f"{os.getpid()}\\n")
    time.sleep(0.2)  # the other process asks meanwhile
    return Outcome(case, (), 1.0, error="CaseFailed", message=str(os.getpid()))

input()  # until both are ready
store = SessionStore(directory)
print(store.once(Case("dpsgd", batch_size=8, seq_len=256), measure).message)
"""


def test_case_is_measured_once_among_processes(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = {process.communicate()[0].strip() for process in processes}
    finally:
        for process in processes:
            process.kill()
    [measurer] = (tmp_path / "measured").read_text().split()
    assert answers == {measurer}
    assert [outcome.message for outcome in SessionStore(tmp_path).outcomes()] == [measurer]
