"""Counting in a process of its own: what it does to itself, it does to nobody else."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from dpbench.case import Case
from dpbench.instruments.base import Running
from dpbench.instruments.child import Child
from dpbench.instruments.logical.result import LogicalResult
from dpbench.registry import MODELS, TRAINERS
from dpbench.results.rows import Measurement


class CountingApart(Running):
    """A case under count in a process of its own.

    Args:
        case: the case.
        most_steps: see `Logical`.
        timeout: seconds it may take.
        directory: where its log goes; None to keep none.
    """

    def __init__(self, case: Case, most_steps: int, timeout: float, directory: Path | None) -> None:
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="dpbench-")
            directory = Path(self._scratch.name)
        names = {"trainer": TRAINERS.argument(case.trainer), "model": MODELS.argument(case.model)}
        spelled = json.dumps(asdict(case) | names)
        self._child = Child(
            [sys.executable, "-m", __package__, spelled, str(most_steps)],
            case=case,
            log=(directory / case.report_path).with_suffix(".logical.log"),
            timeout=timeout,
            read=self._read,
        )

    def rows(self) -> list[Measurement]:
        return self._child.rows()

    def _read(self, child: Child) -> list[Measurement]:
        result = LogicalResult.from_json(child.record()["counted"])
        self.operators, self.notes = result.operators, result.notes
        return list(result.rows)

    def cancel(self) -> None:
        self._child.cancel()
        if self._scratch:
            self._scratch.cleanup()
