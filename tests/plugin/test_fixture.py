"""The ``ncu`` fixture, as any project that installs dpbench can use it."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite


def test_it_takes_a_case_or_the_fields_of_one(project: RunSuite, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_suite="""
        from dpbench import Case
        def test_report(ncu):
            cell = {"batch_size": 4, "seq_len": 64, "model_size": "tiny"}
            standard = ncu("standard", **cell)
            dpsgd = ncu(Case("dpsgd", **cell))
            assert dpsgd.dram_bytes == dpsgd.phases.dram_bytes.sum()
            assert list(dpsgd.phases.index)[:3] == ["forward", "backward", "clip"]
            assert dpsgd.ratio_to(standard) == dpsgd.dram_bytes / standard.dram_bytes
            assert dpsgd.ratio_to(standard, "global_load_bytes", phase="backward") > 1
            assert set(dpsgd.frame.instrument) == {"ncu"}
            assert "per step and phase" in str(dpsgd)
        """
    )
    project().assert_outcomes(passed=1)


def test_a_ratio_between_different_configurations_is_refused(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_report(ncu):
            cell = {"batch_size": 4, "model_size": "tiny"}
            ncu("dpsgd", seq_len=64, **cell).ratio_to(ncu("standard", seq_len=32, **cell))
        """
    )
    result = project()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*differ in more than the trainer*"])


def test_without_an_option_that_measures_it_skips_also_a_test_that_takes_it_by_name(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_report(request):
            request.getfixturevalue("ncu")("dpsgd", batch_size=4, seq_len=64, model_size="tiny")
        """
    )
    result = project("-n0", "-rs", "--dpbench-save=nothing", replayed=False)
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["dpbench: 1 test measures with --ncu", "*needs --ncu"])
    assert not list((pytester.path / ".dpbench").rglob("*.json"))
