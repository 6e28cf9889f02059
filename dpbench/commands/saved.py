"""What ``dpbench run`` does with saved runs: save its own, go on with one, compare with one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import Grid
from dpbench.errors import ConfigurationError
from dpbench.gpu import Gpu
from dpbench.instruments.base import Instrument
from dpbench.instruments.ncu.ranges import Ncu, ncu_version
from dpbench.options import add_comparing, add_saving, add_storage
from dpbench.results.rows import NO_HARDWARE

if TYPE_CHECKING:
    from dpbench.results.gate import Verdict
    from dpbench.results.outcome import Outcome
    from dpbench.results.run import Run
    from dpbench.results.session import RunFile
    from dpbench.results.threshold import Threshold


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
        self.limits: list[Threshold] = [Threshold.parse(text) for text in options.compare_fail]
        self.asked = [(case, i.name) for case in grid.cases() for i in instruments]
        hardware = {i.name for i in instruments} - {"logical"}
        self.device = (
            (gpu.name if gpu and options.device == "cuda" else "cpu") if hardware else None
        )
        self.reference = self._reference(instruments)
        self.kept: list[Outcome] = self._begin()

    def _reference(self, instruments: Sequence[Instrument]) -> Run | None:
        from dpbench.results.references import choose
        from dpbench.results.run import Run

        if self.options.compare is None and not self.limits:
            return None
        names = [i.name for i in instruments]
        wanted = [(NO_HARDWARE if n == "logical" else str(self.device), n) for n in names]
        if self.options.compare:
            run = Run.load(self.storage.find(self.options.compare))
            if not set(wanted) & set(run.sources):
                by = f"{', '.join(names)} on {self.device or 'no hardware'}"
                raise ConfigurationError(f"{run.path} has nothing by {by}")
            return run
        candidates = self.storage.candidates({device for device, _ in wanted})
        choice = choose(candidates, wanted, self.asked)
        for line in choice.skipped:
            self._say(line)
        if choice.run is None and self.limits and not self.options.compare_first_run_ok:
            raise ConfigurationError(
                f"no complete run in {self.storage.directory} has any of these cases by "
                f"{' or '.join(names)} to judge by; if this is the first, say "
                f"--compare-first-run-ok"
            )
        if choice.run:
            self._say(f"comparing with {choice.run.name}")
        return choice.run or Run.of("the storage")

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
        from dpbench.results.gate import judge
        from dpbench.results.outcome import COMPLETE, INTERRUPTED
        from dpbench.results.run import Run
        from dpbench.show.comparison import comparison_tables, grown_lines
        from dpbench.show.layout import as_text

        if self.reference is None:
            return self._finish(outcomes, complete, None)
        session = self.premise.session(COMPLETE if complete else INTERRUPTED)
        after = Run.of("this run", outcomes, self.premise.environment, session)
        verdict = judge(
            self.reference,
            after,
            self.limits,
            asked=self.asked,
            first_run_ok=self.options.compare_first_run_ok,
        )
        try:
            if tables := comparison_tables(verdict, "Change: ", self.reference.name):
                print(f"\n{as_text(tables)}")
            if lines := grown_lines(verdict.regressions):
                print("\n".join(["", "What changed most:", *lines]))
            for note in verdict.notes:
                self._say(note)
            for missing in verdict.unjudged:
                self._say(f"ERROR: {missing}")
        finally:  # whether or not anybody reads that
            wrong = self._finish(outcomes, complete, verdict)
        return wrong

    def _finish(self, outcomes: Sequence[Outcome], complete: bool, verdict: Verdict | None) -> bool:
        """Write the file for the last time, and let go of it."""
        wrong = verdict is not None and not verdict.passed
        if self.file is None:
            return wrong
        if not outcomes:
            self.file.discard()
            return wrong
        try:
            self.file.write(outcomes, complete=complete, **(verdict.as_json() if verdict else {}))
        except OSError as error:
            self._say(f"ERROR: {self.file.give_up(error)}")
            return True
        self.file.close()
        self._say(f"saved {self.file.path}")
        return wrong

    def _say(self, text: str) -> None:
        print(f"dpbench run: {text}", file=sys.stderr)
