"""A change to Opacus as `docs/upstream` proposes it: applied to a copy, tried and counted.

    python bench/upstream.py kept unused

takes the diff from ``docs/upstream/kept.md``, applies it to a copy of the installed Opacus, and
prints for flat and ghost clipping how far three updates with noise together are from those of
Opacus as it is, relative to their norm, and the logical GB of a step of the 1b model at 8 x 256.

    python bench/upstream.py --tests
    python bench/upstream.py --gradients
    python bench/upstream.py --layers
    python bench/upstream.py --norms

- run the tests that Opacus's wheel brings, but for its accountants', or those of them alone that
  read gradients, on each copy, and print how many fail that pass on Opacus as it is;
- count single layers, those of the grid `opacus-layers` at its smallest batch, and print by how
  many percent bytes and peaks change;
- print the largest norm of an update that ``update`` of ``docs/upstream/norms.md`` finds, over
  three shapes and three seeds.

Opacus's tests import torchvision for random images and three models: without it, tests that train
such a model fail on each copy, Opacus's own included.
"""

from __future__ import annotations

import argparse
import json
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

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/upstream"
TRAINERS = ("dpsgd", "dpsgd_ghost")
SHARDED = ("reductions", "shards")
"""Pages of changes under FSDP2, which `bench/upstream_ranks.py` tries over ranks."""

READ_GRADIENTS = (
    "opacus/tests/grad_samples/conv2d_test.py::Conv2d_test"
    "::test_asymetric_dilation_and_kernel_size",
    "opacus/tests/grad_sample_module_fast_gradient_clipping_test.py",
    "opacus/tests/grad_sample_hooks_fast_gradient_clipping_test.py",
    "opacus/tests/grad_sample_module_test.py",
)
"""Tests of Opacus that read gradients, norms or sums of them."""

CONFTEST = """
from hypothesis import settings

settings.register_profile("few", max_examples=5)
settings.load_profile("few")
"""
"""For Opacus's tests: 5 examples of each property instead of 100."""


def names() -> list[str]:
    """The changes that a page has a diff of."""
    pages = sorted(PAGES.glob("*.md"))
    return [page.stem for page in pages if "```diff" in page.read_text(encoding="utf-8")]


def blocks(name: str, kind: str) -> list[str]:
    """The blocks of a page that are of a language."""
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)


def patched(name: str, folder: Path) -> None:
    """Put a copy of the installed Opacus into a folder, with the diffs of a page.

    Raises:
        CalledProcessError: a diff does not apply.
    """
    source = Path(str(find_spec("opacus").origin)).parent  # type: ignore[union-attr]
    shutil.copytree(source, folder / "opacus", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in blocks(name, "diff") if name else ():
        subprocess.run(
            ["patch", "-p1", "--quiet", "--fuzz=0"], input=diff, text=True, cwd=folder, check=True
        )


def opacus_tests(name: str, tests: Sequence[str]) -> dict[str, str]:
    """Run tests of Opacus on a copy with a change; of each test ``passed``, or what it was."""
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
        if done.returncode not in (0, 1):  # 1: some failed
            raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}")
        cases = list(ElementTree.parse(Path(folder) / "tests.xml").iter("testcase"))
    return {
        f"{case.get('classname')}.{case.get('name')}": case[0].tag
        if len(case) and case[0].tag in ("failure", "error", "skipped")
        else "passed"
        for case in cases
    }


def print_tests(names: Sequence[str], tests: Sequence[str]) -> int:
    """Print how many of Opacus's tests pass with each change; how many no longer do."""
    print(f"{'change':14}{'passed':>8}{'skipped':>9}{'failed':>8}{'of them only with it':>22}")
    original = opacus_tests("", tests)
    lost = 0
    for name in ["", *names]:
        found = opacus_tests(name, tests) if name else original
        outcomes = list(found.values())
        passed, skipped = (outcomes.count(outcome) for outcome in ("passed", "skipped"))
        worse = [t for t in original if original[t] == "passed" and found.get(t) != "passed"]
        failed = len(outcomes) - passed - skipped
        line = f"{name or 'Opacus':14}{passed:8}{skipped:9}{failed:8}{len(worse):22}"
        print(" ".join([line, *worse]), flush=True)
        lost += len(worse)
    return lost


def measure_layers() -> None:
    """Print bytes and peaks of single layers under the Opacus that this process imports."""
    from dpbench.core.grid import Grid
    from dpbench.instruments.logical.logical import Logical

    warnings.simplefilter("ignore")
    grid = Grid.named("opacus-layers")
    found = {}
    for case in grid.with_axes(batch_size=grid.values("batch_size")[:1]).cases():
        if case.trainer != grid.baseline:
            rows = [row for row in Logical().count(case).rows if row.phase == "step"]
            values = {row.metric: row.value for row in rows}
            moved = values["logical_read_bytes"] + values["logical_write_bytes"]
            layer = case.set.removeprefix("layer=")
            found[f"{case.trainer} {layer}"] = [moved, values["peak_memory_bytes"]]
    print(json.dumps(found))


