"""Scripts that train, as somebody might have written them."""

from __future__ import annotations

TRAINING = """
import gc
import sys
gc.disable()  # a quarter of the time of imports is the collector's
import torch
gc.enable()
from torch import nn
if {"--exits-at-once", "--interrupted", "--killed"} & {*sys.argv}:
    # The first optimizer imports the compiler, which takes as long as all the rest of PyTorch.
    from types import SimpleNamespace
    def as_it_is(function, *_, **options):
        return function
    compiler = SimpleNamespace(disable=as_it_is, graph_break=lambda: None)
    sys.modules["torch._dynamo"] = compiler
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "--private" in sys.argv:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer
    model = GradSampleModule(model)
    optimizer = DPOptimizer(
        optimizer, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=8
    )
for step in range(8):
    data = torch.randn(8, 256)
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--fails" in sys.argv and step == 4:
        raise ValueError("the data is gone")
    if "--exits" in sys.argv and step == 4:
        sys.exit(3)
    if "--exits-at-once" in sys.argv and step == 4:
        import os
        if os.fork() == 0:
            sys.exit(7)  # the fork's own end
        os.wait()
        os._exit(3)
    if "--killed" in sys.argv and step == 5:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    if "--interrupted" in sys.argv and step == 4:
        import os, signal
        os.kill(os.getppid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
print(f"loss {loss:.6f} {sys.argv[1:]} {__name__}")
"""

NO_STEP = "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()\n"

FORK = """
import os
if os.fork() == 0:
    os._exit(0)
os.wait()
"""

NEEDS_ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.parse_args()
"""
