"""How much CPU a session takes beside measuring: 32 cases by an instrument that takes no time.

Prints seconds for a session that saves its run, and for one that writes JSON, Markdown and CSV,
too.

    python bench/session_speed.py
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path

from dpbench.case import Case
from dpbench.instruments.interface import Instrument, Running
from dpbench.results.rows import Measurement
from dpbench.session import Session
from dpbench.settings import Settings

PHASES = ("step", "forward", "backward", "clip", "noise", "optimizer")
METRICS = (
    *("dram_read_bytes", "dram_write_bytes", "l2_read_bytes", "l2_write_bytes"),
    *("global_load_bytes", "global_store_bytes", "l2_total_bytes"),
)


class Instant(Instrument):
    """Has 126 rows for any case."""

    name = "ncu"

    def start(self, case: Case) -> Running:
        """Begin no measurement."""
        return Reading(case)


class Reading(Running):
    """What it has of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def rows(self) -> list[Measurement]:
        """Three steps of each phase and metric."""
        return [
            Measurement(self.case, "ncu", phase, metric, 1e9 + n, "B", n, "NVIDIA H200", "x")
            for phase in PHASES
            for metric in METRICS
            for n in range(3)
        ]


def seconds(*files: str) -> float:
    """The CPU time of a session with these files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings(
            directory=folder,
            grid="grid1",
            axes={"batch_size": [1, 2, 4, 8], "seq_len": [64, 128]},
            device="cpu",
            storage=folder / "saved",
            save="it",
            **{kind: folder / f"run.{kind}" for kind in files},  # type: ignore[arg-type]
        )
        plan = [(case, Instant()) for case in settings.chosen_grid().cases()]
        with closing(Session(plan, settings)) as session:
            session.begin()
            start = time.process_time()
            for case, _ in plan:
                session.measure(case)
            session.finish(complete=True)
            session.summary()
            assert (len(session.findings.outcomes()), session.problems) == (32, [])
            return time.process_time() - start


def main() -> None:
    """Print both."""
    seconds()  # imports pandas
    print(f"saved: {seconds():.2f} s; with files: {seconds('json', 'markdown', 'csv'):.2f} s")


if __name__ == "__main__":
    main()
