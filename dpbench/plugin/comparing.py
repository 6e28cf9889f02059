"""``--dpbench-compare`` and its kin: a test fails when what it measured got worse."""

from __future__ import annotations

import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.errors import ConfigurationError, mode_of
from dpbench.plugin.saving import storage_directory
from dpbench.results.rows import NO_HARDWARE

if TYPE_CHECKING:
    from dpbench.case import Case
    from dpbench.plugin.manager import Manager
    from dpbench.results.gate import Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.run import Run
    from dpbench.results.threshold import Threshold
    from dpbench.show.layout import Table

KEY = "dpbench_comparing"
"""Where an xdist worker finds what its controller decided."""

MARKER = (
    "dpbench(compare_fail=[...]): limits for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty. Without --dpbench-compare it is compared "
    "with the latest complete run, as with --dpbench-compare-fail"
)


class Comparing:
    """The session's reference and limits, in each process that runs tests.

    A plugin of its own. A process that runs a test judges what the test asked for; what it finds
    travels on the test's report. The controller judges the whole session at its end.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.options = manager.options
        self.notes: list[str] = []
        """What the summary says about comparing."""
        self.regressions: list[dict[str, Any]] = []
        """What got worse, as plain rows; complete in the controller alone."""
        self.unjudged: list[dict[str, Any]] = []
        """What limits could not judge, as plain rows; complete in the controller alone."""
        self._named: Path | None = None
        self._candidates: list[Path] | None = None
        """Files that may be the reference, newest first; None until they are needed."""
        self._collected: list[tuple[Case, str]] = []
        """The cases that this process's tests are known to ask for, each by an instrument."""
        self._asked: list[tuple[Outcome, Callable[[Case], Outcome]]] = []
        """What the running test asked for, with what measures other cases in the same way."""
        self._seen: list[Mapping[str, Any]] = []
        if manager.is_worker:
            self._take_over(manager.config.workerinput[KEY])  # type: ignore[attr-defined]
        elif manager.runs_tests and self.is_asked_for:
            self._begin()

    @property
    def is_asked_for(self) -> bool:
        """Whether the session compares, whatever the tests' markers say."""
        return self.options.dpbench_compare is not None or bool(self.options.dpbench_compare_fail)

    @property
    def updates(self) -> bool:
        """Whether the reference is to be rewritten, or added to."""
        return bool(self.options.dpbench_update or self.options.dpbench_update_new_only)

    @cached_property
    def limits(self) -> list[Threshold]:
        """Those of the command line; none apply to numbers that are about to be replaced."""
        return [] if self.options.dpbench_update else self._parse(self.options.dpbench_compare_fail)

    def _parse(self, texts: Sequence[str] | None) -> list[Threshold]:
        from dpbench.results.threshold import Threshold

        return [Threshold.parse(text) for text in texts or ()]

    # --- before anything runs, in the controller ---------------------------------------------

    def _begin(self) -> None:
        self._parse(self.options.dpbench_compare_fail)  # refuses what is no limit
        if text := self.options.dpbench_compare:
            path = self._path_of(text)
            if path.exists():
                self._check(path)
                self._named = path
            else:
                self._candidates = []
            return
        self._candidates = self._saved()
        if self.limits and not (self._candidates or self.options.dpbench_compare_first_run_ok):
            raise ConfigurationError(
                f"no saved run on {' or '.join(sorted({d for d, _ in self._sources()}))} in "
                f"{storage_directory(self.manager)} to judge by; "
                f"if this is the first, say --dpbench-compare-first-run-ok"
            )

    def _saved(self) -> list[Path]:
        from dpbench.results.storage import Storage

        devices = {device for device, _ in self._sources()}
        return Storage(storage_directory(self.manager)).candidates(devices)

    def _path_of(self, text: str) -> Path:
        """The file that the user named; it may be absent only if it is to be made."""
        from dpbench.results.storage import Storage

        path = Path(self.manager.config.invocation_params.dir / text)
        mode = mode_of(path)
        if stat.S_ISDIR(mode) or path.suffix == ".py" or "::" in text:
            raise ConfigurationError(
                f"--dpbench-compare took {text!r} for a run: name tests before it, or write "
                f"--dpbench-compare=NUM or --dpbench-compare=FILE"
            )
        if self.updates and not mode:
            return path
        written = self.options.dpbench_json
        if written and path == Path(self.manager.config.invocation_params.dir / written):
            raise ConfigurationError(
                f"--dpbench-json would write over {text}, which is compared with; to renew a "
                f"reference, leave --dpbench-compare out"
            )
        return Storage(storage_directory(self.manager)).find(
            text if text.isdecimal() else str(path)
        )

    def _check(self, path: Path) -> None:
        """Refuse a file that cannot be compared with what will be measured."""
        from dpbench.results.run import Run

        run = Run.load(path)
        wanted = self._sources()
        devices = {instrument: device for device, instrument in wanted}
        conflict = any(devices.get(name, device) != device for device, name in run.sources)
        if self.updates:
            refused, remedy = conflict, "not updated; name another file"
        else:
            apart = conflict or not set(wanted) & set(run.sources)
            refused = apart and not self.options.dpbench_compare_across
            remedy = "not compared; --dpbench-compare-across does it all the same"
        if refused:
            there, here = (
                "; ".join(f"{name} on {device}" for device, name in pairs) or "nothing"
                for pairs in (run.sources, wanted)
            )
            raise ConfigurationError(
                f"{path} holds {there}, this session measures {here}: {remedy}"
            )
        self.reference = run

    def _sources(self) -> list[tuple[str, str]]:
        """The (device, instrument) pairs that this session can measure."""
        gpu = self.manager.gpu
        hardware = [(gpu.name, i.name) for i in self.manager.instruments] if gpu else []
        return [*hardware, (NO_HARDWARE, "logical")]

    def for_worker(self) -> dict[str, Any]:
        """What `_take_over` needs, as plain types."""
        candidates = self._candidates
        return {
            "named": str(self._named) if self._named else None,
            "candidates": None if candidates is None else [str(path) for path in candidates],
        }

    def _take_over(self, given: Mapping[str, Any]) -> None:
        self._named = Path(given["named"]) if given["named"] else None
        if given["candidates"] is not None:
            self._candidates = [Path(path) for path in given["candidates"]]

    # --- around a test, in the process that runs it ------------------------------------------

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what the tests are known to ask for: the reference should have it."""
        self._collected = [key for item in session.items for key in self._asked_by(item)]

    def _asked_by(self, item: pytest.Item) -> list[tuple[Case, str]]:
        """What a test asks for according to its parameters and fixtures."""
        from dpbench.case import Case

        params = item.callspec.params if hasattr(item, "callspec") else {}
        case = params.get("dpbench_case")
        return [(case, name) for name in self._measures(item)] if isinstance(case, Case) else []

    def _measures(self, item: pytest.Item) -> list[str]:
        """The instruments that a test's fixtures measure with in this session."""
        by_ncu = [i.name for i in self.manager.instruments] if "ncu" in measuring(item) else []
        return [*by_ncu, *(["logical"] if "logical_io" in measuring(item) else [])]

    @cached_property
    def reference(self) -> Run:
        """What the session is compared with; without rows if there is nothing."""
        from dpbench.results.references import choose
        from dpbench.results.run import Run

        if self._named is not None:
            return Run.load(self._named)
        if self._candidates is None:  # only a marker asks for it
            self._candidates = self._saved()
        choice = choose(self._candidates, self._sources(), self._collected)
        self.notes += choice.skipped
        return choice.run or Run.of("the storage")

    def asked(self, outcome: Outcome, measure: Callable[[Case], Outcome]) -> None:
        """The test that is running asked for this case; ``measure`` gives others like it."""
        if all(outcome != other for other, _ in self._asked):
            self._asked.append((outcome, measure))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """What a test asks for, its fixtures included, belongs to it."""
        self._asked.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that passed if what it asked for was not judged, or got worse."""
        own = self._own_limits(item)
        try:
            result = yield
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

    def _own_limits(self, item: pytest.Item) -> list[Threshold] | None:
        """A test's own limits, if it has a marker; a wrong marker fails the test."""
        marker = item.get_closest_marker("dpbench")
        if marker is None or self.options.dpbench_update:
            return None
        texts = marker.kwargs.get("compare_fail")
        reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
        if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
            try:
                return self._parse(texts)
            except ConfigurationError as error:
                reason = str(error)
        pytest.fail(f"dpbench: {reason}", pytrace=False)

    def _judge(
        self, item: pytest.Item, own: list[Threshold] | None, *, skipped: bool = False
    ) -> str:
        """Judge what a test asked for; returns the reason to fail it, if there is one."""
        limits = self.limits if own is None else own
        if own and not measuring(item) and "dpbench" not in [m.name for m in item.own_markers]:
            return ""  # its class or module has the marker, for others
        if not limits or not (self._asked or own):
            return ""
        from dpbench.show.comparison import regression_text

        verdict = self._verdict(limits)
        unjudged = [u for u in verdict.unjudged if u.cases or not (own is None or skipped)]
        item.stash[SEEN] = {
            "regressions": verdict.regressions,
            "unjudged": [missing.as_json() for missing in unjudged],
            "reference": None if self.reference.frame.empty else str(self.reference.path),
        }
        reasons = []
        if worse := len(verdict.regressions):
            text = regression_text(verdict.regressions)
            item.add_report_section("call", "dpbench comparison", text)
            count = f"{worse} regression{'s' if worse > 1 else ''}"
            reasons.append(
                f"{count} against {self.reference.name}; see the section 'dpbench comparison'"
            )
        reasons += [f"{missing}{self._remedy()}" for missing in unjudged]
        return "\n".join(f"dpbench: {reason}" for reason in reasons)

    def _remedy(self) -> str:
        if not self.reference.frame.empty:
            return ""
        return " (if this is the first run, say --dpbench-compare-first-run-ok)"

    def _verdict(self, limits: list[Threshold]) -> Verdict:
        """What the running test asked for; a ratio needs its baseline, measured if it is not."""
        from dpbench.results.gate import cases_of, judge
        from dpbench.results.run import Run

        outcomes = [outcome for outcome, _ in self._asked]

        def judged(measured: Sequence[Outcome]) -> Verdict:
            return judge(
                self.reference,
                Run.of("this session", measured),
                limits,
                asked=cases_of(outcomes),
                across=self.options.dpbench_compare_across,
                first_run_ok=self.options.dpbench_compare_first_run_ok,
            )

        verdict = judged(outcomes)
        ratios = {str(limit) for limit in limits if limit.ratio}
        if not any(missing.limit in ratios for missing in verdict.unjudged):
            return verdict
        baselines = [measure(o.case.baseline) for o, measure in self._asked if not o.error]
        return judged([*outcomes, *(b for b in baselines if b not in outcomes)])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report what was found: as plain types it survives the way from a worker."""
        report = yield
        if (call.when == "setup" and report.outcome == "passed") or not measuring(item):
            return report
        if call.when != "teardown" and item.get_closest_marker("dpbench") is None and self.limits:
            from dpbench.results.gate import cases_of

            asked = [*self._asked_by(item), *cases_of(outcome for outcome, _ in self._asked)]
            general = [[asdict(case), name] for case, name in dict.fromkeys(asked)]
            seen: dict[str, Any] = item.stash.get(SEEN, {})
            vars(report)["dpbench_comparison"] = {"general": general, **seen}
        elif call.when == "call" and SEEN in item.stash:
            vars(report)["dpbench_comparison"] = item.stash[SEEN]
        return report

    # --- when it is over, in the controller --------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests' processes found."""
        seen: Mapping[str, Any] = getattr(report, "dpbench_comparison", {})
        if seen:
            self._seen.append(seen)
        if seen.get("reference"):  # xdist's controller has not seen what its workers collected
            self._named = self._named or Path(seen["reference"])
        for found, kind in ((self.regressions, "regressions"), (self.unjudged, "unjudged")):
            found += [row for row in seen.get(kind, ()) if row not in found]

    def _session_verdict(self, *, limited: bool = False) -> Verdict | None:
        """The whole session beside its reference; None if it compares nothing.

        If ``limited``, only what the limits of the command line are for: not the tests that have
        their own.
        """
        outcomes = self.manager.outcomes()
        general = [seen["general"] for seen in self._seen if "general" in seen]
        if not (outcomes or general) or not (self.is_asked_for or self._seen):
            return None
        from dpbench.case import Case
        from dpbench.results.gate import cases_of, judge
        from dpbench.results.outcome import COMPLETE
        from dpbench.results.run import Run

        asked = [(Case(**fields), name) for keys in general for fields, name in keys]
        if not self._collected:  # xdist's controller collects nothing
            self._collected = asked
        premise = self.manager.saving.premise
        return judge(
            self.reference,
            Run.of("this session", outcomes, premise.environment, premise.session(COMPLETE)),
            # Without a test that the command line's limits are for, they have nothing to judge.
            self.limits if general else [],
            asked=asked if limited else [*asked, *cases_of(outcomes)],
            across=self.options.dpbench_compare_across,
            first_run_ok=self.options.dpbench_compare_first_run_ok,
        )

    def problems(self) -> list[str]:
        """What the limits of the command line could not judge in the session as a whole."""
        if not self.limits:
            return []
        if not any("general" in seen for seen in self._seen):
            self.notes.append("--dpbench-compare-fail judged nothing: no test it is for measures")
        verdict = self._session_verdict(limited=True)
        if verdict is None:
            return []
        self.unjudged += [u.as_json() for u in verdict.unjudged if u.as_json() not in self.unjudged]
        return [f"{missing}{self._remedy()}" for missing in verdict.unjudged]

    def tables(self) -> list[Table]:
        """The whole session against the reference; also notes what a reader should know."""
        verdict = self._session_verdict()
        if verdict is None:
            return []
        from dpbench.show.comparison import comparison_tables

        if not self.reference.frame.empty:
            self.notes.append(f"compared with {self.reference.name}")
        self.notes += verdict.notes
        return comparison_tables(verdict, "Change: ", self.reference.name)


def measuring(item: pytest.Item) -> set[str]:
    """The fixtures of a test that measure."""
    return {"ncu", "logical_io"} & {*getattr(item, "fixturenames", ())}


SEEN: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""What judging a test found."""
