"""A small network with random operators and buffers, and a step of it."""

import torch
from torch import nn


def network():
    torch.manual_seed(0)
    layers = []
    for _ in range(3):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(32, 1))


def loss_of(model, x):
    return model(x).square().mean()


def batch(rows=256):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
