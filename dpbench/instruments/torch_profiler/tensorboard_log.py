"""A profile as TensorBoard shows it: scalars by phase, and the case as hyper-parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from dpbench.case import Case
from dpbench.results.rows import STEP, Measurement

SUFFIX = ".dpbench"
"""The end of our event files' names: an earlier log of ours is replaced, others stay."""


def write_log(
    case: Case, record: dict[str, Any], rows: Iterable[Measurement], directory: Path
) -> None:
    """Write one event file: scalars ``METRIC/PHASE`` by recorded step, and hyper-parameters.

    Hyper-parameters are the case's fields and the versions; their metrics are those of the whole
    step, as means over the recorded steps.
    """
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    for earlier in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
        earlier.unlink()
    of_step: dict[str, list[float]] = defaultdict(list)
    # Not add_hparams: that would open a second event file, in a folder named after the time.
    with SummaryWriter(str(directory), filename_suffix=SUFFIX) as writer:
        for row in rows:
            writer.add_scalar(f"{row.metric}/{row.phase}", row.value, row.repeat)
            if row.phase == STEP:
                of_step[f"{row.metric}/{STEP}"].append(row.value)
        hyper_parameters = {**asdict(case), "device": record["device"], "torch": record["torch"]}
        metrics = {name: fmean(values) for name, values in of_step.items()}
        for summary in hparams(hyper_parameters, metrics):
            writer.file_writer.add_summary(summary)
