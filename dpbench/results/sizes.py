"""Whether steps of scripts can be compared although their batches differ in size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from statistics import fmean

from dpbench.core.subject import Script
from dpbench.results.kernels import POISSON
from dpbench.results.outcome import Outcome

SAME_SIZE_FLOPS = 0.01
"""Largest relative difference in arithmetic between steps whose batches have the same size."""

NEAR = 0.1
"""If the mean numbers of examples of two scripts' steps differ by at most this share, their means
are divided. The ratio is then wrong by at most about this share, because the cost of a step is a
constant plus a part for each example."""


def no_ratios(standards: Iterable[Outcome], outcomes: Iterable[Outcome]) -> list[str]:
    """Return why mean steps of scripts cannot be divided by those of the baseline, if any."""
    found = [_judged(*pair) for pair in _pairs(standards, outcomes)]
    return [*dict.fromkeys(f"no ratio to the baseline: {why}" for near, why in found if not near)]


def ratio_notes(outcomes: Sequence[Outcome], baseline: str) -> Iterator[str]:
    """Yield a note for each script that has ratios, but batches of other sizes than the baseline.

    Args:
        outcomes: the outcomes of a run.
        baseline: the name of the baseline's script.
    """
    standards = [o for o in outcomes if o.case.trainer == baseline]
    for pair in _pairs(standards, [o for o in outcomes if o not in standards]):
        near, note = _judged(*pair)
        if near and note:
            yield f"{pair[1].case.id}: {note}"


def other_sizes(before: Iterable[Outcome], after: Iterable[Outcome]) -> Iterator[str]:
    """Yield a note for each script whose batches differ in size, and differ between two runs."""
    for old, new in _pairs(before, after):
        more = max(map(_excess, (old, new)))
        if old.case == new.case and more > SAME_SIZE_FLOPS and _sizes(old) != _sizes(new):
            what = "examples" if new.examples else "arithmetic in forward"
            yield (
                f"{new.case.id}: batches differ in size, also between the runs: one step has up to "
                f"{more:.0%} more {what} than another, and numbers are means over the steps; draw "
                f"the same batches, by seed= of make_private (a seeded run is for measuring, not "
                f"private) or generator= of the data loader that Opacus gets, or record more "
                f"--steps"
            )


def _pairs(
    first: Iterable[Outcome], second: Iterable[Outcome]
) -> Iterator[tuple[Outcome, Outcome]]:
    """Yield the pairs of scripts' outcomes that the same instrument measured."""
    for pair in product(first, second):
        if pair[0].by & pair[1].by and all(isinstance(each.case, Script) for each in pair):
            yield pair


def _judged(standard: Outcome, outcome: Outcome) -> tuple[bool, str]:
    """Return whether mean steps of a script and its baseline can be divided, and a note."""
    both = (outcome, standard)
    sampled = [POISSON in each.notes or len({*each.examples}) > 1 for each in both]
    if any(sampled) and _sizes(standard) == _sizes(outcome) != ():
        return True, ""
    if any(sampled) and all(any(each.examples) for each in both):
        means = [fmean(each.examples) for each in both]
        differ = "batches differ in size"
        of = f"{means[0]:.1f} and {means[1]:.1f} examples"
        if max(means) <= (1 + NEAR) * min(means):
            most = f"{max(outcome.examples)} and {max(standard.examples)}"
            return True, (
                f"{differ}: the ratios compare mean steps, of {of}; those of times compare "
                f"medians, and those of peaks the largest steps, of {most} examples"
            )
        return False, (
            f"{differ}, and mean steps have {of}, which is more than {NEAR:.0%} apart: record more "
            f"--steps, or use the same batch size"
        )
    varies = [yes or _excess(o) > SAME_SIZE_FLOPS for yes, o in zip(sampled, both, strict=True)]
    if varies[0] == varies[1]:
        unknown = "batches of both differ in size, and how their mean steps compare is unknown"
        return True, unknown * (varies[0] and _sizes(standard) != _sizes(outcome))
    which = "the script's" if varies[0] else "the baseline's"
    return False, (
        f"only {which} batches differ in size, as Poisson batches do, and how many examples each "
        f"step has is unknown; compare scripts that sample in the same way"
    )


def _sizes(outcome: Outcome) -> tuple[float, ...]:
    """Return the number of examples of each step if it is known, otherwise forward's arithmetic."""
    flops = (r.value for r in outcome.rows if (r.metric, r.phase) == ("flops", "forward"))
    return outcome.examples or tuple(flops)


def _excess(outcome: Outcome) -> float:
    """Return by how much the largest step exceeds the smallest in examples or arithmetic."""
    sizes = _sizes(outcome)
    return max(sizes) / (min(sizes) or math.nan) - 1 if sizes else 0.0
