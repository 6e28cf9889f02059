"""Measure the cases of a grid and print tables.

By default, bytes come from hardware counters read by Nsight Compute. Times and peak memory come
from a second process without Nsight Compute. If a case fails, the other cases are still measured,
and the exit code is 1. Without a GPU, or with --instrument logical, bytes are not measured but
counted. These are the bytes that each operator must move, counted on tensors without data. The
tables say whether numbers were measured or counted.

A grid file is TOML with one key per axis, a value or a list of values:

  trainer = ["standard", "dpsgd"]
  batch_size = [8, 16]
  seq_len = 256
  model_size = "medium"

Examples:
  dpbench run --trainer standard --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench run --grid grid1 --json run.json --markdown run.md --html run.html
  dpbench run --instrument logical --batch-size 8 --seq-len 256
  dpbench run --instrument logical --autosave --compare-fail logical_bytes:1%
  dpbench run --columns dram_bytes,dram_ratio,spread --sort dram_ratio --group-by device
  dpbench run --instrument ncu --instrument timing --instrument logical
  dpbench run --ncu-metrics dram_read_throughput,gld_throughput
  dpbench run --kernels-phase clip --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench run --instrument timing --device cpu --model-size tiny --batch-size 4 --seq-len 32
  dpbench run --instrument torch_profiler --trainer dpsgd --profile-schedule active=3
  dpbench run --grid grid1 --shard 2/4 --json shard2.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing

from tqdm import tqdm

from dpbench.commands import cluster
from dpbench.commands.merge import Shard
from dpbench.core import gpu
from dpbench.core.case import Case
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import printable
from dpbench.core.grid import METHODS
from dpbench.core.settings import OPTIONS, Settings, declare
from dpbench.instruments import ON_GPU, choose, declare_built_in
from dpbench.instruments.counters import CounterOptions
from dpbench.runner import check_named
from dpbench.session import Session
from dpbench.show.comparison import grown_text
from dpbench.show.layout import as_text, terminal_width
from dpbench.show.outputs import append_step_summary

COMMON = (
    *("--trainer", "--batch-size", "--seq-len", "--model-size", "--precision", "--optimizer"),
    *("--grid", "--instrument", "--output", "--html"),
    *("--save", "--compare", "--compare-fail"),
)
"""Options in the short help."""

GROUPS = {
    "trainer": "cases",
    "instrument": "measuring",
    "columns": "tables, here and in Markdown",
    "output": "files",
    "save": "saved runs, for dpbench list and dpbench compare",
}
"""Titles of groups in the help, by the first option of the group."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    for name in OPTIONS:
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        declare(group.add_argument, name)
        if name == "instrument":
            declare_built_in(group.add_argument)
    parser.set_defaults(grid=METHODS)
    cluster.add_arguments(parser.add_argument_group("a cluster, with a job for each shard"))


def run(options: argparse.Namespace) -> int:
    """Measure the cases. The exit code is 1 if a case failed or a number exceeds a limit."""
    if options.cluster:
        return cluster.run(options, measure_grid)
    return measure_grid(Settings.read(options))


def measure_grid(settings: Settings) -> int:
    """Measure the settings' cases. Return 1 if a case failed or a number exceeds a limit."""
    cases = settings.chosen_grid().cases()
    check_named(cases)
    if settings.shard:
        cases = Shard.parse(settings.shard).cases(cases)
        if not cases:
            raise ConfigurationError(
                f"shard {settings.shard} has no case, because the grid has fewer cells than shards"
            )
    settings.check()
    gpu_here = next(iter(gpu.visible_gpus()), None)
    names = settings.instrument or _instruments_here(settings, gpu_here, cases)
    instruments = choose(names, settings)
    session = Session([(case, i) for case in cases for i in instruments], settings, gpu=gpu_here)
    with closing(session):
        session.begin()
        try:
            _measure(session, cases)
        finally:  # keep and print what an interrupted session has measured
            complete = {*cases} <= {outcome.case for outcome in session.store.outcomes()}
            session.finish(complete=complete)
            show(session, "run")
        return 1 if session.failed else 0


def _measure(session: Session, cases: Sequence[Case]) -> None:
    """Measure the cases in order, and print the errors of cases that fail."""
    with tqdm(cases, unit="case", disable=None, file=sys.stderr) as progress:
        for case in progress:
            progress.set_description(case.id)
            outcome = session.measure(case)
            if outcome.error:
                progress.write(outcome.message, file=sys.stderr)


def _instruments_here(
    settings: Settings, gpu_here: gpu.Gpu | None, cases: Sequence[Case]
) -> tuple[str, ...]:
    """Return the default instruments.

    If this machine has a GPU and a case needs several GPUs, the default is ``cupti``. Otherwise, if
    this machine has a GPU or an option needs a GPU, the defaults are `ON_GPU`. Otherwise, the
    default is ``logical``.
    """
    if gpu_here and any(case.gpus > 1 for case in cases):
        return ("cupti",)
    counters = settings.of(CounterOptions)
    if gpu_here or counters.ncu_path or counters.ncu_metrics or settings.profiles_kernels:
        return ON_GPU
    print(
        "dpbench run: this machine has no CUDA GPU, so logical bytes are counted", file=sys.stderr
    )
    return ("logical",)


def show(session: Session, command: str) -> None:
    """Print tables, notes and problems. On GitHub, also add the tables to the step summary."""
    tables = session.summary()
    warning = append_step_summary(tables)
    lines = [
        *session.notes,
        *([f"WARNING: {warning}"] if warning else []),
        *(f"ERROR: {text}" for text in session.problems),
    ]
    try:
        print(as_text(tables, terminal_width()))
        found = session.comparison
        if found and (grown := grown_text(found.regressions, found.largest)):
            print(f"\n{grown}")
        sys.stdout.flush()
    finally:  # print problems last, even if the tables cannot be printed
        for line in lines:
            print(printable(f"dpbench {command}: {line}"), file=sys.stderr)
