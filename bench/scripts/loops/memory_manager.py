"""Opacus's BatchMemoryManager: each step in two physical batches; 4 steps."""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
data = TensorDataset(torch.randn(32, 8), torch.randint(2, (32,)))
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=8),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    poisson_sampling=False,
)
with BatchMemoryManager(
    data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
) as batches:
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
print(f"loss {loss.item():.6f}")
