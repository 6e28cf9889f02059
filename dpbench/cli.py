"""The ``dpbench`` command; what each of its commands does is in `dpbench.commands`."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TextIO

from dpbench.errors import ConfigurationError, DpbenchError

COMMANDS = (
    "doctor",
    "smoke",
    "step",
    "run",
    "exec",
    "show",
    "compare",
    "list",
)
"""Modules of `dpbench.commands`: the docstring is the help, ``add_arguments(parser)`` declares
the arguments, ``run(options)`` does it and returns the exit code."""

LOAD_TRAINERS = ("smoke", "step", "run")
"""Commands that find outside trainers, models and instruments in the current directory too.

It is searched last, or a file there could pass for a module of dpbench's or of a library's."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

PIPE_CLOSED = 141
"""What a shell says of a program that SIGPIPE ended: whoever read its output has gone."""

ENDED_BY_CTRL_C = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 good, 1 a failure, 2 bad input)."""
    name = ["dpbench"]  # and the command's, as soon as it is known
    try:
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal knows ÷
                sys.stdout.reconfigure(errors="backslashreplace")
            return _run(argv, name)
        finally:  # here, where a closed pipe can be caught, and not when the interpreter ends
            print(end="", flush=True)
    except DpbenchError as error:
        code, words = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, words = ENDED_BY_CTRL_C, "interrupted"
    except BrokenPipeError:  # dpbench list | head
        _discard(sys.stdout)
        code, words = PIPE_CLOSED, ""
    except OSError as error:  # dpbench list >/dev/full
        if error.filename is not None:
            raise
        _discard(sys.stdout)
        code, words = 1, str(error)
    try:
        print(f"{' '.join(name)}: {words}\n" if words else "", end="", file=sys.stderr, flush=True)
    except OSError:  # with 2>&1 both are the pipe
        _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Let what a stream still holds go nowhere: the interpreter tries again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(argv: Sequence[str] | None, name: list[str]) -> int:
    """Read the arguments and run their command; its name is added to the other."""
    try:
        directory = str(Path.cwd())
    except FileNotFoundError as error:
        raise ConfigurationError("the current directory no longer exists; go to another") from error
    written = sys.argv[1:] if argv is None else argv
    options = build_parser().parse_args([hyphenated(text) for text in written])
    for name_of_rest in ("module", "program"):  # a script's own arguments stay as they are
        if rest := getattr(options, name_of_rest, None):
            setattr(options, name_of_rest, [*written[-len(rest) :]])
    name.append(options.command_name)
    if options.command_name in LOAD_TRAINERS and directory not in sys.path:
        sys.path.append(directory)
    # A batch system's signal must end the measured processes too, as Ctrl-C does.
    heard = [s for s in ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # not nohup's
    handlers = {s: signal.signal(s, signal.default_int_handler) for s in heard}
    try:
        return int(options.command(options))
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
