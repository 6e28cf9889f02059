"""Apply each change that `docs/upstream` proposes to a copy of Opacus, and try the copies.

    python bench/upstream.py kept unused

takes the diffs from ``docs/upstream/kept.md`` and ``unused.md``. For flat and for ghost clipping,
each copy trains three steps with noise. The script prints the relative difference of their total
update from that with the installed Opacus, and the logical GB of a step of the 1b model at 8 x 256.
Options:

    python bench/upstream.py --tests
    python bench/upstream.py --gradients
    python bench/upstream.py --layers
    python bench/upstream.py --norms
    python bench/upstream.py all --dpbench run --trainer dpsgd --instrument cupti

- ``--tests`` runs the tests in Opacus's wheel on each copy, except the tests of Opacus's
  accountants. It prints how many tests fail with the copy and pass with the installed Opacus.
- ``--gradients`` runs only the tests in `READ_GRADIENTS`.
- ``--layers`` counts the single layers of the grid `opacus-layers` at the smallest batch. It prints
  by how many percent each diff changes bytes and peaks of memory.
- ``--norms`` calls the function ``update`` of ``docs/upstream/norms.md`` for three shapes and three
  seeds, and prints the largest norm of an update for each dtype and offset.
- ``--dpbench`` runs a command of dpbench with the first page's copy.

Opacus's tests import torchvision for random images and three models. Without torchvision, some
tests fail with every copy and with the installed Opacus.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

import torch

from dpbench import Case, Grid, TrainerBase
from dpbench.child.build import build, pick_device
from dpbench.instruments.logical.logical import Logical
from dpbench.training.parallel import gathered

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/upstream"
TRAINERS = ("dpsgd", "dpsgd_ghost")
BEFORE_ALL = ("kept", "unused", "unused-ghost", "taken", "noise", "norms", "strided")
SHARDED = ("reductions", "shards")
"""Pages with changes for FSDP2, which `bench/upstream_ranks.py` tries over two ranks."""

READ_GRADIENTS = (
    "opacus/tests/grad_samples/conv2d_test.py::Conv2d_test"
    "::test_asymetric_dilation_and_kernel_size",
    "opacus/tests/grad_sample_module_fast_gradient_clipping_test.py",
    "opacus/tests/grad_sample_hooks_fast_gradient_clipping_test.py",
    "opacus/tests/grad_sample_module_test.py",
)
"""Tests of Opacus that read per-sample gradients, norms of gradients or sums of gradients."""

CONFTEST = """
from hypothesis import settings

settings.register_profile("few", max_examples=5)
settings.load_profile("few")
"""
"""A ``conftest.py`` with which Opacus's tests try 5 examples of a property instead of 100."""


def names() -> list[str]:
    """Return the names of the pages of docs/upstream that have a diff."""
    pages = sorted(PAGES.glob("*.md"))
    return [page.stem for page in pages if "```diff" in page.read_text(encoding="utf-8")]


def blocks(name: str, language: str) -> list[str]:
    """Return the fenced blocks in a language, such as ``diff``, on a page of docs/upstream."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)


def patched(name: str, folder: Path) -> None:
    """Copy the installed Opacus into a folder and apply a page's diffs, or none for ``""``.

    The diff of the page ``all`` is applied after those of the pages `BEFORE_ALL`.

    Raises:
        CalledProcessError: a diff does not apply.
    """
    source = Path(str(find_spec("opacus").origin)).parent  # type: ignore[union-attr]
    shutil.copytree(source, folder / "opacus", ignore=shutil.ignore_patterns("__pycache__"))
    for page in (*BEFORE_ALL, name) if name == "all" else (name,) if name else ():
        for diff in blocks(page, "diff"):
            patch = ["patch", "-p1", "--quiet", "--fuzz=0", "--no-backup-if-mismatch"]
            subprocess.run(patch, input=diff, text=True, cwd=folder, check=True)


# --- in a process that imports a copy -------------------------------------------------------------


def with_copy(name: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in a process that imports a patched copy of Opacus."""
    with TemporaryDirectory() as folder:
        patched(name, Path(folder))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        return subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            env=environment,
            text=True,
            **options,
        )


