"""The hooks of a session: its beginning, its workers, and the summary at its end."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

import pytest

from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.gpu import SESSION_GPUS, visible_gpus
from dpbench.core.settings import Settings
from dpbench.instruments import choose
from dpbench.plugin.each_test import NOTHING_MEASURED, EachTest
from dpbench.plugin.fixtures import NEEDS, case_of, measuring, takes
from dpbench.session import Failure, Session

if TYPE_CHECKING:
    from dpbench.core.grid import Grid
    from dpbench.results.outcome import Outcome

SHARED = "dpbench"
"""The key of what the controller passes to xdist workers."""

CRASHED = "???"
"""The phase in xdist's report of a test whose worker died."""

WORKERS_PER_GPU = 2
"""One worker prepares a case while the other measures; a third would only wait."""

RUNS_NO_TEST = (
    *("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow"),
    *("collectonly", "setuponly", "setupplan"),
)
"""Options of pytest that run no test."""


def read_settings(config: pytest.Config) -> Settings:
    """What pytest's command line asks for."""
    return Settings.read(config.option, of_pytest=True, directory=config.invocation_params.dir)


def useful_workers(grid: Grid) -> int:
    """How many xdist workers ``-n auto`` means: no more than there are cases."""
    return min(WORKERS_PER_GPU * len(visible_gpus()), len(grid.cases()))


def visible_names() -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls each GPU that this process may use.

    Entries of the caller's own list if there is one, for it may pick some GPUs or slices of one;
    otherwise UUIDs, which do not depend on how CUDA numbers GPUs.
    """
    gpus = visible_gpus()
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return [gpu.uuid for gpu in gpus]
    return [entry.strip() for entry in asked.split(",")][: len(gpus)]


class WholeSession:
    """One `Session`, in each process that runs tests."""

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
        self.over: set[str] = set()
        """The ids of the tests that have ended, their teardown included."""
        self.reports: dict[str, pytest.TestReport] = {}
        """The outcome of each test, by its id."""
        if self.runs_tests and not self.is_worker:
            self.session.begin()
            self.session.store.directory  # noqa: B018  # for forks: made now, they share it
            if self.measures:
                # A batch system's SIGTERM must end the measured processes too, as Ctrl-C does.
                signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _instruments(self) -> list[str]:
        """The instruments of the fixtures; where CUPTI counts, its process gives the times too."""
        settings = self.settings
        names = [*(settings.instrument or ()), *(["cupti"] if settings.cupti else [])]
        if settings.ncu:
            names += ["ncu"] if settings.no_timing or "cupti" in names else ["timing", "ncu"]
        return names

    # --- tests -------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test that takes ``dpbench_case`` once for each case of the grid.

        ``sys.path`` is complete only now, so missing modules are found here, before anything is
        measured.
        """
        if "dpbench_case" not in metafunc.fixturenames:
            return
        from dpbench.runner import check_named

        cases = self.session.grid.cases()
        with pytest.MonkeyPatch.context() as patch:  # as in the process that measures
            patch.setattr(sys, "path", [*sys.path])
            try:
                check_named(cases)
            except ConfigurationError as error:
                raise pytest.Collector.CollectError(f"dpbench: {error}") from error
        metafunc.parametrize("dpbench_case", cases, ids=[case.id for case in cases])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip tests that measure unless ``--ncu`` or ``--cupti`` was given, and order the others.

        Tests of one case run one after the other, so that workers measure different cases. For
        workers the longest cases come first, so that no GPU waits for another at the end.
        """
        cases = self.session.grid.cases()
        if self.is_worker:
            cases.sort(key=lambda case: -case.batch_size * max(case.seq_len, 1))
        place: dict[Case | None, int] = {case: number for number, case in enumerate(cases)}
        where = [number for number, item in enumerate(items) if case_of(item) in place]
        ordered = sorted((items[number] for number in where), key=lambda item: place[case_of(item)])
        for number, item in zip(where, ordered, strict=True):  # all others keep their order
            items[number] = item
        only, skips = self.settings.only, self.settings.skip
        for item in items if only or skips else ():
            if takes(item) is not only:
                option = "--dpbench-only" if only else "--dpbench-skip"
                item.add_marker(pytest.mark.skip(reason=f"skipped by {option}"))
        for fixture in NEEDS.keys() - measuring(self.settings):
            for item in items:
                if takes(item, [fixture]):
                    item.add_marker(pytest.mark.skip(reason=f"needs {NEEDS[fixture]}"))

    @pytest.hookimpl(tryfirst=True)  # before an xdist worker sends what it collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell the session's processes which cases the selected tests request."""
        if self.runs_tests and (known := [*filter(None, map(self.each_test.known, session.items))]):
            self.session.store.ask(known)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests have ended and how, and store what a worker could not write."""
        if report.when in ("teardown", CRASHED):
            self.over.add(report.nodeid)
        if report.when != "teardown":
            self.reports[report.nodeid] = report
        if unwritten := getattr(report, "dpbench", None):
            self.session.store.take(unwritten)

    # --- xdist -------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass to an xdist worker what it needs to join the session."""
        node.workerinput[SHARED] = self.session.shared()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, specs: Sequence[Any]) -> None:
        """Give each worker on this machine a GPU; the replacement of a crashed one keeps it.

        Cases of several GPUs also use those that follow in the list of all.
        """
        names = visible_names() if self.measures else []
        for number, spec in enumerate(spec for spec in specs if names and spec.popen):
            spec.env["CUDA_VISIBLE_DEVICES"] = names[number % len(names)]
            spec.env[SESSION_GPUS] = ",".join(names)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give workers whole cases, unless the user chose another distribution."""
        if not (self.measures and config.getvalue("dist") in ("load", "worksteal")):
            return None
        from dpbench.plugin.scheduling import CaseScheduling

        return CaseScheduling(config, log, self.session.store)

    # --- the end -----------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        """Print what will be measured, and on which GPUs."""
        if self.settings.disable:
            return [f"dpbench: {NOTHING_MEASURED}"]
        if not self.session.instruments:
            return []
        count = len(self.session.grid.cases())
        gpus = visible_gpus()
        times = f"{len(gpus)} x " * (len(gpus) > 1)
        where = f"{times}{gpus[0].name} (driver {gpus[0].driver})" if gpus else "no GPU"
        return [f"dpbench: {self.session.grid.name}, {count} cases, {where}"]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Judge the session once all tests have run, and report tests as failed that got worse."""
        try:
            return (yield)
        finally:
            if not self.is_worker and self.runs_tests:
                passed = [test for test, report in self.reports.items() if report.passed]
                complete = self._is_complete(session)
                failures = self.session.judge(complete=complete, passed=passed)
                for test in [test for test in self.reports if test in failures]:
                    self._fail(test, failures[test])

    def _is_complete(self, session: pytest.Session) -> bool:
        stopped = session.shouldfail or session.shouldstop  # by -x, to be resumed
        return len(self.over) >= session.testscollected and not stopped

    def _fail(self, test: str, failure: Failure) -> None:
        """Report a test as failed, in place of its earlier report."""
        report = self.reports.get(test)
        if report is None or report.failed:
            return
        from dpbench.show.comparison import regression_text

        reasons = [f"dpbench: {missing}{self.session.remedy}" for missing in failure.unjudged]
        sections = []
        if worse := len(failure.regressions):
            sections = [("dpbench comparison", regression_text(failure.regressions))]
            count = f"{worse} regression{'s' if worse > 1 else ''}"
            section = "see the section 'dpbench comparison'"
            reasons.insert(0, f"dpbench: {count} against {self.session.reference.name}; {section}")
        report_failed(self.config, report, "\n".join(reasons), *sections)

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside the terminal's, which shows problems
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Iterator[None]:
        """Write the files, once no other plugin measures any more.

        Fail if asked to measure and nothing was measured.
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
        # A problem fails the session even if no test failed: a test may have been skipped while
        # another measured its case, or a plugin may have changed the test's outcome.
        if self.session.problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self.measures and not self._has_measured():
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _has_measured(self) -> bool:
        """Whether the session has measured if asked to; otherwise add a problem."""
        instruments = tuple(instrument.name for instrument in self.session.instruments)
        outcomes = self.session.store.outcomes()
        has_measured = any(o.rows and o.instruments == instruments for o in outcomes)
        if not has_measured:
            asked = next(n for n in ("ncu", "cupti", "instrument") if getattr(self.settings, n))
            option = self.settings.option(asked)
            fixture = " or ".join(measuring(self.settings))
            self.session.problem(
                f"{option} was given and nothing was measured; "
                f"select tests that use the {fixture} fixture, e.g. -m gpu"
            )
        return has_measured

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tables, notes and problems of the whole session."""
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
        for problem in session.problems:
            say(f"ERROR: dpbench: {problem}", red=True)

    def _show_tables(
        self, terminalreporter: pytest.TerminalReporter, outcomes: Sequence[Outcome]
    ) -> None:
        from dpbench.show.export import append_step_summary
        from dpbench.show.layout import as_text, terminal_width

        tables = self.session.summary()
        hook = self.config.hook.pytest_dpbench_group_stats
        if hook.get_hookimpls():  # the project's own tables
            hook(config=self.config, summary=self.session.run.summary, tables=tables)
        for line in as_text(tables, terminal_width()).splitlines():
            # Line by line: if the terminal's encoding lacks a character, pytest escapes the whole
            # text, line ends included.
            terminalreporter.write_line(line)
        if warning := append_step_summary(tables):
            terminalreporter.write_line(f"WARNING: dpbench: {warning}", yellow=True)

    def pytest_unconfigure(self) -> None:
        """Remove the processes' shared files."""
        if not self.is_worker:
            self.session.close()


