"""What a session was asked for. Each option is declared here, once, for pytest and the commands.

A field of `Settings` is an option of ``dpbench run``, of pytest, or of both; `declare` gives other
commands some of the same.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

from dpbench.core import option_fields
from dpbench.core.case import ALL_PHASES, AXES
from dpbench.core.errors import ConfigurationError, unknown
from dpbench.core.files import check_distinct_files, check_writable_file, is_standard_output
from dpbench.core.grid import GRIDS, Grid
from dpbench.core.option_fields import SHORT_FORMS, below, output_of, own_values
from dpbench.core.registry import INSTRUMENTS, OUTPUTS

Options = TypeVar("Options")


@dataclass(frozen=True)
class Settings:
    """What a session was asked for, by ``dpbench run`` or by pytest."""

    of_pytest: bool = False
    directory: Path = Path()
    """The directory of relative paths."""

    # what is measured
    ncu: bool = option_fields.of_pytest("measure cases under NVIDIA Nsight Compute")
    cupti: bool = option_fields.of_pytest(
        "measure cases by CUPTI in the process that trains; with --ncu as well, times are its own",
        pytest="--cupti",
    )
    only: bool = option_fields.of_pytest(
        "skip tests that take none of dpbench's fixtures; overrides --dpbench-skip"
    )
    skip: bool = option_fields.of_pytest("skip tests that take one of dpbench's fixtures")
    disable: bool = option_fields.of_pytest(
        "run each step once and measure, save and write nothing; a test is skipped where it reads "
        "a number"
    )
    grid: str = option_fields.option(
        f"cases: {', '.join(GRIDS)}, or a .toml file", "grid1", metavar="GRID"
    )
    axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values along axes of `Case` that replace the grid's; each axis is an option."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """The values of options that instruments declare, by field."""
    baseline: str | None = option_fields.option(
        "the trainer whose numbers ratios divide by, measured along the same axes: a name or "
        "package.module:Class (default standard)",
        metavar="TRAINER",
    )

    shard: str | None = option_fields.option(
        "measure part K of N of the grid, a cell with all its trainers; dpbench merge joins them",
        pytest="",
        metavar="K/N",
    )

    # how it is measured
    instrument: tuple[str, ...] | None = option_fields.option(
        f"what measures: {', '.join(INSTRUMENTS)}, or package.module:Class; repeatable; default "
        "timing and ncu, without a GPU logical; for pytest's ncu and counters fixtures it comes on "
        "top of --ncu and --cupti",
        action="append",
        metavar="NAME",
    )
    device: str = option_fields.option(
        "for timing and torch_profiler", "cuda", choices=("cuda", "cpu")
    )
    no_timing: bool = option_fields.of_pytest(
        "count bytes only: no second, unprofiled process for step time and peak memory"
    )
    ncu_dir: Path = option_fields.option(
        "where .ncu-rep reports and logs go", Path("ncu_reports"), metavar="DIR"
    )
    kernels: bool = option_fields.option(
        "profile each kernel as well, in one more process, tens of ms a kernel",
        False,
        pytest="--ncu-kernels",
    )
    kernels_phase: tuple[str, ...] | None = option_fields.option(
        "profile the kernels of these phases only, e.g. clip; separated by commas",
        pytest="--ncu-kernels-phase",
        action="append",
        metavar="PHASES",
    )
    warmup: int = option_fields.option("warmup steps without ncu", 3, metavar="N")
    active: int = option_fields.option("active steps without ncu", 5, metavar="N")
    timeout: float = option_fields.option(
        "end a measured process after this long on the GPU, and stop waiting for another "
        "session's process after as long",
        1800.0,
        metavar="SECONDS",
    )

    # what is shown
    columns: str | None = option_fields.option(
        "columns to show, separated by commas: metrics (dram_bytes, step_time_seconds, …), their "
        "ratio to standard, spread over the steps, or measured over logical (dram_ratio, "
        "dram_spread, dram_over_logical, …), ncu counters",
        metavar="LABELS",
    )
    sort: str | None = option_fields.option(
        "sort each table by a column, an axis of the case, or name; ascending", metavar="COL"
    )
    group_by: str | None = option_fields.option(
        f"what shares a table, separated by commas: cell, device, phase, {', '.join(AXES)}; name, "
        "fullname, func, fullfunc, param or param:NAME of the test (default cell)",
        metavar="LABEL",
    )
    expect: tuple[str, ...] = option_fields.option(
        "the expected range of a ratio to standard, e.g. dram_ratio:2-5 (the default; for the L2 "
        "1.5-3); cases outside are named beside the tables; none: no range; repeatable",
        (),
        action="append",
        metavar="RATIO:LOW-HIGH",
    )
    top: int = option_fields.option(
        "how many kernels a table shows", 10, pytest="--ncu-kernels-top", metavar="N"
    )

    # what is written
    output: tuple[Path, ...] = option_fields.file(
        f"the run as the file's ending says ({', '.join(OUTPUTS)}; others register; repeatable)",
        default=(),
        action="append",
    )
    json: Path | None = option_fields.file("every row, and what follows from them,")
    markdown: Path | None = option_fields.file("the tables")
    csv: Path | None = option_fields.file("every row as CSV")
    html: Path | None = option_fields.file("a page of charts and tables (needs plotly and jinja2)")

    # what is saved, and compared with
    save: str | None = option_fields.option("save the run in the storage as NAME", metavar="NAME")
    autosave: bool = option_fields.option("save the run under the commit and the time", False)
    resume: bool = option_fields.option(
        "go on with the latest interrupted run on this device, if versions, code and grid are the "
        "same; with save the latest of that name; with save or autosave, begin one if there is "
        "none",
        False,
    )
    compare: str | None = option_fields.option(
        "compare with a saved run; without a value with the latest complete one on the same "
        "device that has what this one measures and passed its own comparison",
        nargs="?",
        const="",
        metavar="NUM|NAME|FILE",
    )
    compare_fail: tuple[str, ...] = option_fields.option(
        "fail if something got worse by more: METRIC[@PHASE]:5%%, METRIC:0.5GB, METRIC:5%%+0.1GB "
        "(beyond both), METRIC:±5%% (either way); a metric's ratio to standard is dram_ratio, "
        "l2_served_ratio, logical_ratio, …; repeatable",
        (),
        action="append",
        metavar="SPEC",
    )
    compare_first_run_ok: bool = option_fields.option(
        "pass what a limit cannot judge because nothing like it was saved before", False
    )
    compare_across: bool = option_fields.of_pytest(
        "compare also what another device measured; it is labelled"
    )
    storage: Path = option_fields.option(
        "where runs are saved and references found", Path(".dpbench"), metavar="DIR"
    )

    def __post_init__(self) -> None:
        if not self.timeout > 0:
            raise ConfigurationError(f"the time-out must be positive, not {self.timeout:g} s")
        if wrong := [phase for phase in self.phases if phase not in ALL_PHASES]:
            raise unknown("phase", wrong[0], ALL_PHASES)

    @classmethod
    def read(
        cls, options: Namespace, *, of_pytest: bool = False, directory: Path = Path()
    ) -> Settings:
        """The settings of a command line; relative paths become paths below a directory.

        A command may lack options: these have their defaults.
        """
        given: dict[str, Any] = {}
        for name in OPTIONS:
            place = _name(name, of_pytest).lstrip("-").replace("-", "_")
            if place in options:
                given[name] = below(directory, getattr(options, place))
        own = own_values(options).items()
        given["own"] = {n: directory / v if isinstance(v, Path) else v for n, v in own}
        axes = {axis: values for axis in AXES if (values := given.pop(axis, None)) is not None}
        if given.get("disable"):
            kept = ("own", "only", "skip", "disable", "grid", "baseline", "compare_fail")
            given = {name: given[name] for name in kept}
        return cls(of_pytest=of_pytest, directory=directory, axes=axes, **given)

    def option(self, name: str) -> str:
        """An option as its user writes it, e.g. ``--dpbench-save``."""
        return _name(name, self.of_pytest)

    def chosen_grid(self) -> Grid:
        """The named grid, with the axes that options give in place of its own."""
        return Grid.named(self.grid).with_axes(self.baseline, **self.axes)

    def of(self, options: type[Options]) -> Options:
        """The options of an instrument, see `dpbench.Instrument.options`."""
        return options(**self.own_of(options))

    def own_of(self, instrument: type) -> dict[str, Any]:
        """The values of an instrument's own options, by its fields."""
        return {
            name: self.own[name]
            for name in option_fields.own_fields(instrument)
            if name in self.own
        }

    @property
    def files(self) -> dict[str, tuple[str, Path]]:
        """The files that were asked for, each with its output, by the option that names it."""
        short = {self.option(n): (kind, getattr(self, n)) for n, kind in SHORT_FORMS.items()}
        named = {f"{self.option('output')} {p}": (output_of(p), p) for p in self.output}
        return {option: file for option, file in (short | named).items() if file[1]}

    @property
    def tables_to(self) -> TextIO:
        """Where tables are printed: where a file is not written at the same time."""
        asked = any(is_standard_output(path) for _, path in self.files.values())
        return sys.stderr if asked else sys.stdout

    @property
    def saves(self) -> bool:
        """Whether the session has a file of its own in the storage."""
        return self.save is not None or self.autosave or self.resume

    @property
    def compares(self) -> bool:
        """Whether the session is compared with what was measured before."""
        return self.compare is not None or bool(self.compare_fail)

    @property
    def measures(self) -> bool:
        """Whether one of pytest's fixtures measures."""
        return self.ncu or self.cupti or bool(self.instrument)

    @property
    def profiles_kernels(self) -> bool:
        """Whether kernels are profiled one by one; each option about kernels implies it."""
        return bool(self.kernels or self.kernels_phase)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases whose kernels are profiled; empty for all phases."""
        option = self.option("kernels_phase")
        return option_fields.listed(self.kernels_phase, option, "phase, such as clip")

    def check(self) -> None:
        """Refuse settings that contradict each other, and files that cannot be written."""
        if self.save is not None and self.autosave:
            raise ConfigurationError(
                f"{self.option('autosave')} names the run itself: drop {self.option('save')}"
            )
        if self.disable and self.compare_fail:
            raise ConfigurationError(
                "--dpbench-disable measures nothing that --dpbench-compare-fail could judge: "
                "drop one"
            )
        for option, (_, path) in self.files.items():
            if self.compare and path == self.directory / self.compare:
                raise ConfigurationError(
                    f"{option} would write over {self.compare}, which is compared with; "
                    f"to renew a reference, leave {self.option('compare')} out"
                )
        if self.of_pytest and self.profiles_kernels and not self.measures:
            raise ConfigurationError("--ncu-kernels adds to --ncu; give it")
        check_distinct_files({option: path for option, (_, path) in self.files.items()})
        for _, path in self.files.values():
            check_writable_file(path)


OPTIONS: dict[str, Mapping[str, Any]] = {
    **{axis: option_fields.axis(axis).metadata for axis in AXES},
    **{declared.name: declared.metadata for declared in fields(Settings) if declared.metadata},
}


def _name(option: str, of_pytest: bool) -> str:
    """The name of an option in pytest or the commands; empty if they lack it."""
    return option_fields.spelled(option, OPTIONS[option], of_pytest=of_pytest)


def declare(
    add: Callable[..., object],
    *names: str,
    of_pytest: bool = False,
    called: str | None = None,
    **changed: Any,
) -> None:
    """Declare these options; without names, all options of pytest or of ``dpbench run``.

    Args:
        add: ``group.addoption`` or ``parser.add_argument``.
        names: fields of `Settings`, or axes.
        of_pytest: whether they are named as pytest names them.
        called: what a command calls its option, if it is not the field's name.
        changed: arguments of ``add`` that differ for a command.
    """
    for name in names or OPTIONS:
        if option := called or _name(name, of_pytest):
            add(option, **{**OPTIONS[name]["declared"], **changed})
