"""``--dpbench-html``: the page says how its session came about, and outlives an empty one."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import RunSuite


def test_a_session_in_which_no_case_ran_leaves_the_last_page_alone(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    page = "--dpbench-html=page.html"
    assert project(page, "-k", "test_dram", "--dpbench-trainer=standard").ret == pytest.ExitCode.OK
    first = (pytester.path / "page.html").read_text(encoding="utf-8")
    assert ">started</td>" in first  # the session, as in the page of a saved run
    assert ">status</td><td>complete</td>" in first

    empty = project(page, "-k", "no_such_test", replayed=False)
    empty.stdout.fnmatch_lines(["*dpbench: no case ran, so page.html was not written*"])
    assert (pytester.path / "page.html").read_text(encoding="utf-8") == first
