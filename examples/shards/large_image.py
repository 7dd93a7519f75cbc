"""A convolutional network on one image that is too large for a device: two processes share it.

torchrun --nproc-per-node 2 examples/shards/large_image.py

The two lines are the call of ``lowtide.fit`` with a mesh, and the step in place of the function. Each process
holds its part of the image and of every activation, and gets from the other what convolutions read beyond it.
Everything else is the training loop of one device. At the end both are compared.
"""

from __future__ import annotations

import copy
import os

import torch
from torch import nn

import lowtide
from lowtide.units import format_bytes

SIZE, BUDGET, STEPS = 192, "6MiB", 3


class Network(nn.Module):
    """Some of what images are segmented with: strides, a BatchNorm, a pool, a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Two numbers for each pixel."""
        x = self.first(image)
        found: torch.Tensor = self.last(torch.cat([x, self.up(self.down(x))], 1))
        return found


def loss_of(model: nn.Module, image: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The loss of an image."""
    return nn.functional.cross_entropy(model(image), classes)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, image = Network(), torch.randn(1, 3, SIZE, SIZE)
    classes = torch.randint(0, 2, (1, SIZE, SIZE))
    alone = copy.deepcopy(model)

    step = lowtide.fit(
        loss_of, model, image, classes, budget=BUDGET, mesh=int(os.environ["WORLD_SIZE"]), time_limit=1
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    expected = torch.optim.Adam(alone.parameters(), lr=1e-2)
    apart = 0.0
    for _ in range(STEPS):
        loss = step(model, image, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reference = loss_of(alone, image, classes)
        reference.backward()
        expected.step()
        expected.zero_grad()
        apart = max(apart, float((loss - reference).detach().abs()))
    model.eval()
    alone.eval()
    with torch.no_grad():
        apart = max(apart, float((step(model, image, classes) - loss_of(alone, image, classes)).abs()))
    whole = {name: value.detach() for name, value in alone.named_parameters()}
    parts = [
        (value.detach(), whole[name][step.boxes[name].slices()]) for name, value in model.named_parameters()
    ]
    drift = max(float((part - value).norm() / value.norm()) for part, value in parts)
    rank = torch.distributed.get_rank()
    print(
        f"rank {rank}: planned {format_bytes(step.plan.predicted.peak_bytes)} of {BUDGET}, "
        f"losses within {apart:.0e} and parameters within {drift:.0e} of one device",
        flush=True,
    )
    torch.distributed.destroy_process_group()
    if not (apart < 1e-5 and drift < 1e-4):
        raise SystemExit(1)