def report_failed(
    config: pytest.Config, report: pytest.TestReport, reasons: str, *sections: tuple[str, str]
) -> None:
    """Send every reporter a failure of a test, and let it forget the earlier report.

    Args:
        config: of the session.
        report: the last report of the test before its teardown.
        reasons: why it has failed.
        sections: titles and texts that are added to the report.
    """
    failed = copy(report)
    failed.outcome, failed.longrepr = "failed", reasons
    failed.sections = [*report.sections, *sections]
    vars(failed).pop("wasxfail", None)  # an xfail mark expects another failure
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    for listed in terminal.stats.values() if terminal else ():
        if report in listed:
            listed.remove(report)
    most, config.option.maxfail = config.option.maxfail, 0  # there is nothing left to stop
    try:
        config.hook.pytest_runtest_logreport(report=failed)
    finally:
        config.option.maxfail = most
    for plugin in config.pluginmanager.get_plugins():
        if hasattr(plugin, "node_reporters_ordered"):  # pytest's own, of --junitxml
            _merge_last(plugin, report.outcome)


def _merge_last(junit: Any, outcome: str) -> None:
    """Move the failure that was reported last into the test's element, and count the test once."""
    *others, last = junit.node_reporters_ordered
    new: Element = last.to_xml()
    named = {name: new.get(name) for name in ("classname", "name")}
    for other in reversed(others):
        old: Element = other.to_xml()
        if named.items() <= old.attrib.items():
            for skipped in old.findall("skipped"):
                old.remove(skipped)
            old[:0] = new.findall("failure")
            junit.node_reporters_ordered.remove(last)
            junit.stats[outcome] -= 1
            return
