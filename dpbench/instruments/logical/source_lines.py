"""Where an operator comes from: the module and the source line that ran it.

Autograd's nodes are numbered as forward makes them (``at::sequence_number`` in PyTorch), so an
operator of backward has the place of the forward operator that made its node.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.utils import hooks

CALL = nn.Module._call_impl.__code__
"""The code that runs a module's forward; its ``self`` is the module."""

ENGINE = _engine_run_backward.__code__
"""The code that runs backward; Python that it calls is a hook, or computes forward again."""

WRAPPERS = re.compile(r"\b(_module|module|_orig_mod|_fsdp_wrapped_module)\.")
"""What Opacus, DDP, ``torch.compile`` and FSDP put before the names of modules."""


class Place(NamedTuple):
    """The module, with ``*`` for numbers of layers, and the line, e.g. ``model.py:24 forward``."""

    module: str
    line: str


class Places:
    """The places of the operators of one step."""

    def __init__(self) -> None:
        self._of_nodes: dict[int, Place] = {}
        self._names: dict[int, str] = {}  # of modules, by id

    def here(self) -> Place:
        """The place of the operator that runs."""
        node = torch._C._current_autograd_node()
        of_node = None if node is None else self._of_nodes.get(node._sequence_nr())
        modules, source = [], None
        for frame in _outwards(sys._getframe(1)):
            if frame.f_code is ENGINE and of_node:
                break
            if (module := _module_of(frame)) is not None:  # empty ones are false
                modules.append(module)
            if source is None and not _is_passed(frame.f_code.co_filename):
                source = frame
        if of_node and source is None:
            return of_node
        module_name = self._name(modules) or (of_node.module if of_node else "")
        place = Place(module_name, line_of(source) if source else "")
        if node is None:
            self._of_nodes.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _name(self, modules: list[nn.Module]) -> str:
        """The innermost module's name in the outermost that was seen to call it."""
        if not modules:
            return ""
        inner, outer = modules[0], modules[-1]
        if id(inner) not in self._names:
            with suppress(Exception):  # a model's own method, and only a name is lost
                for name, each in outer.named_modules():
                    plain = WRAPPERS.sub("", f"{name}.").strip(".") or type(each).__name__
                    self._names.setdefault(id(each), re.sub(r"\b\d+\b", "*", plain))
        return self._names.get(id(inner), type(inner).__name__)


def _module_of(frame: FrameType) -> nn.Module | None:
    """The module whose forward, or whose backward hook, a frame runs."""
    if frame.f_code is CALL or frame.f_code.co_filename == hooks.__file__:
        runs = frame.f_locals.get("self")
        module = runs.module if isinstance(runs, hooks.BackwardHook) else runs
        return module if isinstance(module, nn.Module) else None
    return None


def source_frame(frame: FrameType) -> FrameType:
    """The innermost frame outside PyTorch and the parts of dpbench that measure."""
    outside = (each for each in _outwards(frame) if not _is_passed(each.f_code.co_filename))
    return next(outside, frame)


def line_of(frame: FrameType) -> str:
    """A frame's line and function, e.g. ``train.py:24 step``."""
    name = frame.f_code.co_name
    return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}" + f" {name}" * (name[0] != "<")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


@cache
def _is_passed(file: str) -> bool:
    """Whether lines of a file say nothing about what runs an operator."""
    ours = Path(__file__).parents[2]
    of_steps = file.startswith((f"{ours / 'training'}", f"{ours / 'workloads'}"))
    passed = str(ours), str(Path(str(torch.__file__)).parent), "<frozen"
    return file.startswith(passed) and not of_steps


@cache
def shown(file: str) -> str:
    """A file's path from this directory, or from the folder of its library."""
    path = Path(file)
    folders = {Path.cwd(), *map(Path, sys.path)} - {Path()}
    shorter = [str(path.relative_to(each)) for each in folders if path.is_relative_to(each)]
    return min(shorter, key=len, default=file)
