"""``--dpbench-only`` and ``--dpbench-skip``: tests with dpbench's fixtures, and those without."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite

SUITE = """
def test_measures(ncu):
    ncu("standard", batch_size=4, seq_len=64, model_size="tiny")

def test_counts(logical_io):
    raise LookupError

def test_plain():
    pass
"""


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        (["--dpbench-only"], {"test_measures": "PASSED", "test_counts": "FAILED"}),
        (["--dpbench-skip"], {"test_plain": "PASSED"}),
        (
            ["--dpbench-only", "--dpbench-skip"],
            {"test_measures": "PASSED", "test_counts": "FAILED"},
        ),
    ],
)
def test_the_others_are_skipped(
    project: RunSuite, pytester: pytest.Pytester, options: list[str], ended: dict[str, str]
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    result = project("-v", *options)
    for test in ("test_measures", "test_counts", "test_plain"):
        result.stdout.fnmatch_lines([f"*::{test} {ended.get(test, 'SKIPPED')}*"])


def test_a_gate_is_not_passed_by_skipping_what_it_judges(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(test_suite=SUITE)
    limit = ["--dpbench-compare-fail=global_load_bytes:5%", "--dpbench-compare-first-run-ok"]
    result = project("--dpbench-skip", *limit)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["ERROR: dpbench: *was not checked*"])


def test_tests_that_measure_no_case_stay_where_they_are(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    """Those of one case come together, in the places that tests of cases have."""
    pytester.makepyfile(
        test_suite="""
        def test_first():
            pass

        def test_case(dpbench_case):
            assert dpbench_case

        def test_between():
            pass

        def test_case_again(dpbench_case):
            assert dpbench_case

        def test_last():
            pass
        """
    )
    result = project("-v", replayed=False)
    named = [line.split()[0].partition("::")[2] for line in result.stdout.lines if "PASSED" in line]
    one, other = "[standard-bs4-seq64-tiny-fp32]", "[dpsgd-bs4-seq64-tiny-fp32]"
    assert named == [
        "test_first",
        *(f"test_case{one}", f"test_case_again{one}"),
        "test_between",
        *(f"test_case{other}", f"test_case_again{other}"),
        "test_last",
    ]
