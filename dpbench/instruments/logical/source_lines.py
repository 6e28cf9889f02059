"""Finds the module and the source line that ran an operator.

Autograd numbers its nodes in the order in which forward creates them (``at::sequence_number`` in
PyTorch). An operator in backward gets the module and the line of the forward operator that created
the node, unless user code calls the operator in backward, for example in a hook.
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
"""Code object of the method of ``nn.Module`` that runs a module's forward."""

ENGINE = _engine_run_backward.__code__
"""Code object of the function that runs backward.

Python frames within this function belong to hooks, to the backward of custom autograd functions, or
to activation checkpointing, which runs forward again.
"""

WRAPPERS = re.compile(r"\b(_module|module|_orig_mod|_fsdp_wrapped_module)\.")
"""Prefixes that Opacus, DDP, ``torch.compile`` and FSDP add to the names of modules."""


class Place(NamedTuple):
    """The module and source line of an operator.

    Attributes:
        module: name of the module in the model, as in ``blocks.3.linear``.
        line: file, line and function, as in ``model.py:24 forward``.
    """

    module: str
    line: str


class PlaceFinder:
    """Finds the module and the source line of each operator in one step."""

    def __init__(self) -> None:
        self._of_nodes: dict[int, Place] = {}
        self._names: dict[int, str] = {}  # names of modules by `id`

    def current(self) -> Place:
        """Return the place of the running operator."""
        node = torch._C._current_autograd_node()
        of_node = None if node is None else self._of_nodes.get(node._sequence_nr())
        modules, source = [], None
        for frame in _outer_frames(sys._getframe(1)):
            if frame.f_code is ENGINE and of_node:
                break
            if (module := _module_of(frame)) is not None:  # an empty `nn.Sequential` is false
                modules.append(module)
            if source is None and _is_source(frame):
                source = frame
        if of_node and source is None:
            return of_node
        module_name = self._name(modules) or (of_node.module if of_node else "")
        place = Place(module_name, line_of(source) if source else "")
        if node is None:
            self._of_nodes.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _name(self, modules: list[nn.Module]) -> str:
        """Return the name that the first module has as a submodule of the last module.

        ``modules`` are sorted from the innermost to the outermost call.
        """
        if not modules:
            return ""
        inner, outer = modules[0], modules[-1]
        if id(inner) not in self._names:
            with suppress(Exception):  # a model may override `named_modules`
                for name, each in outer.named_modules():
                    plain = WRAPPERS.sub("", f"{name}.").strip(".") or type(each).__name__
                    self._names.setdefault(id(each), plain)
        return self._names.get(id(inner), type(inner).__name__)


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose forward or backward hook a frame runs, or None."""
    if frame.f_code is CALL or frame.f_code.co_filename == hooks.__file__:
        runs = frame.f_locals.get("self")
        module = runs.module if isinstance(runs, hooks.BackwardHook) else runs
        return module if isinstance(module, nn.Module) else None
    return None


def source_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame that is not in PyTorch or in dpbench's code for measuring.

    If all frames are in such code, returns ``frame``.
    """
    return next(filter(_is_source, _outer_frames(frame)), frame)


def line_of(frame: FrameType) -> str:
    """Return the file, line and function of a frame, as in ``train.py:24 step``."""
    name = frame.f_code.co_name
    return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}" + f" {name}" * (
        name[0] != "<"
    )


def _outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _is_source(frame: FrameType) -> bool:
    """Return True if a frame is of user code, but not of a user's dispatch mode or subclass."""
    code = frame.f_code
    return code.co_name != "__torch_dispatch__" and not _is_skipped(code.co_filename)


@cache
def _is_skipped(file: str) -> bool:
    """Return True if a file belongs to PyTorch, Python's import system or dpbench.

    Returns False for files of dpbench's trainers and workloads.
    """
    ours = Path(__file__).parents[2]
    of_steps = file.startswith((f"{ours / 'training'}", f"{ours / 'workloads'}"))
    passed = str(ours), str(Path(str(torch.__file__)).parent), "<frozen", "<eval_with_key>"
    return file.startswith(passed) and not of_steps


@cache
def short_path(file: str) -> str:
    """Return the shortest path of a file from the current directory or a folder of ``sys.path``.

    For a file of a package, the folder that contains the package counts as well. If no such folder
    contains the file, returns ``file``.
    """
    path = Path(file)
    folders = {Path.cwd(), *map(Path, sys.path)} - {Path()}
    packages = [each for each in path.parents if (each / "__init__.py").exists()]
    folders |= {outermost.parent for outermost in packages[-1:]}
    shorter = [str(path.relative_to(each)) for each in folders if path.is_relative_to(each)]
    return min(shorter, key=len, default=file)
