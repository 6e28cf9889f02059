"""Say which kernels and copies move the bytes of one case, and whether they are all.

Measures the case three times, each in a process of its own: the ranges of its phases and then
each kernel under Nsight Compute, and copies and operators under the PyTorch profiler. Prints the
account (ranges less kernels less copies), the kernels and operators that move most, and the
copies. The exit code is 1 if more than 1 % of the step's bytes are left over.

Examples:
  dpbench attribute --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench attribute --trainer dpsgd --batch-size 8 --seq-len 256 --saved     # no GPU needed
  dpbench attribute --trainer dpsgd_ghost --json account.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.case import PHASES, Case
from dpbench.commands.options import add_case, chosen_case
from dpbench.errors import ConfigurationError, DpbenchError
from dpbench.files import check_writable_file, write_text
from dpbench.settings import Settings, declare
from dpbench.show.view import check_top

if TYPE_CHECKING:
    import pandas as pd

    from dpbench.show.layout import Table

TAKEN = ("ncu_path", "ncu_dir", "profile_dir", "timeout")
"""The settings of a measurement that this command takes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_case(parser)
    declare(parser.add_argument, *TAKEN, "top")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the account, in bytes")
    parser.add_argument(
        "--saved", action="store_true", help="measure nothing; read what an earlier run left"
    )


def run(options: argparse.Namespace) -> int:
    """Print the account and write it; returns the exit code."""
    from dpbench.results.frame import TOLERANCE, account, unaccounted
    from dpbench.show.kernels import account_table
    from dpbench.show.layout import as_text, terminal_width

    case = chosen_case(options)
    check_top(options.top)
    if options.json:
        check_writable_file(options.json)
    if not options.saved:
        _measure(case, options)
    rows, tables = _saved(case, options)
    accounted = account(rows)
    if options.json:
        phases = accounted.to_dict("index")
        document = {"case": case.id, "unit": "B", "tolerance": TOLERANCE, "phases": phases}
        write_text(options.json, json.dumps(document, indent=1) + "\n")
    print(as_text([account_table(case.id, accounted), *tables], terminal_width()))
    return 1 if unaccounted(accounted) else 0


def _measure(case: Case, options: argparse.Namespace) -> None:
    """Measure the case; what was found is in the files that it leaves."""
    from dpbench.gpu import visible_gpus
    from dpbench.instruments import choose
    from dpbench.runner import measure

    settings = Settings(**{name: getattr(options, name) for name in TAKEN})
    instruments = choose(("ncu", "ncu_kernels", "torch_profiler"), settings)
    for instrument in instruments:
        instrument.check()
    outcome = measure(case, instruments, gpu=next(iter(visible_gpus()), None))
    if outcome.error:
        log = f" (log: {outcome.log})" if outcome.log else ""
        raise DpbenchError(f"{outcome.error}: {outcome.message}{log}")


def _saved(case: Case, options: argparse.Namespace) -> tuple[pd.DataFrame, list[Table]]:
    """The rows of a case's files, and tables of its kernels and copies."""
    from dpbench.instruments.ncu import range_report
    from dpbench.instruments.ncu.kernel_report import read_kernels
    from dpbench.instruments.torch_profiler.files import operators_of, read_summary
    from dpbench.results.frame import to_frame
    from dpbench.results.kernels import dram_bytes_of_step, fold, kernel_rows
    from dpbench.results.roofline import known_roofs
    from dpbench.show.kernels import kernel_tables
    from dpbench.show.profile import copies_table

    ranges = range_report.read(options.ncu_dir / case.report_path, case)
    path = options.ncu_dir / range_report.report_path(case, range_report.KERNELS)
    kernels = read_kernels(path)
    launched = range_report.launches_by_phase(options.ncu_dir / case.report_path)
    profiled = {launch.phase for launch in kernels.launches}
    missing = [phase for phase in PHASES if launched.get(phase) and phase not in profiled]
    if missing:
        raise ConfigurationError(
            f"{path} lacks the kernels of {', '.join(missing)}; an account needs those of every "
            f"phase: measure without --saved, or dpbench run --kernels without --kernels-phase"
        )
    directory, device = options.profile_dir / case.id, kernels.device
    profile = read_summary(directory)
    counts = fold(kernels.launches, operators_of(directory, kernels.launches))
    of_kernels = kernel_rows(case, counts, instrument="ncu_kernels", device=device, tool="ncu")
    tables = kernel_tables(
        counts, case.id, dram_bytes_of_step(ranges), known_roofs(device), top=options.top
    )
    tables += copies_table(profile.launches, profile.steps)
    return to_frame([*ranges, *of_kernels, *profile.rows]), tables
