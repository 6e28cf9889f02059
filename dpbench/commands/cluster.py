"""Measures a grid on a cluster with submitit. Each shard is a job that acts as ``dpbench run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dpbench.commands.merge import Shard, cells, finish
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
"""Default time limit of a job, in minutes. Submitit's own default is 5 minutes."""

PLAN = "asked.json"
"""A file in --cluster-dir with the grid, settings and environment of the shards."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the options of ``dpbench run`` for a cluster."""
    parser.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="submit each shard of the grid as a job, and wait for the jobs; local starts "
        "processes on this machine",
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
        help="folder for the logs and runs of jobs; --resume keeps its complete shards (default "
        "%(default)s)",
    )


def run(options: argparse.Namespace, measure_grid: Callable[[Settings], int]) -> int:
    """Submit the shards as jobs, wait for the jobs, and merge the runs."""
    settings, directory = _checked_settings(options), options.cluster_dir
    shards = [Shard(number, options.shards) for number in range(1, options.shards + 1)]
    files = {shard: directory / f"shard-{shard.number}-of-{shard.total}.json" for shard in shards}
    check_writable(directory)
    try:
        with locked(directory / ".lock", wait=False):
            resumes = _write_plan(settings, directory / PLAN, options.shards)
            wanted = {s: path for s, path in files.items() if not (resumes and _complete(path))}
            jobs = _submit(options, settings, wanted, measure_grid) if wanted else {}
            _wait_for(jobs)
    except Locked as error:
        raise ConfigurationError(
            f"another process uses {directory}: name another --cluster-dir"
        ) from error
    absent = {shard: job for shard, job in jobs.items() if not files[shard].exists()}
    problems = [f"shard {s} has no run; see {job.paths.stderr}" for s, job in absent.items()]
    if len(absent) == len(files):
        raise ConfigurationError("; ".join(problems))
    runs = [Run.load(path) for shard, path in files.items() if shard not in absent]
    return finish(runs, settings, "run", problems)


def _checked_settings(options: argparse.Namespace) -> Settings:
    """Return the settings. Refuse options that make no sense on a cluster."""
    for name in REFUSED:
        if getattr(options, name):
            raise ConfigurationError(f"--cluster does not take --{name.replace('_', '-')}")
    settings = Settings.read(options)
    if not settings.instrument:  # the default differs between machines
        raise ConfigurationError(
            "--cluster measures on other machines, so name an instrument: --instrument cupti, or "
            "--instrument logical without a GPU"
        )
    number = len(cells(settings.chosen_grid().cases()))
    if not 1 <= options.shards <= number:
        raise ConfigurationError(
            f"--shards must be from 1 to {number}, the number of cells of the grid"
        )
    settings.check()
    return settings


def _write_plan(settings: Settings, file: Path, shards: int) -> bool:
    """Write the grid, settings and environment to a file. Return True if complete shards are kept.

    Raises:
        ConfigurationError: shards are to be kept, but their grid, settings or environment differ.
    """
    plan = new_run(
        environment(project=settings.directory.absolute()), settings.chosen_grid().as_json()
    )
    measuring = {name: str(value) for name, value in vars(_job_settings(settings)).items()}
    chosen = {"cluster": {"shards": shards, **measuring}}
    session = plan.session | {"settings": chosen, "status": INTERRUPTED}
    plan = Run.of("this session", (), plan.environment, session)
    resumes = settings.resume and file.exists()
    if resumes:
        merge_interrupted(Run.load(file), plan)
    empty = document((), plan.environment, session)
    write_text(file, document_text(empty))
    return resumes


def _submit(
    options: argparse.Namespace,
    settings: Settings,
    files: Mapping[Shard, Path],
    measure_grid: Callable[[Settings], int],
) -> dict[Shard, Any]:
    """Submit a job for each shard. The job measures the shard and writes its file."""
    try:
        import submitit
    except ImportError as error:
        raise ConfigurationError(
            "--cluster needs the package submitit: pip install submitit"
        ) from error
    # Without this parameter, submitit hides the GPUs from processes on this machine.
    own = {"gpus_per_node": len(gpu.visible_gpus())} if options.cluster == "local" else {}
    given = {"name": "dpbench", "timeout_min": MINUTES, **own, **_parameters(options.cluster_set)}
    try:
        executor = submitit.AutoExecutor(options.cluster_dir / "jobs", cluster=options.cluster)
        executor.update_parameters(**given)
        for path in files.values():
            path.unlink(missing_ok=True)
        shards = [_job_settings(settings, str(s), path.absolute()) for s, path in files.items()]
        jobs = executor.map_array(partial(_job, measure_grid), shards)
    except (NameError, TypeError, RuntimeError, OSError) as error:
        raise ConfigurationError(f"cluster {options.cluster}: {error}") from error
    return dict(zip(files, jobs, strict=True))


def _parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Parse parameters of submitit, ``NAME=VALUE``. A value with only digits becomes a number."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigurationError(f"--cluster-set takes NAME=VALUE, not {text!r}")
        given[name] = int(value) if value.isdecimal() else value
    return given


def _wait_for(jobs: Mapping[Shard, Any]) -> None:
    """Wait for all jobs. Cancel the jobs if this process is interrupted."""
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


def _job_settings(
    settings: Settings, shard: str | None = None, file: Path | None = None
) -> Settings:
    """Return the settings of a job. The job measures a shard and writes only the shard's file."""
    unwritten: dict[str, Any] = dict.fromkeys(("markdown", "csv", "html", "save"))
    unwritten |= {"output": (), "resume": False}
    return replace(settings, shard=shard, json=file, **unwritten)


def _job(measure_grid: Callable[[Settings], int], settings: Settings) -> int:
    """Measure in a process of the cluster, with the user's modules importable."""
    sys.path.append(str(Path.cwd()))
    return measure_grid(settings)
