"""What is measured: a case of the grid, or a script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dpbench.core.case import AXES, USUAL, Case, file_name_of
from dpbench.core.model_size import positive
from dpbench.core.names import quoted

SCRIPT = "script"
"""What the rows of a `Script` have for their workload."""


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
        return Path(SCRIPT) / f"report_{quoted(self.name)}.ncu-rep"


Subject: TypeAlias = Case | Script
"""What is measured."""


def samples_poisson(subject: Subject) -> bool:
    """Whether batches differ in size; of scripts that is unknown."""
    return isinstance(subject, Case) and subject.sampling == "poisson"


def subject_from(row: Mapping[Any, Any]) -> Subject:
    """The case or script that a row is about."""
    if row["workload"] == SCRIPT:
        return Script(row["trainer"], row["batch_size"])
    return Case.from_row(row)
