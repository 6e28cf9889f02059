"""Measure the cases of a grid and print tables.

Bytes come from hardware counters under Nsight Compute, times and peak memory from a second,
unprofiled process. A case that fails leaves the others running; the exit code is 1 then.
Without a GPU, or with --instrument logical, nothing is measured: the bytes that each operator
must move are counted, with neither a GPU nor the memory. The tables say which it was.

A grid file is TOML with one key per axis, a value or a list of values:

  trainer = ["standard", "dpsgd"]
  batch_size = [8, 16]
  seq_len = 256
  model_size = "medium"

Examples:
  dpbench run --grid grid1 --json run.json --markdown run.md
  dpbench run --trainer standard --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench run --ncu-metrics dram_read_throughput,gld_throughput
  dpbench run --kernels-phase clip --ncu-set detailed --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench run --instrument logical --batch-size 8 --seq-len 256
  dpbench run --instrument ncu --instrument timing --instrument logical
  dpbench run --columns dram_bytes,dram_ratio,spread --sort dram_ratio --group-by device
  dpbench run --instrument logical --autosave --compare-fail logical_bytes:1%
  dpbench run --instrument timing --device cpu --model-size tiny --batch-size 4 --seq-len 32
  dpbench run --instrument torch_profiler --trainer dpsgd --profile-schedule active=3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpbench.commands.options import add_cases, chosen_grid, chosen_view
from dpbench.commands.saved import Saved, add_saved
from dpbench.errors import ConfigurationError, check_distinct_files, check_writable_file
from dpbench.instruments import INSTRUMENTS, ON_GPU, choose
from dpbench.instruments.base import Instrument
from dpbench.instruments.settings import InstrumentSettings
from dpbench.options import (
    add_counting,
    add_files,
    add_ncu,
    add_profile,
    add_profile_directory,
    add_steps,
    add_timeout,
    add_top,
    add_try_anyway,
    add_view,
    chosen_kernels,
    one_of,
)
from dpbench.process.schedule import Schedule, Steps
from dpbench.show.view import View

if TYPE_CHECKING:
    from dpbench.results.outcome import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    add_cases(parser)
    how = parser.add_argument_group("measuring")
    how.add_argument(
        "--instrument",
        action="append",
        metavar="NAME",
        help=f"{one_of(INSTRUMENTS)}, or package.module:Class; repeatable; default timing and ncu, "
        "without a GPU logical",
    )
    how.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="for timing and torch_profiler (default %(default)s)",
    )
    add_ncu(how.add_argument)
    add_counting(how.add_argument)
    add_steps(how.add_argument, "the unprofiled", InstrumentSettings.timing_steps)
    add_steps(how.add_argument, "the profiled", InstrumentSettings.ncu_steps, prefix="ncu-")
    add_profile_directory(how.add_argument)
    add_profile(how.add_argument)
    add_timeout(how.add_argument)
    add_try_anyway(how.add_argument)
    shown = parser.add_argument_group("tables", "what is shown, here and in Markdown")
    add_view(shown.add_argument)
    add_top(shown.add_argument)
    files = parser.add_argument_group("files")
    add_files(files.add_argument, ("json", "markdown", "csv", "github-benchmark"))
    add_saved(parser)


def _instruments_here(options: argparse.Namespace) -> tuple[str, ...]:
    """Hardware where there is any, or where it was asked for; logical counting elsewhere."""
    from dpbench.gpu import visible_gpus

    asked = options.ncu_path or options.ncu_metrics or chosen_kernels(options).wanted
    if visible_gpus() or asked:
        return ON_GPU
    print("dpbench run: no CUDA GPU here, so logical bytes are counted instead", file=sys.stderr)
    return ("logical",)


def _chosen_instruments(options: argparse.Namespace) -> list[Instrument]:
    settings = InstrumentSettings(
        directory=options.ncu_dir,
        ncu_path=options.ncu_path,
        metrics=tuple(options.ncu_metrics or ()),
        device=options.device,
        timing_steps=Steps(options.warmup, options.active),
        ncu_steps=Steps(options.ncu_warmup, options.ncu_active),
        timeout=options.timeout,
        kernels=chosen_kernels(options),
        profile_directory=options.profile_dir,
        profile_schedule=Schedule.parse(options.profile_schedule),
        profile_threshold=options.profile_threshold,
    )
    return choose(options.instrument or _instruments_here(options), settings)


def run(options: argparse.Namespace) -> int:
    """Do it; returns the exit code."""
    from tqdm import tqdm

    from dpbench.gpu import visible_gpus
    from dpbench.results.outcome import COMPLETE, INTERRUPTED, write_json
    from dpbench.runner import measure
    from dpbench.show.export import write_renderings

    grid = chosen_grid(options)
    instruments = _chosen_instruments(options)
    view = chosen_view(options)
    renderings = {name: getattr(options, name) for name in ("markdown", "csv", "github_benchmark")}
    files = {"json": options.json, **renderings}
    check_distinct_files({f"--{name.replace('_', '-')}": path for name, path in files.items()})
    for path in filter(None, files.values()):
        check_writable_file(path)
    for instrument in instruments:
        instrument.check()
    gpu = next(iter(visible_gpus()), None)
    on_gpu = any(instrument.hardware for instrument in instruments)
    card = gpu if on_gpu and options.device == "cuda" and not options.try_anyway else None
    saved = Saved(options, grid, instruments, gpu if on_gpu else None)
    outcomes: list[Outcome] = [*saved.kept]
    done = {outcome.case for outcome in outcomes}
    complete = worse = False

    def write_files() -> None:
        saved.write(outcomes)
        if options.json:
            session = saved.premise.session(COMPLETE if complete else INTERRUPTED)
            write_json(options.json, outcomes, saved.premise.environment, session)
        write_renderings(outcomes, view, **renderings)

    try:
        with tqdm(list(grid.cases()), unit="case", disable=None, file=sys.stderr) as progress:
            for case in progress:
                if case in done:
                    continue
                progress.set_description(case.id)
                outcomes.append(measure(case, instruments, gpu=card))
                write_files()  # at once, so that a killed run keeps what it has
                if outcomes[-1].error:
                    progress.write(outcomes[-1].message, file=sys.stderr)
        complete = True
        write_files()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    finally:  # an interrupted run shows what it has
        try:
            _show(outcomes, view)
        finally:  # whether or not anybody reads the tables
            worse = saved.end(outcomes, complete)
    return 1 if worse or any(o.error and not o.skipped for o in outcomes) else 0


def _show(outcomes: Sequence[Outcome], view: View) -> None:
    """Print the tables; on GitHub they go into the step's summary, too."""
    from dpbench.show.export import append_step_summary
    from dpbench.show.layout import as_text, terminal_width
    from dpbench.show.summary import summary_tables

    found = summary_tables(outcomes, view)
    print(as_text(found, terminal_width()))
    if warning := append_step_summary(found):
        print(f"dpbench run: WARNING: {warning}", file=sys.stderr)
