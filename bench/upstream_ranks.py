"""A change to Opacus's ghost clipping under FSDP2, of `docs/upstream`: tried and counted.

    python bench/upstream_ranks.py reductions shards

applies the diff of a page to a copy of the installed Opacus and prints how far three updates
without noise, over two ranks of gloo, are from those of Opacus as it is, relative to their norm;
what one rank of 64 sends in a step of the 1b model at 4 x 256 a rank, and moves in the phase
``noise``, both in GB; how far noise in the shards of two ranks is correlated that a script gave
one seed; and how many checks of ``dpbench verify`` over two ranks passed and failed.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.upstream import SHARDED, asked, measured, with_copy

TRAINER = "dpsgd_ghost"
RANKS = 2


def train(rank: int, folder: str) -> None:
    """Train three steps without noise; rank 0 writes what they added, and `noise_of_one_seed`."""
    import torch
    from torch import distributed

    from dpbench import Case
    from dpbench.child.build import build, pick_device
    from dpbench.training.parallel import gathered

    warnings.simplefilter("ignore")
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    case = Case(TRAINER, 4, 12, model_size="tiny", parallel="fsdp2", gpus=RANKS)
    made, batches = build(
        case, pick_device("cpu"), 3, noise_multiplier=0.0, max_grad_norm=0.3, learning_rate=1.0
    )

    def parameters() -> torch.Tensor:
        return torch.cat([gathered(p).detach().flatten() for p in made.model.parameters()])

    start = parameters()
    for batch in batches:
        made.train_step(batch)
    update = parameters() - start
    alike = noise_of_one_seed(made.optimizer)
    if rank == 0:
        found = {"update": update.tolist(), "alike": alike}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def noise_of_one_seed(optimizer: Any) -> float:
    """The correlation of noise in the ranks' shards, where a script gives each the same seed."""
    import torch
    from opacus.optimizers.optimizer import _generate_noise
    from torch import distributed
    from torch.distributed.tensor.experimental import implicit_replication

    torch.manual_seed(0)
    largest = max(optimizer.params, key=torch.numel)
    with implicit_replication():
        noise = _generate_noise(1.0, largest, generator=optimizer.generator)
        own = (torch.zeros_like(largest) + noise).to_local().flatten()
    shards = [torch.empty_like(own) for _ in range(RANKS)]
    distributed.all_gather(shards, own)
    return float(torch.corrcoef(torch.stack(shards))[0, 1])


def measure() -> None:
    """Print the update and the counts of the Opacus that this process imports."""
    from torch import multiprocessing

    from dpbench import Case
    from dpbench.instruments.logical.logical import Logical

    with TemporaryDirectory() as folder:
        multiprocessing.spawn(train, args=(folder,), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    case = Case(TRAINER, 256, 256, model_size="1b", parallel="fsdp2", gpus=64)
    rows = Logical().count(case).rows
    sent = sum(r.value for r in rows if (r.metric, r.phase) == ("collective_bytes", "step"))
    moved = ("logical_read_bytes", "logical_write_bytes")
    noise = sum(r.value for r in rows if r.phase == "noise" and r.metric in moved)
    print(json.dumps({**found, "sent": sent, "noise": noise}))


def tried(name: str) -> dict[str, Any]:
    """What `measure` finds with a change, and what ``dpbench verify`` says of it."""
    verify = f"-m dpbench verify --trainer {TRAINER} --device cpu --parallel fsdp2 --gpus {RANKS}"
    verified = with_copy(name, *verify.split())
    verdicts = re.findall(r"^.{32,40}?  +(ok|FAILED)\b", verified.stdout, re.M)
    counted = {"ok": verdicts.count("ok"), "failed": verdicts.count("FAILED")}
    return measured(name, script=__file__) | counted


def main() -> int:
    """Try and count the changes that are named."""
    options = asked(__doc__ or "")
    if options.here:
        measure()
        return 0
    original = tried("")
    heads = ("update differs by", "sent GB", "noise GB", "r of one seed", "checks ok", "failed")
    print(f"{'change':14}" + "".join(f"{head:>19}" for head in heads))
    for name in ["", *(options.name or SHARDED)]:
        changed = tried(name) if name else original
        pairs = list(zip(original["update"], changed["update"], strict=True))
        far = (sum((b - a) ** 2 for b, a in pairs) / sum(b * b for b, _ in pairs)) ** 0.5
        sent, noise = (changed[what] / 1e9 for what in ("sent", "noise"))
        print(
            f"{name or 'Opacus':14}{far:19.1e}{sent:19.2f}{noise:19.2f}"
            f"{abs(changed['alike']):19.2f}{changed['ok']:19}{changed['failed']:19}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
