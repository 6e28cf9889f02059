"""The ``dpbench`` command: ``smoke``, ``step``, ``run``, ``show``."""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dpbench.case import ATTENTIONS, AXES, GRIDS, MODEL_SIZES, PRECISIONS, Case, Grid
from dpbench.errors import ConfigurationError, DpbenchError, check_writable_file
from dpbench.instruments import INSTRUMENTS, ON_GPU, choose
from dpbench.instruments.child import Steps
from dpbench.instruments.ncu import Ncu
from dpbench.instruments.timing import Timing
from dpbench.registry import MODELS, TRAINERS

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

_Command = Callable[[argparse.Namespace], int]
_Adds = Callable[[argparse.ArgumentParser], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 good, 1 a failure, 2 bad input)."""
    if str(Path.cwd()) not in sys.path:  # as with python -m: an outside trainer may lie here
        sys.path.insert(0, str(Path.cwd()))
    arguments = [hyphenated(text) for text in (sys.argv[1:] if argv is None else argv)]
    options = build_parser().parse_args(arguments)
    # A batch system's signal must end the measured processes too, as Ctrl-C does.
    handlers = {s: signal.signal(s, signal.default_int_handler) for s in ENDING_SIGNALS}
    try:
        return int(options.command(options))
    except DpbenchError as error:
        print(f"dpbench {options.command_name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"dpbench {options.command_name}: interrupted", file=sys.stderr)
        return 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def hyphenated(text: str) -> str:
    """``--batch_size=8`` as ``--batch-size=8``; values keep their underscores."""
    return re.sub(r"^--[a-z_]+", lambda match: match[0].replace("_", "-"), text)


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command and its help."""
    parser = argparse.ArgumentParser(
        prog="dpbench",
        description="Measure how many bytes differentially private training moves.",
        epilog="`pytest -m gpu --ncu` is the same measurement with assertions.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")
    for name, function, adds, summary, description in _COMMANDS:
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        adds(command)
        command.set_defaults(command=function)
    return parser


# --- smoke -----------------------------------------------------------------------------------


