"""Other people's training scripts, unmodified, under ``dpbench exec``: what it finds in them.

``python bench/scripts/run.py --opacus CHECKOUT`` runs the examples of a checkout of Opacus, and
loops by Hugging Face's Trainer, Lightning and fastDP where these are installed, with a few random
data in place of downloads. Each runs by itself and once more watched, by timing and to its end,
without a GPU. Prints a Markdown table: how many steps and which phases were found, whether these
are the right ones, and whether the script printed the same. A second table has scripts that fail
by themselves or train in other processes, and what is said of each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLAIN = ("forward", "backward", "optimizer")
PRIVATE = ("forward", "backward", "clip", "noise", "optimizer")


@dataclass(frozen=True)
class Script:
    """A script with its arguments, and what is in it."""

    title: str
    command: tuple[str, ...]
    steps: int
    phases: tuple[str, ...]
    stand_ins: str = "vision"
    needs: str = "opacus"
    seeded: bool = True


def scripts(opacus: Path) -> Iterator[Script]:
    """Everything that is tried."""
    examples = opacus / "examples" if (opacus / "examples").is_dir() else opacus
    epochs = ("--epochs", "2", "--batch-size", "16", "--device", "cpu")
    mnist = (str(examples / "mnist.py"), "--test-batch-size", "16", *epochs)
    yield Script("mnist", mnist, 8, PRIVATE)
    yield Script("mnist --disable-dp", (*mnist, "--disable-dp"), 8, PLAIN)
    cifar = (str(examples / "cifar10.py"), *epochs, "--batch-size-test", "16", "--workers", "0")
    cifar += ("--seed", "0", "--checkpoint-file", "checkpoint")
    for mode in ("hooks", "ew", "functorch", "no_op"):
        arguments = (*cifar, "--grad_sample_mode", mode)
        yield Script(f"cifar10 --grad_sample_mode {mode}", arguments, 8, PRIVATE)
    per_layer = (*cifar, "--clip_per_layer", "--max-per-sample-grad_norm", "10")
    yield Script("cifar10 --clip_per_layer", per_layer, 8, PRIVATE)
    yield Script("cifar10 --disable-dp", (*cifar, "--disable-dp"), 8, PLAIN)
    imdb = (str(examples / "imdb.py"), *epochs, "--workers", "1")
    yield Script("imdb, workers", imdb, 8, PRIVATE, "reviews")
    names = (str(examples / "char-lstm-classification.py"), "--data-root", "names", *epochs)
    yield Script("char-lstm, DPLSTM", names, 8, PRIVATE, seeded=False)
    yield Script("char-lstm, DPGRU", (*names, "--mode", "gru"), 8, PRIVATE, seeded=False)
    yield Script("dcgan --disable-dp, two networks", (*gan(examples), "--disable-dp"), 4, PLAIN)
    loops = HERE / "loops"
    clipped = (*PLAIN, "clip")
    trainer = (str(loops / "hugging_face_trainer.py"),)
    yield Script("Hugging Face Trainer", trainer, 6, clipped, "none", "transformers")
    lightning = (str(loops / "lightning_module.py"),)
    yield Script("Lightning", lightning, 4, PLAIN, "none", "lightning")
    memory = (str(loops / "memory_manager.py"),)
    yield Script("BatchMemoryManager", memory, 4, PRIVATE, "none")
    book_keeping = (str(loops / "book_keeping.py"),)
    yield Script("fastDP, book-keeping", book_keeping, 8, PRIVATE, "none", "fastDP")


def gan(examples: Path) -> tuple[str, ...]:
    """The example of two networks, small."""
    small = ("--batch-size", "4", "--ngf", "8", "--ndf", "8", "--epochs", "2", "--workers", "0")
    return (
        str(examples / "dcgan.py"),
        "--data-root",
        ".",
        "--device",
        "cpu",
        "--manualSeed",
        "1",
        *small,
    )


def without_steps(opacus: Path) -> Iterator[Script]:
    """Those that fail by themselves here, and those that train in other processes."""
    examples = opacus / "examples" if (opacus / "examples").is_dir() else opacus
    yield Script("dcgan", gan(examples), 0, ())
    cifar = (str(examples / "cifar10.py"), "--device", "cpu", "--workers", "0", "--epochs", "1")
    yield Script("cifar10 --grad_sample_mode ghost", (*cifar, "--grad_sample_mode", "ghost"), 0, ())
    yield Script("cifar10 --local_rank 0", (*cifar, "--local_rank", "0"), 0, ())
    yield Script("fsdp_example", (str(examples / "fsdp_example.py"),), 0, ())
    parallel = (str(examples / "tensor_parallelism_toy.py"),)
    yield Script("tensor_parallelism_toy", parallel, 0, ())
    rank = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    mnist = (str(examples / "mnist.py"), "--device", "cpu", "--epochs", "1", "--batch-size", "16")
    yield Script("torchrun mnist", (*rank, *mnist), 0, ())
    yield Script("imdb --unknown", (str(examples / "imdb.py"), "--unknown"), 0, (), "reviews")


def line(script: Script, instrument: str) -> list[str]:
    """A script's line of the table; without steps, what `dpbench exec` says of it."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "names"
        names.mkdir()
        for language in ("English", "Welsh"):
            words = (f"{language}{'ab' * (n % 5)}{n}\n" for n in range(40))
            (names / f"{language}.txt").write_text("".join(words), encoding="utf-8")
        path = [str(HERE / script.stand_ins), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }

        def done(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
            )

        def output(*command: str) -> str:
            ended = done(*command)
            if ended.returncode:
                sys.stderr.write(ended.stderr[-3000:])
            return ended.stdout

        if not script.steps:
            ended = done("-m", "dpbench", "exec", "--instrument", instrument, *script.command)
            said = [line for line in ended.stderr.splitlines() if line.startswith("dpbench exec:")]
            words = " ".join(" ".join(said).partition(": ")[2].partition(": ")[2].split())
            return [script.title, words.partition(". ")[0] if ended.returncode else "nothing"]
        alone = output(*script.command)
        watched = ("-m", "dpbench", "exec", "--instrument", instrument, "--continue", "--skip", "0")
        told = output(*watched, "--steps", "1000", "--json", "run.json", *script.command)
        rows = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))["rows"]
    metrics = ("step_time_seconds", "logical_read_bytes")
    times = [row for row in rows if row["metric"] in metrics]
    steps = len({row["repeat"] for row in times})
    phases = {row["phase"] for row in times} - {"step", "outside"}
    whole = sum(row["value"] for row in times if row["phase"] == "step")
    outside = sum(row["value"] for row in times if row["phase"] == "outside")
    said = [line for line in alone.splitlines() if line and "runtime" not in line]  # lasts differ
    same = bool(said) and [line for line in told.splitlines() if line in said] == said
    return [
        script.title,
        f"{steps} of {script.steps}",
        ", ".join(name for name in PRIVATE if name in phases),
        "yes" if steps == script.steps and phases == {*script.phases} else "NO",
        ("yes" if same else "NO") if script.seeded else "not seeded",
        f"{outside / whole:.0%}" if whole else "-",
    ]


def main() -> None:
    """Run them and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--opacus", type=Path, required=True, help="a checkout of Opacus")
    parser.add_argument("--only", default="", help="those whose title has this")
    parser.add_argument("--instrument", choices=("timing", "logical"), default="timing")
    options = parser.parse_args()
    heads = ["script", "steps", "phases", "right", "prints the same", "outside"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for script in scripts(options.opacus.resolve()):
        if options.only in script.title and importlib.util.find_spec(script.needs):
            print(f"| {' | '.join(line(script, options.instrument))} |", flush=True)
    print("\n| script | what dpbench exec says |\n|---|---|")
    for script in without_steps(options.opacus.resolve()):
        if options.only in script.title:
            print(f"| {' | '.join(line(script, options.instrument))} |", flush=True)


if __name__ == "__main__":
    main()
