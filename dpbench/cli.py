"""The ``dpbench`` command; what each of its commands does is in `dpbench.commands`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from dpbench.errors import DpbenchError

COMMANDS = (
    "doctor",
    "smoke",
    "step",
    "run",
    "show",
    "compare",
    "list",
    "report",
    "kernels",
    "attribute",
    "roofline",
    "ceilings",
)
"""Modules of `dpbench.commands`: the docstring is the help, ``add_arguments(parser)`` declares
the arguments, ``run(options)`` does it and returns the exit code."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


PIPE_CLOSED = 141
"""What a shell says of a program that SIGPIPE ended: whoever read its output has gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 good, 1 a failure, 2 bad input)."""
    try:
        try:
            return _run(argv)
        finally:  # here, where a closed pipe can be caught, and not when the interpreter ends
            sys.stdout.flush()
    except BrokenPipeError:  # dpbench list | head
        for stream in (sys.stdout, sys.stderr):  # with 2>&1 both are the pipe
            try:
                stream.flush()
            except BrokenPipeError:  # or the interpreter tries again when it ends, and complains
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return PIPE_CLOSED


def _run(argv: Sequence[str] | None) -> int:
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
    for name in COMMANDS:
        module = import_module(f"dpbench.commands.{name}")
        text = (module.__doc__ or "").strip()
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.set_defaults(command=module.run)
    return parser
