"""Defines `Script` and `Subject`. A measurement has a case or a script as its subject."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from dpbench.core.case import AXES, USUAL, Case, file_name_of, positive
from dpbench.core.names import file_name_part

SCRIPT = "script"
"""The value of ``workload`` in the rows of a `Script`."""


class Script(msgspec.Struct, frozen=True, array_like=True):
    """A user's script, or a user's function that takes a step.

    In rows of a run, the workload of a script is `SCRIPT`, and the trainer is the script's name.
    The batch size is 0 if the user has not set it. Other columns that describe a case are empty,
    because dpbench does not know how the script trains. In JSON, a script is an array and a case is
    an object, so msgspec tells them apart.
    """

    name: str
    batch_size: int = 0

    def __post_init__(self) -> None:
        if self.batch_size:
            size = positive("batch size", self.batch_size)
            msgspec.structs.force_setattr(self, "batch_size", size)

    @property
    def trainer(self) -> str:
        """The name of the script, which is the trainer in the script's rows."""
        return self.name

    @property
    def gpus(self) -> int:
        """Always 0, because dpbench does not know how many GPUs a script uses."""
        return 0

    @property
    def id(self) -> str:
        """The name of the script."""
        return self.name

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that describe the script in rows; most columns are empty."""
        own = {"trainer": self.name, "batch_size": self.batch_size, "workload": SCRIPT}
        return {axis: type(USUAL[axis])() for axis in AXES} | own

    @property
    def cell(self) -> tuple[Any, ...]:
        """`SCRIPT` and the batch size. Scripts with equal cells are compared, like cases."""
        return (SCRIPT, self.batch_size)

    def with_trainer(self, trainer: str) -> Script:
        """Return a script that has this trainer as its name, and the same batch size."""
        return Script(trainer, self.batch_size)

    @property
    def file_name(self) -> str:
        """The id, converted to the name of a file or folder."""
        return file_name_of(self.id)

    @property
    def report_path(self) -> Path:
        """The path of the script's Nsight Compute report, relative to the report directory."""
        return Path(SCRIPT) / f"report_{file_name_part(self.name)}.ncu-rep"


Subject: TypeAlias = Case | Script
"""A subject of a measurement."""

Asked: TypeAlias = Collection[tuple[Subject, str]]
"""What should be measured: subjects, each with the name of an instrument."""


def samples_poisson(subject: Subject) -> bool:
    """Return True if a case has Poisson sampling; False for scripts, whose sampling is unknown."""
    return isinstance(subject, Case) and subject.sampling == "poisson"


def subject_from(row: Mapping[Any, Any]) -> Subject:
    """Return the case or script that a row of a run describes."""
    if row["workload"] == SCRIPT:
        return Script(row["trainer"], row["batch_size"])
    return _case(**{axis: row[axis] for axis in AXES if axis in row})


@lru_cache(maxsize=None, typed=True)
def _case(**fields: Any) -> Case:
    """Return a case. The result is cached, because a run has many rows of each case."""
    return Case.from_row(fields)
