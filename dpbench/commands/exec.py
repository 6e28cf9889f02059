"""Measure the steps of a training script, unmodified, by phase.

The script runs as Python would run it, with its arguments, once for each instrument. dpbench finds
its steps and their phases. Work in no phase (batches, logs, evaluation) is counted in the phase
outside. The first --skip steps are not recorded, the next --steps are recorded. Then the script is
ended where its next step would begin. With --continue, it runs on. Options of the script follow its
name.

Instruments: timing records times. logical counts the bytes that each operator reads and writes, on
the real tensors. cupti counts DRAM bytes with hardware counters of a GPU. ncu reads the counters of
Nsight Compute, which runs the script several times if the counters need several passes.
torch_profiler records traces, and the CPU and GPU time of each operator. --baseline names a saved
run of another script. Ratios then divide by its numbers, phase by phase.

If torchrun starts several ranks on one machine, each rank records its own steps with timing,
logical, cupti or torch_profiler. The first rank prints one table and writes the files.

--verify checks a script that trains by Opacus or dpbench.make_private. The optimizer must have the
model's parameters. Each trainable parameter must get a gradient and move. A parameter or buffer may
depend on the private batches only through private steps. Each private step is taken with and
without noise: without noise, its gradients must equal those of a loop over the examples, clipped,
and the noise must be normal, independent and of the right deviation. The exit code is 1 if a check
fails, or if anything could not be judged. The check turns dropout off and lowers clipping
thresholds, so the script always ends after the checked steps.

Examples:
  dpbench exec plain.py --batch-size 64
  dpbench exec --instrument timing --skip 10 --steps 20 --continue train.py
  dpbench exec --save plain plain.py
  dpbench exec --baseline 1 private.py
  dpbench exec --autosave --compare-fail logical_bytes:1% -m mypackage.train --lr 0.1
  dpbench exec --verify private.py --lr 0.1
  torchrun --nproc-per-node 2 -m dpbench exec --json run.json train.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain

from dpbench.child.script_ranks import Rank
from dpbench.commands.list import saved_run
from dpbench.commands.run import show
from dpbench.commands.step import write_report
from dpbench.commands.verify import ScriptChecks, as_text
from dpbench.core import gpu
from dpbench.core.errors import ConfigurationError, ScriptInterrupted
from dpbench.core.grid import Grid
from dpbench.core.settings import Settings, declare
from dpbench.core.subject import Script
from dpbench.instruments import choose, declare_built_in
from dpbench.instruments.interface import Instrument
from dpbench.instruments.script import ScriptRun
from dpbench.instruments.torch_profiler.profile_folder import REPORT, own_folder
from dpbench.instruments.torch_profiler.profiler import TorchProfiler
from dpbench.results.conditions import differing_conditions, no_ratios
from dpbench.results.outcome import Outcome
from dpbench.results.run import Run
from dpbench.runner import measure
from dpbench.session import Session, sources
from dpbench.verify.check_result import NOTE, OK, Check

COMMON = (
    *("--instrument", "--skip", "--steps", "--batch-size", "--name", "--baseline", "--verify"),
    *("--output", "--json", "--html", "--save", "--compare", "--compare-fail"),
)
"""Options in the short help."""

DECLARED = {
    "measuring": ("ncu_dir",),
    "tables": ("columns", "sort", "expect"),
    "files": ("output", "json", "markdown", "csv", "html"),
    "saved runs": (
        *("save", "autosave", "compare", "compare_fail", "compare_first_run_ok", "storage"),
    ),
}
"""Options shared with ``dpbench run``, by the title of their group."""

INSTRUMENT_OPTIONS = ("ncu_path", "ncu_metrics", "profile_dir", "profile_threshold")
"""Options of instruments that apply to scripts."""

OPTIONS = {
    *(*COMMON, "--timeout", "--continue", "--name"),
    *(f"--{n.replace('_', '-')}" for n in (*chain(*DECLARED.values()), *INSTRUMENT_OPTIONS)),
}
"""All options of this command."""

REFUSED_BY_VERIFY = ("instrument", "baseline", *DECLARED["files"], *DECLARED["saved runs"][:-1])
"""Options that --verify refuses."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this command."""
    parser.usage = "dpbench exec [options] (SCRIPT | -m MODULE) [ARGUMENT …]"
    measuring = parser.add_argument_group("measuring")
    known = "timing, logical, cupti, ncu, torch_profiler, or package.module:Class; repeatable"
    default = "(default cupti, or logical without a GPU)"
    declare(measuring.add_argument, "instrument", help=f"{known} {default}")
    for name, number, help in (
        ("--skip", 3, "number of first steps that are not recorded (default %(default)d)"),
        ("--steps", 5, "number of steps to record (default %(default)d)"),
        ("--batch-size", 0, "number of examples in a step, to show samples per second"),
    ):
        measuring.add_argument(name, type=int, default=number, metavar="N", help=help)
    measuring.add_argument(
        "--timeout",
        dest="end_after",
        type=float,
        metavar="SECONDS",
        help="end the script after this time, not counting its wait for the GPU, and print where "
        "it was (default: never)",
    )
    measuring.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="let the script run on after the recorded steps, instead of ending the script",
    )
    measuring.add_argument(
        "--verify", action="store_true", help="check clipping and noise instead of measuring"
    )
    measuring.add_argument(
        "--name",
        metavar="NAME",
        help="the script's name in tables and saved runs (default: its path, or the module's name)",
    )
    measuring.add_argument(
        "--baseline",
        metavar="NUM|FILE",
        help="a saved run of another script; ratios divide by its numbers",
    )
    for title, names in DECLARED.items():
        group = measuring if title == measuring.title else parser.add_argument_group(title)
        declare(group.add_argument, *names)
    declare_built_in(measuring.add_argument, *INSTRUMENT_OPTIONS)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Run the script, and print its numbers.

    The exit code is 1 if the script failed or a number exceeds a limit.
    """
    rank = Rank.here()
    gpu_here = next(iter(gpu.visible_gpus()), None)
    settings = replace(Settings.read(options), device="cuda" if gpu_here else "cpu")
    settings.check()
    if options.verify:
        return _verify(options, settings)
    names = options.instrument or ["cupti" if gpu_here else "logical"]
    case, scripts = _script_runs(options, settings, choose(names, settings, "script"))
    if rank and len(scripts) > 1:
        raise ConfigurationError("several ranks run a script only once: choose one --instrument")
    if rank and rank.number:  # only the first rank has a session
        return rank.hand_over(measure(case, scripts))
    baseline, standards = None, []
    if options.baseline is not None:
        baseline = saved_run(options.baseline, options.storage)
        here = sources(scripts, settings, gpu_here)
        standards = _standards(options.baseline, baseline, case, here)
    axes = {axis: (value,) for axis, value in case.columns.items()}
    cases = [case, *dict.fromkeys(outcome.case for outcome in standards)]
    plan = [(c, script) for c in cases for script in scripts]
    grid = Grid(case.trainer, axes)
    grid = replace(grid, baseline=cases[1].trainer) if standards else grid
    session = Session(plan, settings, gpu=gpu_here, grid=grid)
    with closing(session):
        session.begin()
        try:
            if rank:
                session.store.add([rank.gather(measure(case, scripts))])
                session.write()
            _measure(session, case, scripts)
        finally:  # keep and print what an interrupted session has measured
            if refused := no_ratios(standards, session.store.outcomes()):
                session.notes += refused
                del cases[1:]
            else:
                session.store.add(standards)
            outcomes = session.store.outcomes()
            failed = any(
                outcome.error for outcome in outcomes
            )  # a failed run must not become a reference
            complete = not failed and {*cases} <= {outcome.case for outcome in outcomes}
            session.finish(complete=complete)
            if session.comparison:
                session.notes += _other_name(session.reference, case)
            if baseline:
                session.notes += _baseline_notes(baseline, session.begun)
            show(session, "exec")
        return 1 if session.failed else 0


def _verify(options: argparse.Namespace, settings: Settings) -> int:
    """Run the script, and print the checks of its steps.

    The exit code is 1 if a check or the script failed, or if a check could not be judged.
    """
    refused = [name for name in REFUSED_BY_VERIFY if getattr(options, name, None)]
    if refused or options.go_on:
        name = "continue" if options.go_on else refused[0].replace("_", "-")
        raise ConfigurationError(f"--verify measures and saves nothing, so leave out --{name}")
    case, [script] = _script_runs(options, settings, [ScriptChecks()])
    pending = script.start(case)
    try:
        outcome = pending.outcome()
    finally:
        pending.cancel()
    checks = [Check(**check) for check in outcome.details.get("checks", ())]
    if outcome.error:
        hint = _misplaced(script, outcome.message)
        print(f"dpbench exec: {outcome.message}{hint}", file=sys.stderr)
    if checks:
        print(as_text(case, checks))
    if outcome.error == ScriptInterrupted.__name__:
        raise KeyboardInterrupt
    passed = checks and not outcome.error
    return 0 if passed and all(check.verdict in (OK, NOTE) for check in checks) else 1


def _misplaced(script: ScriptRun, said: str) -> str:
    """Return a hint if a script refused arguments, and some are options of this command."""
    found = [a for a in script.program[1:] if a.partition("=")[0] in OPTIONS]
    if not found or "exit status 2" not in said:
        return ""
    return f"; the script was given {found[0]}: options of dpbench exec go before the script"


def _measure(session: Session, case: Script, scripts: Sequence[ScriptRun]) -> None:
    """Run the script once for each instrument, and print the errors of runs that fail."""
    for script in scripts:
        outcome = session.measure(case, [script])
        if outcome.error:
            hint = _misplaced(script, outcome.message)
            print(f"dpbench exec: {outcome.message}{hint}", file=sys.stderr)
            if outcome.error == ScriptInterrupted.__name__:
                raise KeyboardInterrupt  # instead of running the script again
        elif isinstance(script.instrument, TorchProfiler):
            folder = own_folder(script.instrument.directory.absolute() / case.file_name)
            steps = {"active": 1, "repeat": len({row.repeat for row in outcome.rows})}
            write_report(folder, outcome.rows, steps, folder)
            report = f"{folder / REPORT}; the same folder has a trace of each step"
            session.notes.append(f"operators by time and memory: {report}")


def _script_runs(
    options: argparse.Namespace, settings: Settings, instruments: Sequence[Instrument]
) -> tuple[Script, list[ScriptRun]]:
    """Return the script as the subject to measure, and a run of the script for each instrument."""
    program = options.module or options.program
    if not program:
        raise ConfigurationError("name a script, or a module with -m, before its options")
    # Scripts are told apart by their paths, relative to the folder that contains the storage.
    path = os.path.relpath(program[0].removesuffix(".py"), settings.storage.parent)
    name = options.name or (program[0] if options.module else path)
    case = Script(name, options.batch_size)
    scripts = [
        ScriptRun(
            instrument,
            tuple(program),
            bool(options.module),
            skip=options.skip,
            steps=options.steps,
            go_on=options.go_on,
            timeout=options.end_after,
        )
        for instrument in instruments
    ]
    for script in scripts:
        script.check()
    return case, scripts


def _standards(
    named: str, run: Run, case: Script, sources: Sequence[tuple[str, str]]
) -> list[Outcome]:
    """Return the outcomes of a saved run's script, with only the rows from ``sources``.

    Args:
        named: the value of --baseline.
        run: the saved run.
        case: the script that this session measures.
        sources: pairs of a device and the name of an instrument.

    Raises:
        ConfigurationError: the run has no row of ``sources``, it has several scripts, its script
            has the name of ``case``, or its batch size is not the batch size of ``case``.
    """
    scripts = [o for o in run.outcomes if isinstance(o.case, Script)]
    scripts = [o for o in scripts if o.case.trainer != run.baseline]
    shared = [
        replace(outcome, rows=tuple(rows))
        for outcome in scripts
        if (rows := [r for r in outcome.rows if (r.device, r.instrument) in sources])
    ]
    if len(names := dict.fromkeys(outcome.case.trainer for outcome in scripts)) != 1:
        raise ConfigurationError(
            f"--baseline {named}: {run.path} has {'the scripts ' * bool(names)}"
            f"{', '.join(names) or 'no script'}; name a run of one script, which dpbench exec "
            f"--save NAME SCRIPT saves"
        )
    if not shared:
        present = ", ".join(f"{device} by {name}" for device, name in run.sources) or "nothing"
        needed = " or ".join(f"{device} by {name}" for device, name in sources)
        raise ConfigurationError(
            f"--baseline {named}: {run.path} has no steps of a script that were measured on "
            f"{needed}; it has measurements on {present}"
        )
    if shared[0].case.trainer == case.trainer:
        raise ConfigurationError(
            f"--baseline {named}: its script is also called {case.trainer}; name this one with "
            f"--name"
        )
    if (size := shared[0].case.batch_size) != case.batch_size:
        raise ConfigurationError(
            f"--baseline {named}: the batch size of {shared[0].case.id} is {size or 'not given'}, "
            f"here it is {case.batch_size or 'not given'}; pass the same --batch-size to both runs"
        )
    return shared


def _other_name(reference: Run, case: Script) -> Iterator[str]:
    """Yield a note if a reference has scripts, but none with the name of this script."""
    scripts = dict.fromkeys(
        o.case.trainer for o in reference.outcomes if isinstance(o.case, Script)
    )
    if scripts and case.trainer not in scripts:
        names = " and ".join(scripts)
        yield f"{reference.name} has {names}: if {case.trainer} is the same, name it with --name"


def _baseline_notes(baseline: Run, here: Run) -> Iterator[str]:
    """Yield notes that name the baseline's run and how it differs, apart from its script."""
    yield f"baseline: {baseline.name}, {baseline.path}"
    differences = [
        difference
        for difference in differing_conditions(baseline, here)
        if "'s program " not in difference
    ]
    if differences:
        yield f"differences from the baseline: {'; '.join(differences)}"
