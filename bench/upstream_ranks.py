"""Apply each change that `docs/upstream` proposes for FSDP2 to a copy of Opacus, and try it.

    python bench/upstream_ranks.py reductions shards

prints for Opacus's ghost clipping, without a diff and with the diff of each page:

- the relative difference of the update of three steps from the update with the installed Opacus,
  without noise and over two ranks that communicate by gloo;
- the counted GB that one rank of 64 sends in a step of the 1b model at 4 x 256 a rank, and the GB
  that this rank moves in the phase ``noise``;
- the correlation of the noise in the shards of two ranks whose generators have the same seed;
- how many checks of ``dpbench verify`` over two ranks passed and failed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from opacus.optimizers.optimizer import _generate_noise
from torch import distributed, multiprocessing
from torch.distributed.tensor.experimental import implicit_replication

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.upstream import SHARDED, difference, measured, parsed, trained, with_copy
from dpbench import Case
from dpbench.instruments.logical.logical import Logical
from dpbench.training.parallel import OwnGenerator

TRAINER = "dpsgd_ghost"
RANKS = 2


def train(rank: int, folder: str) -> None:
    """Train three steps without noise. Rank 0 saves the update and the `noise_correlation`."""
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    case = Case(TRAINER, 4, 12, model_size="tiny", parallel="fsdp2", gpus=RANKS)
    trainer, update = trained(case, noise_multiplier=0.0)
    correlation = noise_correlation(trainer.optimizer)
    if rank == 0:
        found = {"update": update.tolist(), "correlation": correlation}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def noise_correlation(optimizer: Any) -> float:
    """Return the correlation of two ranks' noise, if both ranks have the same seed."""
    torch.manual_seed(0)
    if isinstance(optimizer.generator, OwnGenerator):  # the trainer's, which differs between ranks
        optimizer.generator = None
    largest = max(optimizer.params, key=torch.numel)
    with implicit_replication():
        noise = _generate_noise(1.0, largest, generator=optimizer.generator)
        own = (torch.zeros_like(largest) + noise).to_local().flatten()
    shards = [torch.empty_like(own) for _ in range(RANKS)]
    distributed.all_gather(shards, own)
    return float(torch.corrcoef(torch.stack(shards))[0, 1])


def measure_ranks() -> dict[str, Any]:
    """Return what `train` writes, and counted bytes, with the Opacus that this process imports."""
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(train, args=(folder,), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    case = Case(TRAINER, 256, 256, model_size="1b", parallel="fsdp2", gpus=64)
    rows = Logical().count(case).rows
    sent = sum(r.value for r in rows if (r.metric, r.phase) == ("collective_bytes", "step"))
    moved = ("logical_read_bytes", "logical_write_bytes")
    noise = sum(r.value for r in rows if r.phase == "noise" and r.metric in moved)
    return {**found, "sent": sent, "noise": noise}


def tried(name: str) -> dict[str, Any]:
    """Return the results of `measure_ranks` and ``dpbench verify`` with a patched copy."""
    verify = f"-m dpbench verify --trainer {TRAINER} --device cpu --parallel fsdp2 --gpus {RANKS}"
    verified = with_copy(name, *verify.split(), stdout=subprocess.PIPE)
    verdicts = re.findall(r"^.{32,40}?  +(ok|FAILED)\b", verified.stdout, re.M)
    counted = {"ok": verdicts.count("ok"), "failed": verdicts.count("FAILED")}
    return measured(name, "ranks", script=__file__) | counted


def main() -> int:
    """Try the changes that the command line names."""
    options = parsed(__doc__ or "")
    if options.here:
        print(json.dumps(measure_ranks()))
        return 0
    original = tried("")
    heads = ("update differs by", "sent GB", "noise GB", "r of one seed", "checks ok", "failed")
    print(f"{'change':14}" + "".join(f"{head:>19}" for head in heads))
    for name in ["", *(options.name or SHARDED)]:
        changed = tried(name) if name else original
        far = difference(original["update"], changed["update"])
        sent, noise = (changed[what] / 1e9 for what in ("sent", "noise"))
        print(
            f"{name or 'Opacus':14}{far:19.1e}{sent:19.2f}{noise:19.2f}"
            f"{abs(changed['correlation']):19.2f}{changed['ok']:19}{changed['failed']:19}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
