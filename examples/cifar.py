"""Train a convolutional network from scratch: privately, by Opacus, or without privacy.

Its images are a pattern for each class, and noise. With ``--data FOLDER``, they are CIFAR-10, which
torchvision downloads into the folder. Install it from the index that torch is from, for CPUs by
``pip install torchvision --index-url https://download.pytorch.org/whl/cpu``.
"""

import argparse
from itertools import islice

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import dpbench

SIZE, EPOCHS, DELTA = 100, 4, 1e-5
PRIVACY = {"epochs": EPOCHS, "target_epsilon": 8, "target_delta": DELTA, "max_grad_norm": 1}


def network() -> nn.Module:
    """Return a network with group norms: batch norms would mix examples."""
    layers = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after)]
        layers += [nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))


def images(folder: str | None) -> list[Dataset]:
    """Return the examples for training and for the test."""
    if folder:
        from torchvision import datasets, transforms  # --help says how to install it

        form = transforms.ToTensor()
        return [datasets.CIFAR10(folder, each, form, download=True) for each in (True, False)]
    labels = torch.arange(3000) % 10
    patterns = nn.functional.interpolate(torch.randn(10, 3, 4, 4), size=32, mode="bilinear")
    pictures = patterns[labels] + 4 * torch.randn(3000, 3, 32, 32)
    return random_split(TensorDataset(pictures, labels), [2500, 500])


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return a loss for each example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", metavar="FOLDER")
parser.add_argument("--steps", type=int, metavar="N", help="end after N steps")
way = parser.add_mutually_exclusive_group()
way.add_argument("--opacus", action="store_true")
way.add_argument("--plain", action="store_true")
asked = parser.parse_args()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
(train, test), model, private = images(asked.data), network().to(device), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(train, SIZE, shuffle=True)
if asked.opacus:
    engine = PrivacyEngine()
    made = {"module": model, "optimizer": optimizer, "data_loader": loader}
    model, optimizer, loader = engine.make_private_with_epsilon(**made, **PRIVACY)
elif not asked.plain:
    private = dpbench.make_private(model, optimizer, train, batch_size=SIZE, **PRIVACY)
    loader = private.loader
for batch in islice((batch for _ in range(EPOCHS) for batch in loader), asked.steps):
    if private:
        private.step(batch, losses)
    else:
        losses(model, [each.to(device) for each in batch]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
with torch.no_grad():
    right = [model(x.to(device)).argmax(1).cpu() == y for x, y in DataLoader(test, 250)]
spent = private.epsilon if private else engine.get_epsilon if asked.opacus else None
epsilon = f"ε {spent(DELTA):.2f} at δ {DELTA:g}" if spent else "not private"
print(f"accuracy {torch.cat(right).float().mean():.1%}, {epsilon}")
