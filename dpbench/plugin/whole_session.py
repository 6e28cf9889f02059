"""Hooks of pytest that begin a session, choose its tests, check its limits and write its files."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.gpu import visible_gpus
from dpbench.core.settings import Settings
from dpbench.instruments import choose
from dpbench.plugin.each_test import NOTHING_MEASURED, EachTest
from dpbench.plugin.fixtures import NEEDS, grid_case, measuring_fixtures, uses_fixture
from dpbench.results.outcome import Outcome
from dpbench.runner import check_named
from dpbench.session import Session
from dpbench.show.layout import Table, as_text, terminal_width

if TYPE_CHECKING:
    import pandas as pd


SHARED = "dpbench"
"""The key in ``workerinput`` of the values that the controller passes to a worker."""

CRASHED = "???"
"""The value of ``when`` in xdist's report of a test whose worker died."""

RUNS_NO_TEST = (
    *("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow"),
    *("collectonly", "setuponly", "setupplan"),
)
"""Options with which pytest runs no test."""


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of pytest's command line."""
    return Settings.read(config.option, of_pytest=True, directory=config.invocation_params.dir)


class WholeSession:
    """Hooks of pytest for one `Session`, in the controller or in a worker of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.settings = read_settings(config)
        self.is_worker = hasattr(config, "workerinput")
        self.runs_tests = not any(getattr(config.option, name, False) for name in RUNS_NO_TEST)
        self.measures = self.settings.measures and self.runs_tests
        if self.runs_tests and not self.is_worker:
            self.settings.check()
        hook = config.hook
        self.session = Session(
            [],
            self.settings,
            gpu=next(iter(visible_gpus()), None) if self.measures else None,
            instruments=choose(self._instruments(), self.settings) if self.measures else [],
            workers=getattr(config.option, "numprocesses", None) or 0,
            shared=config.workerinput[SHARED] if self.is_worker else None,  # type: ignore[attr-defined]
            on_environment=lambda environment: hook.pytest_dpbench_update_machine_info(
                config=config, machine_info=environment
            ),
            on_document=lambda document: hook.pytest_dpbench_update_json(
                config=config, output_json=document
            ),
        )
        self.each_test = EachTest(self.session)
        self.ended: set[str] = set()
        """Ids of the tests that have ended, including their teardown."""
        if self.runs_tests and not self.is_worker:
            self.session.begin()
            self.session.store.directory  # noqa: B018  # created here, so that forks share it
            if self.measures:
                # SIGTERM of a batch system must also end the measured processes, like Ctrl-C.
                signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _instruments(self) -> list[str]:
        """Return the names of instruments that the options choose.

        With ``--cupti``, ``timing`` is omitted, because CUPTI's process also measures times.
        """
        settings = self.settings
        names = [*(settings.instrument or ()), *(["cupti"] if settings.cupti else [])]
        if settings.ncu:
            names += ["ncu"] if settings.no_timing or "cupti" in names else ["timing", "ncu"]
        return names

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test with the argument ``dpbench_case`` once for each case of the grid.

        Also checks the names in the cases, because ``sys.path`` may be incomplete before this hook.
        """
        if "dpbench_case" not in metafunc.fixturenames:
            return
        cases = self.session.cases
        with pytest.MonkeyPatch.context() as patch:  # the check may add the current directory
            patch.setattr(sys, "path", [*sys.path])
            try:
                check_named(cases)
            except ConfigurationError as error:
                raise pytest.Collector.CollectError(f"dpbench: {error}") from error
        metafunc.parametrize("dpbench_case", cases, ids=[case.id for case in cases])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort tests of the grid by case, and skip tests that the options exclude.

        Tests of one case run one after the other, so that workers measure different cases. Workers
        begin with cases with the most examples or tokens, so that GPUs finish at similar times.
        """
        cases = self.session.cases if any(map(grid_case, items)) else []
        if self.is_worker:
            cases = sorted(cases, key=lambda c: -c.batch_size * max(c.seq_len, 1))
        place: dict[Case | None, int] = {case: number for number, case in enumerate(cases)}
        numbers = [number for number, item in enumerate(items) if grid_case(item) in place]
        by_case = sorted((items[n] for n in numbers), key=lambda item: place[grid_case(item)])
        for number, item in zip(numbers, by_case, strict=True):  # other tests keep their places
            items[number] = item
        only, skips = self.settings.only, self.settings.skip
        for item in items if only or skips else ():
            if uses_fixture(item) is not only:
                option = "--dpbench-only" if only else "--dpbench-skip"
                item.add_marker(pytest.mark.skip(reason=f"skipped by {option}"))
        for fixture in NEEDS.keys() - measuring_fixtures(self.settings):
            for item in items:
                if uses_fixture(item, [fixture]):
                    item.add_marker(pytest.mark.skip(reason=f"needs {NEEDS[fixture]}"))

    @pytest.hookimpl(tryfirst=True)  # before an xdist worker sends what it collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell all processes which cases the selected tests request."""
        if self.runs_tests and (
            known := [*filter(None, map(self.each_test.expected_request, session.items))]
        ):
            self.session.store.ask(known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note that a test has ended, and write files that a worker could not write."""
        if report.when in ("teardown", CRASHED):
            self.ended.add(report.nodeid)
        if unwritten := getattr(report, "dpbench", None):
            self.session.store.take(unwritten)

    def pytest_report_header(self) -> list[str]:
        """Return a line for pytest's header: the grid, the number of cases and the GPUs."""
        if self.settings.disable:
            return [f"dpbench: {NOTHING_MEASURED}"]
        if not self.session.instruments:
            return []
        count = len(self.session.cases)
        gpus = visible_gpus()
        times = f"{len(gpus)} x " * (len(gpus) > 1)
        where = f"{times}{gpus[0].name} (driver {gpus[0].driver})" if gpus else "no GPU"
        return [f"dpbench: {self.session.grid.name}, {count} cases, {where}"]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """After the last test, check the limits that no test has checked."""
        try:
            return (yield)
        finally:
            if not self.is_worker and self.runs_tests:
                self.session.check_limits(complete=self._is_complete(session))

    def _is_complete(self, session: pytest.Session) -> bool:
        stopped = session.shouldfail or session.shouldstop  # e.g. by -x; the run can be resumed
        return len(self.ended) >= session.testscollected and not stopped

    @pytest.hookimpl(
        wrapper=True, trylast=True
    )  # so that it runs before the terminal prints problems
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        """Write the files. Fail the session after a problem, or if nothing was measured.

        Other plugins may measure cases in this hook, so their hooks run first.
        """
        try:
            yield
        finally:
            if not self.is_worker and self.runs_tests:
                self._finish(session, exitstatus)

    def _finish(self, session: pytest.Session, exitstatus: int) -> None:
        self.session.finish(complete=self._is_complete(session))
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        # All tests may have passed although there is a problem. Another plugin may change a test's
        # outcome, or a skipped test may have limits on a case that another test measures.
        if self.session.problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self.measures and not self._has_measured():
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _has_measured(self) -> bool:
        """Return True if the chosen instruments have measured a case. If not, add a problem."""
        instruments = tuple(instrument.name for instrument in self.session.instruments)
        outcomes = self.session.store.outcomes()
        has_measured = any(o.rows and o.instruments == instruments for o in outcomes)
        if not has_measured:
            chosen = next(n for n in ("ncu", "cupti", "instrument") if getattr(self.settings, n))
            option = self.settings.option(chosen)
            fixture = " or ".join(measuring_fixtures(self.settings))
            self.session.problem(
                f"{option} is set, but nothing was measured; "
                f"select tests that use the {fixture} fixture, e.g. with -m gpu"
            )
        return has_measured

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables, notes and problems of the session."""
        if self.is_worker:
            return
        say = terminalreporter.write_line
        session = self.session
        skipped = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
        for options in NEEDS.values():
            if waiting := sum(f"Skipped: needs {options}'" in reason for reason in skipped):
                test = "tests measure" if waiting > 1 else "test measures"
                say(f"dpbench: {waiting} {test} with {options}")
        outcomes = session.store.outcomes()
        if not outcomes and self.runs_tests:
            for _, path in self.settings.files.values():
                named = os.path.relpath(path, self.settings.directory)
                say(f"dpbench: no case ran, so {named} was not written")
        if not (outcomes or session.problems or session.notes):
            return
        terminalreporter.section("dpbench")
        if outcomes:
            self._show_tables(terminalreporter, outcomes)
        for note in session.notes:
            say(f"dpbench: {printable(note)}")
        whole = terminalreporter.config.option.tbstyle not in ("no", "line")
        failures = terminalreporter.getreports("failed") if whole else ()
        shown = {line for report in failures for line in report.longreprtext.splitlines()}
        for problem in session.problems:
            if f"dpbench: {problem}" not in shown and problem not in shown:
                say(f"ERROR: dpbench: {problem}", red=True)

    def _show_tables(
        self, terminalreporter: pytest.TerminalReporter, outcomes: Sequence[Outcome]
    ) -> None:
        from dpbench.show.outputs import append_step_summary

        tables = self.session.summary()
        hook = self.config.hook.pytest_dpbench_group_stats
        if hook.get_hookimpls():  # the hooks may add tables
            hook(config=self.config, summary=self.session.run.summary, tables=tables)
        for line in as_text(tables, terminal_width()).splitlines():
            # Each line is written by its own call. If the terminal's encoding lacks a character,
            # pytest escapes the whole text of a call, including line breaks.
            terminalreporter.write_line(line)
        if warning := append_step_summary(tables):
            terminalreporter.write_line(f"WARNING: dpbench: {warning}", yellow=True)

    def pytest_unconfigure(self) -> None:
        """Remove the directory through which the processes of the session shared outcomes."""
        if not self.is_worker:
            self.session.close()


# --- hooks that a project may implement in its conftest.py --------------------------------------


def pytest_dpbench_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Change the description of the software and the machine, which is part of a saved run.

    A session calls this hook at most once, when it first needs the description.
    """


def pytest_dpbench_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Change the JSON document of a run. This hook is called before each write of the run."""


def pytest_dpbench_group_stats(
    config: pytest.Config, summary: pd.DataFrame, tables: list[Table]
) -> None:
    """Add or change tables before the session prints them.

    Args:
        config: pytest's configuration.
        summary: one row for each case, instrument, phase and metric, see
            `dpbench.results.summary.summary`.
        tables: the tables to print, in order.
    """
