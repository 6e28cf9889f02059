"""Measures a grid on a cluster by submitit: each shard is a job, which acts as ``dpbench run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dpbench.commands.shards import Shard, cells
from dpbench.core import gpu
from dpbench.core.errors import ConfigurationError
from dpbench.core.files import Locked, check_writable, locked, write_text
from dpbench.core.settings import Settings
from dpbench.results.conditions import environment, merge_interrupted, new_run
from dpbench.results.outcome import COMPLETE, INTERRUPTED, document, document_text
from dpbench.results.run import Run

REFUSED = ("shard", "autosave", "compare", "compare_fail")
"""Options of ``dpbench run`` that --cluster refuses."""

MINUTES = 24 * 60
"""The default time limit of a job. Submitit's own is 5 minutes."""

ASKED = "asked.json"
"""The file in --cluster-dir that says what the shards are parts of: grid, settings, environment."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options of ``dpbench run`` for a cluster."""
    parser.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="submit each shard of the grid as a job, and wait; local starts processes here",
    )
    parser.add_argument(
        "--shards", type=int, default=2, metavar="N", help="number of jobs (default %(default)s)"
    )
    parser.add_argument(
        "--cluster-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of submitit, such as slurm_partition=gpu; repeatable",
    )
    parser.add_argument(
        "--cluster-dir",
        type=Path,
        default=Path("dpbench_shards"),
        metavar="DIR",
        help="where jobs write logs and runs; --resume keeps the shards that are complete there "
        "(default %(default)s)",
    )


def run(options: argparse.Namespace, measured: Callable[[Settings], int]) -> int:
    """Submit the shards as jobs, wait, and merge their runs."""
    from dpbench.commands.merge import finish  # loads pandas

    settings, directory = _checked(options), options.cluster_dir
    shards = [Shard(number, options.shards) for number in range(1, options.shards + 1)]
    files = {shard: directory / f"shard-{shard.number}-of-{shard.of}.json" for shard in shards}
    check_writable(directory)
    try:
        with locked(directory / ".lock", wait=False):
            resumes = _begin(settings, directory / ASKED, options.shards)
            wanted = {s: path for s, path in files.items() if not (resumes and _complete(path))}
            jobs = _submit(options, settings, wanted, measured) if wanted else {}
            _wait(jobs)
    except Locked as error:
        raise ConfigurationError(f"{directory} is in use: name another --cluster-dir") from error
    absent = {shard: job for shard, job in jobs.items() if not files[shard].exists()}
    problems = [f"shard {s} has no run; see {job.paths.stderr}" for s, job in absent.items()]
    if len(absent) == len(files):
        raise ConfigurationError("; ".join(problems))
    runs = [Run.load(path) for shard, path in files.items() if shard not in absent]
    return finish(runs, settings, "run", problems)


def _checked(options: argparse.Namespace) -> Settings:
    """The settings. Those that make no sense on a cluster are refused."""
    for name in REFUSED:
        if getattr(options, name):
            raise ConfigurationError(f"--cluster does not take --{name.replace('_', '-')}")
    settings = Settings.read(options)
    if not settings.instrument:  # this machine's default may differ from the others'
        raise ConfigurationError(
            "--cluster measures on other machines: name what measures there, such as --instrument "
            "cupti, or --instrument logical without a GPU"
        )
    there = len(cells(settings.chosen_grid().cases()))
    if not 1 <= options.shards <= there:
        raise ConfigurationError(f"--shards must be from 1 to {there}, the cells of the grid")
    settings.check()
    return settings


def _begin(settings: Settings, file: Path, shards: int) -> bool:
    """Write what the shards are parts of into a file; return whether complete shards are kept.

    Raises:
        ConfigurationError: shards are to be kept, and are parts of something else.
    """
    asked = new_run(
        environment(project=settings.directory.absolute()), settings.chosen_grid().as_json()
    )
    measuring = {name: str(value) for name, value in vars(_of_a_job(settings)).items()}
    chosen = {"cluster": {"shards": shards, **measuring}}
    session = asked.session | {"settings": chosen, "status": INTERRUPTED}
    asked = Run.of("this session", (), asked.environment, session)
    resumes = settings.resume and file.exists()
    if resumes:
        merge_interrupted(Run.load(file), asked)
    empty = document((), asked.environment, session)
    write_text(file, document_text(empty))
    return resumes


def _submit(
    options: argparse.Namespace,
    settings: Settings,
    files: Mapping[Shard, Path],
    measured: Callable[[Settings], int],
) -> dict[Shard, Any]:
    """Submit a job for each shard, which measures it as the settings say and writes its file."""
    try:
        import submitit
    except ImportError as error:
        raise ConfigurationError("--cluster needs submitit: pip install submitit") from error
    # Otherwise submitit would hide the GPUs from its processes on this machine.
    own = {"gpus_per_node": len(gpu.visible_gpus())} if options.cluster == "local" else {}
    given = {"name": "dpbench", "timeout_min": MINUTES, **own, **_parameters(options.cluster_set)}
    try:
        executor = submitit.AutoExecutor(options.cluster_dir / "jobs", cluster=options.cluster)
        executor.update_parameters(**given)
        for path in files.values():
            path.unlink(missing_ok=True)
        shards = [_of_a_job(settings, str(s), path.absolute()) for s, path in files.items()]
        jobs = executor.map_array(partial(_job, measured), shards)
    except (NameError, TypeError, RuntimeError, OSError) as error:
        raise ConfigurationError(f"cluster {options.cluster}: {error}") from error
    return dict(zip(files, jobs, strict=True))


def _parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Submitit's parameters from ``NAME=VALUE``; a value of digits is a number."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigurationError(f"--cluster-set takes NAME=VALUE, not {text!r}")
        given[name] = int(value) if value.isdecimal() else value
    return given


def _wait(jobs: Mapping[Shard, Any]) -> None:
    """Wait for all jobs; cancel them if interrupted."""
    try:
        for shard, job in jobs.items():
            job.wait()
            print(f"dpbench run: shard {shard}: {job.state.lower()}", file=sys.stderr)
    except BaseException:
        for job in jobs.values():
            job.cancel()
        raise


def _complete(path: Path) -> bool:
    with suppress(ConfigurationError):  # a damaged file is measured again
        return path.exists() and Run.load(path).status == COMPLETE
    return False


def _of_a_job(settings: Settings, shard: str | None = None, file: Path | None = None) -> Settings:
    """The settings with which a job measures a shard and writes nothing but its file."""
    unwritten: dict[str, Any] = dict.fromkeys(("markdown", "csv", "html", "save"))
    unwritten |= {"output": (), "resume": False}
    return replace(settings, shard=shard, json=file, **unwritten)


def _job(measured: Callable[[Settings], int], settings: Settings) -> int:
    """Measure in a process of the cluster, which finds the user's modules as this one does."""
    sys.path.append(str(Path.cwd()))
    return measured(settings)
