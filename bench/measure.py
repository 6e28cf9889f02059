"""Measures the evidence of the documents, one file after another, in as many calls as it takes.

    python bench/measure.py --list            # the command of each file
    python bench/measure.py --minutes 9       # goes on where the last call stopped
    python bench/measure.py methods-tf32      # only these files

A call ends when its minutes are over: the run that it is at is interrupted, which keeps what is
complete, and resumed by the next call. Wanted are a clean checkout and nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

OPACUS = "--trainer standard --trainer dpsgd --trainer dpsgd_ghost --trainer dpsgd_fgc"
OWN = (
    "--trainer lean --trainer ghost_lean --trainer mixed_ghost --trainer micro_batch "
    "--trainer book_keeping --trainer fused"
)
CHANGES = " ".join(
    f"--trainer {trainer}:changes={change}"
    for trainer, changes in (
        ("lean", ("kept", "summed", "unused", "noise")),
        ("ghost_lean", ("summed", "bias", "unused", "none", "taken", "noise")),
    )
    for change in changes
)
CUPTI = "--instrument cupti --warmup 2"
LLAMA = (
    "--set hidden_size=2048 --set num_hidden_layers=22 --set intermediate_size=5632 "
    "--set num_attention_heads=32 --set num_key_value_heads=4 --set vocab_size=32000"
)

PLAN = {
    **{
        f"methods-{length}": f"{CUPTI} {OPACUS} {OWN} --precision fp32 --precision bf16 "
        f"--batch-size 8 --seq-len {length}"
        for length in (256, 1024)
    },
    **{f"cupti-grid1-{session}": f"{CUPTI} --grid grid1" for session in (1, 2, 3)},
    **{f"ncu-grid1-{session}": "--instrument ncu --grid grid1" for session in (1, 2, 3)},
    "methods-tf32": f"{CUPTI} {OPACUS} --precision tf32 --batch-size 8 --seq-len 256 "
    "--seq-len 1024",
    "methods-16x1024": f"{CUPTI} {OPACUS} --precision tf32 --precision bf16 --batch-size 16 "
    "--seq-len 1024",
    "methods-amp": f"{CUPTI} --instrument logical {OPACUS} --precision bf16-amp --batch-size 8 "
    "--seq-len 256",
    **{
        f"{name}-{length}": f"{CUPTI} --instrument logical {OPACUS} --trainer fused "
        f"--workload {workload} --set seq_len={length} {more} --batch-size {batch}"
        for name, workload, more, sizes in (
            ("gpt2", "hf-causal-lm", "--set model_type=gpt2", ((8, 256), (16, 512))),
            ("llama", "hf-causal-lm", f"--set model_type=llama {LLAMA}", ((8, 256), (8, 512))),
            (
                "bert",
                "hf-sequence-classification",
                "--set model_type=bert",
                ((16, 256), (16, 512)),
            ),
        )
        for batch, length in sizes
    },
    **{
        f"vit-{batch}": f"{CUPTI} --instrument logical {OPACUS} --workload hf-image-classification "
        f"--set model_type=vit --set num_labels=1000 --batch-size {batch}"
        for batch in (32, 64)
    },
    **{
        f"resnet-{batch}": f"{CUPTI} --instrument logical {OPACUS} --workload resnet "
        f"--set depth=50 --batch-size {batch}"
        for batch in (64, 128)
    },
    "opacus-changes": f"{CUPTI} {OPACUS} {CHANGES} --precision fp32 --precision bf16 "
    "--trainer dpsgd_zeroing=bench.opacus_changes:ZeroingDPSGDTrainer --batch-size 8 --seq-len 256",
    "ncu-methods-256": "--instrument ncu --trainer standard --trainer fused --trainer dpsgd_fgc "
    "--precision fp32 --precision bf16 --batch-size 8 --seq-len 256",
    "ncu-micro-batch-256": "--instrument ncu --trainer standard --trainer micro_batch "
    "--precision bf16 --batch-size 8 --seq-len 256",
    **{
        f"ncu-{name}": f"--instrument ncu {OPACUS} --precision tf32 --precision bf16 {cells}"
        for name, cells in (
            ("precisions", "--batch-size 8 --seq-len 256 --seq-len 1024"),
            ("precisions-16x1024", "--batch-size 16 --seq-len 1024"),
        )
    },
    # Where they are installed: see bench/peers/README.md.
    "peers": f"{CUPTI} --batch-size 8 --seq-len 256 --trainer standard --trainer dpsgd "
    "--trainer fastdp=bench.peers.fastdp:FastDPTrainer "
    "--trainer backpack=bench.peers.backpack:BackPACKTrainer",
    **{
        f"account-{length}": "--kernels --instrument ncu --instrument torch_profiler "
        f"--trainer standard --trainer dpsgd --batch-size 8 --seq-len {length}"
        for length in (256, 1024)
    },
    **{
        f"account-fused-{length}": "--kernels --instrument ncu --instrument torch_profiler "
        "--trainer standard --trainer fused --precision fp32 --precision bf16 --batch-size 8 "
        f"--seq-len {length}"
        for length in (256, 1024)
    },
}
"""The options of ``dpbench run`` by the name of its file, in the order of their worth.

On one H200 a grid takes five to six minutes, an account of kernels five at 256 tokens and more than
ten at 1024, the others less than five.
"""


def command(name: str, options: str, into: Path) -> list[str]:
    """The argument list that begins a file, or goes on with it."""
    kept = ["--save", name, "--resume", "--storage", str(into / "runs")]
    return [
        *(sys.executable, "-m", "dpbench", "run", *shlex.split(options)),
        *(*kept, "--json", str(into / f"h200-{name}.json")),
    ]


def is_complete(file: Path) -> bool:
    """Whether a file is there, and no case is missing."""
    if not file.exists():
        return False
    return bool(json.loads(file.read_text(encoding="utf-8"))["session"]["status"] == "complete")


def measure(plan: Mapping[str, str], into: Path, seconds: float) -> list[str]:
    """Measure for so long; returns the files that are not complete yet."""
    end = time.monotonic() + seconds
    for name, options in plan.items():
        if is_complete(into / f"h200-{name}.json") or time.monotonic() >= end:
            continue
        process = subprocess.Popen(command(name, options, into), cwd=ROOT)
        try:
            process.wait(end - time.monotonic())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
    return [name for name in plan if not is_complete(into / f"h200-{name}.json")]


def main() -> int:
    """Measure, or list what would be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these files")
    parser.add_argument("--minutes", type=float, default=9.0, help="end after so long (default 9)")
    parser.add_argument("--into", type=Path, default=ROOT / "docs/results", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args()
    if unknown := {*options.names} - {*PLAN}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(PLAN)}")
    plan = {name: PLAN[name] for name in options.names or PLAN}
    if options.list:
        for name, chosen in plan.items():
            print(shlex.join(command(name, chosen, options.into)))
        return 0
    if missing := measure(plan, options.into, options.minutes * 60):
        print(f"to be completed by further calls: {', '.join(missing)}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
