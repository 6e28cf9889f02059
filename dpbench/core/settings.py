"""Defines the settings of a session, and the options of pytest and of commands that set them.

Most fields of `Settings` can be set with an option of ``dpbench run``, of pytest, or of both. Other
commands have some of these options. `option` declares a field of a dataclass as an option. Fields
of instruments can be declared in the same way.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from dpbench.core.case import ALL_PHASES, AXES, CHOICES, COUNTS, DECLARED
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.files import check_distinct_files, check_writable_file
from dpbench.core.grid import GRIDS, Grid
from dpbench.core.registry import INSTRUMENTS, NAMED, OUTPUTS


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    **declared: Any,
) -> Any:
    """Declare a dataclass field that is also an option.

    The option's type is the type of the default, unless the default is None, a boolean or a tuple.

    Args:
        help: the option's help text.
        default: the default value.
        pytest: the option's name in pytest; empty if pytest lacks the option. By default
            ``--dpbench-NAME``, or ``--NAME`` if the field's name begins with ``ncu``.
        command: the option's name in commands; empty if commands lack the option. By default
            ``--NAME``.
        declared: other arguments of ``parser.add_argument``.
    """
    if default is not None and not isinstance(default, bool | tuple):
        help += " (default %(default)s)"
        declared["type"] = type(default)
    if default is False:
        declared["action"] = "store_true"
    declared |= {"help": help, "default": [] if default == () else default}
    metadata = {"pytest": pytest, "command": command, "declared": declared}
    return field(default=default, metadata=metadata)


SHORT_FORMS = {"json": "json", "markdown": "md", "csv": "csv", "html": "html"}
"""Options that write one format, whatever the file's extension is, and the name of the format."""


def axis_help(name: str) -> str:
    """Return the help text of an axis of `Case`."""
    names = NAMED.get(name) or CHOICES.get(name, ())
    help: str = DECLARED[name]["help"]
    return help.format(names=", ".join(names))


def axis_option(name: str) -> Any:
    """Declare an option that replaces the grid's values along an axis."""
    help = f"{axis_help(name)}; replaces the grid's values, repeatable"
    metavar = "NAME=VALUE" if name == "set" else name.upper()
    return option(help, type=int if name in COUNTS else str, action="append", metavar=metavar)


def file(help: str, **names: Any) -> Any:
    """Declare an option that names a file to write."""
    return option(f"write {help} to this file", type=Path, metavar="FILE", **names)


def pytest_flag(help: str, **names: Any) -> Any:
    """Declare an option of pytest without a value, which commands lack."""
    return option(help, False, command="", **names)


def spelled(name: str, described: Mapping[str, Any], *, of_pytest: bool) -> str:
    """Return the name of an option in pytest or in commands, or "" if they lack the option."""
    given: str | None = described["pytest" if of_pytest else "command"]
    if given is not None:
        return given
    prefix = "dpbench-" if of_pytest and not name.startswith("ncu") else ""
    return f"--{prefix}{name.replace('_', '-')}"


def listed(texts: Iterable[str] | None, option: str, what: str) -> tuple[str, ...]:
    """Return the names in an option's values, which are separated by commas.

    Returns an empty tuple if the option is not set. ``what`` describes a name in the error message.
    """
    every: list[str] = []
    for text in texts or ():
        names = [part.strip() for part in text.split(",") if part.strip()]
        if not names:
            raise ConfigurationError(f"{option} {text!r} names no {what}")
        every += names
    return tuple(every)


def output_of(path: Path) -> str:
    """Return the name in `OUTPUTS` that is the extension of a file, or raise an error."""
    ending = path.suffix.removeprefix(".")
    if ending not in OUTPUTS:
        OUTPUTS.register_installed()
    if ending not in OUTPUTS:
        endings = [f".{name}" for name in OUTPUTS]
        raise unknown("file extension", path.suffix, endings, f"for {path}")
    return ending


# --- options that instruments declare --------------------------------------------------------

_OWN = "own option "
"""Prefix of instruments' options among the attributes of a parsed command line."""


