"""How a field of `Settings` says which option it is."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Any

from dpbench.case import ATTENTIONS, CHECKPOINTING, COUNTS, MODEL_SIZES, PRECISIONS
from dpbench.registry import MODELS, OPTIMIZERS, TRAINERS, WORKLOADS


def option(
    help: str,
    default: Any = None,
    *,
    pytest: str | None = None,
    command: str | None = None,
    **declared: Any,
) -> Any:
    """A field that is an option.

    Commands call it ``--NAME``, pytest ``--dpbench-NAME`` unless the name begins with ncu, or as
    is given here; who has it not gives the empty name. It takes what its default is.
    """
    if default is not None and not isinstance(default, bool | tuple):
        help += " (default %(default)s)"
        declared["type"] = type(default)
    if default is False:
        declared["action"] = "store_true"
    declared |= {"help": help, "default": [] if default == () else default}
    metadata = {"pytest": pytest, "command": command, "declared": declared}
    return field(default=default, metadata=metadata)


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


def axis(name: str) -> Any:
    """An option that replaces the values along an axis of the grid."""
    help = f"replaces the grid's, repeatable: {AXIS_HELP[name]}"
    metavar = "NAME=VALUE" if name == "set" else name.upper()
    return option(help, type=int if name in COUNTS else str, action="append", metavar=metavar)


def file(help: str, **names: Any) -> Any:
    """An option that names a file to write."""
    return option(f"write {help} here", type=Path, metavar="FILE", **names)


def of_pytest(help: str, **names: Any) -> Any:
    """A switch of pytest alone."""
    return option(help, False, command="", **names)
