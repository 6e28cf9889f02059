"""Random images with the shape of the real ones."""

import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset


class _Images(Dataset):
    shape: tuple[int, ...]

    def __init__(self, root, train=True, download=False, transform=None):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(64 if train else 32, *self.shape, generator=generator)
        self.data = interpolate(images, transform.size) if transform else images
        self.targets = torch.randint(10, (len(images),), generator=generator)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], self.targets[index]


class MNIST(_Images):
    """28 x 28, one channel."""

    shape = (1, 28, 28)


class CIFAR10(_Images):
    """32 x 32, three channels."""

    shape = (3, 32, 32)


class FakeData(Dataset):
    """What Opacus's tests train on."""

    def __init__(self, size, image_size, num_classes, transform):
        self.images = torch.randn(size, *image_size)
        self.targets = torch.randint(num_classes, (size,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]
