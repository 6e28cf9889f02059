"""The options of the commands that run one case, and the case that they describe."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from dpbench.core import registry
from dpbench.core.case import AXES, TRANSFORMER, Case, check_belongs, own_axes
from dpbench.core.names import joined, parted
from dpbench.core.registry import resolve
from dpbench.core.settings import axis_help, declare

DEFAULTS = {"batch_size": 8, "seq_len": 256}
"""Defaults of axes for which `Case` has no default."""


def add_case(
    parser: argparse.ArgumentParser,
    axes: Iterable[str] = AXES,
    *,
    device: str | None,
    required: bool = True,
    **usual: Any,
) -> None:
    """Declare an option for each of the axes, and an option for the device, if it is used.

    Args:
        parser: the parser that gets the options.
        axes: axes of a case, by default all.
        device: the default device; None for a command that uses no device.
        required: whether an axis without a default must be given.
        usual: defaults of axes that replace the defaults of `DEFAULTS` and `Case`.
    """
    for axis in axes:
        default = {**DEFAULTS, **usual}.get(axis) or getattr(Case, axis, None)
        declare(
            parser.add_argument,
            axis,
            action="append" if axis == "set" else "store",
            required=required and default is None,
            help=axis_help(axis) + (f" (default {default})" if default else ""),
        )
    if device is None:
        return
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default=device,
        help="auto: the GPU if there is one (default %(default)s)",
    )


def chosen_case(options: argparse.Namespace, **usual: Any) -> Case:
    """Make a case from the options of `add_case`. ``usual`` are defaults in place of `DEFAULTS`."""
    chosen = {axis: value for axis in AXES if (value := getattr(options, axis, None)) is not None}
    name, text = parted(registry.WORKLOADS.canonical(chosen.get("workload", TRANSFORMER)))
    chosen["workload"] = workload = joined(name, [text, *chosen.pop("set", ())])
    check_belongs(chosen, [workload])
    # Defaults of the transformer's axes do not apply to other workloads.
    defaults = {**DEFAULTS, **usual}
    chosen = {axis: defaults[axis] for axis in defaults.keys() - own_axes(workload)} | chosen
    return resolve(Case(**chosen))
