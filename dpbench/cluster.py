"""A grid on a cluster, by submitit: one job a shard, each a ``dpbench run`` of its own."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from dpbench import gpu
from dpbench.errors import ConfigurationError
from dpbench.files import Locked, check_writable, locked, write_text
from dpbench.results.conditions import begun, environment, premise_differences
from dpbench.results.outcome import COMPLETE, document, document_text
from dpbench.results.run import Run
from dpbench.results.shards import MACHINES_MAY_DIFFER, Shard, cells
from dpbench.settings import Settings, declare

REFUSED = ("shard", "autosave", "compare", "compare_fail")
"""Options of ``dpbench run`` that belong to one session."""

MINUTES = 24 * 60
"""How long a job may take, unless it is said: submitit's default is 5."""

ASKED = "asked.json"
"""In the directory of shards, what they are of."""


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare what ``dpbench run`` takes for a cluster."""
    parser.add_argument(
        "--cluster",
        choices=("slurm", "local"),
        help="submit the grid in shards and wait; local starts processes of this machine",
    )
    parser.add_argument("--shards", type=int, default=2, metavar="N", help="(default %(default)s)")
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
        help="where jobs log and write; with --resume, shards complete there are not run again "
        "(default %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Submit the shards, wait, and join what they have measured."""
    from dpbench.commands.merge import WRITTEN, asked_for, finish  # loads pandas

    for name in REFUSED:
        if getattr(options, name):
            raise ConfigurationError(f"--cluster does not take --{name.replace('_', '-')}")
    settings = Settings.read(options)
    if not settings.instrument:  # this machine's default need not be the others'
        raise ConfigurationError(
            "--cluster measures on other machines: name what measures there, such as --instrument "
            "cupti, or --instrument logical without a GPU"
        )
    grid = settings.chosen_grid()
    there = len(cells(grid.cases()))
    if not 1 <= options.shards <= there:
        raise ConfigurationError(f"--shards must be from 1 to {there}, the cells of the grid")
    asked_for(options)  # before a job is submitted
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(own)
    for name in (*WRITTEN, "resume"):
        declare(own.add_argument, name)
    words = own.parse_known_args(options.words)[1]
    given, directory = parameters(options.cluster_set), options.cluster_dir
    if options.cluster == "local":  # submitit would hide the GPUs from its processes
        given = {"gpus_per_node": len(gpu.visible_gpus()), **given}
    check_writable(directory)
    with _alone(directory):
        described = begun(environment(project=settings.directory.absolute()), grid)
        chosen = {"shards": options.shards, "options": shlex.join(words)}
        session = described.session | {"settings": {"cluster": chosen}}
        asked = Run.of("this session", (), described.environment, session)
        resume = options.resume and _resumes(directory / ASKED, asked)
        runs, problems = run_shards(
            options.cluster, options.shards, words, directory, given, asked, resume=resume
        )
    if not runs:
        raise ConfigurationError("; ".join(problems))
    return finish(runs, options, "run", problems)


def parameters(texts: Sequence[str]) -> dict[str, Any]:
    """Submitit's parameters from ``NAME=VALUE``; a value of digits is a number."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigurationError(f"a parameter of the cluster is NAME=VALUE, not {text!r}")
        given[name] = int(value) if value.isdecimal() else value
    return given


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Refuse a directory that another session has its shards in."""
    try:
        with locked(directory / ".lock", wait=False):
            yield
    except Locked as error:
        raise ConfigurationError(f"{directory} is in use: name another --cluster-dir") from error


def _resumes(file: Path, asked: Run) -> bool:
    """Whether a directory's shards are of what is asked for; if of something else, refused."""
    if not file.exists():
        return False
    different = premise_differences(Run.load(file), asked, resumed=True)
    if different := [text for text in different if not text.startswith(MACHINES_MAY_DIFFER)]:
        raise ConfigurationError(
            f"the shards in {file.parent} cannot be resumed, for this session differs: "
            f"{'; '.join(different)}"
        )
    return True


def run_shards(
    cluster: str,
    number: int,
    words: Sequence[str],
    directory: Path,
    given: Mapping[str, Any],
    asked: Run,
    *,
    resume: bool = False,
) -> tuple[list[Run], list[str]]:
    """Submit a job for each shard and wait for all of them.

    Args:
        cluster: ``slurm``, or ``local`` for processes of this machine.
        number: how many shards.
        words: the command line of ``dpbench run`` that each job gets, but for its shard.
        directory: where jobs log and write their runs; all machines must see it.
        given: parameters of submitit, such as ``slurm_partition``.
        asked: the session, without cases, as the directory shall describe it.
        resume: whether shards that the directory has complete are taken as they are.

    Returns:
        The runs that there are, and why others are not.
    """
    try:
        import submitit
    except ImportError as error:
        raise ConfigurationError("--cluster needs submitit: pip install 'dpbench[cluster]'") from (
            error
        )
    files = {
        shard: directory / f"shard-{shard.number}-of-{shard.of}.json"
        for shard in (Shard(each, number) for each in range(1, number + 1))
    }
    wanted = [s for s, path in files.items() if not (resume and _complete(path))]
    try:
        executor = submitit.AutoExecutor(folder=directory / "jobs", cluster=cluster)
        executor.update_parameters(**{"name": "dpbench", "timeout_min": MINUTES, **given})
        for shard in wanted:
            files[shard].unlink(missing_ok=True)
        empty = document((), asked.environment, asked.session, derive=False)
        write_text(directory / ASKED, document_text(empty))
        with executor.batch() if wanted else nullcontext():
            jobs = {
                shard: executor.submit(subprocess.run, _command(words, shard, files[shard]))
                for shard in wanted
            }
    except (NameError, TypeError, RuntimeError, OSError) as error:
        raise ConfigurationError(f"cluster {cluster}: {error}") from error
    try:
        for shard, job in jobs.items():
            job.wait()
            print(f"dpbench run: shard {shard}: {job.state.lower()}", file=sys.stderr)
    except BaseException:
        for job in jobs.values():
            job.cancel()
        raise
    absent = {shard: job for shard, job in jobs.items() if not files[shard].exists()}
    problems = [f"shard {s} has no run; see {job.paths.stderr}" for s, job in absent.items()]
    return [Run.load(path) for shard, path in files.items() if shard not in absent], problems


def _complete(path: Path) -> bool:
    with suppress(ConfigurationError):  # damaged, so it is measured again
        return path.exists() and Run.load_head(path).status == COMPLETE
    return False


def _command(words: Sequence[str], shard: Shard, path: Path) -> list[str]:
    own = ["--shard", str(shard), "--json", str(path.absolute())]
    return [sys.executable, "-m", "dpbench", "run", *words, *own]