def _add_smoke(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainer", action="append", help=_TRAINER_HELP)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="cpu")


def _smoke(options: argparse.Namespace) -> int:
    from dpbench.smoke import smoke_test

    failed = 0
    for trainer in options.trainer or list(TRAINERS):
        case = Case(trainer, batch_size=4, seq_len=32, model_size="tiny")
        name = TRAINERS[trainer].__name__
        try:
            smoke_test(case, device=options.device)
        except Exception as error:  # a smoke test reports whatever broke
            failed += 1
            print(f"[TEST FAILED] {name}: {type(error).__name__}: {error}")
        else:
            print(f"[TEST OK] {name} passed local test.")
    return 1 if failed else 0


# --- step ------------------------------------------------------------------------------------


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainer", required=True, help=_TRAINER_HELP)
    parser.add_argument("--batch-size", type=int, default=8, help="examples (default 8)")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--model-size", default="1b", help=_SIZE_HELP)
    parser.add_argument("--precision", default="fp32", help=_one_of(PRECISIONS))
    parser.add_argument("--attention", default="sdpa", help=_one_of(ATTENTIONS))
    parser.add_argument("--model", default="simple", help=_MODEL_HELP)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    _add_steps(parser, "a process's", Timing.steps)
    parser.add_argument(
        "--nvtx",
        action="store_true",
        help="mark phases as NVTX ranges for a profiler, and take no times",
    )


def _step(options: argparse.Namespace) -> int:
    case = Case(
        trainer=options.trainer,
        batch_size=options.batch_size,
        seq_len=options.seq_len,
        model_size=options.model_size,
        precision=options.precision,
        attention=options.attention,
        model=options.model,
    )
    Steps(options.warmup, options.active)  # refuses what makes no sense
    from dpbench.step import run_case

    try:
        record = run_case(
            case,
            device=options.device,
            warmup=options.warmup,
            active=options.active,
            nvtx=options.nvtx,
        )
    except Exception as error:  # whoever started this process learns why from the record
        kind = type(error).__name__
        first_line = str(error).partition("\n")[0]  # PyTorch appends its C++ stack
        message = str(error) if isinstance(error, DpbenchError) else f"{kind}: {first_line}"
        _print_record(error={"kind": kind, "message": message})
        raise
    _print_record(**record)
    return 0


def _print_record(**record: Any) -> None:
    from dpbench import __version__

    print(json.dumps({"dpbench": __version__, **record}), flush=True)


# --- run -------------------------------------------------------------------------------------


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid", default="grid1", help=f"{_one_of(GRIDS)}, or a .toml file (default grid1)"
    )
    narrow = parser.add_argument_group("cases", "each replaces one axis of the grid; repeatable")
    narrow.add_argument("--trainer", action="append", help=_TRAINER_HELP)
    narrow.add_argument("--batch-size", action="append", type=int)
    narrow.add_argument("--seq-len", action="append", type=int)
    narrow.add_argument("--model-size", action="append", help=_SIZE_HELP)
    narrow.add_argument("--precision", action="append", help=_one_of(PRECISIONS))
    narrow.add_argument("--attention", action="append", help=_one_of(ATTENTIONS))
    narrow.add_argument("--model", action="append", help=_MODEL_HELP)
    how = parser.add_argument_group("measuring")
    how.add_argument(
        "--instrument",
        action="append",
        choices=INSTRUMENTS,
        help="repeatable; default timing and ncu, without a GPU logical",
    )
    how.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="for timing alone")
    how.add_argument("--ncu-path", help="the ncu program, if it is not on PATH")
    how.add_argument("--ncu-dir", type=Path, default=Path("ncu_reports"), help="for reports, logs")
    how.add_argument("--ncu-metrics", action="append", help=_METRICS_HELP)
    _add_steps(how, "unprofiled", Timing.steps)
    _add_steps(how, "profiled", Ncu.steps, prefix="ncu-")
    how.add_argument("--timeout", type=float, default=1800.0, help="seconds a case (1800)")
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")


def _instruments_here(options: argparse.Namespace) -> tuple[str, ...]:
    """Hardware where there is any, or where it was asked for; logical counting elsewhere."""
    from dpbench.gpu import visible_gpus

    if visible_gpus() or options.ncu_path or options.ncu_metrics:
        return ON_GPU
    print("dpbench run: no CUDA GPU here, so logical bytes are counted instead", file=sys.stderr)
    return ("logical",)


def _run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from dpbench.gpu import visible_gpus
    from dpbench.results.outcome import (
        Outcome,
        environment,
        summary_tables,
        write_json,
        write_markdown,
    )
    from dpbench.results.tables import as_text
    from dpbench.runner import measure

    grid = Grid.named(options.grid).narrow(**{axis: getattr(options, axis) for axis in AXES})
    instruments = choose(
        options.instrument or _instruments_here(options),
        directory=options.ncu_dir,
        ncu_path=options.ncu_path,
        metrics=options.ncu_metrics,
        device=options.device,
        timing_steps=Steps(options.warmup, options.active),
        ncu_steps=Steps(options.ncu_warmup, options.ncu_active),
        timeout=options.timeout,
    )
    for path in filter(None, (options.json, options.markdown)):
        check_writable_file(path)
    for instrument in instruments:
        instrument.check()
    gpu = next(iter(visible_gpus()), None)
    outcomes: list[Outcome] = []

    def write_files() -> None:
        if options.json:
            write_json(options.json, outcomes, environment(gpu))
        if options.markdown:
            write_markdown(options.markdown, outcomes)

    try:
        with tqdm(list(grid.cases()), unit="case", disable=None, file=sys.stderr) as progress:
            for case in progress:
                progress.set_description(case.id)
                outcomes.append(measure(case, instruments))
                write_files()  # at once, so that a killed run keeps what it has
                if outcomes[-1].error:
                    progress.write(outcomes[-1].message, file=sys.stderr)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: {error.strerror}") from error
    finally:  # an interrupted run shows what it has
        print(as_text(summary_tables(outcomes)))
    return 1 if any(outcome.error for outcome in outcomes) else 0


