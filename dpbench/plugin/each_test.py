"""Around a test: what it measured is judged, and travels to the controller on its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.case import SCRIPT, Case, script_case
from dpbench.comparison import asked_for, limits
from dpbench.errors import ConfigurationError
from dpbench.plugin.asked import case_of, measuring_fixtures, takes, takes_any
from dpbench.session import Session

if TYPE_CHECKING:
    from dpbench.instruments.base import Instrument
    from dpbench.results.compare import Threshold
    from dpbench.results.gate import Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport

MARKER = (
    "dpbench(compare_fail=[...]): limits for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty. Without --dpbench-compare it is compared "
    "with the latest complete run, as with --dpbench-compare-fail"
)

NOTHING_MEASURED = "nothing is measured with --dpbench-disable"

FOUND: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""What judging a test found."""


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

    def __init__(self, session: Session) -> None:
        self.session = session
        self.comparison = session.comparison
        self._measured: list[tuple[Outcome, Sequence[Instrument], CaseReport]] = []
        self._test = ""
        self._steps: list[Callable[[], object]] = []
        """The test that is running, and the steps of its own that it has measured."""
        self._found: list[Mapping[str, Any]] = []
        """What the tests' processes found, in the controller."""

    def case_of_step(self, step: Callable[[], object]) -> Case:
        """The case of a step that the running test has defined, named after both."""
        if step not in self._steps:
            self._steps.append(step)
        names = [getattr(known, "__name__", type(known).__name__) for known in self._steps]
        place = self._steps.index(step)
        again = names[:place].count(names[place])
        name = f"{self._test}:{names[place]}{f'-{again + 1}' if again else ''}"
        return script_case(name)

    def report(self, case: Case, instruments: Sequence[Instrument]) -> CaseReport:
        """The report of a case by these instruments, for the test that is running."""
        from dpbench.results.report import CaseReport

        outcome = self.session.measure(case, instruments)
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

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what the tests are known to ask for: the reference should have it."""
        self.comparison.asked = [key for item in session.items for key in self._asked_by(item)]

    def _asked_by(self, item: pytest.Item) -> list[tuple[Case, str]]:
        """What a test asks for according to its parameters and fixtures."""
        case = case_of(item)
        measures = any(takes(item, name) for name in measuring_fixtures(self.session.settings))
        names = [i.name for i in self.session.instruments] if measures else []
        names += ["logical"] if takes(item, "logical_io") else []
        return [(case, name) for name in names] if case else []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """What a test asks for, its fixtures included, belongs to it."""
        self._measured.clear()
        self._steps.clear()
        self._test = item.nodeid
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that passed if what it asked for got worse by more than it may."""
        own = self._limits_of(item)
        disabled = self.session.settings.disable
        try:
            result = yield
            if disabled and own:
                pytest.skip(f"{NOTHING_MEASURED}, so its limits have judged nothing")
        except pytest.skip.Exception:
            if reason := self._judge(item, own, skipped=True):
                pytest.fail(reason, pytrace=False)
            raise
        except (Exception, pytest.fail.Exception):
            self._judge(item, own)
            raise
        if reason := self._judge(item, own):
            pytest.fail(reason, pytrace=False)
        return result

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
        if own and not takes_any(item) and "dpbench" not in [m.name for m in item.own_markers]:
            return ""  # its class or module has the marker, for others
        if not chosen or not (self._measured or own):
            return ""
        from dpbench.show.comparison import regression_text

        verdict = self._verdict(chosen)
        reference = self.comparison.reference
        unjudged = [u for u in verdict.unjudged if u.cases or not (own is None or skipped)]
        item.stash[FOUND] = {
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
        if (call.when == "setup" and report.outcome == "passed") or not takes_any(item):
            return report
        found: dict[str, Any] = {}
        if call.when == "call":
            judged: dict[str, Any] = item.stash.get(FOUND, {})
            found |= judged
            if found.get("regressions") or found.get("unjudged"):
                report.outcome = "failed"  # also where an xfail mark expects another failure
                vars(report).pop("wasxfail", None)
        outcomes = [outcome for outcome, *_ in self._measured]
        has_own = item.get_closest_marker("dpbench") is not None
        if call.when != "teardown" and not has_own and self.comparison.limits:
            asked = dict.fromkeys([*self._asked_by(item), *asked_for(outcomes)])
            found["general"] = [[asdict(case), name] for case, name in asked]
        if call.when == "call":
            params = item.callspec.params if hasattr(item, "callspec") else {}
            said = {name: v.id if isinstance(v, Case) else str(v) for name, v in params.items()}
            found["tests"] = [
                (
                    outcome.case.id,
                    "+".join(outcome.instruments),
                    {"test": item.nodeid, "params": said},
                    json.loads(json.dumps(measured.extra_info, default=str)),
                )
                for outcome, _, measured in self._measured
            ]
        # A test that the command line's limits are for counts, also if it has asked for nothing.
        kept = {name: value for name, value in found.items() if value or name == "general"}
        vars(report)["dpbench"] = kept
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests' processes found."""
        found: Mapping[str, Any] = getattr(report, "dpbench", {})
        for asked in found.get("tests", ()):
            self.session.note_test(*asked)
        if found.keys() - {"tests"}:
            self._found.append(found)
        if found.get("reference"):  # xdist's controller has not seen what its workers collected
            self.comparison.named = self.comparison.named or Path(found["reference"])
        for name in ("regressions", "unjudged"):
            known = getattr(self.session, name)
            known += [row for row in found.get(name, ()) if row not in known]

    # --- when it is over, in the controller --------------------------------------------------

    def judge_session(self, *, interrupted: bool, all_ended: bool) -> None:
        """The whole session beside its reference: its tables, and what limits could not judge.

        ``interrupted``: it says so itself; ``all_ended``: no measuring test was kept from running.
        """
        outcomes = self.session.outcomes()
        general = [found["general"] for found in self._found if "general" in found]
        if self.comparison.limits and not (interrupted or general):
            self.session.notes.append(
                "--dpbench-compare-fail judged nothing: no test it is for measures"
            )
        if self.comparison.limits and not (interrupted or all_ended):
            self.session.problem(
                "the session ended before every test that measures had run, so "
                "--dpbench-compare-fail has not judged all that was asked for"
            )
        compares = self.session.settings.compares or self._found
        if not (outcomes or general) or not compares:
            return
        asked = [(Case(**fields), name) for keys in general for fields, name in keys]
        if not self.comparison.asked:  # xdist's controller collects nothing
            self.comparison.asked = asked
        run = self.session.as_run(outcomes)
        # Without a test that the command line's limits are for, they have nothing to judge.
        chosen = self.comparison.limits if general else []
        self.comparison.show(self.comparison.judge(run, chosen, [*asked, *asked_for(outcomes)]))
        if chosen and not interrupted:
            for missing in self.comparison.judge(run, chosen, asked).unjudged:
                if missing.as_json() not in self.session.unjudged:
                    self.session.unjudged.append(missing.as_json())
                self.session.problem(f"{missing}{self.comparison.remedy}")
