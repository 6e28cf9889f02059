"""Measures a script in several ranks: ``torchrun`` starts them, each runs ``dpbench exec``.

Each rank records its own steps. Rank 0 collects all rows, through files because the script may have
destroyed its process group.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dpbench.child.failures import CaseFailed, CaseTimedOut, ScriptInterrupted
from dpbench.child.hang_report import WAITED
from dpbench.child.messages import LOST, POLL_SECONDS
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import write_text
from dpbench.results.outcome import Outcome

PATIENCE_SECONDS = 60.0
"""Seconds that rank 0 waits for other ranks after its own script has ended."""

CAUSE_SECONDS = 3.0
"""The same if the script failed in rank 0, perhaps because another rank failed."""


@dataclass(frozen=True)
class Rank:
    """One of several ranks that run a script together on this machine."""

    number: int
    ranks: int
    folder: Path  # named by the launcher's id, which is new for each start

    @classmethod
    def here(cls) -> Rank | None:
        """The rank of this process; None if there is only one."""
        said = os.environ.get
        ranks, own = said("WORLD_SIZE", "1"), said("TORCHELASTIC_ERROR_FILE", "")
        if ranks == "1":
            return None
        if not own.endswith("error.json") or said("LOCAL_WORLD_SIZE") != ranks:
            raise ConfigurationError(
                f"exec measures ranks that one torchrun starts, all on this machine; this is one "
                f"of {ranks} (WORLD_SIZE) that are on several machines or were started otherwise"
            )
        return cls(int(os.environ["RANK"]), int(ranks), Path(own).parents[1])

    def file(self, number: int) -> Path:
        """The file for a rank's outcome."""
        return self.folder / f"dpbench-{number}.json"

    @property
    def locked(self) -> Path:
        """The file whose existence says that rank 0 has locked the GPUs of all ranks."""
        return self.folder / "dpbench-locked"

    def hand_over(self, outcome: Outcome) -> int:
        """Write this rank's outcome for rank 0; return the exit status."""
        write_text(self.file(self.number), json.dumps(outcome.as_json()))
        if outcome.error == CaseTimedOut.__name__:
            time.sleep(CAUSE_SECONDS)  # let others write: after this exit the launcher ends them
        return 1 if outcome.error else 0

    def gather(self, own: Outcome) -> Outcome:
        """The outcome of all ranks, with rows by rank.

        If ranks failed, it has no rows, and the error of the rank that probably failed first.
        """
        deadline = time.monotonic() + (CAUSE_SECONDS if own.error else PATIENCE_SECONDS)
        every = [own, *(self._of(number, own, deadline) for number in range(1, self.ranks))]
        failed = [(rank, outcome) for rank, outcome in enumerate(every) if outcome.error]
        if failed:
            rank, first = min(failed, key=lambda each: _blame_rank(each[1]))
            message = first.message.removeprefix(f"{own.case.id}: ")
            message = f"{own.case.id}: rank {rank}: {message}"
            return replace(own, rows=(), error=first.error, message=message)
        notes = dict.fromkeys(note for outcome in every for note in outcome.notes)
        steps = [len({row.repeat for row in outcome.rows}) for outcome in every]
        if len({*steps}) > 1:
            notes[
                f"ranks took {', '.join(map(str, steps))} steps: only those that every rank took "
                f"count"
            ] = None
        rows = [
            replace(row, rank=rank)
            for rank, outcome in enumerate(every)
            for row in outcome.rows
            if row.repeat < min(steps)
        ]
        return replace(own, rows=tuple(rows), notes=tuple(notes))

    def _of(self, number: int, own: Outcome, deadline: float) -> Outcome:
        """Wait for another rank's outcome, and return it."""
        with suppress(KeyboardInterrupt):  # the launcher ends this rank, because another failed
            while not self.file(number).exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        try:
            return Outcome.from_json(json.loads(self.file(number).read_text(encoding="utf-8")))
        except OSError:
            missing = "it left no record of its steps: it died, or has not ended"
            return Outcome(own.case, (), error=CaseFailed.__name__, message=missing)


def _blame_rank(outcome: Outcome) -> int:
    """How probable it is that a rank failed only because another did; 0 if by itself."""
    if outcome.error == ScriptInterrupted.__name__:
        return 3
    if LOST.search(outcome.message) or WAITED in outcome.message:
        return 2
    return int(not outcome.instruments)  # the rank died or was ended
