"""The ``dpbench`` command; what each of its commands does is in `dpbench.commands`."""

from __future__ import annotations

import argparse
import ast
import io
import os
import signal
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from dpbench import __version__
from dpbench.core.errors import ConfigurationError, DpbenchError
from dpbench.core.files import printable
from dpbench.launch.fork_server import fork_server

COMMANDS = (
    "doctor",
    "smoke",
    "verify",
    "step",
    "run",
    "exec",
    "show",
    "compare",
    "history",
    "bisect",
    "merge",
    "list",
    "advise",
)
"""Modules of `dpbench.commands`: the docstring is the help, ``add_arguments(parser)`` declares
the arguments, ``run(options)`` runs the command and returns the exit code."""

TAKE_INSTRUMENTS = ("step", "run", "exec")
"""The commands that declare the options of instruments from outside."""

ALL = "--help-all"
FEW = 5
"""The number of examples in the short help. A command with many options lists in ``COMMON`` those
that the short help shows; the option `ALL` shows all of them."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

PIPE_CLOSED = 141
"""The exit status that shells give a program that SIGPIPE ended."""

ENDED_BY_CTRL_C = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code (0 good, 1 a failure, 2 bad input)."""
    name = "dpbench"
    try:
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal can print ÷
                sys.stdout.reconfigure(errors="backslashreplace")
            options = _parsed(sys.argv[1:] if argv is None else argv)
            name += f" {options.command_name}"
            with _ending_signals_as_ctrl_c():
                return int(options.command(options))
        finally:  # flush now: at exit a closed pipe could not be caught
            print(end="", flush=True)
    except DpbenchError as error:
        code, words = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, words = ENDED_BY_CTRL_C, "interrupted"
    except OSError as error:  # dpbench list | head, or >/dev/full
        if error.filename is not None:
            raise
        # Discard the rest, which the interpreter would write again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        code, words = 1, str(error)
    print(printable(f"{name}: {words}"), file=sys.stderr)
    return code


def _parsed(written: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the current directory no longer exists; go to another") from error
    if {*written[:1]} & {"run", "advise"} and not {*written} & {"-h", "--help", ALL, "--cluster"}:
        fork_server()  # imports torch, while this process reads its options and imports pandas
    # What follows -- is a command of the user's own.
    end = written.index("--") if "--" in written and written[0] == "bisect" else len(written)
    options = build_parser("".join(written[:1]), written).parse_args(written[:end])
    options.words = written[end + 1 :]
    return options


@contextmanager
def _ending_signals_as_ctrl_c() -> Iterator[None]:
    """Handle a batch system's signals as Ctrl-C, so that measured processes end, too.

    A signal that is ignored, as under nohup, stays ignored.
    """
    heard = [s for s in ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    handlers = {s: signal.signal(s, signal.default_int_handler) for s in heard}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def build_parser(command: str = "", words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of one command, or of all; the others' modules are not imported.

    Args:
        command: the command's name; empty for all.
        words: the command line. Instruments from outside that it names add their options.
    """
    parser = argparse.ArgumentParser(
        prog="dpbench",
        description="Measure how many bytes differentially private training moves.",
        epilog="`pytest -m gpu --ncu` is the same measurement with assertions.",
    )
    parser.add_argument("--version", action="version", version=f"dpbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")
    for name in [command] if command in COMMANDS else COMMANDS:
        text = _help_of(name)
        described = commands.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            module = import_module(f"dpbench.commands.{name}")
            module.add_arguments(described)
            if common := getattr(module, "COMMON", ()):
                described.add_argument(ALL, action="help", help="every option, and more examples")
                if ALL not in words:
                    _shorten(described, {*common, "-h", ALL})
            if command in TAKE_INSTRUMENTS:
                _declare_outside(described, words)
            described.set_defaults(command=module.run)
    return parser


def _shorten(parser: argparse.ArgumentParser, common: Collection[str]) -> None:
    """Leave rarely needed options, paragraphs and examples out of a command's help."""
    for action in parser._actions:
        if action.option_strings and not {*action.option_strings} & {*common}:
            action.help = argparse.SUPPRESS
    first, *_ = str(parser.description).split("\n\n")
    examples = str(parser.description).partition("Examples:\n")[2].splitlines()[:FEW]
    parser.description = "\n".join([first, "", "Examples:", *examples])
    named = [str(action.metavar) for action in parser._actions if not action.option_strings]
    parser.usage = parser.usage or " ".join([parser.prog, "[options]", *(f"{n} …" for n in named)])


def _declare_outside(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the options of instruments from outside, each in a group of its own."""
    from dpbench.instruments import declare_outside

    declare_outside(lambda *title: parser.add_argument_group(*title).add_argument, words)


def _help_of(command: str) -> str:
    """The docstring of a command's module, without importing it: some load pandas."""
    source = Path(__file__).with_name(f"{command}.py")
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
