"""Book-keeping by fastDP: gradients are clipped within backward, and none by example is made."""

import torch
from fastDP import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
images, labels = torch.randn(64, 3, 16, 16), torch.randint(10, (64,))
loader = DataLoader([*zip(images, labels, strict=True)], batch_size=16)
model = nn.Sequential(
    *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.AvgPool2d(4)),
    *(nn.Flatten(), nn.Linear(256, 10)),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = PrivacyEngine(
    model, batch_size=16, sample_size=64, noise_multiplier=1.0, epochs=2, clipping_mode="MixOpt"
)
engine.attach(optimizer)
for _epoch in range(2):
    for batch, target in loader:
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
