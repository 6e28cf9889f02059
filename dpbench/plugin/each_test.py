"""Defines the fixtures that measure cases, and hooks that record which cases a test requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import pytest

from dpbench.child.messages import Steps
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.subject import Script, Subject
from dpbench.instruments.interface import Instrument
from dpbench.instruments.logical.logical import Logical
from dpbench.plugin.fixtures import (
    NEEDS,
    asked_case,
    grid_case,
    limit_texts,
    marker_limits,
    measuring_fixtures,
    shared_name,
    uses_fixture,
)
from dpbench.results.outcome import Outcome
from dpbench.runner import measure
from dpbench.session import Session
from dpbench.session_store import Request

if TYPE_CHECKING:
    from dpbench.results.report import CaseReport

    Measured = tuple[Outcome, CaseReport]

StepFunction = Callable[[], object]
"""A test's own function, which takes one training step."""

NOTHING_MEASURED = "nothing is measured with --dpbench-disable"


class Unmeasured:
    """Replaces a report with ``--dpbench-disable``. A test that reads a number is skipped."""

    def __init__(self, case: Subject) -> None:
        self.case = case
        self.extra_info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself reads such names
            raise AttributeError(name)
        pytest.skip(NOTHING_MEASURED)


class EachTest:
    """The fixtures, and the state of the running test, in one process that runs tests."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tried_out: set[Subject] = set()
        # the state of the running test:
        self._item: pytest.Item | None = None
        self._steps: dict[StepFunction, Script] = {}
        self._names = Counter[str]()
        self._fixtures: list[Any] = []  # those that are being set up, the innermost last
        self._measured: list[Measured] = []
        self._sections: list[tuple[str, str]] = []  # of the report on the test's call

    @pytest.fixture
    def ncu(self) -> Callable[..., CaseReport]:
        """Measure a case under Nsight Compute, and in another process without a profiler.

        The process without a profiler measures time and peak memory. With ``--dpbench-no-timing``,
        this process is omitted. With ``--cupti``, time and peak memory come from the process in
        which CUPTI counts. ``--dpbench-instrument`` adds other instruments. With this option,
        ``--ncu`` is not needed.

        Call the fixture with a `Case` or with the fields of a case. The result is a `CaseReport`. A
        session measures a case once, even if several tests or workers request the case::

            def test_ghost_clipping_saves_bytes(ncu):
                cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
                standard = ncu("standard", **cell)
                assert ncu("dpsgd_ghost", **cell).ratio_to(standard) < 3
        """
        return self._measure

    @pytest.fixture
    def counters(self) -> Callable[..., CaseReport]:
        """Measure a case with hardware counters. Call this fixture like the fixture ``ncu``.

        The report contains the numbers of CUPTI (``--cupti``), of Nsight Compute (``--ncu``), or of
        both. If both measure a metric, the report uses the number of Nsight Compute. With
        ``--cupti``, time, peak memory and busy shares come from CUPTI.
        """
        return self._measure

    @pytest.fixture
    def logical_io(self) -> Callable[..., CaseReport]:
        """Count the logical bytes of a case. This needs no GPU, and no memory for the tensors.

        Call the fixture with a `Case`, with the fields of a case, or with the test's own function
        that takes one step. The result is a `CaseReport`. A session counts a case once, even if
        several tests or workers request the case::

            def test_ghost_clipping_saves_bytes(logical_io):
                cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
                standard = logical_io("standard", **cell)
                assert logical_io("dpsgd_ghost", **cell).ratio_to(standard) < 3
        """
        return self._count

    def _measure(self, case: Case | str | type | StepFunction, **fields: Any) -> CaseReport:
        if not (self.session.instruments or self.session.settings.disable):
            pytest.skip(
                f"needs {NEEDS['ncu']}"
            )  # the test has no skip mark, because it requested the fixture while it ran
        return self._report(case, fields, self.session.instruments)

    def _count(self, case: Case | str | type | StepFunction, **fields: Any) -> CaseReport:
        return self._report(case, fields, [Logical.from_settings(self.session.settings)])

    def _report(
        self, asked: object, fields: dict[str, Any], instruments: Sequence[Instrument]
    ) -> CaseReport:
        """Return the report of a case or of the test's own step, measured by these instruments."""
        step = asked if _is_step(asked, fields) else None
        if self.session.settings.disable:
            case = self._subject(step, self._owner()) if step else asked_case(asked, fields)
            self._try_out(case, step)
            return cast("CaseReport", Unmeasured(case))
        if step:
            outcome = self._measure_step(step, instruments)
        else:
            outcome = self._measure_asked(case := asked_case(asked, fields), instruments)
            if not outcome.error and self._limits_ratios():
                self.session.measure(case.with_trainer(self.session.grid.baseline), instruments)
        from dpbench.results.report import CaseReport

        report = CaseReport.of_outcome(outcome)
        self._measured.append((outcome, report))
        if outcome.error:
            end, tail = outcome.log or "its output", outcome.log_tail
            tail = f"\n--- end of {end}\n{tail}" if tail else ""
            pytest.fail(f"{outcome.error}: {outcome.message}{tail}", pytrace=False)
        return report

    def _ask(
        self, case: Subject, instruments: Sequence[str], extra_info: Mapping[str, Any] | None = None
    ) -> None:
        """Share a request of the running test, or of a hook outside tests, with all processes.

        The request is shared before the measurement, so that it is known if the measurement fails.
        """
        item, extra = self._item, json.loads(json.dumps(extra_info or {}, default=str))
        if item is None:
            self.session.store.ask([Request("", case, (*instruments,))])
            return
        given = item.callspec.params if hasattr(item, "callspec") else {}
        params = {name: v.id if isinstance(v, Case) else str(v) for name, v in given.items()}
        request = Request(item.nodeid, case, (*instruments,), limit_texts(item), params, extra)
        self.session.store.ask([request])

    def _subject(self, step: StepFunction, owner: str) -> Script:
        """Return the subject for a step, which is named by its owner and its function."""
        if step not in self._steps:
            named = f"{owner}:{getattr(step, '__name__', type(step).__name__)}"
            self._names[named] += 1
            again = self._names[named]
            self._steps[step] = Script(f"{named}-{again}" if again > 1 else named)
        return self._steps[step]

    def _owner(self) -> str:
        """Return the name of the fixture that measures a step for tests, or else of the test.

        A fixture may measure a step only for the first test.
        """
        if self._item is None:
            return ""
        if self._fixtures:
            return shared_name(self._item, self._fixtures[-1]) or self._item.nodeid
        return self._item.nodeid

    def _measure_step(self, step: StepFunction, instruments: Sequence[Instrument]) -> Outcome:
        """Measure a step that has not been measured, or whose counts differ from its name's."""
        taken = step in self._steps

        def take() -> object:
            nonlocal taken
            taken = True
            return step()

        owner, used = self._owner(), self._step_instruments(take, instruments)
        outcome = self._measure_asked(self._subject(step, owner), used)
        own = self._item.nodeid if self._item else ""
        counted = [each for each in used if not each.hardware]
        if taken or owner == own or not counted:
            return outcome
        if _counts(measure(outcome.case, counted)) == _counts(outcome):
            return outcome
        del self._steps[step]
        return self._measure_asked(self._subject(step, own), used)

    def _measure_asked(self, case: Subject, instruments: Sequence[Instrument]) -> Outcome:
        self._ask(case, [instrument.name for instrument in instruments])
        return self.session.measure(case, instruments)

    def _step_instruments(
        self, step: StepFunction, instruments: Sequence[Instrument]
    ) -> list[Instrument]:
        """Return instruments that measure the test's own step in this process."""
        from dpbench.instruments.observe import FunctionInstrument

        if wrong := [i.name for i in instruments if not i.measures("step")]:
            pytest.fail(
                f"dpbench: {', '.join(wrong)} cannot measure a step in pytest's process: use "
                f"logical_io(step), --cupti without --ncu, or --dpbench-instrument=timing",
                pytrace=False,
            )
        settings = self.session.settings
        steps = Steps(settings.warmup, settings.active)
        once = Steps(warmup=1, active=1)
        return [FunctionInstrument(i, step, steps if i.hardware else once) for i in instruments]

    def _try_out(self, case: Subject, step: StepFunction | None) -> None:
        """Take one step of a test's function, or of a case, without a measurement.

        The step of a case uses tensors without data, and is taken once in this process.
        """
        if step:
            step()
        elif case not in self._tried_out:
            outcome = measure(case, [Logical()])
            if outcome.error:
                pytest.fail(f"{outcome.error}: {outcome.message}", pytrace=False)
            self._tried_out.add(case)

    def _limits_ratios(self) -> bool:
        """Return True if the running test has a limit on a ratio, which needs the baseline."""
        own = marker_limits(self._item) if self._item else None
        return any(limit.of for limit in (self.session.limits if own is None else own))

    def expected_request(self, item: pytest.Item) -> Request | None:
        """Return what is known about a test's request before the test runs.

        The request follows from the test's parameters, fixtures and marker. Returns None if the
        test uses no fixture of dpbench and has no marker ``dpbench`` of its own. A marker of the
        test's class or module is ignored, because it may be meant for other tests.
        """
        if not (uses_fixture(item) or "dpbench" in [marker.name for marker in item.own_markers]):
            return None
        measures = uses_fixture(item, measuring_fixtures(self.session.settings))
        names = [i.name for i in self.session.instruments] if measures else []
        names += ["logical"] if uses_fixture(item, ["logical_io"]) else []
        return Request(item.nodeid, grid_case(item), (*names,), limit_texts(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, object, object]:
        """Know which fixture is being set up."""
        self._fixtures.append(fixturedef)
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Reset the state before each run of a test."""
        self._item = item
        self._steps.clear()
        self._names.clear()
        self._measured.clear()
        self._sections = []
        return (yield)

    def pytest_runtest_logfinish(self) -> None:
        """Forget the running test, so that later measurements do not belong to it."""
        self._item = None
        self._steps.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Check the limits of a test that has passed, and fail the test if one is exceeded.

        A test with an invalid marker fails before it runs. With ``--dpbench-disable``, a test whose
        marker has limits is skipped after it has run.
        """
        own = marker_limits(item)
        result = yield
        if own and self.session.settings.disable:
            pytest.skip(f"{NOTHING_MEASURED}, so its limits were not checked")
        if not getattr(item, "_excinfo", None):  # where a test case of unittest keeps its exception
            self._judge(item)
        return result

    def _judge(self, item: pytest.Item) -> None:
        """Fail a test because of limits that are exceeded or could not be checked."""
        try:
            judgement = self.session.judge(item.nodeid, limit_texts(item))
        except ConfigurationError as error:
            pytest.fail(f"dpbench: {error}", pytrace=False)
        if judgement is None or judgement.passed:
            return
        reasons = [f"dpbench: {missing}" for missing in judgement.unjudged]
        if worse := len(judgement.regressions):
            from dpbench.show.comparison import exceeded_lines, regression_text

            self._sections = [("dpbench comparison", regression_text(judgement.regressions))]
            count = f"{worse} regression{'s' if worse > 1 else ''}"
            against = " and ".join(dict.fromkeys(r["reference"] for r in judgement.regressions))
            section = "see the section 'dpbench comparison'"
            first = f"dpbench: {count} against {against}; {section}"
            reasons = [first, *exceeded_lines(judgement.regressions), *reasons]
        pytest.fail("\n".join(reasons), pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Share the ``extra_info`` of a test's reports when the teardown of the test has run."""
        if call.when == "teardown":
            for outcome, measured in self._measured:
                if measured.extra_info:
                    self._ask(outcome.case, outcome.instruments, measured.extra_info)
        report = yield
        if call.when == "call":
            report.sections += self._sections
        # the report carries files that could not be written to the controller
        if unwritten := self.session.store.unwritten:
            vars(report)["dpbench"] = unwritten
        return report


def _counts(outcome: Outcome) -> list[tuple[object, ...]]:
    memory = "peak_memory_bytes"  # depends on what lives in the process
    rows = [row for row in outcome.rows if row.instrument == "logical" and row.metric != memory]
    return [(row.phase, row.metric, row.repeat, row.value) for row in rows]


def _is_step(asked: object, fields: dict[str, Any]) -> TypeGuard[StepFunction]:
    """Return True if a fixture was called with a function that takes a step."""
    return callable(asked) and not isinstance(asked, type) and not fields
