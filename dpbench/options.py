"""What pytest and the ``dpbench`` commands both take: each option is declared here, once.

A function declares one group, by way of what it is given: ``group.addoption`` of pytest or
``parser.add_argument`` of argparse. Pytest's options have a prefix.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from dpbench.case import ATTENTIONS, AXES, GRIDS, MODEL_SIZES, PRECISIONS
from dpbench.errors import ConfigurationError
from dpbench.instruments.child import Steps
from dpbench.instruments.ncu.kernel_choice import KernelChoice
from dpbench.instruments.ncu.speed_of_light import SETS, SpeedOfLight
from dpbench.instruments.timing import Timing
from dpbench.instruments.torch_profiler.instrument import TorchProfiler
from dpbench.registry import MODELS, TRAINERS
from dpbench.results.rows import STORAGE
from dpbench.show.view import COLUMNS_HELP, EXPECT_HELP, GROUP_BY_HELP, SORT_HELP, TOP


class Declare(Protocol):
    """``addoption`` or ``add_argument``."""

    def __call__(self, *names: str, **declared: Any) -> object:
        """Declare an option under its names."""


def one_of(names: Iterable[str]) -> str:
    """Names for a help text."""
    return ", ".join(names)


AXIS_ARGUMENTS: dict[str, dict[str, Any]] = {
    "trainer": {"help": f"{one_of(TRAINERS)}, their class names, or package.module:Class"},
    "batch_size": {"type": int, "help": "examples in a step"},
    "seq_len": {"type": int, "help": "tokens in an example"},
    "model_size": {"help": f"{one_of(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS"},
    "precision": {"help": one_of(PRECISIONS)},
    "attention": {"help": one_of(ATTENTIONS)},
    "model": {"help": f"{one_of(MODELS)}, or package.module:Class"},
}
"""How each field of a `Case` is given, as arguments of ``add_argument``."""

FILES = {
    "json": "every row, and what follows from them,",
    "markdown": "the tables",
    "csv": "every row as CSV",
    "html": "a page of charts and tables (needs dpbench[report])",
    "github-benchmark": "the tables' columns for github-action-benchmark (customSmallerIsBetter)",
}
"""Files that can be written, by the option that names them."""


def add_grid(add: Declare, prefix: str = "") -> None:
    """Declare which grid of cases."""
    add(
        f"--{prefix}grid",
        default="grid1",
        metavar="GRID",
        help=f"cases: {one_of(GRIDS)}, or a .toml file (default %(default)s)",
    )


def add_axes(add: Declare, prefix: str = "") -> None:
    """Declare what replaces the axes of the grid."""
    for axis in AXES:
        add(
            f"--{prefix}{axis.replace('_', '-')}",
            action="append",
            metavar=axis.upper(),
            type=AXIS_ARGUMENTS[axis].get("type", str),
            help=f"replaces the grid's, repeatable: {AXIS_ARGUMENTS[axis]['help']}",
        )


def add_ncu(add: Declare) -> None:
    """Declare which ncu, and where its reports go."""
    add("--ncu-path", metavar="PROGRAM", help="the ncu program, if it is not on PATH")
    add(
        "--ncu-dir",
        type=Path,
        default=Path("ncu_reports"),
        metavar="DIR",
        help="where .ncu-rep reports and logs go (default %(default)s)",
    )


def add_counting(add: Declare, kernels: str = "") -> None:
    """Declare what ncu counts, of phases and of kernels; options of ``kernels`` have a prefix."""
    add(
        "--ncu-metrics",
        action="append",
        metavar="NAMES",
        help="what to count: names of dpbench, of nvprof, or ncu counters, separated by commas "
        "(default: DRAM, L2 and global load/store bytes)",
    )
    add(
        f"--{kernels}kernels",
        action="store_true",
        help="profile each kernel as well, in one more process, tens of ms a kernel",
    )
    add(
        f"--{kernels}kernels-phase",
        action="append",
        metavar="PHASES",
        help="profile the kernels of these phases only, e.g. clip; separated by commas",
    )
    add(
        "--ncu-set",
        metavar="SET",
        help="collect this set of ncu's sections for the kernels that move most bytes: "
        f"{one_of(SETS)} (Speed of Light, memory, occupancy, warp states)",
    )
    add(
        "--ncu-section",
        action="append",
        metavar="NAMES",
        help="collect these of ncu --list-sections for them, separated by commas",
    )
    _add_number(add, "--ncu-set-kernels", SpeedOfLight.kernels, "how many kernels these are")


def chosen_kernels(options: Any, prefix: str = "") -> KernelChoice:
    """What the options of `add_counting` ask for; any of them means that kernels are wanted.

    Raises:
        ConfigurationError: a value is none of those that there are.
    """
    phases = _listed(options, f"{prefix}kernels_phase", "phase, such as clip")
    sections = _listed(options, "ncu_section", "section; ncu --list-sections shows them")
    wanted = getattr(options, f"{prefix}kernels") or phases or options.ncu_set or sections
    return KernelChoice(bool(wanted), phases, options.ncu_set, sections, options.ncu_set_kernels)


def _listed(options: Any, option: str, what: str) -> tuple[str, ...]:
    """The names that an option lists, separated by commas; nothing if it was not given."""
    found: list[str] = []
    for text in getattr(options, option) or ():
        names = [name.strip() for name in text.split(",") if name.strip()]
        if not names:
            raise ConfigurationError(f"--{option.replace('_', '-')} {text!r} names no {what}")
        found += names
    return tuple(found)


def add_top(add: Declare, prefix: str = "") -> None:
    """Declare how long a table of kernels is."""
    _add_number(add, f"--{prefix}top", TOP, "how many kernels a table shows")


def add_steps(add: Declare, whose: str, steps: Steps, prefix: str = "") -> None:
    """Declare how many steps of a process warm up, and how many count."""
    for name, default in vars(steps).items():
        _add_number(add, f"--{prefix}{name}", default, f"{name} steps of {whose} process")


def _add_number(add: Declare, option: str, default: int, what: str) -> None:
    add(option, type=int, default=default, metavar="N", help=f"{what} (default %(default)d)")


def add_timeout(add: Declare, prefix: str = "", default: float = Timing.timeout) -> None:
    """Declare how long a measured process may take."""
    add(
        f"--{prefix}timeout",
        type=float,
        default=default,
        metavar="SECONDS",
        help="end a measured process after this long on the GPU (default %(default)g)",
    )


def add_try_anyway(add: Declare, prefix: str = "") -> None:
    """Declare whether a case that does not fit is started."""
    add(
        f"--{prefix}try-anyway",
        action="store_true",
        help="start cases whose predicted peak memory does not fit the GPU, instead of skipping",
    )


def add_profile_directory(add: Declare, prefix: str = "") -> None:
    """Declare where the PyTorch profiler's files go."""
    add(
        f"--{prefix}profile-dir",
        type=Path,
        default=TorchProfiler.directory,
        metavar="DIR",
        help="where the PyTorch profiler's files go, one folder a case (default %(default)s)",
    )


