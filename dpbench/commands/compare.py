"""Compare saved runs: what changed, and whether by more than it may.

A run is the number of a saved one (dpbench list shows them) or a file: of the storage, or
written by --json or --dpbench-json. The first is what the others are compared with. The exit
code is 1 if a change exceeds a --fail, or if a case that the first run has failed in another.

A limit is METRIC[@PHASE]:5%, METRIC:0.5GB, METRIC:5%+0.1GB (only what is beyond both fails), or
METRIC:±5% (either way; +- is the same). Units are SI, a plain number is in the metric's own.
The ratio of any metric to the standard trainer is a metric too: dram_ratio, l2_ratio,
logical_ratio, peak_memory_ratio.

Examples:
  dpbench compare 1 2
  dpbench compare 1 2 --fail dram_bytes:5% --fail dram_ratio:3% --fail dram_bytes@clip:0.1GB
  dpbench compare docs/results/h200-grid1.json logical.json --across
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dpbench.errors import ConfigurationError
from dpbench.settings import declare

if TYPE_CHECKING:
    from dpbench.results.run import Run
    from dpbench.results.threshold import Threshold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("before", metavar="BEFORE", help="number or file")
    parser.add_argument("after", nargs="+", metavar="AFTER", help="numbers or files")
    declare(parser.add_argument, "compare_fail", called="--fail")
    declare(parser.add_argument, "compare_across", called="--across")
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from dpbench.results.run import Run
    from dpbench.results.storage import Storage
    from dpbench.results.threshold import Threshold

    thresholds = [Threshold.parse(text) for text in options.fail]
    storage = Storage(options.storage)
    before, *others = (Run.load(storage.find(text)) for text in (options.before, *options.after))
    bad = [_compare(before, after, thresholds, options.across) for after in others]
    return 1 if any(bad) else 0


def _compare(before: Run, after: Run, thresholds: Sequence[Threshold], across: bool) -> bool:
    """Print what changed from one run to another; returns whether that is a failure."""
    from dpbench.results.compare import compare, judge, unapplied, ungated
    from dpbench.results.references import ungated_in_words
    from dpbench.show.comparison import comparison_tables
    from dpbench.show.layout import as_text

    title = f"{before.name} -> {after.name}"
    changes = compare(before.frame, after.frame, across=across)
    if changes.empty:
        raise ConfigurationError(f"{title}: the two have no case in common")
    if unused := unapplied(changes, thresholds):
        raise ConfigurationError(
            f"{title}: no case of both runs has {', '.join(map(str, unused))}; "
            f"there is {', '.join(sorted(set(changes.metric)))}"
        )
    verdict = judge(changes, thresholds)
    print(f"{title}\n\n{as_text(comparison_tables(changes, verdict))}\n")
    for note in _notes(before, after):
        print(note)
    if not across:  # where instruments differ, so do their metrics
        for line in ungated_in_words(ungated(after.frame, changes, thresholds)):
            print(f"dpbench compare: WARNING: {line}", file=sys.stderr)
    failed = _newly_failed(before, after)
    for name in failed:
        print(f"dpbench compare: {after.name}: {name}", file=sys.stderr)
    worse = int(verdict.regressed.sum())
    if worse:
        print(
            f"dpbench compare: {title}: {worse} regression{'s' if worse > 1 else ''}",
            file=sys.stderr,
        )
    return bool(worse or failed)


def _newly_failed(before: Run, after: Run) -> list[str]:
    """Cases that the first run has and that failed in the second."""
    had = {outcome.case for outcome in before.outcomes if outcome.rows}
    return [f"{o.case.id}: {o.error}" for o in after.outcomes if o.error and o.case in had]


def _notes(before: Run, after: Run) -> Iterator[str]:
    """What else is different, so that a reader can judge what a change comes from."""
    from dpbench.results.conditions import differences
    from dpbench.results.references import listed

    old, new = ({o.case.id for o in run.outcomes if o.rows} for run in (before, after))
    for run, missing in ((before, new - old), (after, old - new)):
        if missing:
            yield f"Not in {run.name}: {', '.join(sorted(missing))}."
    for cases, found in differences(before, after):
        about = f" for {listed(cases)}" if cases else ""
        yield f"Different{about}: {'; '.join(found)}."
