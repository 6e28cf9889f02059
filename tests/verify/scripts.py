"""A script that trains, right or with a fault that people have met, as its arguments say."""

from __future__ import annotations

PRIVATE = """
import sys
import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
asked = {*sys.argv[1:]}


class Adapted(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        if "idle-adapters" in asked:  # as merged or disabled ones
            return self.layer(x)
        return self.layer(x) + self.up(self.down(x))


torch.manual_seed(0)
layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
if "dropout" in asked:
    layers.insert(2, nn.Dropout(0.5))
if "random" in asked:
    class Jitter(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)
    layers.insert(1, Jitter())
if "lora" in asked:
    layers[0], layers[2] = Adapted(layers[0]), Adapted(layers[2])
model = nn.Sequential(*layers)
trained = [p for p in model.parameters() if p.requires_grad]
if "adamw" in asked:
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
else:
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
if "new-adapters" in asked:  # made anew after the optimizer
    layers[0].down, layers[0].up = nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False)
if "half-forgotten" in asked:
    optimizer.param_groups[0]["params"].pop()
data = TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
loader = DataLoader(data, batch_size=8)
criterion = nn.CrossEntropyLoss()
plain = optimizer
if "plain" not in asked:
    mode = next((m for m in ("ghost", "functorch", "ew") if m in asked), "hooks")
    how = {"poisson_sampling": "poisson" in asked, "grad_sample_mode": mode}
    if "per-layer" in asked:
        how |= {"clipping": "per_layer", "max_grad_norm": [0.05] * len(trained)}
    private = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, criterion=criterion,
        noise_multiplier=0.0 if "noiseless" in asked else 1.0,
        **{"max_grad_norm": 0.1} | how,
    )
    model, optimizer, *given, loader = private
    criterion = given[0] if given else criterion
if "bypass" in asked:
    optimizer = plain
if "unclipped" in asked:
    def clip_and_accumulate():
        for p in optimizer.params:
            grad = p.grad_sample.sum(0)
            p.summed_grad = grad if p.summed_grad is None else p.summed_grad + grad
    optimizer.clip_and_accumulate = clip_and_accumulate
if "little-noise" in asked:
    class Quiet(type(optimizer)):
        def add_noise(self):
            sigma, self.noise_multiplier = self.noise_multiplier, self.noise_multiplier / 2
            super().add_noise()
            self.noise_multiplier = sigma
    optimizer.__class__ = Quiet
if "thaws" in asked:
    frozen = [p for p in model.parameters() if not p.requires_grad]
if "tiny-rate" in asked:
    optimizer.param_groups[0]["lr"] = 1e-12
if "scheduler" in asked:
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda n: min(1.0, n / 2))
every = 2 if "accumulate" in asked else 1


def train(batches):
    for number, (x, y) in enumerate(batches):
        loss = criterion(model(x), y)
        loss.backward()
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step() if "scheduler" in asked else None
            if "thaws" in asked:
                frozen[0].data.mul_(0.99)


for epoch in range(2):
    if "virtual" in asked:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as batches:
            train(batches)
    else:
        train(loader)
"""
