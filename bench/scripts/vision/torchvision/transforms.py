"""Transforms that do nothing but `Resize`: the images are tensors already."""


class Resize:
    """The size in which a data set makes its images."""

    def __init__(self, size):
        self.size = size


def Compose(transforms):  # noqa: N802
    """What several transforms do together."""
    return next((each for each in transforms if isinstance(each, Resize)), None)


ToTensor = Normalize = RandomCrop = RandomHorizontalFlip = lambda *_, **__: None