def measured(name: str, what: str, script: str = __file__) -> dict[str, Any]:
    """Run a script with ``--here WHAT`` and a patched copy. Return the JSON in its last line."""
    done = with_copy(name, script, "--here", what, check=True, stdout=subprocess.PIPE)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def trained(case: Case, **options: Any) -> tuple[TrainerBase, torch.Tensor]:
    """Train three steps on a CPU. Return the trainer, and the parameters' change over all steps."""
    warnings.simplefilter("ignore")
    trainer, batches = build(
        case, pick_device("cpu"), 3, learning_rate=1.0, max_grad_norm=0.3, **options
    )

    def parameters() -> torch.Tensor:
        return torch.cat([gathered(p).detach().flatten() for p in trainer.model.parameters()])

    start = parameters()
    for batch in batches:
        trainer.train_step(batch)
    return trainer, parameters() - start


def difference(original: Sequence[float], changed: Sequence[float]) -> float:
    """Return the norm of ``changed - original``, relative to the norm of ``original``."""
    return math.dist(original, changed) / math.hypot(*original)


def measure_updates() -> dict[str, Any]:
    """Return, by trainer, the update of three steps and a step's logical bytes at fp32 and bf16."""
    from tests.logical.layers import count_by_layers

    found = {}
    for trainer in TRAINERS:
        cases = (
            Case(trainer, batch_size=8, seq_len=256, model_size="1b", precision=precision)
            for precision in ("fp32", "bf16")
        )
        _, update = trained(Case(trainer, 4, 12, model_size="tiny"), noise_multiplier=0.01)
        moved = [count_by_layers(case).logical_bytes for case in cases]
        found[trainer] = {"update": update.tolist(), "bytes": moved}
    return found


def measure_layers() -> dict[str, Any]:
    """Return the logical bytes and the peak memory of a step, by trainer and layer."""
    grid = Grid.named("opacus-layers")
    found = {}
    for case in grid.with_axes(batch_size=grid.values("batch_size")[:1]).cases():
        if case.trainer != grid.baseline:
            rows = {r.metric: r.value for r in Logical().count(case).rows if r.phase == "step"}
            moved = rows["logical_read_bytes"] + rows["logical_write_bytes"]
            layer = case.set.removeprefix("layer=")
            found[f"{case.trainer} {layer}"] = [moved, rows["peak_memory_bytes"]]
    return found


def measure_norms() -> dict[str, Any]:
    """Return the largest norms of updates by ghost and by fast clipping, for dtypes and offsets."""
    page: dict[str, Any] = {}
    exec(blocks("norms", "python")[0], page)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        for offset in (0, 30, 100, 1000, 10000):
            found[f"{str(dtype).removeprefix('torch.')} {offset}"] = [
                max(
                    page["update"](*shape, offset, dtype, ghost, seed)
                    for shape in ((128, 32), (16, 256), (512, 128))
                    for seed in range(3)
                )
                for ghost in (True, False)
            ]
    return found


# --- printing -------------------------------------------------------------------------------------


def print_updates(given: Sequence[str]) -> None:
    """Print how far updates differ from the installed Opacus's updates, and the GB of a step."""
    original = measured("", "updates")
    print(f"{'change':14}{'trainer':14}{'update differs by':>18}{'fp32 GB':>10}{'bf16 GB':>10}")
    for name in ["", *given]:
        changed = measured(name, "updates") if name else original
        for trainer in TRAINERS:
            far = difference(original[trainer]["update"], changed[trainer]["update"])
            fp32, bf16 = (moved / 1e9 for moved in changed[trainer]["bytes"])
            print(f"{name or 'Opacus':14}{trainer:14}{far:18.1e}{fp32:10.1f}{bf16:10.1f}")


