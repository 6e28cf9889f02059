"""A project of a user's own, with a GPU that is replayed."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pandas  # noqa: F401  # before pytester, which forgets what its test imports
import pytest

from dpbench import MODELS, TRAINERS, WORKLOADS
from dpbench.instruments import INSTRUMENTS
from dpbench.launch import case_process
from tests.programs import program

REPLAYS = {name: Path(__file__).parents[1] / f"replay_{name}.py" for name in ("ncu", "step")}

FAKES = Path(__file__).parents[1] / "fakes"
"""Where a process finds a GPU that is none."""

CONFTEST = """
import os, pathlib, sys
import dpbench.launch.case_process

class Interpreter:
    executable = str(pathlib.Path(__file__).with_name("step"))

    def __getattr__(self, name):
        return getattr(sys, name)

dpbench.launch.case_process.sys = Interpreter()
"""

SUITE = """
import pytest
pytestmark = pytest.mark.gpu

def test_more_than_standard(dpbench_case, ncu):
    measured = ncu(dpbench_case)
    assert measured.ratio_to(ncu(dpbench_case.baseline), "global_load_bytes") >= 1

def test_dram(dpbench_case, ncu):
    assert ncu(dpbench_case).dram_bytes > 0
"""

RunSuite = Callable[..., pytest.RunResult]


class Imports:
    """What sessions have imported in this process; pytester forgets it, after each and at last.

    Libraries such as NumPy and torch cannot be imported a second time.
    """

    def __init__(self) -> None:
        self.modules: dict[str, ModuleType] = {}

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        own = f"{config.rootpath}{os.sep}"  # a project's own modules are other ones in the next
        for name, module in sys.modules.items():
            if not str(getattr(module, "__file__", None)).startswith(own):
                self.modules[name] = module

    def restore(self) -> None:
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)


@pytest.fixture(autouse=True)
def imports() -> Iterator[Imports]:
    """Ends after ``pytester``, because it starts first."""
    kept = Imports()
    yield kept
    kept.restore()


@pytest.fixture
def temporary(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the project's processes put their temporary files."""
    directory = pytester.mkdir("temporary")
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))  # this process has read TMPDIR
    return directory


@pytest.fixture
def project(
    pytester: pytest.Pytester,
    temporary: Path,
    imports: Imports,
    monkeypatch: pytest.MonkeyPatch,
) -> RunSuite:
    """Run pytest in a user's project; ``replayed`` cases are tiny, standard and dpsgd.

    The session runs in this process, which costs a tenth of a new one, unless it has workers or
    is to be ``alone``.
    """
    for name, replay in REPLAYS.items():
        program(pytester.path / name, replay)
    replay_gpus(monkeypatch)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_suite=SUITE)
    pytester.makefile(
        ".toml",
        cell="trainer = ['standard', 'dpsgd']\nbatch_size = 4\nseq_len = 64\nmodel_size = 'tiny'",
    )

    def run(*arguments: str, replayed: bool = True, alone: bool = False) -> pytest.RunResult:
        measured = ["--ncu", "--ncu-path=./ncu", "--dpbench-no-timing"] if replayed else []
        grid = [] if any("--dpbench-grid" in a for a in arguments) else ["--dpbench-grid=cell.toml"]
        everything = [*WITHOUT, *grid, *measured, *arguments]
        if alone:
            return pytester.runpytest_subprocess(*everything)
        return in_this_process(pytester, everything, imports)

    return run


@pytest.fixture
def refused(project: RunSuite) -> Callable[..., str]:
    """The one line with which a session refuses to begin."""

    def run(*arguments: str) -> str:
        result = project(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        [line] = [line for line in result.stderr.lines if line]
        assert line.startswith("ERROR: dpbench: ")
        return line

    return run


def replay_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be GPUs for this process and for those that it starts."""
    spec = spec_from_file_location("pynvml", FAKES / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    fake = module_from_spec(spec)
    spec.loader.exec_module(fake)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    path = [str(FAKES), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


WITHOUT = [
    *("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"),
    *("-p", "no:randomly", "-p", "no:syrupy", "-p", "no:unraisableexception"),
]
"""Pytest plugins that a project does not need: loading Hypothesis or anyio takes long, of two that
may be installed one changes the order of tests and one the exit code, and the last looks at all
objects of this process at the end of a session."""


def in_this_process(
    pytester: pytest.Pytester, arguments: list[str], imports: Imports
) -> pytest.RunResult:
    """Run a session and leave this process as it was: registries, signal handler."""
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case_process, "sys", sys)
        for registry in (TRAINERS, MODELS, WORKLOADS, INSTRUMENTS):
            patch.setattr(registry, "_targets", dict(registry._targets))
        try:
            return pytester.runpytest_inprocess(
                *arguments, plugins=[imports], no_reraise_ctrlc=True
            )
        finally:
            signal.signal(signal.SIGTERM, handler)
            imports.restore()
