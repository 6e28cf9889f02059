"""Counts cases without hardware, with a bar of progress."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TYPE_CHECKING

from dpbench.case import Case

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome


def count_cases(cases: Collection[Case]) -> list[Outcome]:
    """The logical counts of each case; what cannot be counted is said on standard error."""
    from tqdm import tqdm

    from dpbench.instruments.logical.instrument import Logical
    from dpbench.runner import measure

    outcomes = []
    with tqdm(cases, unit="case", disable=None, file=sys.stderr) as progress:
        for case in progress:
            progress.set_description(case.id)
            outcomes.append(outcome := measure(case, [Logical()]))
            if outcome.error:
                progress.write(outcome.message, file=sys.stderr)
    return outcomes
