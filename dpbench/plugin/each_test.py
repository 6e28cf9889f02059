"""Around a test: its fixtures measure, and what they measured is judged and told on its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import pytest

from dpbench.case import AXES, SCRIPT, Case, script_case
from dpbench.comparison import asked_for, limits
from dpbench.errors import ConfigurationError, unknown
from dpbench.instruments.terminal import shown_past
from dpbench.plugin.fixtures import NEEDS, case_of, measuring, takes
from dpbench.process.messages import Steps
from dpbench.registry import resolve
from dpbench.session import Session

if TYPE_CHECKING:
    from dpbench.instruments.base import Instrument
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

Step = Callable[[], object]
"""One training step, of a test's own."""

MARKER = (
    "dpbench(compare_fail=[...]): limits for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty. Without --dpbench-compare it is compared "
    "with the latest complete run, as with --dpbench-compare-fail"
)

NOTHING_MEASURED = "nothing is measured with --dpbench-disable"


class Unmeasured:
    """What fixtures return with ``--dpbench-disable``: a test that asks it for a number ends."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.extra_info: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python, not by the test
            raise AttributeError(name)
        pytest.skip(NOTHING_MEASURED)


class EachTest:
    """A plugin of its own, in each process that runs tests; the controller judges the whole."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self.session = session
        self.comparison = session.comparison
        capture = config.pluginmanager.getplugin("capturemanager")
        self._uncaught = capture.global_and_fixture_disabled if capture else nullcontext
        self._tried_out: set[Case] = set()
        # of the test that is running:
        self._test = ""
        self._steps: list[Step] = []
        self._measured: list[tuple[Outcome, Sequence[Instrument], CaseReport]] = []
        self._judged: dict[str, Any] = {}
        # in the controller:
        self._general: list[list[tuple[dict[str, Any], str]]] = []
        """What each test asked for that the command line's limits are for."""

    # --- what its fixtures do ----------------------------------------------------------------

    def measure(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
        """What the fixtures ``ncu`` and ``counters`` return is this; see there."""
        if not (self.session.instruments or self.session.settings.disable):
            pytest.skip(f"needs {NEEDS['ncu']}")  # it was taken by its name, while the test ran
        return self._report(case, fields, self.session.instruments)

    def count(self, case: Case | str | type | Step, **fields: Any) -> CaseReport:
        """What the ``logical_io`` fixture returns is this; see there."""
        from dpbench.instruments.logical.instrument import Logical

        return self._report(case, fields, [Logical.from_settings(self.session.settings)])

    def _report(
        self, asked: object, fields: dict[str, Any], instruments: Sequence[Instrument]
    ) -> CaseReport:
        """The report of a case, or of a step of the test's own, by these instruments."""
        step = asked if _is_step(asked, fields) else None
        case = self._case_of_step(step) if step else _case(asked, fields)
        if self.session.settings.disable:
            self._try_out(case, step)
            return cast("CaseReport", Unmeasured(case))
        if step:
            instruments = self._of_step(step, instruments)
        with shown_past(self._uncaught):
            outcome = self.session.measure(case, instruments)
        from dpbench.results.report import CaseReport

        report = CaseReport.of_outcome(outcome)
        self._measured.append((outcome, instruments, report))
        if outcome.skipped:
            pytest.skip(outcome.message)
        if outcome.error:
            parts = [f"{outcome.error}: {outcome.message}"]
            if outcome.log_tail:
                parts += [f"--- end of {outcome.log}", outcome.log_tail]
            pytest.fail("\n".join(parts), pytrace=False)
        return report

    def _case_of_step(self, step: Step) -> Case:
        """The case of a step that the running test has defined, named after both."""
        if step not in self._steps:
            self._steps.append(step)
        names = [getattr(known, "__name__", type(known).__name__) for known in self._steps]
        place = self._steps.index(step)
        again = names[:place].count(names[place])
        return script_case(f"{self._test}:{names[place]}{f'-{again + 1}' if again else ''}")

    def _of_step(self, step: Step, instruments: Sequence[Instrument]) -> list[Instrument]:
        """What measures a step in this process as these instruments measure a case."""
        from dpbench.instruments.observe import OwnStep
        from dpbench.instruments.recorders import RECORDERS

        if wrong := [i.name for i in instruments if i.name not in RECORDERS]:
            pytest.fail(
                f"dpbench: {', '.join(wrong)} cannot measure a step of this process, for it starts "
                f"one of its own: take logical_io(step), --cupti without --ncu, or "
                f"--dpbench-instrument=timing",
                pytrace=False,
            )
        settings = self.session.settings
        steps = Steps(settings.warmup, settings.active)
        once = Steps(warmup=1, active=1)
        return [OwnStep(i.name, step, steps if i.hardware else once) for i in instruments]

    def _try_out(self, case: Case, step: Step | None) -> None:
        """Take a step once; that of a case on tensors without data, as any machine can."""
        from dpbench.instruments.logical.instrument import Logical
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
        """What a test asks for according to its parameters and fixtures."""
        case = case_of(item)
        measures = takes(item, measuring(self.session.settings))
        names = [i.name for i in self.session.instruments] if measures else []
        names += ["logical"] if takes(item, ["logical_io"]) else []
        return [(case, name) for name in names] if case else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """What a test asks for, its fixtures included, belongs to it."""
        self._measured.clear()
        self._judged = {}
        self._steps.clear()
        self._test = item.nodeid
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge also a test whose fixtures have measured and then skipped it."""
        with self._judging_what_ends(item):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that passed if what it asked for got worse by more than it may."""
        own = self._limits_of(item)
        with self._judging_what_ends(item):
            result = yield
            if self.session.settings.disable and own:
                pytest.skip(f"{NOTHING_MEASURED}, so its limits have judged nothing")
        if reason := self._judge(item, own):
            pytest.fail(reason, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Judge what a fixture measures after its test."""
        known = len(self._measured)
        result = yield
        if len(self._measured) > known and (reason := self._judge(item, self._limits_of(item))):
            pytest.fail(reason, pytrace=False)
        return result

    @contextmanager
    def _judging_what_ends(self, item: pytest.Item) -> Iterator[None]:
        """Judge what a test has measured that does not come to its end."""
        try:
            yield
        except pytest.skip.Exception:
            reason = self._measured and self._judge(item, self._limits_of(item), skipped=True)
            if reason:
                pytest.fail(reason, pytrace=False)
            raise
        except (Exception, pytest.fail.Exception):
            if self._measured:
                self._judge(item, self._limits_of(item))
            raise

    def _limits_of(self, item: pytest.Item) -> list[Threshold] | None:
        """A test's own limits, if it has a marker; a wrong marker fails the test."""
        marker = item.get_closest_marker("dpbench")
        if marker is None:
            return None
        texts = marker.kwargs.get("compare_fail")
        reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
        if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
            try:
                return limits(texts)
            except ConfigurationError as error:
                reason = str(error)
        pytest.fail(f"dpbench: {reason}", pytrace=False)

    def _judge(
        self, item: pytest.Item, own: list[Threshold] | None, *, skipped: bool = False
    ) -> str:
        """Judge what a test asked for; returns the reason to fail it, if there is one."""
        if self.session.settings.disable:
            return ""
        chosen = self.comparison.limits if own is None else own
        inherited = "dpbench" not in [marker.name for marker in item.own_markers]
        if own and inherited and not (takes(item) or self._measured):
            return ""  # its class or module has the marker, for others
        if not chosen or not (self._measured or own):
            return ""
        from dpbench.show.comparison import regression_text

        verdict = self._verdict(chosen)
        reference = self.comparison.reference
        unjudged = [u for u in verdict.unjudged if u.cases or not (own is None or skipped)]
        self._judged = {
            "regressions": verdict.regressions,
            "unjudged": [missing.as_json() for missing in unjudged],
            "reference": None if reference.frame.empty else str(reference.path),
        }
        reasons = []
        if worse := len(verdict.regressions):
            text = regression_text(verdict.regressions)
            item.add_report_section("call", "dpbench comparison", text)
            count = f"{worse} regression{'s' if worse > 1 else ''}"
            reasons.append(
                f"{count} against {reference.name}; see the section 'dpbench comparison'"
            )
        reasons += [f"{missing}{self.comparison.remedy}" for missing in unjudged]
        return "\n".join(f"dpbench: {reason}" for reason in reasons)

    def _verdict(self, chosen: Sequence[Threshold]) -> Verdict:
        """What the running test asked for; a ratio needs its baseline, measured if it is not."""
        from dpbench.results.run import Run

        outcomes = [outcome for outcome, *_ in self._measured]
        baseline = self.session.grid.baseline

        def judged(measured: Sequence[Outcome]) -> Verdict:
            run = Run.of("this session", measured, session={"grid": {"baseline": baseline}})
            return self.comparison.judge(run, chosen, asked_for(outcomes))

        verdict = judged(outcomes)
        ratios = {str(limit) for limit in chosen if limit.of}
        if not any(missing.limit in ratios for missing in verdict.unjudged):
            return verdict
        baselines = [
            self.session.measure(replace(outcome.case, trainer=baseline), instruments)
            for outcome, instruments, _ in self._measured
            if not outcome.error and outcome.case.workload != SCRIPT  # nobody says what its is
        ]
        return judged([*outcomes, *(b for b in baselines if b not in outcomes)])

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, which knows xfail
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report what was found: as plain types it survives the way from a worker."""
        report = yield
        if (call.when == "setup" and report.passed) or not (takes(item) or self._measured):
            return report
        found, self._judged = self._judged, {}
        if found.get("regressions") or found.get("unjudged"):
            report.outcome = "failed"  # also where an xfail mark expects another failure
            vars(report).pop("wasxfail", None)
        if call.when != "teardown":
            found["tests"] = self._as_tests(item)
        if self._measured:
            unwritten = self.session.store.unwritten.values()
            found["unwritten"] = [outcome.as_json() for outcome in unwritten]
        found = {name: value for name, value in found.items() if value}
        has_own = item.get_closest_marker("dpbench") is not None
        if not has_own and self.comparison.limits:
            outcomes = [outcome for outcome, *_ in self._measured]
            asked = dict.fromkeys([*self.asked_by(item), *asked_for(outcomes)])
            found["general"] = [(asdict(case), name) for case, name in asked]
        vars(report)["dpbench"] = found
        return report

    def _as_tests(self, item: pytest.Item) -> list[Any]:
        """What `Session.note_test` takes, for each case that the test asked for."""
        params = item.callspec.params if hasattr(item, "callspec") else {}
        said = {name: v.id if isinstance(v, Case) else str(v) for name, v in params.items()}
        test = {"test": item.nodeid, "params": said}
        return [
            (
                outcome.case.id,
                "+".join(outcome.instruments),
                test,
                json.loads(json.dumps(measured.extra_info, default=str)),
            )
            for outcome, _, measured in self._measured
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests' processes found."""
        found: Mapping[str, Any] = getattr(report, "dpbench", {})
        if not found:  # most sessions of most projects have nothing
            return
        from dpbench.results.outcome import Outcome

        for test in found.get("tests", ()):
            self.session.note_test(*test)
        for outcome in found.get("unwritten", ()):
            self.session.store.keep(Outcome.from_json(outcome))
        if "general" in found:
            self._general.append(found["general"])
        if "reference" in found:  # xdist's controller has not seen what its workers collected
            self.comparison.named = self.comparison.named or Path(found["reference"])
        for name in ("regressions", "unjudged"):
            known = getattr(self.session, name)
            known += [row for row in found.get(name, ()) if row not in known]

    def limited(self, *, complete: bool) -> list[tuple[Case, str]]:
        """What the command line's limits are for; if all tests ran and none is, the limits go."""
        if complete and self.comparison.limits and not self._general:
            self.comparison.limits = []
            self.session.notes.append(
                "--dpbench-compare-fail judged nothing: no test it is for measures"
            )
        return [(Case(**case), name) for asked in self._general for case, name in asked]


def _is_step(asked: object, fields: dict[str, Any]) -> TypeGuard[Step]:
    """Whether a fixture was given a function; a class, or what has fields, is a case's."""
    return callable(asked) and not isinstance(asked, type) and not fields


def _case(asked: Any, fields: dict[str, Any]) -> Case:
    """A case, given as one, as its fields, or as one of which some fields are others."""
    if wrong := [name for name in fields if name not in AXES]:
        raise unknown("field of a case", wrong[0], AXES)
    if isinstance(asked, Case):
        return resolve(replace(asked, **fields))
    if "batch_size" not in fields:
        raise ConfigurationError(
            f"{asked!r} is neither a case nor a function that takes a step; with a trainer, give "
            f"batch_size"
        )
    return resolve(Case(**{"trainer": asked, **fields}))
