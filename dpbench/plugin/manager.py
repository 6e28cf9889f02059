"""One session: what it measures, with what, and what came of it."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.case import AXES, Case, Grid
from dpbench.errors import check_writable_file
from dpbench.gpu import Gpu, visible_gpus
from dpbench.instruments import choose
from dpbench.instruments.base import Instrument
from dpbench.instruments.child import Steps

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

NEEDS_NCU = "needs --ncu"
NAME = "dpbench-manager"
"""The manager's name among pytest's plugins."""


class Manager:
    """The session's grid, instruments and outcomes, in each process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.options = config.option
        self.is_worker = hasattr(config, "workerinput")
        grid = Grid.named(self.options.dpbench_grid)
        self.grid = grid.narrow(**{axis: getattr(self.options, f"dpbench_{axis}") for axis in AXES})
        self.instruments: list[Instrument] = []
        self.directory: Path | None = None
        self.gpu: Gpu | None = None
        self.problems: list[str] = []
        runs = not (config.option.collectonly or config.option.help)
        if self.options.ncu and runs:
            self._prepare()

    def _prepare(self) -> None:
        self.instruments = choose(
            ("ncu",) if self.options.dpbench_no_timing else ("timing", "ncu"),
            directory=Path(self.config.invocation_params.dir / self.options.ncu_dir),
            ncu_path=self.options.ncu_path,
            metrics=self.options.ncu_metrics,
            timing_steps=Steps(self.options.dpbench_warmup, self.options.dpbench_active),
            ncu_steps=Steps(self.options.ncu_warmup, self.options.ncu_active),
            timeout=self.options.dpbench_timeout,
        )
        self.gpu = next(iter(visible_gpus()), None)
        if self.is_worker:
            self.directory = Path(self.config.workerinput["dpbench_directory"])  # type: ignore[attr-defined]
            return
        for instrument in self.instruments:
            instrument.check()
        for path in (self.options.dpbench_json, self.options.dpbench_markdown):
            if path is not None:
                check_writable_file(self.config.invocation_params.dir / path)
        self.directory = Path(tempfile.mkdtemp(prefix="dpbench-"))
        # A batch system's signal must end the measured processes too, as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell an xdist worker where the session's outcomes are."""
        node.workerinput["dpbench_directory"] = str(self.directory)

    def measure(self, case: Case | str, **fields: Any) -> CaseReport:
        """What the ``ncu`` fixture returns is this; see there."""
        from dpbench.results.report import CaseReport
        from dpbench.results.store import OutcomeStore
        from dpbench.runner import measure

        if not isinstance(case, Case):
            case = Case(case, **fields)
        assert self.directory is not None, "a test that measures is skipped without --ncu"
        store = OutcomeStore(self.directory)
        fresh: list[Outcome] = []

        def measure_now(case: Case) -> Outcome:
            fresh.append(measure(case, self.instruments))
            return fresh[0]

        outcome = store.once(case, measure_now)
        if fresh:
            self._write()  # at once, so that a killed session keeps what it has
        if outcome.error:
            pytest.fail(_failure(outcome), pytrace=False)
        return CaseReport.of(case, outcome.rows)

    def outcomes(self) -> list[Outcome]:
        """What the session has measured, by any of its processes."""
        from dpbench.results.store import OutcomeStore

        return OutcomeStore(self.directory).outcomes() if self.directory else []

    def pytest_report_header(self) -> str | None:
        """Say what will be measured, and with what."""
        if self.directory is None:
            return None
        count = sum(1 for _ in self.grid.cases())
        where = f"{self.gpu.name} (driver {self.gpu.driver})" if self.gpu else "no GPU"
        return f"dpbench: {self.grid.name}, {count} cases, {where}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the files; a ``--ncu`` session that measured nothing must not look green."""
        if self.is_worker or self.directory is None:
            return
        self._write()
        interrupted = exitstatus == pytest.ExitCode.INTERRUPTED
        if not interrupted and not any(outcome.rows for outcome in self.outcomes()):
            self.problems.append(
                "--ncu was given and nothing was measured; "
                "select tests that use the ncu fixture, e.g. -m gpu"
            )
        if self.problems and exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def _write(self) -> None:
        """Bring the files that were asked for up to date."""
        from dpbench.results.outcome import environment, write_json, write_markdown
        from dpbench.results.store import OutcomeStore

        assert self.directory is not None
        base = self.config.invocation_params.dir
        try:
            with OutcomeStore(self.directory).lock():
                outcomes = self.outcomes()
                if self.options.dpbench_json:
                    write_json(base / self.options.dpbench_json, outcomes, environment(self.gpu))
                if self.options.dpbench_markdown:
                    write_markdown(base / self.options.dpbench_markdown, outcomes)
        except OSError as error:
            self.problems.append(f"{error.filename}: {error.strerror}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One table for the whole session; workers are silent."""
        if self.is_worker:
            return
        waiting = sum(
            NEEDS_NCU in str(report.longrepr) for report in terminalreporter.getreports("skipped")
        )
        if waiting:
            terminalreporter.write_line(f"dpbench: {waiting} tests measure with --ncu")
        if self.directory is None:
            return
        from dpbench.results.outcome import summary_tables
        from dpbench.results.tables import as_text

        outcomes = self.outcomes()
        terminalreporter.section("dpbench")
        if outcomes:
            terminalreporter.write_line(as_text(summary_tables(outcomes)))
        for problem in self.problems:
            terminalreporter.write_line(f"ERROR: dpbench: {problem}", red=True)

    def pytest_unconfigure(self) -> None:
        """Leave nothing behind."""
        if self.directory is not None and not self.is_worker:
            shutil.rmtree(self.directory, ignore_errors=True)


def _failure(outcome: Outcome) -> str:
    parts = [f"{outcome.error}: {outcome.message}"]
    if outcome.log_tail:
        parts += [f"--- end of {outcome.log}", outcome.log_tail]
    return "\n".join(parts)