def print_layers(names: Sequence[str]) -> None:
    """Print by how many percent each change moves bytes and peaks of single layers."""
    original = measured("", "--layers")
    trainers, layers = (dict.fromkeys(part) for part in zip(*map(str.split, original), strict=True))
    print(f"{'% of':48}" + "".join(f"{layer:>13}" for layer in layers))
    for name in names:
        changed = measured(name, "--layers")
        for trainer in trainers:
            for n, what in enumerate(("bytes", "peak")):
                pairs = [
                    (original[key][n], changed[key][n])
                    for key in (f"{trainer} {layer}" for layer in layers)
                ]
                cells = "".join(f"{100 * (b / a - 1):14.1f}" for a, b in pairs)
                print(f"{f'{name} {trainer} {what}':50}{cells}", flush=True)


def measure_norms() -> None:
    """Print norms of updates, by the function of a page, under the Opacus that is imported."""
    import torch

    warnings.simplefilter("ignore")
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
    print(json.dumps(found))


def print_norms() -> None:
    """Print the norms of updates at C = 1 without noise, by type and offset."""
    original, changed = (measured(name, "--norms") for name in ("", "norms"))
    print(f"{'type, offset':20}{'ghost':>12}{'fgc':>12}{'ghost with it':>16}{'fgc with it':>14}")
    for key, (ghost, fgc) in original.items():
        print(f"{key:20}{ghost:12.4f}{fgc:12.4f}{changed[key][0]:16.4f}{changed[key][1]:14.4f}")


def measure() -> None:
    """Print the updates and bytes of the Opacus that this process imports."""
    import torch

    from dpbench import MODEL_SIZES, Case, SimpleBigModel, get_random_dataloader
    from dpbench import TRAINERS as KNOWN
    from tests.logical.layers import count_by_layers

    warnings.simplefilter("ignore")
    tiny = MODEL_SIZES["tiny"]
    found = {}
    for trainer in TRAINERS:
        torch.manual_seed(0)
        model = SimpleBigModel(tiny)
        start = torch.cat([p.detach().flatten() for p in model.parameters()])
        made = KNOWN[trainer](
            model, batch_size=4, learning_rate=1.0, max_grad_norm=0.3, noise_multiplier=0.01
        )
        batches = get_random_dataloader(
            batch_size=4, seq_len=12, vocab_size=tiny.vocabulary, num_batches=3
        )
        for batch in batches:
            made.train_step(batch)
        cases = [
            Case(trainer, batch_size=8, seq_len=256, model_size="1b", precision=precision)
            for precision in ("fp32", "bf16")
        ]
        end = torch.cat([p.detach().flatten() for p in made.model.parameters()])
        found[trainer] = {
            "update": (end - start).tolist(),
            "bytes": [count_by_layers(case).logical_bytes for case in cases],
        }
    print(json.dumps(found))


def with_copy(name: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that imports a copy of Opacus with a change, and keep its output."""
    with TemporaryDirectory() as folder:
        patched(name, Path(folder))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        return subprocess.run(
            [sys.executable, "-W", "ignore", *words],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )


def measured(name: str, *options: str, script: str = __file__) -> dict[str, Any]:
    """What a script finds with a change, in a process of its own."""
    done = with_copy(name, script, "--here", *options, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def asked(about: str, *flags: str) -> argparse.Namespace:
    """What the command line names; ``here`` in a process that `measured` has started."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("name", nargs="*", help="of a page; all by default")
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="see above")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Try and count the changes that are named."""
    options = asked(__doc__ or "", "--tests", "--gradients", "--layers", "--norms")
    if options.here:
        own = {"layers": measure_layers, "norms": measure_norms}
        next((own[flag] for flag in own if getattr(options, flag)), measure)()
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


def print_updates(given: Sequence[str]) -> None:
    """Print how far updates are from Opacus's, and the GB of a step."""
    original = measured("")
    print(f"{'change':14}{'trainer':14}{'update differs by':>18}{'fp32 GB':>10}{'bf16 GB':>10}")
    for name in ["", *given]:
        changed = measured(name) if name else original
        for trainer in TRAINERS:
            before, after = (run[trainer]["update"] for run in (original, changed))
            pairs = list(zip(before, after, strict=True))
            far = (sum((b - a) ** 2 for b, a in pairs) / sum(b * b for b in before)) ** 0.5
            fp32, bf16 = (moved / 1e9 for moved in changed[trainer]["bytes"])
            print(f"{name or 'Opacus':14}{trainer:14}{far:18.1e}{fp32:10.1f}{bf16:10.1f}")


if __name__ == "__main__":
    sys.exit(main())