def add_profile(add: Declare, prefix: str = "") -> None:
    """Declare what the PyTorch profiler records, and what counts as a bottleneck."""
    add(
        f"--{prefix}profile-schedule",
        default=str(TorchProfiler.schedule),
        metavar="NAME=N,…",
        help="steps that the PyTorch profiler skips, waits, warms up, records, and how often "
        "(default %(default)s)",
    )
    add(
        f"--{prefix}profile-threshold",
        type=float,
        default=TorchProfiler.threshold,
        metavar="MS",
        help="list operators with this many ms of a step or more (default %(default)g)",
    )


def add_view(add: Declare, prefix: str = "") -> None:
    """Declare what the tables show, in the words of pytest-benchmark."""
    add(f"--{prefix}columns", metavar="LABELS", help=COLUMNS_HELP)
    add(f"--{prefix}sort", metavar="COL", help=SORT_HELP)
    add(f"--{prefix}group-by", metavar="LABEL", help=GROUP_BY_HELP)
    add(
        f"--{prefix}expect", action="append", default=[], metavar="RATIO:LOW-HIGH", help=EXPECT_HELP
    )


def add_files(add: Declare, names: Iterable[str], prefix: str = "") -> None:
    """Declare what is written to files: names of `FILES`."""
    for name in names:
        add(f"--{prefix}{name}", type=Path, metavar="FILE", help=f"write {FILES[name]} here")


def add_storage(add: Declare, prefix: str = "") -> None:
    """Declare where runs are saved."""
    add(
        f"--{prefix}storage",
        type=Path,
        default=STORAGE,
        metavar="DIR",
        help="where runs are saved and references found (default %(default)s)",
    )


def add_saving(add: Declare, prefix: str = "") -> None:
    """Declare whether, and as what, a run is saved."""
    add(f"--{prefix}save", metavar="NAME", help="save the run in the storage as NAME")
    add(
        f"--{prefix}autosave",
        action="store_true",
        help="save the run under the commit and the time",
    )
    add(
        f"--{prefix}resume",
        action="store_true",
        help="go on with the latest interrupted run on this device, if versions, code and grid "
        f"are the same; with --{prefix}save or --{prefix}autosave, begin one if there is none",
    )


def add_comparing(add: Declare, what_fails: str, prefix: str = "") -> None:
    """Declare what a run is compared with, and beyond which limits something fails."""
    add(
        f"--{prefix}compare",
        nargs="?",
        const="",
        metavar="NUM|FILE",
        help="compare with a saved run; without a value with the latest complete one on the same "
        "device that has what this one measures and passed its own comparison",
    )
    add_limit(add, f"--{prefix}compare-fail", what_fails)
    add(
        f"--{prefix}compare-first-run-ok",
        action="store_true",
        help="pass what a limit cannot judge because nothing like it was saved before",
    )


def add_limit(add: Declare, option: str, what_fails: str) -> None:
    """Declare the limits of changes."""
    add(
        option,
        action="append",
        default=[],
        metavar="SPEC",
        help=f"{what_fails} by more: METRIC[@PHASE]:5%%, METRIC:0.5GB, "
        "METRIC:5%%+0.1GB (beyond both), METRIC:±5%% (either way); a metric's ratio to standard "
        "is dram_ratio, l2_ratio, logical_ratio, …; repeatable",
    )


def add_across(add: Declare, option: str) -> None:
    """Declare that what cannot be the same may be compared."""
    add(
        option,
        action="store_true",
        help="compare also what another device or instrument measured; it is labelled",
    )
