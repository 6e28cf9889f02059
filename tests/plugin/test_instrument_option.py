"""``--dpbench-instrument``: the fixture measures with what it names, here one from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.commands.cli import main
from dpbench.core.metrics import METRICS
from tests.plugin.conftest import RunSuite
from tests.test_instrument_from_outside import write

CHOSEN = ["--dpbench-instrument=meter:Power", "--dpbench-device=cpu", "-n0"]
SUITE = """
import pytest

def test_energy(ncu):
    assert ncu("standard", batch_size=4, seq_len=16, model_size="tiny").value("energy_joules") > 1

@pytest.mark.xfail
def test_may_fail(ncu):
    ncu("dpsgd", batch_size=4, seq_len=16, model_size="tiny")
    assert False
"""


@pytest.fixture(autouse=True)
def metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the instrument adds one."""
    monkeypatch.setattr(METRICS, "_known", dict(METRICS._known))


def test_it_is_saved_judged_drawn_and_compared(
    project: RunSuite, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    write(pytester.path)
    pytester.makepyfile(test_suite=SUITE)
    first = project(*CHOSEN, "--dpbench-save=first", replayed=False)
    first.assert_outcomes(passed=1, xfailed=1)
    assert main(["show", "1", "--html=report.html"]) == 0
    assert "energy J" in Path("report.html").read_text()

    write(pytester.path, joules=3.0)
    limit = "--dpbench-compare-fail=energy_joules:5%"
    worse = project(*CHOSEN, limit, "--dpbench-save=second", replayed=False)
    worse.assert_outcomes(failed=1, xfailed=1)
    worse.stdout.fnmatch_lines(["ERROR: dpbench: energy_joules@step of dpsgd-*limit 5%"])
    capsys.readouterr()
    assert main(["compare", "1", "2", "--fail=energy_joules:5%"]) == 1
    assert "2 regressions" in capsys.readouterr().err


def test_a_session_that_measured_nothing_fails(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    write(pytester.path)
    pytester.makepyfile(test_suite="def test_nothing(): pass")
    result = project(*CHOSEN, replayed=False)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*--dpbench-instrument is set, but nothing was measured*"])


def test_a_fixture_that_outlives_a_test_cannot_measure(
    project: RunSuite, pytester: pytest.Pytester
) -> None:
    """What it measured would belong to whichever test came first, with that one's limits."""
    write(pytester.path)
    pytester.makepyfile(
        test_suite="""
        import pytest

        @pytest.fixture(scope="session")
        def measured(ncu): ...

        def test_it(measured): ...
        """
    )
    result = project(*CHOSEN, replayed=False)
    result.stdout.fnmatch_lines(["*ScopeMismatch*"])
    assert result.ret != 0