def own_fields(instrument: type) -> dict[str, Mapping[str, Any]]:
    """Return the metadata of each field that `option` declared in a dataclass."""
    own = fields(instrument) if is_dataclass(instrument) else ()
    return {each.name: each.metadata for each in own if "declared" in each.metadata}


def declare_own(
    add: Callable[..., object], instrument: type, *names: str, of_pytest: bool = False
) -> None:
    """Declare the options of an instrument, or only the options in ``names`` if there are any."""
    for name, described in own_fields(instrument).items():
        if not names or name in names:
            option = spelled(name, described, of_pytest=of_pytest)
            add(option, dest=_OWN + name, **described["declared"])


def own_values(options: Namespace) -> dict[str, Any]:
    """Return the values of instruments' options in a parsed command line.

    The keys are names of fields of instruments.
    """
    return {n.removeprefix(_OWN): v for n, v in vars(options).items() if n.startswith(_OWN)}


Options = TypeVar("Options")


@dataclass(frozen=True)
class Settings:
    """The settings of pytest, or of a command that measures or shows runs."""

    of_pytest: bool = False
    directory: Path = Path()
    """The directory below which relative paths are resolved."""

    # what is measured
    ncu: bool = pytest_flag("measure cases under NVIDIA Nsight Compute")
    cupti: bool = pytest_flag(
        "measure cases, including their times, by CUPTI in the process that trains",
        pytest="--cupti",
    )
    only: bool = pytest_flag(
        "skip tests that use none of dpbench's fixtures; overrides --dpbench-skip"
    )
    skip: bool = pytest_flag("skip tests that use one of dpbench's fixtures")
    disable: bool = pytest_flag(
        "run each step once, without measurement and without files; a test that reads a number is "
        "skipped"
    )
    grid: str = option(
        f"the grid of cases: {', '.join(GRIDS)}, or a .toml file", "grid1", metavar="GRID"
    )
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """By field of `Case`, values that replace the grid's values. Each field is an option."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that instruments declare, by the name of the instrument's field."""
    baseline: str | None = option(
        "the trainer whose numbers are the denominators of ratios, which is also measured: a name "
        "or package.module:Class (default standard)",
        metavar="TRAINER",
    )

    shard: str | None = option(
        "measure only shard K of N of the grid, made of whole cells; dpbench merge joins shards",
        pytest="",
        metavar="K/N",
    )

    # how it is measured
    instrument: tuple[str, ...] | None = option(
        f"an instrument: {', '.join(INSTRUMENTS)}, or package.module:Class; repeatable (default "
        "timing and ncu, or logical without a GPU); in pytest, an addition to --ncu and --cupti",
        action="append",
        metavar="NAME",
    )
    device: str = option("the device of timing and torch_profiler", "cuda", choices=("cuda", "cpu"))
    no_timing: bool = pytest_flag(
        "count bytes only, without the second process that measures step time and peak memory"
    )
    ncu_dir: Path = option(
        "the directory of .ncu-rep reports and logs", Path("ncu_reports"), metavar="DIR"
    )
    kernels: bool = option(
        "also profile each kernel, in another process; each kernel takes tens of ms",
        False,
        pytest="--ncu-kernels",
    )
    kernels_phase: tuple[str, ...] | None = option(
        "profile only the kernels of these phases, e.g. clip; separated by commas",
        pytest="--ncu-kernels-phase",
        action="append",
        metavar="PHASES",
    )
    warmup: int = option("number of warmup steps, except under ncu", 3, metavar="N")
    active: int = option("number of measured steps, except under ncu", 5, metavar="N")
    timeout: float = option(
        "end a measured process after this time on the GPU; also the longest wait for a process of "
        "another session",
        1800.0,
        metavar="SECONDS",
    )

    # what is shown
    columns: str | None = option(
        "columns to show, separated by commas: metrics (dram_bytes, step_time_seconds, …), ratios "
        "to standard (dram_ratio), spreads over steps (dram_spread), measured divided by logical "
        "bytes (dram_over_logical), or ncu counters",
        metavar="LABELS",
    )
    sort: str | None = option(
        "sort each table in ascending order by a column, an axis of the case, or name",
        metavar="COL",
    )
    group_by: str | None = option(
        "show rows in one table if they have the same value of these labels, separated by commas: "
        f"cell, device, phase, {', '.join(AXES)}; name, fullname, func, fullfunc, param or "
        "param:NAME of the test (default cell)",
        metavar="LABEL",
    )
    expect: tuple[str, ...] = option(
        "the expected range of a ratio to standard; cases above the range are listed with the "
        "tables; repeatable; none removes all ranges (default dram_ratio:2-5 and "
        "l2_served_ratio:1.5-3)",
        (),
        action="append",
        metavar="RATIO:LOW-HIGH",
    )
    top: int = option(
        "the number of kernels or source lines in a table",
        10,
        pytest="--ncu-kernels-top",
        metavar="N",
    )

    # what is written
    output: tuple[Path, ...] = file(
        f"the run in the format of its extension ({', '.join(OUTPUTS)}, or a registered output)",
        default=(),
        action="append",
    )
    json: Path | None = file("the run with all rows as JSON")
    markdown: Path | None = file("the tables as Markdown")
    csv: Path | None = file("all rows as CSV")
    html: Path | None = file("a page of charts and tables (needs plotly and jinja2)")

    # what is saved, and compared with
    save: str | None = option("save the run in the storage under this name", metavar="NAME")
    autosave: bool = option("save the run under a name made of the commit and the time", False)
    resume: bool = option(
        "continue the latest interrupted run on this device with the same versions, code and grid; "
        "with save, the latest of this name; with save or autosave, start a new run if none is "
        "interrupted",
        False,
    )
    compare: str | None = option(
        "compare with a saved run; without a value, with the latest complete run on the same "
        "device that has one of this session's cases and passed its own comparison",
        nargs="?",
        const="",
        metavar="NUM|NAME|FILE",
    )
    compare_fail: tuple[str, ...] = option(
        "fail if a metric got worse by more than a limit: METRIC[@PHASE]:5%%, METRIC:0.5GB, "
        "METRIC:5%%+0.1GB (more than both), METRIC:±5%% (in either direction); ratios to "
        "standard are dram_ratio, l2_served_ratio, logical_ratio, …; repeatable",
        (),
        action="append",
        metavar="SPEC",
    )
    compare_first_run_ok: bool = option("accept cases without a saved reference", False)
    compare_across: bool = pytest_flag(
        "also compare with runs on other devices; the tables name these devices"
    )
    storage: Path = option("the directory of saved runs", Path(".dpbench"), metavar="DIR")

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigurationError(f"the time-out must be positive, not {self.timeout:g} s")
        if wrong := [phase for phase in self.phases if phase not in ALL_PHASES]:
            raise unknown("phase", wrong[0], ALL_PHASES)

    @classmethod
    def read(
        cls, options: Namespace, *, of_pytest: bool = False, directory: Path = Path()
    ) -> Settings:
        """Return the settings of a command line. An option that it does not set has its default.

        With ``--dpbench-disable``, most options for measurement and output are ignored.

        Args:
            options: the parsed command line.
            of_pytest: True for pytest's command line.
            directory: the directory below which relative paths are resolved.
        """
        given: dict[str, Any] = {}
        for name in OPTIONS:
            place = _name(name, of_pytest).lstrip("-").replace("-", "_")
            if place in options:
                given[name] = _below(directory, getattr(options, place))
        own = own_values(options).items()
        given["own"] = {n: directory / v if isinstance(v, Path) else v for n, v in own}
        axes = {axis: values for axis in AXES if (values := given.pop(axis, None)) is not None}
        if given.get("disable"):
            used = ("own", "only", "skip", "disable", "grid", "baseline", "compare_fail")
            given = {name: given[name] for name in used}
        return cls(of_pytest=of_pytest, directory=directory, axes=axes, **given)

    def option(self, name: str) -> str:
        """Return the option that sets a field, e.g. ``--dpbench-save``."""
        return _name(name, self.of_pytest)

    def chosen_grid(self) -> Grid:
        """Return the grid that the option ``grid`` names, with the values of other options."""
        return Grid.named(self.grid).with_axes(self.baseline, **self.axes)

    def of(self, options: type[Options]) -> Options:
        """Return an instance of a class of options, with the values of the command line."""
        return options(**self.own_of(options))

    def own_of(self, instrument: type) -> dict[str, Any]:
        """Return the command line's values of the options that a class declares, by field name."""
        return {name: self.own[name] for name in own_fields(instrument) if name in self.own}

    @property
    def files(self) -> dict[str, tuple[str, Path]]:
        """For each option that names a file to write: the output's name and the file's path."""
        short = {self.option(n): (kind, getattr(self, n)) for n, kind in SHORT_FORMS.items()}
        named = {f"{self.option('output')} {p}": (output_of(p), p) for p in self.output}
        return {option: file for option, file in (short | named).items() if file[1]}

    @property
    def saves(self) -> bool:
        """True if the session saves its run in the storage."""
        return self.save is not None or self.autosave or self.resume

    @property
    def compares(self) -> bool:
        """True if the session is compared with a reference run."""
        return self.compare is not None or bool(self.compare_fail)

    @property
    def measures(self) -> bool:
        """True if pytest's options choose an instrument."""
        return self.ncu or self.cupti or bool(self.instrument)

    @property
    def profiles_kernels(self) -> bool:
        """True if an option about kernels is set, so that each kernel is profiled."""
        return bool(self.kernels or self.kernels_phase)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases whose kernels are profiled; empty if kernels of all phases are."""
        option = self.option("kernels_phase")
        return listed(self.kernels_phase, option, "phase, such as clip")

    def check(self) -> None:
        """Raise `ConfigurationError` for contradictory settings and unwritable output files."""
        if self.save is not None and self.autosave:
            raise ConfigurationError(
                f"{self.option('autosave')} chooses the name of the run: omit {self.option('save')}"
            )
        if self.disable and self.compare_fail:
            raise ConfigurationError(
                "--dpbench-disable measures nothing, so --dpbench-compare-fail cannot be checked: "
                "omit one of the options"
            )
        for option, (_, path) in self.files.items():
            if self.compare and path == self.directory / self.compare:
                raise ConfigurationError(
                    f"{option} would overwrite the reference run {self.compare}; "
                    f"to renew the reference run, omit {self.option('compare')}"
                )
        if self.of_pytest and self.profiles_kernels and not self.measures:
            raise ConfigurationError("--ncu-kernels requires an instrument: add --ncu or --cupti")
        check_distinct_files({option: path for option, (_, path) in self.files.items()})
        for _, path in self.files.values():
            check_writable_file(path)


OPTIONS: dict[str, Mapping[str, Any]] = {
    **{axis: axis_option(axis).metadata for axis in AXES},
    **{declared.name: declared.metadata for declared in fields(Settings) if declared.metadata},
}


def _below(directory: Path, value: Any) -> Any:
    """Return an option's value, with relative paths below ``directory`` and tuples for lists."""
    if isinstance(value, list):
        return tuple(_below(directory, each) for each in value)
    return directory / value if isinstance(value, Path) else value


def _name(option: str, of_pytest: bool) -> str:
    """Return the name of an option in pytest or in commands, or "" if they lack the option."""
    return _names(of_pytest)[option]


@cache
def _names(of_pytest: bool) -> dict[str, str]:
    return {name: spelled(name, each, of_pytest=of_pytest) for name, each in OPTIONS.items()}


def declare(
    add: Callable[..., object],
    *names: str,
    of_pytest: bool = False,
    called: str | None = None,
    **changed: Any,
) -> None:
    """Declare options of pytest or of a command.

    Args:
        add: ``group.addoption`` or ``parser.add_argument``.
        names: fields of `Settings` or of `Case`; by default all that are options of pytest, or of
            commands.
        of_pytest: True for options of pytest, False for options of a command.
        called: the name of the option, if it differs from the field's name.
        changed: arguments of ``add`` that replace the declared arguments.
    """
    for name in names or OPTIONS:
        if option := called or _name(name, of_pytest):
            add(option, **{**OPTIONS[name]["declared"], **changed})
