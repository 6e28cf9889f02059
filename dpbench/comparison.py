"""What a session is compared with, and judged by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    import pandas as pd

    from dpbench.case import Case
    from dpbench.results.outcome import Outcome
    from dpbench.results.references import References
    from dpbench.results.threshold import Threshold
    from dpbench.settings import Settings
    from dpbench.show.layout import Table


@dataclass(frozen=True)
class Judgement:
    """Outcomes against their references.

    Args:
        changes: what became of each number.
        verdict: those that a limit judges, and whether it is exceeded.
        regressions: where it is, as plain rows.
    """

    changes: pd.DataFrame
    verdict: pd.DataFrame
    regressions: list[dict[str, Any]]

    @property
    def applied(self) -> set[str]:
        """The limits that something was judged by."""
        return set(self.verdict.threshold)

    def of(self, case: Case) -> Judgement:
        """What of this is about one case's trainer."""
        return Judgement(
            self.changes[self.changes.trainer == case.trainer],
            self.verdict[self.verdict.trainer == case.trainer],
            [row for row in self.regressions if row["trainer"] == case.trainer],
        )


@dataclass
class Comparison:
    """The references and limits of a session, and what its end says about them.

    Args:
        settings: what was asked for.
        references: what each case is compared with.
    """

    settings: Settings
    references: References
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    limits: list[Threshold] = field(init=False)

    def __post_init__(self) -> None:
        self.limits = limits(self.settings.compare_fail)

    @classmethod
    def begin(cls, settings: Settings, sources: Sequence[tuple[str, str]]) -> Comparison:
        """With one run that was named, or for each case with the newest good one.

        Args:
            settings: what was asked for.
            sources: each (device, instrument) that the session can have rows of.
        """
        from dpbench.results.references import References
        from dpbench.results.run import Run
        from dpbench.results.storage import Storage

        storage = Storage(settings.storage)
        if not settings.compare:
            return cls(settings, storage.references(device for device, _ in sources))
        run = Run.load(storage.find(_named_run(settings, settings.compare)))
        devices = {instrument: device for device, instrument in sources}
        conflict = any(devices.get(name, device) != device for device, name in run.sources)
        apart = conflict or not set(sources) & set(run.sources)
        if apart and not settings.compare_across:
            there, here = (
                "; ".join(f"{name} on {device}" for device, name in pairs) or "nothing"
                for pairs in (run.sources, sources)
            )
            remedy = "; --dpbench-compare-across does it all the same" * settings.of_pytest
            raise ConfigurationError(
                f"{run.path} holds {there}, this session measures {here}: not compared{remedy}"
            )
        return cls(settings, References.to(run))

    def leave_out(self, path: Path) -> None:
        """The session writes this run file, so it is none of its references."""
        self.references.own = path

    def shared(self) -> dict[str, Any]:
        """What `join` needs, as plain types."""
        files = {str(path): time for path, time in self.references.files.items()}
        return {"files": files, "named": self.references.named}

    @classmethod
    def join(cls, settings: Settings, shared: Mapping[str, Any]) -> Comparison:
        """The comparison of a session that another process has begun."""
        from dpbench.results.references import References

        files = {Path(path): time for path, time in shared["files"].items()}
        return cls(settings, References(files, named=shared["named"]))

    def judge(self, outcomes: Sequence[Outcome], limits: Sequence[Threshold]) -> Judgement:
        """These outcomes against their references, by these limits. Only here is judged."""
        from dpbench.results.compare import judge, regressions
        from dpbench.results.frame import to_frame

        after = to_frame(row for outcome in outcomes for row in outcome.rows)
        changes = self.references.changes(after, across=self.settings.compare_across)
        verdict = judge(changes, limits)
        return Judgement(changes, verdict, regressions(verdict))

    def finish(self, outcomes: Sequence[Outcome]) -> Judgement:
        """The whole session: what changed in tables, and lines about what did not compare."""
        from dpbench.results.compare import ungated
        from dpbench.results.frame import to_frame
        from dpbench.results.references import alone, alone_in_words, ungated_in_words
        from dpbench.show.comparison import comparison_tables

        judgement = self.judge(outcomes, self.limits)
        changes, across = judgement.changes, self.settings.compare_across
        after = to_frame(row for outcome in outcomes for row in outcome.rows)
        self.notes += self.references.skipped
        if names := sorted(changes.reference.unique()):
            self.notes.append(f"compared with {', '.join(names)}")
        if without := alone(after, changes, across=across):
            self.warnings.append(alone_in_words(without))
        if not across:  # where instruments differ, so do their metrics
            self.warnings += ungated_in_words(ungated(after, changes, self.limits))
        self.tables = comparison_tables(changes, judgement.verdict, "Change: ")
        return judgement

    def unused_limits(self, applied: Collection[str]) -> list[str]:
        """A line for each limit that nothing was judged by: a gate that was not there."""
        return [
            f"{self.settings.option('compare_fail')}={limit}: nothing that was measured has this "
            f"metric and phase in the reference too"
            for limit in map(str, self.limits)
            if limit not in applied
        ]


def limits(texts: Sequence[str]) -> list[Threshold]:
    """Limits as their user wrote them."""
    if not texts:
        return []
    from dpbench.results.threshold import Threshold  # loads pandas

    return [Threshold.parse(text) for text in texts]


def _named_run(settings: Settings, named: str) -> str:
    """What `Storage.find` takes: a number, or a path."""
    path = settings.directory / named
    if path.is_dir() or path.suffix == ".py" or "::" in named:
        option = settings.option("compare")
        raise ConfigurationError(
            f"{option} took {named!r} for a run: name tests before it, or write "
            f"{option}=NUM or {option}=FILE"
        )
    return named if named.isdecimal() else str(path)
