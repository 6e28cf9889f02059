"""``--dpbench-compare`` and its kin: a test fails when what it measured got worse."""

from __future__ import annotations

import stat
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dpbench.errors import ConfigurationError, mode_of
from dpbench.plugin.saving import storage_directory
from dpbench.results.rows import NO_HARDWARE

if TYPE_CHECKING:
    import pandas as pd

    from dpbench.case import Case
    from dpbench.plugin.manager import Manager
    from dpbench.results.outcome import Outcome
    from dpbench.results.references import References
    from dpbench.results.threshold import Threshold
    from dpbench.show.layout import Table

KEY = "dpbench_comparing"
"""Where an xdist worker finds what its controller decided."""

MARKER = (
    "dpbench(compare_fail=[...]): thresholds for what this test measures, instead of those of "
    "--dpbench-compare-fail; none if the list is empty"
)


class Comparing:
    """The session's reference and thresholds, in each process that runs tests.

    A plugin of its own. The controller chooses the reference before anything runs. A process
    that runs a test judges what the test asked for; what it finds travels on the test's report.

    Raises:
        ConfigurationError: a threshold or the reference does not exist, or the reference was
            made with other instruments or on another device.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.options = manager.options
        self.references: References | None = None
        """What is compared with; None if nothing is, or the named file is yet to be made."""
        self.notes: list[str] = []
        """What the summary says about comparing."""
        self.warnings: list[str] = []
        """What it warns of."""
        self.regressions: list[dict[str, Any]] = []
        """What got worse, as plain rows; complete in the controller alone."""
        self.applied: set[str] = set()
        """Thresholds of the command line that something was judged by."""
        self.judged = False
        """Whether something was judged by the thresholds of the command line."""
        self._asked: list[tuple[Outcome, Callable[[Case], Outcome]]] = []
        if manager.is_worker:
            self._take_over(manager.config.workerinput[KEY])  # type: ignore[attr-defined]
        elif manager.runs_tests and self.is_asked_for:
            self._begin()

    @property
    def is_asked_for(self) -> bool:
        """Whether the session compares."""
        return self.options.dpbench_compare is not None or bool(self.options.dpbench_compare_fail)

    @property
    def updates(self) -> bool:
        """Whether the reference is to be rewritten, or added to."""
        return bool(self.options.dpbench_update or self.options.dpbench_update_new_only)

    @cached_property
    def thresholds(self) -> list[Threshold]:
        """Those of the command line; none apply to numbers that are about to be replaced."""
        return [] if self.options.dpbench_update else self._parse(self.options.dpbench_compare_fail)

    def _parse(self, texts: Sequence[str] | None) -> list[Threshold]:
        from dpbench.results.threshold import Threshold

        return [Threshold.parse(text) for text in texts or ()]

    # --- before anything runs, in the controller ---------------------------------------------

    def _begin(self) -> None:
        assert self.thresholds is not None  # refuses what makes no sense
        text = self.options.dpbench_compare
        if text:
            path = self._named(text)
            self.references = self._of(path) if path.exists() else None
        else:
            from dpbench.results.storage import Storage

            devices = {device for device, _ in self._wanted()}
            self.references = Storage(storage_directory(self.manager)).references(devices)

    def _named(self, text: str) -> Path:
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
        return Storage(storage_directory(self.manager)).find(
            text if text.isdecimal() else str(path)
        )

    def _of(self, path: Path) -> References:
        """A file as the reference, if it can be compared with what will be measured.

        Raises:
            ConfigurationError: they cannot, and it was not asked for all the same.
        """
        from dpbench.results.references import References
        from dpbench.results.run import Run

        run = Run.load(path)
        wanted = self._wanted()
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
        return References.to(run)

    def _wanted(self) -> list[tuple[str, str]]:
        """The (device, instrument) pairs that this session can measure."""
        gpu = self.manager.gpu
        hardware = [(gpu.name, i.name) for i in self.manager.instruments] if gpu else []
        return [*hardware, (NO_HARDWARE, "logical")]

    def for_worker(self) -> dict[str, Any] | None:
        """What `_take_over` needs, as plain types."""
        if self.references is None:
            return None
        return {
            "files": {str(path): time for path, time in self.references.files.items()},
            "named": self.references.named,
        }

    def _take_over(self, given: Mapping[str, Any] | None) -> None:
        if given is None:
            return
        from dpbench.results.references import References

        files = {Path(path): time for path, time in given["files"].items()}
        self.references = References(files, named=given["named"])

    def leave_out(self, path: Path) -> None:
        """The session writes this run file, so it is none of its references."""
        if self.references is not None:
            self.references.own = path

    # --- around a test, in the process that runs it ------------------------------------------

    def asked(self, outcome: Outcome, measure: Callable[[Case], Outcome]) -> None:
        """The test that is running asked for this case; ``measure`` gives others like it."""
        if self.references is not None and all(outcome != other for other, _ in self._asked):
            self._asked.append((outcome, measure))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """What a test asks for, its fixtures included, belongs to it."""
        self._asked.clear()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail a test that passed if what it asked for got worse by more than it may."""
        thresholds = self._thresholds_of(item.get_closest_marker("dpbench"))
        try:
            result = yield
        except (Exception, pytest.fail.Exception):
            self._judge(item, thresholds)
            raise
        if worse := self._judge(item, thresholds):
            pytest.fail(worse, pytrace=False)
        return result

    def _thresholds_of(self, marker: pytest.Mark | None) -> list[Threshold]:
        """A test's own thresholds, or the session's; a wrong marker fails the test."""
        if marker is None or self.options.dpbench_update:
            return self.thresholds
        texts = marker.kwargs.get("compare_fail")
        reason = "write the marker as dpbench(compare_fail=['METRIC:5%'])"
        if not marker.args and set(marker.kwargs) == {"compare_fail"} and isinstance(texts, list):
            try:
                return self._parse(texts)
            except ConfigurationError as error:
                reason = str(error)
        pytest.fail(f"dpbench: {reason}", pytrace=False)

    def _judge(self, item: pytest.Item, thresholds: list[Threshold]) -> str:
        """Judge what a test asked for; returns the reason to fail it, if there is one."""
        from dpbench.results.compare import judge, regressions
        from dpbench.show.comparison import regression_text

        if not (thresholds and self._asked) or self.references is None:
            return ""
        found: list[dict[str, Any]] = []
        applied: set[str] = set()
        judged = self.references.named
        for outcome, measure in self._asked:
            changes = self._changes_of(outcome, measure, thresholds)
            judged = judged or not changes.empty
            verdict = judge(changes, thresholds)
            applied |= set(verdict.threshold)
            found += regressions(verdict)
        general = thresholds is self.thresholds
        item.stash[SEEN] = {
            "regressions": found,
            "applied": sorted(applied) if general else [],
            "judged": general and judged,
        }
        if not found:
            return ""
        names = ", ".join(sorted({row["reference"] for row in found}))
        item.add_report_section("call", "dpbench comparison", regression_text(found))
        count = f"{len(found)} regression{'s' if len(found) > 1 else ''}"
        return f"dpbench: {count} against {names}; see the section 'dpbench comparison'"

    def _changes_of(
        self, outcome: Outcome, measure: Callable[[Case], Outcome], thresholds: list[Threshold]
    ) -> pd.DataFrame:
        """One case compared; a ratio needs its baseline, which is measured if nobody has yet."""
        changes = self._changes([outcome])
        if changes[changes.metric.isin([t.name for t in thresholds if t.ratio])].after.isna().any():
            changes = self._changes([outcome, measure(outcome.case.baseline)])
            changes = changes[changes.trainer == outcome.case.trainer]
        return changes

    def _changes(self, outcomes: Sequence[Outcome]) -> pd.DataFrame:
        """These outcomes against their references."""
        from dpbench.results.frame import to_frame

        assert self.references is not None
        after = to_frame(row for outcome in outcomes for row in outcome.rows)
        return self.references.changes(after, across=self.options.dpbench_compare_across)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Give the report what was found: as plain types it survives the way from a worker."""
        report = yield
        if call.when == "call" and SEEN in item.stash:
            vars(report)["dpbench_comparison"] = item.stash[SEEN]
        return report

    # --- when it is over, in the controller --------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what the tests' processes found."""
        seen: Mapping[str, Any] = getattr(report, "dpbench_comparison", {})
        self.regressions += [r for r in seen.get("regressions", ()) if r not in self.regressions]
        self.applied |= set(seen.get("applied", ()))
        self.judged = self.judged or bool(seen.get("judged"))

    def problems(self) -> list[str]:
        """Thresholds that nothing was judged by: a gate that was never there must not pass."""
        if not self.judged:
            return []
        return [
            f"--dpbench-compare-fail={threshold}: nothing that was measured has this metric and "
            f"phase in the reference too"
            for threshold in map(str, self.thresholds)
            if threshold not in self.applied
        ]

    def tables(self, outcomes: Sequence[Outcome]) -> list[Table]:
        """The whole session against the references; also notes which, and what has none."""
        rows = [row for outcome in outcomes for row in outcome.rows]
        if self.references is None or not rows:
            return []
        from dpbench.results.compare import judge, ungated
        from dpbench.results.frame import to_frame
        from dpbench.results.references import alone, alone_in_words, ungated_in_words
        from dpbench.show.comparison import comparison_tables

        changes = self._changes(outcomes)
        self.notes += self.references.skipped
        if names := sorted(changes.reference.unique()):
            self.notes.append(f"compared with {', '.join(names)}")
        across = self.options.dpbench_compare_across
        without = alone(to_frame(rows), changes, across=across)
        if without and not self.updates:  # what an update adds, it counts itself
            self.warnings.append(alone_in_words(without))
        if not across:  # where instruments differ, so do their metrics
            missing = ungated(to_frame(rows), changes, self.thresholds)
            self.warnings += ungated_in_words(missing)
        return comparison_tables(changes, judge(changes, self.thresholds), "Change: ")


SEEN: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
"""What judging a test found."""
