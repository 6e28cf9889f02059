"""``--dpbench-histogram``: the page of charts, with the run that is compared with beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.plugin.conftest import RunSuite
from tests.plugin.saved_runs import less, recorded_document, save


def test_the_reference_stands_beside_the_session(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    save(pytester.path, "earlier", recorded_document(less))
    result = project("--dpbench-histogram=charts/after", "--dpbench-compare")
    assert result.ret == pytest.ExitCode.OK
    page = (pytester.path / "charts/after.html").read_text(encoding="utf-8")
    assert "4 cases measured on NVIDIA H200." in page
    assert "tiny fp32, 0001_earlier" in page
    assert "tiny fp32, after" in page


def test_without_a_prefix_the_time_is_its_name(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    project("--dpbench-trainer=standard", "-k", "dram", "--dpbench-histogram")
    [page] = pytester.path.glob("dpbench_*T*Z.html")
    assert "1 case measured on NVIDIA H200." in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dpbench-histogram=a", "--dpbench-html=a.html"], "name the same file, 'a.html'"),
        (["--dpbench-histogram=/dev/null/a"], "/dev/null cannot be written"),
    ],
)
def test_what_cannot_work_is_one_line(
    refused: Callable[..., str], options: list[str], words: str
) -> None:
    assert words in refused(*options)