def print_layers(given: Sequence[str]) -> None:
    """Print by how many percent each change alters the bytes and peak memory of single layers."""
    original = measured("", "layers")
    trainers, layers = (dict.fromkeys(part) for part in zip(*map(str.split, original), strict=True))
    print(f"{'% of':48}" + "".join(f"{layer:>13}" for layer in layers))
    for name in given:
        changed = measured(name, "layers")
        for trainer in trainers:
            keys = [f"{trainer} {layer}" for layer in layers]
            for n, what in enumerate(("bytes", "peak")):
                shares = (100 * (changed[key][n] / original[key][n] - 1) for key in keys)
                cells = "".join(f"{share:13.1f}" for share in shares)
                print(f"{f'{name} {trainer} {what}':48}{cells}", flush=True)


def print_norms() -> None:
    """Print norms of updates without noise, clipped to a threshold of 1, by dtype and offset."""
    original, changed = (measured(name, "norms") for name in ("", "norms"))
    print(f"{'type, offset':20}{'ghost':>12}{'fgc':>12}{'ghost with it':>16}{'fgc with it':>14}")
    for key, (ghost, fgc) in original.items():
        print(f"{key:20}{ghost:12.4f}{fgc:12.4f}{changed[key][0]:16.4f}{changed[key][1]:14.4f}")


def opacus_tests(name: str, tests: Sequence[str]) -> dict[str, str]:
    """Run tests of Opacus on a patched copy.

    Returns:
        ``passed``, ``skipped``, ``failure`` or ``error`` by test.
    """
    with TemporaryDirectory() as folder:
        patched(name, Path(folder))
        (Path(folder) / "conftest.py").write_text(CONFTEST)
        isolated = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
        options = f"-q --ignore-glob=*account* -c {os.devnull} -p no:cacheprovider".split()
        options += ["--rootdir", folder, "--junitxml", "tests.xml"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | isolated,
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):  # 0: all passed, 1: a test failed
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        cases = list(ElementTree.parse(Path(folder) / "tests.xml").iter("testcase"))
    outcomes = ("failure", "error", "skipped")
    return {
        f"{case.get('classname')}.{case.get('name')}": next(
            (child.tag for child in case if child.tag in outcomes), "passed"
        )
        for case in cases
    }


def print_tests(given: Sequence[str], tests: Sequence[str]) -> int:
    """Print outcomes of Opacus's tests. Return the number of failures that only a change causes."""
    print(f"{'change':14}{'passed':>8}{'skipped':>9}{'failed':>8}{'of them only with it':>22}")
    original = opacus_tests("", tests)
    lost = 0
    for name in ["", *given]:
        found = opacus_tests(name, tests) if name else original
        outcomes = list(found.values())
        passed, skipped = (outcomes.count(outcome) for outcome in ("passed", "skipped"))
        worse = [t for t in original if original[t] == "passed" and found.get(t) != "passed"]
        failed = len(outcomes) - passed - skipped
        line = f"{name or 'Opacus':14}{passed:8}{skipped:9}{failed:8}{len(worse):22}"
        print(" ".join([line, *worse]), flush=True)
        lost += len(worse)
    return lost


def parsed(about: str, *flags: str) -> argparse.Namespace:
    """Read the command line. Users do not set the option ``--here``, which `measured` sets."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("name", nargs="*", help="page of docs/upstream; all pages by default")
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="see the docstring of this file")
    parser.add_argument("--dpbench", nargs=argparse.REMAINDER, help="words of a dpbench command")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Try the changes that the command line names."""
    options = parsed(__doc__ or "", "--tests", "--gradients", "--layers", "--norms")
    if options.here:
        print(json.dumps(globals()[f"measure_{options.here}"]()))
    elif options.dpbench:
        return with_copy(options.name[0], "-m", "dpbench", *options.dpbench).returncode
    elif options.tests or options.gradients:
        tests = ["opacus/tests"] if options.tests else READ_GRADIENTS
        return min(print_tests(options.name or names(), tests), 1)
    elif options.layers:
        print_layers(options.name or names())
    elif options.norms:
        print_norms()
    else:
        print_updates(options.name or [name for name in names() if name not in SHARDED])
    return 0


if __name__ == "__main__":
    sys.exit(main())
