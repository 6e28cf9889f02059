"""The pytest plugin: options, the ``ncu`` fixture, the grid's cases, one table at the end.

Everything heavy is imported inside functions: ``pytest --help`` loads no torch and no pandas.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.case import AXES, GRIDS, Case, Grid
from dpbench.errors import DpbenchError, check_writable_file
from dpbench.gpu import Gpu, visible_gpus
from dpbench.instruments import choose
from dpbench.instruments.base import Instrument
from dpbench.instruments.child import Steps
from dpbench.instruments.ncu import Ncu
from dpbench.instruments.timing import Timing

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

NEEDS_NCU = "needs --ncu"
MANAGER = "dpbench-manager"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options; their defaults are the instruments' own."""
    group = parser.getgroup("dpbench", "I/O cost of differentially private training (dpbench)")
    group.addoption("--ncu", action="store_true", help="measure cases under NVIDIA Nsight Compute")
    group.addoption("--ncu-path", metavar="PROGRAM", help="the ncu program, if not on PATH")
    group.addoption(
        "--ncu-dir",
        type=Path,
        default=Path("ncu_reports"),
        metavar="DIR",
        help="where .ncu-rep reports and logs go (default ncu_reports)",
    )
    group.addoption(
        "--ncu-metrics",
        action="append",
        metavar="NAMES",
        help="what to count: names of dpbench, of nvprof, or ncu counters, separated by commas "
        "(default: DRAM, L2 and global load/store bytes)",
    )
    for prefix, whose, steps in (
        ("ncu", "profiled", Ncu.steps),
        ("dpbench", "unprofiled", Timing.steps),
    ):
        for name, default in vars(steps).items():
            group.addoption(
                f"--{prefix}-{name}",
                type=int,
                default=default,
                metavar="N",
                help=f"{name} steps of the {whose} process (default {default})",
            )
    group.addoption(
        "--dpbench-grid",
        default="grid1",
        metavar="GRID",
        help=f"cases of the dpbench_case fixture: {', '.join(GRIDS)}, or a .toml file "
        "(default grid1)",
    )
    for axis in AXES:
        group.addoption(
            f"--dpbench-{axis.replace('_', '-')}",
            action="append",
            type=int if axis in ("batch_size", "seq_len") else str,
            metavar=axis.upper(),
            help=f"replaces the grid's {axis.replace('_', ' ')}; repeatable",
        )
    group.addoption(
        "--dpbench-no-timing",
        action="store_true",
        help="count bytes only: no second, unprofiled process for step time and peak memory",
    )
    group.addoption(
        "--dpbench-timeout",
        type=float,
        default=Timing.timeout,
        metavar="SECONDS",
        help="end a case's process after this long on the GPU (default %(default)g)",
    )
    group.addoption("--dpbench-json", type=Path, metavar="FILE", help="write every row here")
    group.addoption("--dpbench-markdown", type=Path, metavar="FILE", help="write the tables here")


def pytest_configure(config: pytest.Config) -> None:
    """Check what was asked for before anything runs, and say so in one line if it can't."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU")
    try:
        manager = Manager(config)
    except DpbenchError as error:
        raise pytest.UsageError(f"dpbench: {error}") from error
    config.pluginmanager.register(manager, MANAGER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``dpbench_case`` once for each case of the grid."""
    if "dpbench_case" in metafunc.fixturenames:
        manager: Manager = metafunc.config.pluginmanager.getplugin(MANAGER)
        cases = list(manager.grid.cases())
        metafunc.parametrize("dpbench_case", cases, ids=[case.id for case in cases])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what measures under ncu unless ``--ncu`` was given: it takes minutes of a GPU.

    Tests of one case come one after the other: xdist workers then measure different cases,
    instead of waiting for each other's.
    """
    manager: Manager = config.pluginmanager.getplugin(MANAGER)
    position = {case.id: place for place, case in enumerate(manager.grid.cases())}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        case = callspec.params.get("dpbench_case") if callspec else None
        return position.get(case.id, len(position)) if case else len(position)

    items.sort(key=place)
    if not config.option.ncu:
        for item in items:
            if "ncu" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=NEEDS_NCU))


@pytest.fixture
def ncu(pytestconfig: pytest.Config) -> Callable[..., CaseReport]:
    """Measure a case: re-executes it under Nsight Compute, and unprofiled for its time.

    Called with a `Case` or with a case's fields; returns a `CaseReport`. However many tests,
    fixtures or xdist workers ask for a case, it is measured once a session::

        def test_ghost_clipping_saves_bytes(ncu):
            cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
            standard = ncu("standard", **cell)
            assert ncu("dpsgd_ghost", **cell).ratio_to(standard) < 3
    """
    manager: Manager = pytestconfig.pluginmanager.getplugin(MANAGER)
    return manager.measure


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
