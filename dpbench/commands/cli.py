"""The program ``dpbench``, which runs one of the commands in `dpbench.commands`."""

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
from dpbench.core.errors import DpbenchError, unknown
from dpbench.core.files import printable

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
"""Modules of `dpbench.commands`. A module's docstring is the command's help. Its function
``add_arguments(parser)`` declares the arguments, and ``run(options)`` runs the command and returns
the exit code."""

WITH_INSTRUMENT_OPTIONS = ("step", "run", "exec")
"""Commands that take the options of instruments from outside dpbench."""

HELP_ALL = "--help-all"
MOST_EXAMPLES = 5
"""Largest number of examples in the short help. A command has a short help if its module has a list
``COMMON``, which names the options that the short help shows. The option `HELP_ALL` shows all
options."""

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)

PIPE_CLOSED = 141
"""Exit code that shells report for a program that SIGPIPE ended."""

ENDED_BY_CTRL_C = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Return its exit code.

    The exit code is 0 for success, 1 for a failure, 2 for bad input, `ENDED_BY_CTRL_C` or
    `PIPE_CLOSED`.
    """
    name = "dpbench"
    try:
        try:
            if isinstance(sys.stdout, io.TextIOWrapper):  # not every terminal can print ÷
                sys.stdout.reconfigure(errors="backslashreplace")
            options = _parse_arguments(sys.argv[1:] if argv is None else argv)
            name += f" {options.command_name}"
            with _ending_signals_as_ctrl_c():
                return int(options.command(options))
        finally:  # flush now, because at exit nothing can catch a closed pipe
            print(end="", flush=True)
    except DpbenchError as error:
        code, words = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, words = ENDED_BY_CTRL_C, "interrupted"
    except OSError as error:  # e.g. from dpbench list | head, or >/dev/full
        if error.filename is not None:
            raise
        # Discard the remaining output, which the interpreter would write again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return PIPE_CLOSED
        code, words = 1, str(error)
    print(printable(f"{name}: {words}"), file=sys.stderr)
    return code


def _parse_arguments(written: Sequence[str]) -> argparse.Namespace:
    # Words after -- are a command of the user.
    end = written.index("--") if "--" in written and written[0] == "bisect" else len(written)
    options, rest = build_parser("".join(written[:1]), written).parse_known_args(written[:end])
    if rest:
        known = sorted({*options.parser._option_string_actions} - {"-h", "-m"})
        options.parser.error(str(unknown("argument", rest[0].partition("=")[0], known)))
    options.words = written[end + 1 :]
    return options


@contextmanager
def _ending_signals_as_ctrl_c() -> Iterator[None]:
    """Handle the signals of batch systems as Ctrl-C, so that measured processes end too.

    Ignored signals, as under nohup, stay ignored.
    """
    handled = [s for s in ENDING_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    handlers = {s: signal.signal(s, signal.default_int_handler) for s in handled}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def build_parser(command: str = "", words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, or of one command.

    If one command is named, only the module of this command is imported.

    Args:
        command: the command's name, or "" for all commands.
        words: the command line. Instruments from outside dpbench add their options if the command
            line names them.
    """
    parser = argparse.ArgumentParser(
        prog="dpbench",
        description="Measure how many bytes differentially private training moves.",
        epilog="`pytest -m gpu --ncu` measures the same cases in tests, which can fail.",
    )
    parser.add_argument("--version", action="version", version=f"dpbench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command_name")
    for name in [command] if command in COMMANDS else COMMANDS:
        text = _module_docstring(name)
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
                described.add_argument(
                    HELP_ALL, action="help", help="show all options and examples"
                )
                if HELP_ALL not in words:
                    _shorten(described, {*common, "-h", HELP_ALL})
            if command in WITH_INSTRUMENT_OPTIONS:
                _declare_instrument_options(described, words)
            described.set_defaults(command=module.run, parser=described)
    return parser


def _shorten(parser: argparse.ArgumentParser, common: Collection[str]) -> None:
    """Remove rarely needed options, paragraphs and examples from a command's help."""
    for action in parser._actions:
        if action.option_strings and not {*action.option_strings} & {*common}:
            action.help = argparse.SUPPRESS
    first, *_ = str(parser.description).split("\n\n")
    examples = str(parser.description).partition("Examples:\n")[2].splitlines()[:MOST_EXAMPLES]
    parser.description = "\n".join([first, "", "Examples:", *examples])
    named = [str(action.metavar) for action in parser._actions if not action.option_strings]
    parser.usage = parser.usage or " ".join([parser.prog, "[options]", *(f"{n} …" for n in named)])


def _declare_instrument_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Declare the options of instruments from outside dpbench, in a group for each instrument."""
    from dpbench.instruments import declare_outside

    declare_outside(lambda *title: parser.add_argument_group(*title).add_argument, words)


def _module_docstring(command: str) -> str:
    """Return the docstring of a command's module without importing it, which can be slow."""
    source = Path(__file__).with_name(f"{command}.py")
    return ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
