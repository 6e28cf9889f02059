"""A change to Opacus as `docs/upstream` proposes it: applied to a copy, tried and counted.

    python bench/upstream.py kept unused

takes the diff from ``docs/upstream/kept.md``, applies it to a copy of the installed Opacus, and
prints for flat and ghost clipping how far three updates with noise together are from those of
Opacus as it is, relative to their norm, and the logical GB of a step of the 1b model at 8 x 256.
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
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/upstream"
TRAINERS = ("dpsgd", "dpsgd_ghost")
SHARDED = ("reductions", "shards")
"""Pages of changes under FSDP2, which `bench/upstream_ranks.py` tries over ranks."""


def names() -> list[str]:
    """The changes that a page has a diff of."""
    pages = sorted(PAGES.glob("*.md"))
    return [page.stem for page in pages if "```diff" in page.read_text(encoding="utf-8")]


def patched(name: str, folder: Path) -> None:
    """Put a copy of the installed Opacus into a folder, with the diffs of a page.

    Raises:
        CalledProcessError: a diff does not apply.
    """
    source = Path(str(find_spec("opacus").origin)).parent  # type: ignore[union-attr]
    shutil.copytree(source, folder / "opacus", ignore=shutil.ignore_patterns("__pycache__"))
    page = (PAGES / f"{name}.md").read_text(encoding="utf-8") if name else ""
    for diff in re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S):
        subprocess.run(
            ["patch", "-p1", "--quiet", "--fuzz=0"], input=diff, text=True, cwd=folder, check=True
        )


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


def measured(name: str) -> dict[str, dict[str, list[float]]]:
    """What `measure` finds with a change, in a process of its own."""
    with TemporaryDirectory() as folder:
        patched(name, Path(folder))
        path = os.pathsep.join([folder, str(ROOT)])
        command = [sys.executable, "-W", "ignore", __file__, "--here"]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
        )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def asked(about: str) -> argparse.Namespace:
    """What the command line names; ``here`` in a process that `measured` has started."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("name", nargs="*", help="of a page; all by default")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Try and count the changes that are named."""
    options = asked(__doc__ or "")
    if options.here:
        measure()
        return 0
    original = measured("")
    print(f"{'change':14}{'trainer':14}{'update differs by':>18}{'fp32 GB':>10}{'bf16 GB':>10}")
    alone = [name for name in names() if name not in SHARDED]
    for name in ["", *(options.name or alone)]:
        changed = measured(name) if name else original
        for trainer in TRAINERS:
            before, after = (run[trainer]["update"] for run in (original, changed))
            pairs = list(zip(before, after, strict=True))
            far = (sum((b - a) ** 2 for b, a in pairs) / sum(b * b for b in before)) ** 0.5
            fp32, bf16 = (moved / 1e9 for moved in changed[trainer]["bytes"])
            print(f"{name or 'Opacus':14}{trainer:14}{far:18.1e}{fp32:10.1f}{bf16:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
