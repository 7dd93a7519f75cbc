"""A small captured step with operators of every family, for tests that damage or rename it."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.cost.device import Device, Environment, store_device
from lowtide.cost.estimate import estimate
from lowtide.cost.probe import environment
from lowtide.cost.step import Step
from lowtide.plan.budget import parse_budget
from lowtide.plan.program.costs import Costs
from lowtide.plan.result.plan import Plan
from tests.planning import plan_for

DEVICE = Device(Environment("a device", "cpu"), {"float32": 1e9}, 1e9, 1e-6, 1 << 30)
"""Made up: costs that follow from it are the same everywhere."""


def described(folder: Path) -> None:
    """Put a device into a cache folder as if it was this machine: estimates follow from it, nothing is measured."""
    store_device(folder, msgspec.structs.replace(DEVICE, environment=environment("cpu")))


class Families(nn.Module):
    """An image and a sequence through operators of every family that has access rules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.batch = nn.BatchNorm2d(4)
        self.groups = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.group = nn.GroupNorm(2, 4)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.words = nn.Embedding(8, 8)
        self.layer = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.batch(self.first(image)))
        x = functional.pad(self.group(self.groups(x)), (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1]
        x = functional.max_pool2d(x, 2)
        x = functional.interpolate(self.up(functional.avg_pool2d(x, 2)), scale_factor=2.0, mode="bilinear")
        x = functional.pixel_shuffle(torch.cat([x, x.flip(3)], 1), 2).roll(1, 2)
        y = self.layer(self.words(tokens))
        q = self.linear(y).unflatten(-1, (2, 4)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
        y = torch.softmax(y, -1).cumsum(1) + functional.dropout(y, 0.5)
        index = tokens[:, :4].sort(1).values
        picked = y.gather(1, index.unsqueeze(-1).expand(-1, -1, 8)).mean((1, 2))
        return functional.log_softmax(x, 1), picked


def families_loss(
    model: nn.Module, image: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    scores, picked = model(image, tokens)
    return functional.nll_loss(scores, labels) + functional.smooth_l1_loss(picked, picked.detach() * 2)


@functools.cache
def families() -> Step:
    """The step with estimated costs; nothing is run."""
    torch.manual_seed(0)
    model = Families()
    image = torch.randn(2, 3, 8, 8)
    labels = torch.zeros(2, 16, 16, dtype=torch.int64)
    tokens = torch.arange(12).reshape(2, 6) % 8
    graph = lowtide.capture(families_loss, model, image, tokens, labels).step.graph
    return Step(graph, "capture", estimate(graph, DEVICE))


@functools.cache
def families_plan() -> Plan:
    """A plan for the step that recomputes."""
    step = families()
    costs = Costs(tuple(float(cost.seconds.value) for cost in step.costs if cost.seconds), origin="estimated")
    return plan_for(step.graph, costs, parse_budget("85%"), time_limit=60.0)  # it ends by itself
