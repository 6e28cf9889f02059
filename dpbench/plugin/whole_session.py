"""The hooks of a session: what it begins with, what its workers are told, what its end says."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard, cast

import pytest

from dpbench.case import AXES, Case
from dpbench.errors import ConfigurationError, unknown
from dpbench.files import printable
from dpbench.gpu import visible_gpus
from dpbench.instruments import choose
from dpbench.instruments.terminal import shown_on
from dpbench.plugin.asked import NEEDS, AskedCases, measuring_fixtures
from dpbench.plugin.each_test import NOTHING_MEASURED, EachTest, Unmeasured
from dpbench.process.schedule import Steps
from dpbench.registry import resolve
from dpbench.session import Session
from dpbench.settings import Settings

if TYPE_CHECKING:
    from dpbench.instruments.base import Instrument
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

Step = Callable[[], object]
"""One training step, of a test's own."""

NAME = "dpbench-session"
"""The name of `WholeSession` among pytest's plugins."""

SHARED = "dpbench"
"""What an xdist worker and its controller tell each other is under this name."""

UNFINISHED = (
    pytest.ExitCode.INTERRUPTED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
"""How a session ends that has not done what it was to do."""

RUNS_NO_TEST = (
    *("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow"),
    *("collectonly", "setuponly", "setupplan"),
)
"""Options of pytest with which no test runs, so that there is nothing to measure."""


def read_settings(config: pytest.Config) -> Settings:
    """What pytest's command line asks for."""
    return Settings.read(config.option, of_pytest=True, directory=config.invocation_params.dir)


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
        self.session = Session(
            self.settings,
            choose(self._instruments(), self.settings) if self.measures else [],
            next(iter(visible_gpus()), None) if self.measures else None,
            workers=getattr(config.option, "numprocesses", None) or 0,
            counts=True,
        )
        self.session.update_environment = lambda environment: (
            config.hook.pytest_dpbench_update_machine_info(config=config, machine_info=environment)
        )
        self.session.update_document = lambda document: config.hook.pytest_dpbench_update_json(
            config=config, output_json=document
        )
        self.each_test = EachTest(self.session)
        self.asked = AskedCases({})
        self.terminal: TextIO | None = None
        """What a person shall see while a test still runs: whom it waits for, progress."""
        self._tried_out: set[Case] = set()
        if self.is_worker:
            self.session.join(config.workerinput[SHARED])  # type: ignore[attr-defined]
        elif self.runs_tests:
            self.session.begin()
            if self.measures:
                # A batch system's signal must end the measured processes too, as Ctrl-C does.
                signal.signal(signal.SIGTERM, signal.default_int_handler)
        if self.measures:
            self.terminal = _open_terminal()

    def _instruments(self) -> list[str]:
        """The names of what the fixtures measure with; where CUPTI counts, its process is timed."""
        settings = self.settings
        names = [*(settings.instrument or ()), *(["cupti"] if settings.cupti else [])]
        if settings.ncu:
            names += ["ncu"] if settings.no_timing or "cupti" in names else ["timing", "ncu"]
        return names

    # --- tests -------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)  # before an xdist worker says what it collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which cases the tests ask for: an interrupted run has fewer.

        Only now is ``sys.path`` as it will be. If a case names a module that is not there, no test
        is left to run.
        """
        if not self.runs_tests:
            return
        fixtures = measuring_fixtures(self.settings)
        self.asked = AskedCases.of(session.items, [*fixtures, "logical_io"])
        if self.asked.problem:
            session.items.clear()
        self._expect_cases()
        if self.is_worker:  # the controller collects nothing
            self.asked.write(self.session.store.directory)

    def _expect_cases(self) -> None:
        self.session.expect(self.asked.cases)
        if self.asked.problem:
            self.session.problem(self.asked.problem)

    def measure(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
        """What the fixtures ``ncu`` and ``counters`` return is this; see there."""
        if _is_step(case, fields):
            steps = Steps(self.settings.warmup, self.settings.active)
            return self._report_step(case, [i.name for i in self.session.instruments], steps)
        return self._report(_case(case, fields), self.session.instruments)

    def count(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
        """What the ``logical_io`` fixture returns is this; see there."""
        if _is_step(case, fields):
            return self._report_step(case, ["logical"], Steps(warmup=1, active=1))
        return self._report(_case(case, fields), choose(["logical"], Settings(of_pytest=True)))

    def _report_step(self, step: Step, names: Sequence[str], steps: Steps) -> CaseReport:
        """The report of a function that does one step, in this process."""
        from dpbench.instruments.observe import OwnStep
        from dpbench.instruments.recorders import RECORDERS

        case = self.each_test.case_of_step(step)
        if self.settings.disable:
            step()
            return cast("CaseReport", Unmeasured(case))
        if wrong := [name for name in names if name not in RECORDERS]:
            pytest.fail(
                f"dpbench: {', '.join(wrong)} cannot measure a step of this process, for it starts "
                f"one of its own: take logical_io(step), --cupti without --ncu, or "
                f"--dpbench-instrument=timing",
                pytrace=False,
            )
        return self.each_test.report(case, [OwnStep(name, step, steps) for name in names])

    def _report(self, case: Case, instruments: Sequence[Instrument]) -> CaseReport:
        if self.settings.disable:
            return cast("CaseReport", self._tried(case))
        with shown_on(self.terminal):
            return self.each_test.report(case, instruments)

    def _tried(self, case: Case) -> Unmeasured:
        """A case whose step has been taken once, on tensors without data: any machine can."""
        from dpbench.instruments.logical.instrument import Logical
        from dpbench.runner import measure

        if case not in self._tried_out:
            outcome = measure(case, [Logical()])
            if outcome.error:
                pytest.fail(f"{outcome.error}: {outcome.message}", pytrace=False)
            self._tried_out.add(case)
        return Unmeasured(case)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note which tests have come to their end."""
        self.asked.hear(report)

    # --- xdist -------------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker of the session."""
        node.workerinput[SHARED] = self.session.shared()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take over what a worker measured and could not write."""
        told = getattr(node, "workeroutput", {}).get(SHARED)
        if told:
            from dpbench.results.outcome import Outcome

            self.session.unwritten += [Outcome.from_json(data) for data in told["unwritten"]]
            for problem in told["problems"]:
                self.session.problem(problem)

    # --- the end -----------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        """Say what will be measured, and with what."""
        if self.settings.disable:
            return [f"dpbench: {NOTHING_MEASURED}"]
        if not self.session.instruments:
            return []
        count = sum(1 for _ in self.session.grid.cases())
        gpus = visible_gpus()
        times = f"{len(gpus)} x " * (len(gpus) > 1)
        where = f"{times}{gpus[0].name} (driver {gpus[0].driver})" if gpus else "no GPU"
        both = "dpbench: bytes counted by ncu and by CUPTI, of which tests are given ncu's"
        return [
            f"dpbench: {self.session.grid.name}, {count} cases, {where}",
            *([both] if {"ncu", "cupti"} <= {i.name for i in self.session.instruments} else []),
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the files; a ``--ncu`` session that measured nothing must not look green."""
        if not self.runs_tests:
            return
        if self.is_worker:
            self.config.workeroutput[SHARED] = {  # type: ignore[attr-defined]
                "unwritten": [o.as_json() for o in self.session.unwritten_here],
                "problems": self.session.problems,
            }
            return
        if not session.items and self.session.directory is not None:  # workers have collected
            self.asked.read(self.session.directory)
            self._expect_cases()
        outcomes = self.session.outcomes()
        self.session.explain(self.asked.reasons({outcome.case.id for outcome in outcomes}))
        stopped = exitstatus in UNFINISHED or session.shouldfail or session.shouldstop
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        with self.session.reporting_problems():
            self.each_test.judge_session(interrupted=interrupted, all_ended=self.asked.all_ended)
        self.session.finish(complete=self.asked.all_ended and not stopped)
        if not (interrupted or self.session.problems):
            self._check_measured(outcomes)
        if self.session.problems and exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _check_measured(self, outcomes: Sequence[Outcome]) -> None:
        """A session that was to measure has measured something; others need not."""
        instruments = tuple(instrument.name for instrument in self.session.instruments)
        if self.measures and not any(o.rows and o.instruments == instruments for o in outcomes):
            asked = next(n for n in ("ncu", "cupti", "instrument") if getattr(self.settings, n))
            option = self.settings.option(asked)
            fixture = " or ".join(measuring_fixtures(self.settings))
            self.session.problem(
                f"{option} was given and nothing was measured; "
                f"select tests that use the {fixture} fixture, e.g. -m gpu"
            )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One table for the whole session; workers are silent."""
        if self.is_worker:
            return
        say = terminalreporter.write_line
        session = self.session
        skipped = [str(report.longrepr) for report in terminalreporter.getreports("skipped")]
        for options in NEEDS.values():
            if waiting := sum(f"Skipped: needs {options}'" in reason for reason in skipped):
                say(f"dpbench: {waiting} tests measure with {options}")
        outcomes = session.outcomes()
        if not outcomes and self.runs_tests:
            for path in self.settings.files.values():
                named = os.path.relpath(path, self.settings.directory)
                say(f"dpbench: no case ran, so {named} was not written")
        if not (outcomes or session.problems or session.notes or session.comparison.notes):
            return
        terminalreporter.section("dpbench")
        if outcomes:
            self._show_tables(terminalreporter, outcomes)
        for note in [*session.comparison.notes, *session.notes]:
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
        if hook.get_hookimpls():  # the project has tables of its own
            from dpbench.results.frame import summarise, to_frame

            summary = summarise(to_frame(row for outcome in outcomes for row in outcome.rows))
            hook(config=self.config, summary=summary, tables=tables)
        for line in as_text(tables, terminal_width()).splitlines():
            # One by one: of what a terminal's encoding lacks a sign for, pytest escapes all,
            # the ends of lines too.
            terminalreporter.write_line(line)
        if warning := append_step_summary(tables):
            terminalreporter.write_line(f"WARNING: dpbench: {warning}", yellow=True)

    def pytest_unconfigure(self) -> None:
        """Leave nothing behind."""
        if self.terminal is not None:
            self.terminal.close()
        if not self.is_worker:
            self.session.close()


def _is_step(case: Any, fields: dict[str, Any]) -> TypeGuard[Step]:
    """Whether a fixture was given a function; a class, or what has fields, is a case's."""
    return callable(case) and not isinstance(case, type) and not fields


def _case(case: Any, fields: dict[str, Any]) -> Case:
    """A case, given as one, as its fields, or as one of which some fields are others."""
    if wrong := [name for name in fields if name not in AXES]:
        raise unknown("field of a case", wrong[0], AXES)
    if isinstance(case, Case):
        return resolve(replace(case, **fields))
    if "batch_size" not in fields:
        raise ConfigurationError(
            f"{case!r} is neither a case nor a function that takes a step; with a trainer, give "
            f"batch_size"
        )
    return resolve(Case(**{"trainer": case, **fields}))


def _open_terminal() -> TextIO | None:
    """A second way to standard error; to be opened while pytest catches nothing, as at first."""
    try:
        return os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8", errors="replace")
    except (AttributeError, OSError, ValueError):  # closed, or something that has no descriptor
        return None
