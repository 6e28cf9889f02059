"""The hooks around each test: its fixtures measure; what they measured is judged and shared."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import pytest

from dpbench.child.messages import Steps
from dpbench.core.case import Case, Script
from dpbench.plugin.fixtures import NEEDS, asked_case, case_of, limits_of, measuring, takes
from dpbench.session import Session

if TYPE_CHECKING:
    from dpbench.findings import Asked
    from dpbench.instruments.interface import Instrument
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

    Measured = tuple[Outcome, Sequence[Instrument], CaseReport]

Step = Callable[[], object]
"""One training step, of a test's own."""

NO_PARAMETERS = "[NOTSET]"
"""How pytest ends the id of a test that has an empty list of parameters, and skips it."""

NOTHING_MEASURED = "nothing is measured with --dpbench-disable"


class Unmeasured:
    """What fixtures return with ``--dpbench-disable``: it skips a test that reads a number."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.extra_info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python, not by the test
            raise AttributeError(name)
        pytest.skip(NOTHING_MEASURED)


class EachTest:
    """The fixtures, and the judging of what a test measured, in each process that runs tests."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._tried_out: set[Case] = set()
        # of the test that is running:
        self._item: pytest.Item | None = None
        self._steps: list[Step] = []
        self._runs = False
        """Whether its body runs: subtests have their reports meanwhile."""
        self._measured: list[Measured] = []
        self._shared = 0
        """How many of these have been shared with the session."""

    # --- its fixtures ------------------------------------------------------------------------

    @pytest.fixture
    def ncu(self) -> Callable[..., CaseReport]:
        """Measure a case: re-executes it under Nsight Compute, and unprofiled for its time.

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
        """Measure a case by hardware counters, whichever reads them: the same as ``ncu`` otherwise.

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

    def _measure(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
        if not (self.session.instruments or self.session.settings.disable):
            pytest.skip(f"needs {NEEDS['ncu']}")  # asked for by name, so no mark could skip it
        return self._report(case, fields, self.session.instruments)

    def _count(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
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
        self._share_asked(case, instruments)
        outcome = self.session.measure(case, instruments)
        from dpbench.results.report import CaseReport

        report = CaseReport.of_outcome(outcome)
        self._measured.append((outcome, instruments, report))
        if outcome.error:
            tail = f"\n--- end of {outcome.log}\n{outcome.log_tail}" if outcome.log_tail else ""
            pytest.fail(f"{outcome.error}: {outcome.message}{tail}", pytrace=False)
        return report

    def _share_asked(self, case: Case, instruments: Sequence[Instrument]) -> None:
        """Let the session know what is asked for before it is measured, maybe in a fork.

        What no test asks for (a hook, after the last one) is limited, too.
        """
        names, item = [instrument.name for instrument in instruments], self._item
        asked = {**vars(case), "instruments": names, "tests": [_as_test(item)] if item else []}
        marked = item is not None and item.get_closest_marker("dpbench") is not None
        limited = None if marked else [(case, name) for name in names]
        self.session.findings.share(outcomes=[asked], limited=limited)

    def _subject(self, step: Step) -> Script:
        """A step of the running test as a subject, named after the test and the function."""
        if step not in self._steps:
            self._steps.append(step)
        names = [getattr(known, "__name__", type(known).__name__) for known in self._steps]
        place = self._steps.index(step)
        again = names[:place].count(names[place])
        test = self._item.nodeid if self._item else ""
        return Script(f"{test}:{names[place]}{f'-{again + 1}' if again else ''}")

    def _of_step(self, step: Step, instruments: Sequence[Instrument]) -> list[Instrument]:
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

    def _try_out(self, case: Case, step: Step | None) -> None:
        """Take one step; that of a case on tensors without data, which works on any machine."""
        from dpbench.instruments.logical.logical import Logical
        from dpbench.runner import measure

        if step:
            step()
        elif case not in self._tried_out:
            outcome = measure(case, [Logical()])
            if outcome.error:
                pytest.fail(f"{outcome.error}: {outcome.message}", pytrace=False)
            self._tried_out.add(case)

    # --- judging it --------------------------------------------------------------------------

    def asked_by(self, item: pytest.Item) -> list[tuple[Case, str]]:
        """The cases that a test asks for, as its parameters and fixtures say, by instruments."""
        case = case_of(item)
        return [(case, name) for name in self._instruments_of(item)] if case else []

    def _instruments_of(self, item: pytest.Item) -> list[str]:
        """The instruments of the fixtures that a test takes."""
        measures = takes(item, measuring(self.session.settings))
        names = [i.name for i in self.session.instruments] if measures else []
        return names + (["logical"] if takes(item, ["logical_io"]) else [])

    def _asked_before(self, item: pytest.Item) -> Asked:
        """What a test had asked for in the reference: it must not lose a case unseen."""
        if not self.session.limits:
            return []
        every = [name for _, name in self.session.sources]  # a test may request a fixture by name
        return self.session.reference.asked_by(
            item.nodeid.removesuffix(NO_PARAMETERS),
            self._instruments_of(item) if takes(item) else every,
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Begin anew with each run of a test: what its fixtures measure belongs to it."""
        self._item = item
        self._steps.clear()
        self._measured.clear()
        self._shared = 0
        return (yield)

    def pytest_runtest_logfinish(self) -> None:
        """End the test: what is measured from now on is no test's."""
        self._item = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test with a wrong marker before it measures anything."""
        limits_of(item)
        self._runs = True
        try:
            return (yield)
        finally:
            self._runs = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which handles xfail
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Judge what a test has measured, however it ends, and share it with the session.

        What its fixtures measured during setup is judged with the test itself, if it runs.
        """
        fresh = self._measured[self._shared :]
        is_due = {"setup": call.excinfo, "call": not self._runs, "teardown": fresh}[call.when]
        marked = item.get_closest_marker("dpbench") is not None
        before = self._asked_before(item) if is_due and not marked else []
        if not (is_due and (takes(item) or self._measured or marked or before)):
            return (yield)
        self._shared = len(self._measured)
        payload: dict[str, Any] = {}
        judged = pytest.CallInfo.from_call(
            lambda: self._judge(item, call, payload),
            call.when,
            reraise=(pytest.exit.Exception, KeyboardInterrupt),
        )
        if not marked:
            payload["limited"] = [*self.asked_by(item), *before]
        self.session.findings.share(outcomes=self._of_test(item, fresh), **payload)
        if call.excinfo is None or _is_skip(call):
            call.excinfo = judged.excinfo or call.excinfo
        report = yield
        if unwritten := self.session.findings.unwritten:  # goes with the report to the controller
            vars(report)["dpbench"] = unwritten
        if judged.excinfo and not (_is_skip(judged) or report.failed):
            # An xfail mark or another plugin may have expected a failure, but not this one.
            report.outcome, report.longrepr = "failed", item.repr_failure(judged.excinfo)
            vars(report).pop("wasxfail", None)
        return report

    def _judge(
        self, item: pytest.Item, call: pytest.CallInfo[None], payload: dict[str, Any]
    ) -> None:
        """Fail a test if what it measured got worse by more than a limit, or was not judged.

        What was found is added to the payload that the session's other processes get.
        """
        failure = call.excinfo or getattr(item, "_excinfo", None)  # of a unittest.TestCase
        passed = call.when == "call" and not failure
        if not (self._measured or passed):
            return
        own = limits_of(item)
        if own and self.session.settings.disable:
            pytest.skip(f"{NOTHING_MEASURED}, so its limits have judged nothing")
        chosen = self.session.limits if own is None else own
        # A marker of its class or module may be meant for other tests.
        is_meant = takes(item) or "dpbench" in [marker.name for marker in item.own_markers]
        if not (chosen and (self._measured or (own and is_meant))):
            return
        from dpbench.show.comparison import regression_text

        verdict = self._verdict(chosen)
        reference = self.session.reference
        unjudged = [u for u in verdict.unjudged if u.cases or (own and not _is_skip(call))]
        payload["regressions"] = verdict.regressions
        payload["unjudged"] = unjudged
        payload["reference"] = None if reference.frame.empty else str(reference.path)
        reasons = [f"{missing}{self.session.remedy}" for missing in unjudged]
        if worse := len(verdict.regressions):
            text = regression_text(verdict.regressions)
            item.add_report_section("call", "dpbench comparison", text)
            count = f"{worse} regression{'s' if worse > 1 else ''}"
            section = "see the section 'dpbench comparison'"
            reasons.insert(0, f"{count} against {reference.name}; {section}")
        if reasons:
            pytest.fail("\n".join(f"dpbench: {reason}" for reason in reasons), pytrace=False)

    def _verdict(self, chosen: Sequence[Threshold]) -> Verdict:
        """The verdict on the running test; measures the baselines that limits of ratios need."""
        from dpbench.results.run import Run

        outcomes = [outcome for outcome, *_ in self._measured]
        asked, baseline = [key for o in outcomes for key in o.asked], self.session.grid.baseline
        for outcome, instruments, _ in self._measured if any(limit.of for limit in chosen) else ():
            if not (outcome.error or isinstance(outcome.case, Script)):  # scripts have no baseline
                case = outcome.case.under(baseline)
                outcomes.append(self.session.measure(case, instruments))
        each = {(outcome.case, outcome.instruments): outcome for outcome in outcomes}.values()
        run = Run.of("this session", each, session={"grid": {"baseline": baseline}})
        return self.session.judge(run, chosen, asked)

    def _of_test(self, item: pytest.Item, measured: Sequence[Measured]) -> list[dict[str, Any]]:
        """Outcomes without rows: which test asked for each case, and what it added."""
        return [
            {
                **vars(outcome.case),
                "instruments": outcome.instruments,
                "tests": [_as_test(item)],
                "extra_info": json.loads(json.dumps(report.extra_info, default=str)),
            }
            for outcome, _, report in measured
        ]


def _as_test(item: pytest.Item) -> dict[str, Any]:
    """A test as outcomes name it."""
    given = item.callspec.params if hasattr(item, "callspec") else {}
    params = {name: v.id if isinstance(v, Case) else str(v) for name, v in given.items()}
    return {"test": item.nodeid, "params": params}


def _is_skip(call: pytest.CallInfo[None]) -> bool:
    return call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)


def _is_step(asked: object, fields: dict[str, Any]) -> TypeGuard[Step]:
    """Whether a fixture was called with a function that takes a step."""
    return callable(asked) and not isinstance(asked, type) and not fields
