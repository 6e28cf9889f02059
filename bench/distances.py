"""How far gradients of each private trainer are from those of the fp64 reference.

    python -m bench.distances fp32 > docs/results/distances-fp32.txt
    python -m bench.distances bf16 > docs/results/distances-bf16.txt

On a CPU, with the reference and the distances of ``dpbench verify``: of each parameter the norm of
the difference ÷ the norm of the reference, the largest over parameters and steps, with half of the
examples clipped and with all.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence

import pandas as pd
import torch

from bench.evidence import METHODS, PRIVATE
from dpbench.case import AXES
from dpbench.commands.options import add_case, chosen_case
from dpbench.show.layout import Shown, Table, as_text
from dpbench.verify.verification import Verification

MODELS = {
    "transformer": "--model-size tiny --seq-len 16",
    "ResNet-18": "--workload resnet --set depth=18 --set image_size=32",
    "Llama": "--workload hf-causal-lm --set model_type=llama --set hidden_size=64 "
    "--set num_hidden_layers=2 --set intermediate_size=128 --set num_attention_heads=4 "
    "--set num_key_value_heads=2 --set vocab_size=200 --set seq_len=16",
}
"""Small models, by the options of ``dpbench verify``."""


def distance(model: str, trainer: str, precision: str) -> float:
    """The largest relative distance of a parameter's gradient."""
    parser = argparse.ArgumentParser()
    add_case(parser, [*AXES], device="cpu")
    words = f"--trainer {trainer} --precision {precision} --batch-size 4 {model}"
    case = chosen_case(parser.parse_args(shlex.split(words)))
    verification = Verification(case, torch.device("cpu"), "flat")
    far = []
    path = verification.paths[0]  # the batch as a whole
    for threshold in (verification.half, verification.below_all):
        seen = verification.steps(path, threshold, 0.0)
        far += verification.far(path, seen, threshold)
    return max(off for step in far for off in step.values())


def main(
    precision: str, trainers: Sequence[str] = METHODS, models: Sequence[str] = tuple(MODELS)
) -> None:
    """Print a table: a line for each trainer, and each beside the furthest of Opacus's three."""
    warnings.filterwarnings("ignore")
    off = {m: [distance(MODELS[m], trainer, precision) for trainer in trainers] for m in models}
    frame = pd.DataFrame(off, index=[*trainers])
    opacus = frame[frame.index.isin(PRIVATE)].max()
    shown = pd.concat([frame, (frame / opacus).add_suffix(" ÷")], axis=1).reset_index(names="name")
    columns: dict[str, Shown] = {"trainer": ("name", str)}
    columns |= {model: (model, "{:.3g}".format) for model in models}
    columns |= {f"{model}\n÷ Opacus": (f"{model} ÷", "{:.2f}".format) for model in models}
    notes = ["÷ Opacus: by the furthest of its three trainers."]
    title = f"{precision}: the furthest parameter's distance from the reference"
    print(as_text([Table.of(title, shown, columns, notes)], 120))


if __name__ == "__main__":
    main(sys.argv[1])
