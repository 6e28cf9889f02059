"""What is measured: a case of the grid, or a script."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpbench.core.case import AXES, USUAL, Case, file_name_of, for_path
from dpbench.core.model_size import positive

SCRIPT = "script"
"""What the rows of a `Script` have for their workload."""


class Subject(Protocol):
    """What is measured: a `Case` or a `Script`."""

    @property
    def trainer(self) -> str:
        """The trainer of its rows."""

    @property
    def batch_size(self) -> int:
        """The examples in a step; 0 if unknown."""

    @property
    def gpus(self) -> int:
        """The GPUs that share a step; 0 if unknown."""

    @property
    def id(self) -> str:
        """A name for test ids and messages."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Its columns in rows: a value along each of `AXES`."""

    @property
    def cell(self) -> Hashable:
        """The key of its cell: subjects that differ only in the trainer share a cell."""

    @property
    def file_name(self) -> str:
        """The id as the name of a file or folder."""

    @property
    def report_path(self) -> Path:
        """Where its report lies below the report directory."""

    def with_trainer(self, trainer: str) -> Subject:
        """What it is compared with: the same with another trainer."""


@dataclass(frozen=True)
class Script:
    """A script, a loop or a step of one's own, by its name.

    Its rows have the name as trainer, and nothing on other axes, because only its author knows how
    it trains. The batch size is 0 unless it is given.
    """

    name: str
    batch_size: int = 0

    def __post_init__(self) -> None:
        if self.batch_size:
            object.__setattr__(self, "batch_size", positive("batch size", self.batch_size))

    @property
    def trainer(self) -> str:
        """Its name, as the trainer of its rows."""
        return self.name

    @property
    def gpus(self) -> int:
        """Unknown."""
        return 0

    @property
    def id(self) -> str:
        """Its name."""
        return self.name

    @property
    def columns(self) -> dict[str, Any]:
        """Its columns in rows, most of them empty."""
        own = {"trainer": self.name, "batch_size": self.batch_size, "workload": SCRIPT}
        return {axis: type(USUAL[axis])() for axis in AXES} | own

    @property
    def cell(self) -> tuple[Any, ...]:
        """The batch size, and that it is a script."""
        return (SCRIPT, self.batch_size)

    def with_trainer(self, trainer: str) -> Script:
        """Another script with the same batch size."""
        return Script(trainer, self.batch_size)

    @property
    def file_name(self) -> str:
        """The id as the name of a file or folder."""
        return file_name_of(self.id)

    @property
    def report_path(self) -> Path:
        """Where its report lies below the report directory."""
        return Path(SCRIPT) / f"report_{for_path(self.name)}.ncu-rep"


def samples_poisson(subject: Subject) -> bool:
    """Whether batches differ in size; of scripts that is unknown."""
    return isinstance(subject, Case) and subject.sampling == "poisson"


def subject_from(row: Mapping[Any, Any]) -> Case | Script:
    """The case or script that a row is about."""
    if row["workload"] == SCRIPT:
        return Script(row["trainer"], row["batch_size"])
    return Case.from_row(row)
