"""Recommend a method for a case, with reasons, without a GPU.

A step of each method is counted on tensors without data: bytes, arithmetic, launches and memory.
These counts give the least time that the card needs, the least time that Python needs, a predicted
time, and the largest batch that fits. Of the methods that fit, the one with the least predicted
time is recommended. Advice is for GPUs: on a CPU, `fused` can be slower than Opacus's trainers.

RUN is the number or name of a saved run, or a file that --json wrote. With RUN, its cases are
advised on, and the tables also show its measured numbers. Options such as --precision then select
some of the cases.

Examples:
  dpbench advise
  dpbench advise --trainable lora:16 --optimizer adamw --precision bf16 --seq-len 1024 --gpu h100
  dpbench advise --workload resnet --set depth=50 --batch-size 64 --memory 24GB
  dpbench advise --trainer dpsgd --trainer fused --trainer mine=package.module:Trainer
  dpbench advise docs/results/h200-methods-256.json.xz --precision bf16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from dpbench.advice.choice import Advice, advise, cut, parse_memory, with_measured
from dpbench.advice.footprint import FRAGMENTATION, MAX_BATCH, RESERVED
from dpbench.advice.predict import KERNEL_SECONDS, OPERATOR_SECONDS, measured_operator_seconds
from dpbench.commands.case_arguments import add_case, chosen_case
from dpbench.commands.list import saved_run
from dpbench.core import gpu
from dpbench.core.case import AXES, Case
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.registry import TRAINERS, resolve_saved
from dpbench.core.settings import axis_help, declare
from dpbench.core.subject import Script
from dpbench.results.roofline import find_card, known_roofs
from dpbench.results.run import Run
from dpbench.show.comparison import amount
from dpbench.show.layout import Shown, Table, as_text, step_milliseconds, terminal_width
from dpbench.show.tables import title_parts

DEFAULT_CARD = "h200"
"""Card to advise for, if neither the options nor the run nor this machine has a known card."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a saved run with the cases to advise on"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="a card that dpbench knows, such as h200, h100, a100, l4, t4 or rtx4090 (default: the "
        f"GPU of RUN, else the GPU of this machine, else {DEFAULT_CARD})",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="the memory of the GPU, such as 80GB or 79.6GiB"
    )
    help = f"{axis_help('trainer')}; repeatable (default: the trainers of RUN, or all)"
    declare(parser.add_argument, "trainer", help=help, dest="trainers")
    add_case(parser, AXES[1:], device=None)
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Print the advice. Return 1 if a trainer that --trainer names cannot be counted, else 0."""
    if options.run and options.run.endswith(".py"):
        raise ConfigurationError(
            f"{options.run} is no saved run: measure a script with dpbench exec, and advise on a "
            f"model with --workload"
        )
    saved = saved_run(options.run, options.storage) if options.run else None
    cells = _cells(saved, options) if saved else {chosen_case(options, trainer="standard"): ()}
    card, memory = _card(options, saved)
    memory = parse_memory(options.memory) if options.memory else memory
    name = find_card(card).name
    operator_seconds, launch = _operator_seconds()
    failed = False
    for number, (case, measured) in enumerate(cells.items()):
        names = options.trainers or [*measured]
        advice = _advice(case, names, card, memory, operator_seconds)
        failed |= bool(options.trainers and advice.refused)
        table = _table(case, advice, name, memory, saved, launch)
        print("\n" * bool(number) + advice.reason + "\n\n" + as_text([table], terminal_width()))
    return int(failed)


def _operator_seconds() -> tuple[float, str]:
    """Return the CPU time for an operator, and a text that says where it comes from."""
    why = "no GPU is visible"
    try:
        with TemporaryDirectory() as folder:
            if measured := measured_operator_seconds(Path(folder)):
                return measured, f"{measured * 1e6:.0f} µs (measured on this host)"
    except DpbenchError as error:
        why = str(error)
    return OPERATOR_SECONDS, f"{OPERATOR_SECONDS * 1e6:.0f} µs (assumed, because {why})"


def _advice(
    case: Case, names: list[str], card: str, memory: float | None, operator_seconds: float
) -> Advice:
    """Return advice on a case. Show the progress if stderr is a terminal."""
    number = len(names or TRAINERS)
    with tqdm(total=number, unit="method", disable=None, file=sys.stderr) as bar:

        def counted(trainer: str) -> None:
            bar.set_description(trainer)
            bar.update()

        return advise(
            case,
            trainers=names,
            gpu=card,
            memory=memory,
            progress=counted,
            operator_seconds=operator_seconds,
        )


def _card(options: argparse.Namespace, saved: Run | None) -> tuple[str, float | None]:
    """Return the card to advise for, and its memory if the card is taken from this machine.

    The card is named by --gpu. Without --gpu, it is the GPU of the run, else a GPU of this machine,
    else `DEFAULT_CARD`.
    """
    if options.gpu:
        return options.gpu, None
    for device in saved.devices if saved else ():
        if known_roofs(device):
            return device, None
    for here in gpu.visible_gpus():
        if known_roofs(here.name):
            return here.name, here.memory_bytes
    return DEFAULT_CARD, None


def _cells(saved: Run, options: argparse.Namespace) -> dict[Case, list[str]]:
    """Return the trainers in each cell of a run, for the cases that match the options.

    A cell is a group of cases that differ only in the trainer. The key of a cell is the case of the
    baseline trainer.
    """
    axes = [axis for axis in AXES if axis != "set"]
    chosen = {axis: value for axis in axes if (value := getattr(options, axis, None)) is not None}
    cells: dict[Case, list[str]] = {}
    if saved.outcomes and all(isinstance(outcome.case, Script) for outcome in saved.outcomes):
        raise ConfigurationError(
            f"{saved.name} is a run of a script, which is no case: advise on a model with "
            f"--workload"
        )
    for outcome in saved.outcomes:
        case = outcome.case
        if isinstance(case, Case) and chosen.items() <= case.columns.items():
            try:
                resolve_saved(case.baseline)  # before the cell is added
                cells.setdefault(case.baseline, []).append(resolve_saved(case).trainer)
            except ConfigurationError as error:
                print(f"dpbench advise: {error}", file=sys.stderr)
    if not cells:
        raise ConfigurationError(
            f"{saved.name} has no case that matches the options and can be counted"
        )
    return cells


def _table(
    case: Case, advice: Advice, card: str, memory: float | None, saved: Run | None, launch: str
) -> Table:
    frame = advice.frame
    if saved is not None:
        frame = with_measured(frame, saved.summary, case)
    ratio = "{:.2f}".format
    columns: dict[str, Shown] = {
        "method": ("trainer", str),
        "bytes\n÷": ("bytes_ratio", ratio),
        "FLOP\n÷": ("flops_ratio", ratio),
        "peak\n÷": ("peak_ratio", ratio),
        "roof-\nline\nms": ("roofline_seconds", step_milliseconds),
        "launch\nms": ("launch_seconds", step_milliseconds),
        "time\nms": ("predicted_seconds", step_milliseconds),
        "time\n÷": ("predicted_ratio", ratio),
        "max\nbatch": ("largest_batch", lambda size: f"{'≥ ' * (size >= MAX_BATCH)}{size}"),
        "measured\nms": ("measured_seconds", step_milliseconds),
        "DRAM\n÷": ("measured_bytes_ratio", ratio),
    }
    columns = {header: shown for header, shown in columns.items() if shown[0] in frame}
    card_text = f"{card} with {memory / 1e9:.3g} GB" if memory else card
    parts = title_parts({**case.columns, "trainer": ""})
    title = ", ".join([*parts, f"{card_text}: ÷ is the ratio to the standard step"])
    return Table.of(title, frame, columns, _notes(advice, case, launch))


def _notes(advice: Advice, case: Case, launch: str) -> Iterator[str]:
    standard = advice.frame.iloc[0]
    yield "Bytes, FLOP, launches and peak memory are counted. Roofline, launch, time are predicted."
    yield (
        f"A standard step has {amount(standard.logical_bytes, 'B')}, "
        f"{amount(standard.flops, 'FLOP')}, {standard.launches:.0f} launches, and "
        f"{amount(standard.peak_memory_bytes, 'B')} of peak memory."
    )
    yield (
        "Least times: roofline is the time for the bytes or the arithmetic of each operator, at "
        f"the rates that the card reaches. Launch is {launch} of CPU time for each operator "
        "outside CUDA graphs. Time is, of each phase, its launches or its kernels, whichever take "
        f"longer; {KERNEL_SECONDS * 1e6:g} µs are added for each kernel."
    )
    room = f"{FRAGMENTATION:.0%} of it or its largest tensor, whichever is larger"
    yield f"Max batch: beside its counted peak remain {RESERVED / 1e9:g} GB for CUDA, and {room}."
    if advice.frame.launch_seconds.eq(0).any():
        yield (
            "CUDA graphs may hold more memory than is counted, so the max batch of `fused` may be "
            "too large: for ResNet-50 at fp32 and batch 64, 6.02 GB are counted, and 6.70 GB were "
            "measured."
        )
    if case.gpus > 1:
        yield "Numbers are for one rank, without the time of communication between ranks."
    for why in dict.fromkeys(advice.refused.values()):
        if cut(why) not in advice.reason:
            trainers = ", ".join(name for name, other in advice.refused.items() if other == why)
            yield f"{trainers}: {why}"
