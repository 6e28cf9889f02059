"""Around a test: what it measured is judged, and travels to the controller on its report."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.case import Case
from dpbench.comparison import Judgement, limits
from dpbench.errors import ConfigurationError
from dpbench.session import Session

if TYPE_CHECKING:
    from dpbench.instruments.base import Instrument
    from dpbench.results.outcome import Outcome
    from dpbench.results.report import CaseReport
    from dpbench.results.threshold import Threshold

MARKER = (
    "dpbench(compare_fail=[...]): thresholds for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty"
)

FOUND: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""What judging a test found."""


class EachTest:
    """A plugin of its own, in each process that runs tests."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.applied: set[str] = set()
        """Limits of the command line that something was judged by."""
        self.judged = False
        """Whether something was judged by limits of the command line."""
        self._measured: list[tuple[Outcome, Sequence[Instrument], CaseReport]] = []

    def report(self, case: Case, instruments: Sequence[Instrument]) -> CaseReport:
        """The report of a case by these instruments, for the test that is running."""
        from dpbench.results.report import CaseReport

        outcome = self.session.measure(case, instruments)
        if outcome.skipped:
            pytest.skip(outcome.message)
        if outcome.error:
            pytest.fail(_failure(outcome), pytrace=False)
        report = CaseReport.of_outcome(outcome)
        self._measured.append((outcome, instruments, report))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """What a test asks for, its fixtures included, belongs to it."""
        self._measured.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that passed if what it asked for got worse by more than it may."""
        own = self._limits_of(item)
        try:
            result = yield
        except (Exception, pytest.fail.Exception):
            self._judge(item, own)
            raise
        if worse := self._judge(item, own):
            pytest.fail(worse, pytrace=False)
        return result

    def _limits_of(self, item: pytest.Item) -> list[Threshold] | None:
        """A test's own limits, if it has some; a wrong marker fails the test."""
        marker = item.get_closest_marker("dpbench")
        if marker is None or self.session.comparison is None:
            return None
        texts = marker.kwargs.get("compare_fail")
        reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
        if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
            try:
                return limits(texts)
            except ConfigurationError as error:
                reason = str(error)
        pytest.fail(f"dpbench: {reason}", pytrace=False)

    def _judge(self, item: pytest.Item, own: list[Threshold] | None) -> str:
        """Judge what a test asked for; returns the reason to fail it, if there is one."""
        comparison = self.session.comparison
        if comparison is None or not self._measured:
            return ""
        chosen = comparison.limits if own is None else own
        if not chosen:
            return ""
        from dpbench.show.comparison import regression_text

        judgements = [self._judgement_of(*measured[:2], chosen) for measured in self._measured]
        worse: list[dict[str, Any]] = []
        for judgement in judgements:
            worse += [row for row in judgement.regressions if row not in worse]
        judged = comparison.references.named or any(not j.changes.empty for j in judgements)
        item.stash[FOUND] = {
            "regressions": worse,
            "applied": sorted(set().union(*(j.applied for j in judgements))) * (own is None),
            "judged": own is None and judged,
        }
        if not worse:
            return ""
        names = ", ".join(sorted({row["reference"] for row in worse}))
        item.add_report_section("call", "dpbench comparison", regression_text(worse))
        count = f"{len(worse)} regression{'s' if len(worse) > 1 else ''}"
        return f"dpbench: {count} against {names}; see the section 'dpbench comparison'"

    def _judgement_of(
        self, outcome: Outcome, instruments: Sequence[Instrument], chosen: Sequence[Threshold]
    ) -> Judgement:
        """One case judged; a ratio needs its baseline, which is measured if nobody has yet."""
        assert self.session.comparison is not None
        judgement = self.session.comparison.judge([outcome], chosen)
        ratios = judgement.changes.metric.isin([limit.name for limit in chosen if limit.ratio])
        if not judgement.changes[ratios].after.isna().any():
            return judgement
        baseline = self.session.measure(outcome.case.baseline, instruments)
        return self.session.comparison.judge([outcome, baseline], chosen).of(outcome.case)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report what was found: as plain types it survives the way from a worker."""
        report = yield
        if call.when == "call":
            found = item.stash.get(FOUND, {})
            if extra := [
                (outcome.case.id, "+".join(outcome.instruments), _plain(report.extra_info))
                for outcome, _, report in self._measured
                if report.extra_info
            ]:
                found = {**found, "extra_info": extra}
            if found:
                vars(report)["dpbench"] = found
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests' processes found."""
        found: Mapping[str, Any] = getattr(report, "dpbench", {})
        known = self.session.regressions
        known += [row for row in found.get("regressions", ()) if row not in known]
        self.applied |= set(found.get("applied", ()))
        self.judged = self.judged or bool(found.get("judged"))
        for case, by, info in found.get("extra_info", ()):
            self.session.extra_info.setdefault((case, by), {}).update(info)

    def check_limits(self) -> None:
        """A limit of the command line that judged nothing is a problem."""
        if self.judged and self.session.comparison is not None:
            for line in self.session.comparison.unused_limits(self.applied):
                self.session.problem(line)


def _plain(value: Any) -> Any:
    """The value as it comes back from a JSON file; what JSON does not know becomes text."""
    return json.loads(json.dumps(value, default=str))


def _failure(outcome: Outcome) -> str:
    parts = [f"{outcome.error}: {outcome.message}"]
    if outcome.log_tail:
        parts += [f"--- end of {outcome.log}", outcome.log_tail]
    return "\n".join(parts)