# --- show ------------------------------------------------------------------------------------


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.ncu-rep")


def _show(options: argparse.Namespace) -> int:
    from dpbench.instruments.ncu_report_file import case_of, read
    from dpbench.results.frame import to_frame
    from dpbench.results.tables import as_text, tables

    paths: dict[Case, Path] = {}
    for path in options.reports:
        case = case_of(path)
        if case in paths:
            raise ConfigurationError(
                f"{paths[case]} and {path} are the same case; show them one at a time"
            )
        paths[case] = path
    rows = [row for case, path in paths.items() for row in read(path, case)]
    print(as_text(tables(to_frame(rows))))
    return 0


# --- shared ----------------------------------------------------------------------------------


def _add_steps(
    parser: argparse._ActionsContainer, whose: str, steps: Steps, prefix: str = ""
) -> None:
    for name, default in (("warmup", steps.warmup), ("active", steps.active)):
        parser.add_argument(
            f"--{prefix}{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"{whose} {name} steps (default {default})",
        )


def _one_of(names: Iterable[str]) -> str:
    return ", ".join(names)


_TRAINER_HELP = f"{_one_of(TRAINERS)}, their class names, or package.module:Class"
_SIZE_HELP = f"{_one_of(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS (default 1b)"
_MODEL_HELP = f"{_one_of(MODELS)}, or package.module:Class"
_METRICS_HELP = "names of ours, of nvprof, or ncu counters, separated by commas (default all ours)"

_COMMANDS: tuple[tuple[str, _Command, _Adds, str, str], ...] = (
    (
        "smoke",
        _smoke,
        _add_smoke,
        "check that every trainer trains, on a tiny model",
        """Train two steps of a tiny model with each trainer and say whether it worked.

The exit code is 0 if every trainer did.

examples:
  dpbench smoke
  dpbench smoke --trainer dpsgd --trainer mypackage.trainers:MyTrainer""",
    ),
    (
        "step",
        _step,
        _add_step,
        "run one case in this process and print one JSON line",
        """Run one case: build it, warm up, run the active steps, print one JSON line.

This is the process that instruments measure; by hand it is the quickest way to try a trainer.
The line holds seconds by phase for each active step, and peak memory in bytes (CUDA only).

examples:
  dpbench step --trainer dpsgd --batch-size 4 --seq-len 32 --model-size tiny --device cpu
  dpbench step --trainer dpsgd_ghost --batch-size 8 --seq-len 256 --model-size 1b""",
    ),
    (
        "run",
        _run,
        _add_run,
        "measure the cases of a grid and print tables",
        """Measure every case of a grid, each in processes of its own, and print tables.

Bytes come from hardware counters under Nsight Compute, times and peak memory from a second,
unprofiled process. A case that fails leaves the others running; the exit code is 1 then.
Without a GPU, or with --instrument logical, nothing is measured: the bytes that each operator
must move are counted, with neither a GPU nor the memory. The tables say which it was.

A grid file is TOML with one key per axis, a value or a list of values:

  trainer = ["standard", "dpsgd"]
  batch_size = [8, 16]
  seq_len = 256
  model_size = "medium"

examples:
  dpbench run --grid grid1 --json run.json --markdown run.md
  dpbench run --trainer standard --trainer dpsgd --batch-size 8 --seq-len 256
  dpbench run --ncu-metrics dram_read_throughput,gld_throughput
  dpbench run --instrument logical --batch-size 8 --seq-len 256
  dpbench run --instrument timing --device cpu --model-size tiny --batch-size 4 --seq-len 32""",
    ),
    (
        "show",
        _show,
        _add_show,
        "print tables from saved reports; needs no GPU",
        """Print tables from Nsight Compute reports that dpbench made.

The case is read off the path, .../SIZE-PRECISION/report_TRAINER_bsB_seqT.ncu-rep.

examples:
  dpbench show ncu_reports/1b-fp32/*.ncu-rep""",
    ),
)
