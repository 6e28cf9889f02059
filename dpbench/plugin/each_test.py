"""The hooks around each test: fixtures measure, and the session records their requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import pytest

from dpbench.child.messages import Steps
from dpbench.core.case import Case
from dpbench.core.subject import Script, Subject
from dpbench.plugin.fixtures import (
    NEEDS,
    asked_case,
    case_of,
    limits_of,
    measuring,
    takes,
    texts_of,
)
from dpbench.session import Session
from dpbench.session_store import Request

if TYPE_CHECKING:
    from dpbench.instruments.interface import Instrument
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

    Measured = tuple[Outcome, CaseReport]

StepFunction = Callable[[], object]
"""One training step, of a test's own."""

NOTHING_MEASURED = "nothing is measured with --dpbench-disable"


class Unmeasured:
    """What fixtures return with ``--dpbench-disable``: it skips a test that reads a number."""

    def __init__(self, case: Subject) -> None:
        self.case = case
        self.extra_info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python, not by the test
            raise AttributeError(name)
        pytest.skip(NOTHING_MEASURED)


class EachTest:
    """The fixtures and each test's requests, in each process that runs tests."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tried_out: set[Subject] = set()
        # state of the running test:
        self._item: pytest.Item | None = None
        self._steps: list[StepFunction] = []
        self._measured: list[Measured] = []

    # --- its fixtures ------------------------------------------------------------------------

    @pytest.fixture
    def ncu(self) -> Callable[..., CaseReport]:
        """Measure a case: run it under Nsight Compute, and unprofiled for its time.

        With ``--cupti`` as well, time and peak memory are those of the process that CUPTI counts
        in. ``--dpbench-instrument`` adds other instruments, or without ``--ncu`` replaces these.

        Called with a `Case` or with a case's fields; returns a `CaseReport`. However many tests,
        fixtures or xdist workers ask for a case, it is measured once a session::

            def test_ghost_clipping_saves_bytes(ncu):
                cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
                standard = ncu("standard", **cell)
                assert ncu("dpsgd_ghost", **cell).ratio_to(standard) < 3
        """
        return self._measure

    @pytest.fixture
    def counters(self) -> Callable[..., CaseReport]:
        """Measure a case by hardware counters, with any tool that reads them; otherwise as ``ncu``.

        With ``--cupti`` the report is CUPTI's, with ``--ncu`` ncu's. With both it has the rows of
        both; where they have the same number its values are ncu's, the reference, while time, peak
        memory and busy shares are CUPTI's.
        """
        return self._measure

    @pytest.fixture
    def logical_io(self) -> Callable[..., CaseReport]:
        """Count the logical bytes of a case; needs neither a GPU nor the case's memory.

        Called with a `Case`, with a case's fields, or with a function that does one step of the
        test's own; returns a `CaseReport`. However many tests, fixtures or xdist workers ask for a
        case, it is counted once a session::

            def test_ghost_clipping_saves_bytes(logical_io):
                cell = {"batch_size": 8, "seq_len": 256, "model_size": "1b"}
                standard = logical_io("standard", **cell)
                assert logical_io("dpsgd_ghost", **cell).ratio_to(standard) < 3
        """
        return self._count

    def _measure(self, case: Case | str | type | StepFunction, **fields: Any) -> CaseReport:
        if not (self.session.instruments or self.session.settings.disable):
            pytest.skip(f"needs {NEEDS['ncu']}")  # asked for by name, so no mark could skip it
        return self._report(case, fields, self.session.instruments)

    def _count(self, case: Case | str | type | StepFunction, **fields: Any) -> CaseReport:
        from dpbench.instruments.logical.logical import Logical

        return self._report(case, fields, [Logical.from_settings(self.session.settings)])

    def _report(
        self, asked: object, fields: dict[str, Any], instruments: Sequence[Instrument]
    ) -> CaseReport:
        """The report of a case, or of a step of the test's own, by these instruments."""
        step = asked if _is_step(asked, fields) else None
        case = self._subject(step) if step else asked_case(asked, fields)
        if self.session.settings.disable:
            self._try_out(case, step)
            return cast("CaseReport", Unmeasured(case))
        if step:
            instruments = self._of_step(step, instruments)
        self._ask(case, [instrument.name for instrument in instruments])
        outcome = self.session.measure(case, instruments)
        if not (step or outcome.error) and self._limits_ratios():
            self.session.measure(case.with_trainer(self.session.grid.baseline), instruments)
        from dpbench.results.report import CaseReport

        report = CaseReport.of_outcome(outcome)
        self._measured.append((outcome, report))
        if outcome.error:
            tail = f"\n--- end of {outcome.log}\n{outcome.log_tail}" if outcome.log_tail else ""
            pytest.fail(f"{outcome.error}: {outcome.message}{tail}", pytrace=False)
        return report

    def _ask(
        self, case: Subject, instruments: Sequence[str], extra_info: Mapping[str, Any] | None = None
    ) -> None:
        """Tell the session of a request before it is measured, perhaps in a fork.

        Limits also apply to cases that no test requests but a hook, after the last test.
        """
        item, extra = self._item, json.loads(json.dumps(extra_info or {}, default=str))
        if item is None:
            self.session.store.ask([Request("", case, (*instruments,))])
            return
        given = item.callspec.params if hasattr(item, "callspec") else {}
        params = {name: v.id if isinstance(v, Case) else str(v) for name, v in given.items()}
        request = Request(item.nodeid, case, (*instruments,), texts_of(item), params, extra)
        self.session.store.ask([request])

    def _subject(self, step: StepFunction) -> Script:
        """A step of the running test as a subject, named after the test and the function."""
        if step not in self._steps:
            self._steps.append(step)
        names = [getattr(known, "__name__", type(known).__name__) for known in self._steps]
        place = self._steps.index(step)
        again = names[:place].count(names[place])
        test = self._item.nodeid if self._item else ""
        return Script(f"{test}:{names[place]}{f'-{again + 1}' if again else ''}")

    def _of_step(self, step: StepFunction, instruments: Sequence[Instrument]) -> list[Instrument]:
        """Instruments that measure a step in this process, as the given ones measure a case."""
        from dpbench.instruments.observe import FunctionInstrument

        if wrong := [i.name for i in instruments if not i.measures("step")]:
            pytest.fail(
                f"dpbench: {', '.join(wrong)} cannot measure a step of this process, because it "
                f"starts one of its own: use logical_io(step), --cupti without --ncu, or "
                f"--dpbench-instrument=timing",
                pytrace=False,
            )
        settings = self.session.settings
        steps = Steps(settings.warmup, settings.active)
        once = Steps(warmup=1, active=1)
        return [FunctionInstrument(i, step, steps if i.hardware else once) for i in instruments]

    def _try_out(self, case: Subject, step: StepFunction | None) -> None:
        """Take one step; a case's step uses tensors without data, so it works on any machine."""
        from dpbench.instruments.logical.logical import Logical
        from dpbench.runner import measure

        if step:
            step()
        elif case not in self._tried_out:
            outcome = measure(case, [Logical()])
            if outcome.error:
                pytest.fail(f"{outcome.error}: {outcome.message}", pytrace=False)
            self._tried_out.add(case)

    def _limits_ratios(self) -> bool:
        """Whether a limit on what the running test measures needs the baseline, too."""
        own = limits_of(self._item) if self._item else None
        return any(limit.of for limit in (self.session.limits if own is None else own))

    # --- what it asks for --------------------------------------------------------------------

    def known(self, item: pytest.Item) -> Request | None:
        """What a test will request, known from its parameters, fixtures and marker before it runs.

        None if it requests nothing of dpbench: a marker of its class or module may be for other
        tests.
        """
        if not (takes(item) or "dpbench" in [marker.name for marker in item.own_markers]):
            return None
        measures = takes(item, measuring(self.session.settings))
        names = [i.name for i in self.session.instruments] if measures else []
        names += ["logical"] if takes(item, ["logical_io"]) else []
        return Request(item.nodeid, case_of(item), (*names,), texts_of(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Reset the state before each run of a test, so that measurements belong to it."""
        self._item = item
        self._steps.clear()
        self._measured.clear()
        return (yield)

    def pytest_runtest_logfinish(self) -> None:
        """End the test: later measurements belong to no test."""
        self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test with a wrong marker before it measures anything."""
        own = limits_of(item)
        result = yield
        if own and self.session.settings.disable:
            pytest.skip(f"{NOTHING_MEASURED}, so its limits have judged nothing")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Share what a test added to its reports, once it has ended."""
        if call.when == "teardown":
            for outcome, measured in self._measured:
                if measured.extra_info:
                    self._ask(outcome.case, outcome.instruments, measured.extra_info)
        report = yield
        if unwritten := self.session.store.unwritten:  # goes with the report to the controller
            vars(report)["dpbench"] = unwritten
        return report


def _is_step(asked: object, fields: dict[str, Any]) -> TypeGuard[StepFunction]:
    """Whether a fixture was called with a function that takes a step."""
    return callable(asked) and not isinstance(asked, type) and not fields
