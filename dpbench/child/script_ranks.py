"""Collects the measurements of a script that runs in several ranks.

``torchrun`` starts the ranks, and each rank runs ``dpbench exec`` and records its own steps. Rank 0
collects the rows of all ranks. Ranks send their rows in files, because the script may have
destroyed its process group.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dpbench.child.messages import LOST, POLL_SECONDS, WAITED
from dpbench.core.errors import CaseFailed, CaseTimedOut, ConfigurationError, ScriptInterrupted
from dpbench.core.files import write_text
from dpbench.results.outcome import Outcome

PATIENCE_SECONDS = 60.0
"""Largest number of seconds that rank 0 waits for other ranks' files after the script has ended in
rank 0."""

CAUSE_SECONDS = 3.0
"""Largest number of seconds that rank 0 waits for other ranks' files after the script has failed in
rank 0. The script may have failed because another rank failed. A rank that timed out also waits
this long."""


@dataclass(frozen=True)
class Rank:
    """A rank of a script that runs in several ranks on this machine.

    Attributes:
        number: number of this rank.
        ranks: number of ranks.
        folder: folder for files of all ranks. Each start of ``torchrun`` has a new folder.
    """

    number: int
    ranks: int
    folder: Path

    @classmethod
    def here(cls) -> Rank | None:
        """Return the rank of this process; None if the script runs in a single rank."""
        variable = os.environ.get
        ranks, own = variable("WORLD_SIZE", "1"), variable("TORCHELASTIC_ERROR_FILE", "")
        if ranks == "1":
            return None
        if not own.endswith("error.json") or variable("LOCAL_WORLD_SIZE") != ranks:
            raise ConfigurationError(
                f"dpbench exec measures only ranks that one torchrun has started on this machine; "
                f"WORLD_SIZE says that there are {ranks} ranks, which are on several machines or "
                f"were not started by torchrun"
            )
        return cls(int(os.environ["RANK"]), int(ranks), Path(own).parents[1])

    def file(self, number: int) -> Path:
        """Return the path of the file with a rank's outcome."""
        return self.folder / f"dpbench-{number}.json"

    @property
    def locked(self) -> Path:
        """Path of the file that rank 0 creates when it has locked the GPUs of all ranks."""
        return self.folder / "dpbench-locked"

    def hand_over(self, outcome: Outcome) -> int:
        """Write this rank's outcome to a file for rank 0, and return the exit status."""
        write_text(self.file(self.number), json.dumps(outcome.as_json()))
        if outcome.error == CaseTimedOut.__name__:
            time.sleep(CAUSE_SECONDS)  # torchrun ends the other ranks when this rank exits
        return 1 if outcome.error else 0

    def gather(self, own: Outcome) -> Outcome:
        """Return the joint outcome of all ranks, in which each row names its rank.

        If ranks failed, the outcome has no rows. Its error is the error of the rank that probably
        failed first.
        """
        deadline = time.monotonic() + (CAUSE_SECONDS if own.error else PATIENCE_SECONDS)
        every = [own, *(self._of(number, own, deadline) for number in range(1, self.ranks))]
        failed = [(rank, outcome) for rank, outcome in enumerate(every) if outcome.error]
        if failed:
            rank, first = min(failed, key=lambda each: _blame_order(each[1]))
            message = first.message.removeprefix(f"{own.case.id}: ")
            message = f"{own.case.id}: rank {rank}: {message}"
            return replace(own, rows=(), error=first.error, message=message)
        notes = dict.fromkeys(note for outcome in every for note in outcome.notes)
        steps = [len({row.repeat for row in outcome.rows}) for outcome in every]
        if len({*steps}) > 1:
            notes[
                f"the ranks took {', '.join(map(str, steps))} steps: only steps that every rank "
                f"took are counted"
            ] = None
        rows = [
            replace(row, rank=rank)
            for rank, outcome in enumerate(every)
            for row in outcome.rows
            if row.repeat < min(steps)
        ]
        return replace(own, rows=tuple(rows), notes=tuple(notes))

    def _of(self, number: int, own: Outcome, deadline: float) -> Outcome:
        """Return another rank's outcome. Wait for the rank's file until the deadline."""
        with suppress(KeyboardInterrupt):  # torchrun interrupts this rank if another rank failed
            while not self.file(number).exists() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        try:
            return Outcome.from_json(json.loads(self.file(number).read_text(encoding="utf-8")))
        except OSError:
            missing = "it left no record of its steps, because it died or has not ended"
            return Outcome(own.case, (), error=CaseFailed.__name__, message=missing)


def _blame_order(outcome: Outcome) -> int:
    """Return a number from 0 to 3. The rank with the smallest number probably failed first."""
    if outcome.error == ScriptInterrupted.__name__:
        return 3
    if LOST.search(outcome.message) or WAITED in outcome.message:
        return 2
    return int(not outcome.instruments)  # a rank without a record died or was ended
