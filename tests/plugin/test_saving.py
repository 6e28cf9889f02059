"""Where runs are saved, and a storage that breaks down."""

from __future__ import annotations

import pytest

from dpbench.results.schema import parsed
from dpbench.results.storage import Storage
from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import recorded_document, save


def test_runs_of_counted_cases_lie_in_a_folder_of_their_own(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(
        test_suite="""
        def test_counts(logical_io):
            logical_io("standard", batch_size=2, seq_len=8, model_size="tiny")
        """
    )
    project("-n0", "--dpbench-autosave", "--dpbench-storage=kept", replayed=False)
    [path] = Storage(pytester.path / "kept").paths()
    assert path.parent.name == "cpu-logical"


def test_storage_that_breaks_down_is_one_error_and_leaves_earlier_runs(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    earlier = save(pytester.path, "earlier", recorded_document())
    text = earlier.read_text()
    pytester.makepyfile(
        test_suite="""
        import pathlib, shutil
        case = dict(batch_size=4, seq_len=64, model_size="tiny")
        def test_measures(ncu):
            ncu("standard", **case)
        def test_takes_the_folder_away(ncu):
            folder = pathlib.Path(".dpbench/NVIDIA-H200")
            folder.rename("moved")
            folder.touch()
            ncu("dpsgd", **case)
        """
    )
    result = project("-n0", "--dpbench-save=first", "--dpbench-json=run.json")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert result.stdout.str().count("ERROR: dpbench: ") == 1
    result.stdout.fnmatch_lines(["ERROR: dpbench: *NVIDIA-H200*"])
    assert (pytester.path / "moved/0001_earlier.json").read_text() == text
    kept = parsed((pytester.path / "moved/0002_first.json").read_bytes())
    assert {row["trainer"] for row in kept["rows"]} == {"standard"}
    assert len(parsed((pytester.path / "run.json").read_bytes())["cases"]) == 2
