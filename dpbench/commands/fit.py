"""Find the largest batch that fits a GPU, without one.

Peak memory is counted on tensors without data, which takes a few seconds a trainer, and no memory.
Of the GPU's memory some is set apart for CUDA itself and for what the allocator cannot use. Without
--gpu and --memory it is the first GPU's of this machine.

Examples:
  dpbench fit --gpu h200
  dpbench fit --memory 80GB --trainer dpsgd --trainer dpsgd_ghost --precision bf16 --seq-len 1024
  dpbench fit --gpu h100 --trainer dpsgd --micro-batches 1 --micro-batches 8
  dpbench fit --gpu l4 --trainer dpsgd --workload resnet --set depth=50
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import product
from typing import Any

from tqdm import tqdm

from dpbench.advise.fit import (
    FRAGMENTATION,
    RESERVED,
    LargestBatch,
    Needed,
    largest_batch,
    needed,
    parse_memory,
)
from dpbench.commands.options import add_case, chosen_case
from dpbench.core import gpu
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.grid import GRIDS
from dpbench.core.options import axis_help
from dpbench.core.registry import locate
from dpbench.core.settings import declare

REPEATED = ("trainer", "micro_batches")
"""The axes of which each value has lines of its own; the batch size is what is looked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpu", metavar="NAME", help="a card that dpbench knows, such as h200")
    where.add_argument("--memory", metavar="SIZE", help="of a GPU, such as 80GB or 79.6GiB")
    for axis in REPEATED:
        declare(
            parser.add_argument, axis, help=f"{axis_help(axis)}; repeatable", dest=f"each_{axis}"
        )
    axes = [axis for axis in AXES if axis not in (*REPEATED, "batch_size")]
    add_case(parser, axes, device="cpu")


def run(options: argparse.Namespace) -> int:
    """Print a table of the largest batches; the exit status is 1 if one could not be found."""
    import pandas as pd

    from dpbench.show.layout import Shown, Table, as_text, gigabytes, terminal_width

    memory, where = _memory(options)
    lines: list[dict[str, Any]] = []
    apart = f"{RESERVED / 1e9:.1f} GB and {FRAGMENTATION:.0%} of the peak, or the largest tensor,"
    notes = [f"Counted, not measured; {apart} are set apart for CUDA and the allocator."]
    cases = _cases(options)
    with tqdm(cases, unit="line", disable=None, file=sys.stderr) as progress:

        def counted(tried: Case) -> Needed:
            progress.set_description(tried.id)
            return needed(tried)

        for case in progress:
            line: dict[str, Any] = {"trainer": case.trainer, "parts": case.micro_batches}
            try:
                line |= _found(largest_batch(case, memory, counted), notes, case)
            except DpbenchError as error:
                notes.append(str(error))
            lines.append(line)
    frame = pd.DataFrame(lines, columns=["trainer", "parts", "batch", "bytes", "phase"])
    columns: dict[str, Shown] = {
        "trainer": ("trainer", str),
        "micro-\nbatches": ("parts", str),
        "largest\nbatch": ("batch", str),
        "peak\nGB": ("bytes", gigabytes),
        "largest in": ("phase", str),
    }
    length = f", sequence {cases[0].seq_len}" if cases[0].seq_len else ""
    title = f"{cases[0].configuration}{length}, {where}: the largest batch that fits"
    print(as_text([Table.of(title, frame, columns, notes)], terminal_width()))
    return int(frame.batch.isna().any())


def _found(largest: LargestBatch, notes: list[str], case: Case) -> dict[str, Any]:
    needs = largest.needs
    if needs.guessed:
        notes.append(f"{case.trainer}: operators without a rule of their own weigh in the count.")
    if largest.unbounded:
        size = largest.batch_size
        notes.append(f"{case.trainer}: {size} fits too, and larger ones were not tried.")
    if not largest.batch_size:
        one = f"one example in each of {case.micro_batches} micro-batches"
        notes.append(f"{case.trainer}: not even {one} fits.")
    batch = f"{'≥ ' * largest.unbounded}{largest.batch_size}"
    return {"batch": batch, "bytes": needs.memory, "phase": needs.phase}


def _cases(options: argparse.Namespace) -> list[Case]:
    """A case for each trainer and number of micro-batches."""
    trainers = options.each_trainer or GRIDS["grid1"].values("trainer")
    ranks = options.gpus or 1
    whole = (chosen_case(options, trainer=name, batch_size=ranks) for name in trainers)
    cases = [
        replace(case, batch_size=parts * ranks, micro_batches=parts)
        for case, parts in product(whole, options.each_micro_batches or [1])
    ]
    locate(cases)
    return cases


def _memory(options: argparse.Namespace) -> tuple[float, str]:
    """The memory of a GPU in bytes, and its name."""
    from dpbench.results.roofline import find_card

    if options.memory:
        return parse_memory(options.memory), options.memory
    if options.gpu:
        card = find_card(options.gpu)
        if card.memory is None:
            raise ConfigurationError(f"the memory of {card.name} is not known: give --memory")
        return card.memory, f"{card.name} with {card.memory / 1e9:.0f} GB"
    here = next(iter(gpu.visible_gpus()), None)
    if here is None or here.memory_bytes is None:
        raise ConfigurationError(
            "no GPU here that says how much memory it has: give --gpu NAME or --memory 80GB"
        )
    return here.memory_bytes, f"{here.name} with {here.memory_bytes / 1e9:.0f} GB"
