"""What ``dpbench run`` does with saved runs: save its own, go on with one, compare with one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.case import Grid
from dpbench.errors import ConfigurationError
from dpbench.gpu import Gpu
from dpbench.instruments.base import Instrument
from dpbench.instruments.ncu.ranges import Ncu, ncu_version
from dpbench.options import add_comparing, add_saving, add_storage
from dpbench.results.rows import NO_HARDWARE

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome
    from dpbench.results.references import References
    from dpbench.results.session import RunFile
    from dpbench.results.threshold import Threshold
    from dpbench.show.layout import Table


def add_saved(parser: argparse.ArgumentParser) -> None:
    """Declare the options; they are those of pytest without ``dpbench-``."""
    group = parser.add_argument_group("saved runs", "dpbench list and dpbench compare read them")
    add_saving(group.add_argument)
    add_comparing(group.add_argument, "exit with 1 if something got worse")
    add_storage(group.add_argument)


class Saved:
    """The run's own file and what it is compared with, as the options of `add_saved` say.

    Raises:
        ConfigurationError: the storage cannot be written, or what was named does not exist.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        grid: Grid,
        instruments: Sequence[Instrument],
        gpu: Gpu | None,
    ) -> None:
        from dpbench.results.outcome import environment
        from dpbench.results.session import Premise
        from dpbench.results.storage import Storage
        from dpbench.results.threshold import Threshold

        self.options = options
        ncu = [ncu_version(i.path) for i in instruments if isinstance(i, Ncu)]
        found = environment(gpu, ncu=ncu[0] if ncu else None, project=Path.cwd())
        asked = len(list(grid.cases()))
        self.premise = Premise.now(found, grid, instruments, cases_asked=asked)
        self.storage = Storage(options.storage)
        self.file: RunFile | None = None
        self.thresholds: list[Threshold] = [Threshold.parse(text) for text in options.compare_fail]
        hardware = {i.name for i in instruments} - {"logical"}
        self.device = (
            (gpu.name if gpu and options.device == "cuda" else "cpu") if hardware else None
        )
        self.references = self._references(grid, instruments)
        self.kept: list[Outcome] = self._begin()

    def _references(self, grid: Grid, instruments: Sequence[Instrument]) -> References | None:
        from dpbench.results.references import References, keys_of
        from dpbench.results.run import Run

        if self.options.compare is None and not self.thresholds:
            return None
        names = [i.name for i in instruments]
        wanted = [(NO_HARDWARE if n == "logical" else str(self.device), n) for n in names]
        if self.options.compare:
            run = Run.load(self.storage.find(self.options.compare))
            if not set(wanted) & set(run.sources):
                by = f"{', '.join(names)} on {self.device or 'no hardware'}"
                raise ConfigurationError(f"{run.path} has nothing by {by}")
            return References.to(run)
        references = self.storage.references(device for device, _ in wanted)
        found = sorted(path.stem for path in references.chosen(keys_of(grid.cases(), wanted)))
        for line in references.skipped:
            self._say(line)
        if found:
            self._say(f"comparing with {', '.join(found)}")
        return references

    def _begin(self) -> list[Outcome]:
        """Take a number, or an interrupted run's; returns what need not be measured again."""
        from dpbench.results.session import RunFile

        if self.options.save is not None and self.options.autosave:
            raise ConfigurationError("--autosave names the run itself: drop --save")
        named = self.options.save is not None or self.options.autosave
        if self.options.resume:
            run, skipped = self.storage.interrupted(self.device)
            for line in skipped:
                self._say(line)
            if run is not None:
                self.file, kept = RunFile.resume(self.storage, run, self.premise)
                return kept
            if not named:
                raise ConfigurationError(
                    f"no interrupted run in {self.storage.directory} to resume"
                )
        if named:
            self.file = RunFile.create(self.storage, self.options.save, self.device, self.premise)
        return []

    def write(self, outcomes: Sequence[Outcome]) -> None:
        """Bring the file up to date.

        Raises:
            ConfigurationError: it cannot be written, and is given up.
        """
        if self.file is not None:
            try:
                self.file.write(outcomes)
            except OSError as error:
                file, self.file = self.file, None
                raise ConfigurationError(file.give_up(error)) from error

    def end(self, outcomes: Sequence[Outcome], complete: bool) -> bool:
        """Print what changed, finish the file; returns whether something is wrong."""
        from dpbench.show.layout import as_text

        tables, worse, unused = self._compare(outcomes)
        try:
            if tables:
                print(f"\n{as_text(tables)}")
            for threshold in unused:
                self._say(f"ERROR: {threshold}: not in both runs, so nothing was judged by it")
        finally:  # whether or not anybody reads that
            wrong = self._finish(outcomes, complete, worse)
        return wrong or bool(unused)  # a gate that was not there must not pass

    def _finish(
        self, outcomes: Sequence[Outcome], complete: bool, worse: list[dict[str, Any]]
    ) -> bool:
        """Write the file for the last time, and let go of it."""
        if self.file is None:
            return bool(worse)
        if not outcomes:
            self.file.discard()
            return False
        try:
            self.file.write(outcomes, complete=complete, regressions=worse)
        except OSError as error:
            self._say(f"ERROR: {self.file.give_up(error)}")
            return True
        self.file.close()
        self._say(f"saved {self.file.path}")
        return bool(worse)

    def _compare(
        self, outcomes: Sequence[Outcome]
    ) -> tuple[list[Table], list[dict[str, Any]], list[Threshold]]:
        """What changed; what got worse by too much; limits that nothing was judged by."""
        from dpbench.results.compare import judge, regressions, unapplied, ungated
        from dpbench.results.frame import to_frame
        from dpbench.results.references import alone, alone_in_words, ungated_in_words
        from dpbench.show.comparison import comparison_tables

        after = to_frame(row for outcome in outcomes for row in outcome.rows)
        if self.references is None or after.empty:
            return [], [], []
        changes = self.references.changes(after)
        if without := alone(after, changes):
            self._say(f"WARNING: {alone_in_words(without)}")
        if changes.empty and not self.references.named:  # the first run of these cases
            return [], [], []
        for line in ungated_in_words(ungated(after, changes, self.thresholds)):
            self._say(f"WARNING: {line}")
        verdict = judge(changes, self.thresholds)
        tables = comparison_tables(changes, verdict, "Change: ")
        return tables, regressions(verdict), unapplied(changes, self.thresholds)

    def _say(self, text: str) -> None:
        print(f"dpbench run: {text}", file=sys.stderr)
