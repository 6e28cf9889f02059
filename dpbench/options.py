"""How a field of `Settings` says which option it is."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from dpbench.case import ATTENTIONS, CHECKPOINTING, MODEL_SIZES, PRECISIONS
from dpbench.registry import MODELS, OPTIMIZERS, TRAINERS, WORKLOADS

LIMIT_HELP = (
    "{what} by more: METRIC[@PHASE]:5%%, METRIC:0.5GB, METRIC:5%%+0.1GB (beyond both), "
    "METRIC:±5%% (either way); a metric's ratio to standard is dram_ratio, l2_ratio, "
    "logical_ratio, …; repeatable"
)


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    pytest_help: str | None = None,
    **declared: Any,
) -> Any:
    """A field that is an option.

    Pytest calls it ``--dpbench-NAME``, commands ``--NAME``, unless another name is given here.
    """
    if default is not None and not isinstance(default, bool | tuple):
        help += " (default %(default)s)"
    if default is False:
        declared["action"] = "store_true"
    metadata = {"help": help, "pytest": pytest, "command": command, "declared": declared}
    return field(default=default, metadata={**metadata, "pytest_help": pytest_help or help})


AXIS_HELP = {
    "trainer": f"{', '.join(TRAINERS)}, their class names, or package.module:Class",
    "batch_size": "examples in a step",
    "seq_len": "tokens in an example of the transformer",
    "model_size": f"the transformer's: {', '.join(MODEL_SIZES)}, or VOCABULARYxHIDDENxLAYERSxHEADS",
    "precision": ", ".join(PRECISIONS),
    "attention": f"the transformer's: {', '.join(ATTENTIONS)}",
    "model": f"the transformer's: {', '.join(MODELS)}, or package.module:Class",
    "workload": f"{', '.join(WORKLOADS)}, or package.module:Class",
    "optimizer": f"{', '.join(OPTIMIZERS)}, or package.module:Class",
    "micro_batches": "equal parts in which a batch is trained, gradients accumulating",
    "trainable": "all, a pattern of parameters' names such as '*.bias', or lora:RANK",
    "activation_checkpointing": f"{', '.join(CHECKPOINTING)}: whether blocks run again in backward",
    "set": "a parameter of another workload, NAME=VALUE",
}


def axis(name: str, of: type = str) -> Any:
    """An option that replaces the values along an axis of the grid."""
    help = f"replaces the grid's, repeatable: {AXIS_HELP[name]}"
    metavar = "NAME=VALUE" if name == "set" else name.upper()
    return option(help, type=of, action="append", metavar=metavar)


def number(help: str, default: int, **names: Any) -> Any:
    """An option that takes a whole number."""
    return option(help, default, type=int, metavar="N", **names)


def file(help: str, **names: Any) -> Any:
    """An option that names a file to write."""
    return option(f"write {help} here", type=Path, metavar="FILE", **names)


def ncu(help: str, default: Any = None, **declared: Any) -> Any:
    """An option that pytest names without ``dpbench-`` too."""
    return option(help, default, pytest="--ncu-{stem}", **declared)


def of_pytest(help: str, **names: Any) -> Any:
    """A switch of pytest alone."""
    return option(help, False, command="", **names)
