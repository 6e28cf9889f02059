"""Hold methods to what a private step must at least move.

Each method's bytes are counted without a GPU, by phase, beside the floor of flat clipping: a
standard step, and what the norms must read again. With RUN, a saved run's number or a file of
--json, there is also what was measured of the same cases: DRAM bytes, time, busy share and peak
memory.

Examples:
  dpbench headroom
  dpbench headroom --trainer dpsgd --trainer fused --trainer mine=package.module:Trainer
  dpbench headroom docs/results/h200-methods-256.json --precision bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from dpbench.commands.options import add_case, chosen_case, saved_run
from dpbench.core.case import AXES, BASELINE_TRAINER, PHASES, Case
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.options import axis_help
from dpbench.core.registry import TRAINERS, locate
from dpbench.core.settings import declare
from dpbench.results.rows import STEP

FLOOR = "the floor"


ABOUT_FLOOR = (
    "The floor is of flat clipping with kernels that share nothing: a standard step, and in clip "
    "what the norms must read again: each layer's input and its output's gradient, or each "
    "example's gradient. It is of one rank's batch, without micro-batches."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what this command takes."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="what was measured: number or file")
    help = f"{axis_help('trainer')}; repeatable"
    declare(parser.add_argument, "trainer", help=help, dest="trainers")
    add_case(parser, AXES[1:], device="cpu")
    declare(parser.add_argument, "storage")


def run(options: argparse.Namespace) -> int:
    """Print the bytes of methods and the floor; the exit status is 1 if counting fails.

    A method that does not train as the case says is an error only if it was named.
    """
    import pandas as pd

    from dpbench.advise import headroom
    from dpbench.core.metrics import METRICS
    from dpbench.show.layout import Shown, Table, as_text, gigabytes, terminal_width

    cases = [chosen_case(options, trainer=name) for name in options.trainers or TRAINERS]
    locate(cases)
    saved = saved_run(options.run, options.storage) if options.run else None
    floor = headroom.floor(cases[0])
    least = sum(floor.values())
    known: dict[Case, dict[str, float]] = {}
    if saved is not None:
        with METRICS.including(saved.metrics):
            known = headroom.measured(saved.summary, cases)
    lines: list[dict[str, Any]] = [{"name": FLOOR, "bytes": least, "over": 1.0, **floor}]
    refused: list[str] = []
    failed = False
    for case in cases:
        try:
            lines.append(_line(case, headroom.by_phase(case), least, known.get(case, {})))
        except DpbenchError as error:
            refused.append(str(error))
            failed |= bool(options.trainers) or not isinstance(error, ConfigurationError)
    for line in lines:
        if line["over"] < 1 and line["name"] != BASELINE_TRAINER:
            refused.append(f"{line['name']} moves less: the floor is none here, or it clips none.")
    columns: dict[str, Shown] = {
        "method": ("name", str),
        "counted\nGB": ("bytes", gigabytes),
        "÷\nfloor": ("over", "{:.2f}".format),
        **{phase: (phase, gigabytes) for phase in PHASES},
        "TFLOP": ("flops", lambda value: f"{value / 1e12:.2f}"),
        "peak\nGB": ("peak_memory_bytes", gigabytes),
        "DRAM\nGB": ("measured dram_bytes", gigabytes),
        "÷\nstandard": ("measured dram_ratio", "{:.2f}".format),
        "ms": ("measured step_time_seconds", lambda value: f"{value * 1e3:.1f}"),
        "busy": ("measured gpu_busy_share", "{:.0%}".format),
        "peak measured\nGB": ("measured peak_memory_bytes", gigabytes),
    }
    frame = pd.DataFrame(lines)
    columns = {header: shown for header, shown in columns.items() if shown[0] in frame}
    first = cases[0]
    length = f", sequence {first.seq_len}" if first.seq_len else ""
    title = f"{first.configuration}, batch {first.batch_size}{length}: counted GB by phase"
    notes = [ABOUT_FLOOR]
    if saved is not None and (lacking := [c.trainer for c in cases if not known[c]]):
        notes.append(f"{saved.name} has nothing measured of {', '.join(lacking)}.")
    print(as_text([Table.of(title, frame, columns, [*notes, *refused])], terminal_width()))
    return int(failed)


def _line(
    case: Case,
    phases: Mapping[str, Mapping[str, float]],
    least: float,
    measured: Mapping[str, float],
) -> dict[str, object]:
    """A method's counted bytes by phase, with the floor and what was measured."""
    by_phase = {phase: phases[phase]["bytes"] for phase in PHASES if phase in phases}
    known = {f"measured {name}": value for name, value in measured.items()}
    over = phases[STEP]["bytes"] / least
    return {"name": case.trainer, "over": over, **phases[STEP], **by_phase, **known}
