"""One session: what it measures, with what, and what came of it."""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from dpbench.case import AXES, Case, Grid
from dpbench.errors import ConfigurationError
from dpbench.gpu import Gpu, visible_gpus
from dpbench.instruments import choose
from dpbench.instruments.base import Instrument
from dpbench.instruments.child import Steps
from dpbench.instruments.ncu.progress import shown_on
from dpbench.options import chosen_kernels
from dpbench.plugin import comparing, saving
from dpbench.plugin.asked import Asked
from dpbench.plugin.files import Files
from dpbench.plugin.terminal import open_terminal
from dpbench.plugin.updating import reference_to_update, update
from dpbench.registry import chosen_grid, resolve
from dpbench.show.view import View

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

NEEDS_NCU = "needs --ncu"
NAME = "dpbench-manager"
"""The manager's name among pytest's plugins."""

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


def asked_grid(options: argparse.Namespace) -> Grid:
    """The grid that a session's options describe."""
    axes = {axis: getattr(options, f"dpbench_{axis}") for axis in AXES}
    return chosen_grid(options.dpbench_grid, **axes)


class Manager:
    """The session's grid, instruments and outcomes, in each process that runs tests.

    Outcomes of all its processes lie in one directory, which is made when xdist starts a worker
    or a test first asks for a case.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.options = config.option
        self.is_worker = hasattr(config, "workerinput")
        self.grid = asked_grid(self.options)
        self.view = View.of(
            self.options.dpbench_columns,
            self.options.dpbench_sort,
            self.options.dpbench_group_by,
            self.options.ncu_kernels_top,
            self.options.dpbench_expect,
        )
        self.files = Files(config, self.view)
        self.instruments: list[Instrument] = []
        """What the ``ncu`` fixture measures with; none without ``--ncu``."""
        self.directory: Path | None = None
        self.gpu: Gpu | None = None
        self.terminal: TextIO | None = None
        """Where kernels are counted as they are profiled; no xdist worker's, one of many."""
        self.problems: list[str] = []
        if self.is_worker:
            self.directory = Path(config.workerinput["dpbench_directory"])  # type: ignore[attr-defined]
        self.to_update = reference_to_update(self)
        self.runs_tests = not any(getattr(self.options, name, False) for name in RUNS_NO_TEST)
        if self.options.ncu and self.runs_tests:
            self._prepare_ncu()
        elif self.runs_tests and chosen_kernels(self.options, "ncu_").wanted:
            raise ConfigurationError("--ncu-kernels, --ncu-set and the like add to --ncu; give it")
        elif self.runs_tests and self.options.dpbench_profile:
            raise ConfigurationError(
                "--dpbench-profile profiles the cases that --ncu measures; give both "
                "(dpbench run --instrument torch_profiler needs no Nsight Compute)"
            )
        elif self.runs_tests:
            self._chosen([])  # refuses bad values, though nothing will be measured with them
        if self.runs_tests and not self.is_worker:
            self.files.check()
        self.comparing = comparing.Comparing(self)
        self.saving = saving.Saving(self)  # last: takes a number only if all else is well
        for outcome in self.saving.kept:
            self._keep(outcome)

    def _prepare_ncu(self) -> None:
        names = ["ncu"] if self.options.dpbench_no_timing else ["timing", "ncu"]
        if self.options.dpbench_profile:
            names.append("torch_profiler")
        self.instruments = self._chosen(names)
        self.gpu = next(iter(visible_gpus()), None)
        if self.is_worker:
            return
        for instrument in self.instruments:
            instrument.check()
        if chosen_kernels(self.options, "ncu_").wanted:
            self.terminal = open_terminal()
        # A batch system's signal must end the measured processes too, as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    def _chosen(self, names: Sequence[str]) -> list[Instrument]:
        """The instruments with these names, as the options set them up."""
        base = self.config.invocation_params.dir
        return choose(
            names,
            directory=Path(base / self.options.ncu_dir),
            profile_directory=Path(base / self.options.dpbench_profile_dir),
            profile_schedule=self.options.dpbench_profile_schedule,
            profile_threshold=self.options.dpbench_profile_threshold,
            ncu_path=self.options.ncu_path,
            metrics=self.options.ncu_metrics,
            timing_steps=Steps(self.options.dpbench_warmup, self.options.dpbench_active),
            ncu_steps=Steps(self.options.ncu_warmup, self.options.ncu_active),
            timeout=self.options.dpbench_timeout,
            kernels=chosen_kernels(self.options, "ncu_"),
        )

    @pytest.hookimpl(tryfirst=True)  # before an xdist worker says what it collected
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which cases the tests ask for: an interrupted run has fewer.

        Only now is ``sys.path`` as it will be. If a case names a module that is not there, no test
        is left to run.
        """
        if not self.runs_tests:
            return
        asked = Asked.of(session.items, measures=self.options.ncu)
        if asked.problem:
            session.items.clear()
        self._hear(asked)
        if self.is_worker:  # the controller collects nothing
            asked.note(self._made_directory())

    def _hear(self, asked: Asked | None) -> None:
        """What this process collected, or a worker did."""
        if asked is not None:
            self.saving.expect(asked.cases)
            if asked.problem:
                self._problem(asked.problem)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker where the session's outcomes are."""
        node.workerinput["dpbench_directory"] = str(self._made_directory())
        node.workerinput[saving.KEY] = self.saving.for_worker()
        node.workerinput[comparing.KEY] = self.comparing.for_worker()

    def _made_directory(self) -> Path:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="dpbench-"))
        return self.directory

    def measure(self, case: Case | str, **fields: Any) -> CaseReport:
        """What the ``ncu`` fixture returns is this; see there."""
        assert self.instruments, "a test that measures is skipped without --ncu"
        gpu = None if self.options.dpbench_try_anyway else self.gpu
        return self._report(_case(case, fields), self.instruments, gpu)

    def count(self, case: Case | str, **fields: Any) -> CaseReport:
        """What the ``logical_io`` fixture returns is this; see there."""
        from dpbench.instruments.logical.instrument import Logical

        return self._report(_case(case, fields), [Logical()])

    def _report(
        self, case: Case, instruments: Sequence[Instrument], gpu: Gpu | None = None
    ) -> CaseReport:
        """The report of a case by these instruments, for the test that asks."""
        from dpbench.results.report import CaseReport

        outcome = self._outcome(case, instruments, gpu)
        self.comparing.asked(outcome, lambda other: self._outcome(other, instruments, gpu))
        if outcome.skipped:
            pytest.skip(outcome.message)
        if outcome.error:
            pytest.fail(_failure(outcome), pytrace=False)
        return CaseReport.of_outcome(outcome)

    def _outcome(
        self, case: Case, instruments: Sequence[Instrument], gpu: Gpu | None = None
    ) -> Outcome:
        """The case by these instruments, by this process or whichever asked first."""
        from dpbench.results.store import OutcomeStore
        from dpbench.runner import measure

        fresh: list[Outcome] = []

        def measure_now(case: Case) -> Outcome:
            with shown_on(self.terminal):
                fresh.append(measure(case, instruments, gpu=gpu))
            return fresh[0]

        by = "+".join(instrument.name for instrument in instruments)
        outcome = OutcomeStore(self._made_directory()).once(case, measure_now, by=by)
        if fresh:
            self._write()  # at once, so that a killed session keeps what it has
        return outcome

    def _keep(self, outcome: Outcome) -> None:
        """Take over what an earlier session measured."""
        from dpbench.results.store import OutcomeStore

        by = "+".join(outcome.instruments)
        OutcomeStore(self._made_directory()).once(outcome.case, lambda _: outcome, by=by)

    def outcomes(self) -> list[Outcome]:
        """What the session has measured and counted, by any of its processes."""
        if self.directory is None or not any(self.directory.glob("*.json")):
            return []  # without pandas: most sessions of most projects have nothing
        from dpbench.results.store import OutcomeStore

        return OutcomeStore(self.directory).outcomes()

    def pytest_report_header(self) -> str | None:
        """Say what will be measured, and with what."""
        if not self.instruments:
            return None
        count = sum(1 for _ in self.grid.cases())
        return f"dpbench: {self.grid.name}, {count} cases, {self._gpus_in_words()}"

    def _gpus_in_words(self) -> str:
        gpus = visible_gpus()
        times = f"{len(gpus)} x " if len(gpus) > 1 else ""
        return f"{times}{gpus[0].name} (driver {gpus[0].driver})" if gpus else "no GPU"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the files; a ``--ncu`` session that measured nothing must not look green."""
        if self.is_worker or not self.runs_tests:
            return
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        self._hear(Asked.noted(self.directory))
        complete = (
            exitstatus not in UNFINISHED
            and not (session.shouldfail or session.shouldstop)
            and not self.saving.partial
        )
        if not interrupted:
            self.problems += self.comparing.problems()  # before the run is written, which says so
        self._write(complete)
        with self._saying_problems():
            self.saving.end(self.outcomes())
        self._write_page(complete)
        if not interrupted:
            self._update(complete)
        if not (interrupted or self.problems or self._measured_what_was_asked()):
            self.problems.append(
                "--ncu was given and nothing was measured; "
                "select tests that use the ncu fixture, e.g. -m gpu"
            )
        if self.problems and exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _measured_what_was_asked(self) -> bool:
        """Whether a ``--ncu`` session has measured something; others need not."""
        return not self.instruments or any(
            outcome.rows and "ncu" in outcome.instruments for outcome in self.outcomes()
        )

    def _write(self, complete: bool = False) -> None:
        """Bring the run and the files that were asked for up to date."""
        if not ((self.files.paths or self.saving.file) and self.outcomes()):
            return
        from dpbench.results.store import OutcomeStore

        with self._saying_problems(), OutcomeStore(self._made_directory()).lock():
            outcomes = self.outcomes()
            self.saving.write(outcomes, complete)
            self.files.write(outcomes, *self._premise(complete))

    def _write_page(self, complete: bool) -> None:
        if "html" not in self.files.paths or not (outcomes := self.outcomes()):
            return
        with self._saying_problems():
            self.files.write_page(outcomes, *self._premise(complete))

    def _premise(self, complete: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The environment, and the session as far as it has come."""
        return self.saving.premise.environment, self.saving.session(complete)

    @contextmanager
    def _saying_problems(self) -> Iterator[None]:
        """Let what cannot be written keep nothing else from being done."""
        try:
            yield
        except ConfigurationError as error:
            self._problem(str(error))
        except OSError as error:
            self._problem(f"{error.filename}: {error.strerror}")

    def _problem(self, text: str) -> None:
        """Something that the session must not hide; said once."""
        if text not in self.problems:
            self.problems.append(text)

    def _update(self, complete: bool) -> None:
        """Bring the committed reference up to date, if that was asked for."""
        if self.to_update is None:
            return
        with self._saying_problems():
            note = update(self, self.to_update, self.outcomes(), complete=complete)
            self.saving.notes.append(note)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One table for the whole session; workers are silent."""
        if self.is_worker:
            return
        waiting = sum(
            NEEDS_NCU in str(report.longrepr) for report in terminalreporter.getreports("skipped")
        )
        if waiting:
            terminalreporter.write_line(f"dpbench: {waiting} tests measure with --ncu")
        outcomes = self.outcomes()
        if not outcomes and self.runs_tests:
            for named in self.files.names():
                terminalreporter.write_line(f"dpbench: no case ran, so {named} was not written")
        changes = self.comparing.tables()
        notes = [*self.comparing.notes, *self.saving.notes]
        if not (outcomes or self.problems or notes):
            return
        terminalreporter.section("dpbench")
        if outcomes:
            from dpbench.results.outcome import summary_tables
            from dpbench.show.export import append_step_summary
            from dpbench.show.layout import as_text, terminal_width

            found = [*summary_tables(outcomes, self.view), *changes]
            for line in as_text(found, terminal_width()).splitlines():
                # One by one: of what a terminal's encoding lacks a sign for, pytest escapes all,
                # the ends of lines too.
                terminalreporter.write_line(line)
            if warning := append_step_summary(found):
                terminalreporter.write_line(f"WARNING: dpbench: {warning}", yellow=True)
        for note in notes:
            terminalreporter.write_line(f"dpbench: {note}")
        for problem in self.problems:
            terminalreporter.write_line(f"ERROR: dpbench: {problem}", red=True)

    def pytest_unconfigure(self) -> None:
        """Leave nothing behind."""
        if self.terminal is not None:
            self.terminal.close()
        if self.directory is not None and not self.is_worker:
            shutil.rmtree(self.directory, ignore_errors=True)


def _case(case: Case | str, fields: dict[str, Any]) -> Case:
    """A case, given as one or as its fields."""
    return resolve(case if isinstance(case, Case) else Case(case, **fields))


def _failure(outcome: Outcome) -> str:
    parts = [f"{outcome.error}: {outcome.message}"]
    if outcome.log_tail:
        parts += [f"--- end of {outcome.log}", outcome.log_tail]
    return "\n".join(parts)
