"""Trainers that spoil their own process in the first step; `Looks` tells whether it is spoiled."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from dpbench.training.base import Batch
from dpbench.training.standard import StandardTrainer


def surroundings() -> tuple[object, ...]:
    """What one case could change and the next one see."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DPBENCH_")}
    limit = resource.getrlimit(resource.RLIMIT_AS)
    return environment, Path.cwd(), sys.path, limit, os.umask(0), torch.get_default_dtype()


BEFORE = repr(surroundings())


class Misbehaves(StandardTrainer):
    def train_step(self, batch: Batch) -> Tensor:
        self.misbehave()
        return super().train_step(batch)

    def misbehave(self) -> None:
        raise NotImplementedError


class Idle(Misbehaves):
    def misbehave(self) -> None:
        return


class Crashes(Misbehaves):
    def misbehave(self) -> None:
        ctypes.string_at(0)


class Exits(Misbehaves):
    def misbehave(self) -> None:
        os._exit(3)


class Hangs(Misbehaves):
    def misbehave(self) -> None:
        time.sleep(600)


class FillsMemory(Misbehaves):
    def misbehave(self) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        self.kept = [bytearray(2**24) for _ in range(100)]


class ChangesAll(Misbehaves):
    def misbehave(self) -> None:
        os.environ["HOME"] = "/nowhere"
        os.chdir("/")
        sys.path.insert(0, "/nowhere")
        os.umask(0o777)
        torch.set_default_dtype(torch.float64)
        raise ValueError("all has changed")


class Looks(Misbehaves):
    """Says which server has forked its process, by way of another, and what it began with."""

    def misbehave(self) -> None:
        waiting = Path(f"/proc/{os.getppid()}/stat").read_text()
        raise ValueError(f"child of {waiting.rpartition(')')[2].split()[1]}: {BEFORE}")


class Accounts(Misbehaves):
    def misbehave(self) -> None:
        early = "scipy" in sys.modules
        import opacus

        accountant = opacus.PrivacyEngine(accountant="gdp").accountant
        accountant.step(noise_multiplier=1.0, sample_rate=0.01)
        raise RuntimeError(f"early: {early}, epsilon: {accountant.get_epsilon(1e-5):.3f}")
