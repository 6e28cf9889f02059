"""Compare saved runs: what changed, and whether a change exceeds a limit.

A run is a file that --json or --dpbench-json wrote, or the number or name of a saved run, as
dpbench list shows them. If several runs have the name, the newest is taken. Each AFTER is compared
with BEFORE. The exit code is 1 if a change exceeds a limit of --fail, if a limit could not be
checked for all cases of BEFORE, or if one of these cases failed in an AFTER.

A limit is METRIC[@PHASE]:5% or METRIC:0.5GB. Only a change beyond both parts exceeds
METRIC:5%+0.1GB. METRIC:±5% (or +-) also limits a change for the better. Units are SI. A plain
number is in the metric's own unit. The ratio of any metric to the standard trainer is also a
metric: dram_ratio, l2_served_ratio, logical_ratio, peak_memory_ratio.

Examples:
  dpbench compare 1 2
  dpbench compare base this --columns dram_bytes,dram_bytes@clip
  dpbench compare 1 2 --fail dram_bytes:5% --fail dram_ratio:3% --fail dram_bytes@clip:0.1GB
  dpbench compare h200.json h100.json --across
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dpbench.commands.list import saved_run
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.metrics import METRICS
from dpbench.core.settings import declare
from dpbench.results.gate import Comparison, Gate
from dpbench.results.limits import Limit
from dpbench.results.run import Run
from dpbench.results.storage import check_comparable
from dpbench.show.comparison import comparison_tables, exceeded_lines, grown_text
from dpbench.show.layout import Table, as_text
from dpbench.show.view import listed_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument("before", metavar="BEFORE", help="number, name or file")
    parser.add_argument("after", nargs="+", metavar="AFTER", help="numbers, names or files")
    parser.add_argument(
        "--columns", metavar="NAMES", help="metrics to show, as METRIC[@PHASE], separated by commas"
    )
    declare(parser.add_argument, "compare_fail", called="--fail")
    declare(parser.add_argument, "compare_across", called="--across")
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Print the changes from BEFORE to each AFTER."""
    names = (options.before, *options.after)
    before, *others = runs = [saved_run(name, options.storage) for name in names]
    with METRICS.including(*(run.metrics for run in runs)):
        limits = [Limit.parse(text) for text in options.fail]
        named = [Limit.parse(f"{name}:0") for name in listed_names(options.columns)]
        shown = [(each.metric, each.phase) for each in named]
        found = [_compare(before, after, limits, options.across) for after in others]
        failed = [
            _print(before, after, changed, comparison_tables(changed, shown=shown))
            for after, changed in zip(others, found, strict=True)
        ]
    return int(any(failed))


def _compare(before: Run, after: Run, limits: Sequence[Limit], across: bool) -> Comparison:
    check_comparable(before, after.sources, f"{after.path}", across=across, option="--across")
    found = Gate(before, after, across=across).compare(limits)
    if found.changes.empty:
        raise ConfigurationError(f"{before.name} -> {after.name}: the runs have no case in common")
    return found


def _print(before: Run, after: Run, found: Comparison, tables: Sequence[Table]) -> bool:
    """Print the changes from one run to another. Return True if the comparison has failed."""
    title = f"{before.name} -> {after.name}"
    print(f"{title}\n\n{as_text(tables)}\n")
    if grown := grown_text(found.regressions, found.largest):
        print(f"{grown}\n")
    for note in found.notes:
        print(printable(f"{note}."))
    measured = {outcome.case for outcome in before.outcomes if outcome.rows}
    newly_failed = [
        f"{o.case.id}: {o.error}" for o in after.outcomes if o.error and o.case in measured
    ]
    failures = [*map(str, found.unjudged), *newly_failed]
    if worse := len(found.regressions):
        failures.append(f"{worse} regression{'s' if worse > 1 else ''}")
    failures += exceeded_lines(found.regressions)
    for failure in failures:
        print(printable(f"dpbench compare: {title}: {failure}"), file=sys.stderr)
    return bool(failures)
