"""Gradients of a step in tiles and of eager PyTorch in float32, both held against float64.

    python benchmarks/rounding.py [TARGET]

Kernels for other sizes add in another order, and a last digit may tip a maximum or a ReLU. So eager PyTorch differs from
itself as well, when samples go through one by one. The network runs in evaluation: float64 would draw other masks.
Prints the largest difference of an element over the largest element of its gradient.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import zoo
from lowtide.execute.compile.bits import largest_difference
from lowtide.zoo.unet import IGNORED

TARGET = "unet:base=2,batch=17,size=380"
ASKED: dict[str, Any] = {
    "budget": "25%",
    "only": "recompute,tile",
    "cost": "estimated",
    "time_limit": 5.0,
    "cache": False,
}


def gradients(loss: Callable[..., Tensor], model: nn.Module, batch: Sequence[Any]) -> list[Tensor]:
    """Of one step from scratch."""
    model.zero_grad(set_to_none=True)
    loss(model, *batch).backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference in any gradient."""
    return max(largest_difference(a.double(), b.double()) for a, b in zip(some, others, strict=True))


def main() -> None:
    """Compare and print."""
    target = sys.argv[1] if len(sys.argv) > 1 else TARGET
    built = zoo.build(target)
    model, batch = built.model.eval(), built.batch
    wide = copy.deepcopy(model).double()
    wide_batch = [x.double() if x.is_floating_point() else x for x in batch]

    def one_by_one(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        counts = [int((label != IGNORED).sum()) for label in labels]
        parts = [built.loss(model, images[k : k + 1], labels[k : k + 1]) for k in range(len(images))]
        return torch.stack([p * n / sum(counts) for p, n in zip(parts, counts, strict=True)]).sum()

    eager, truth = gradients(built.loss, model, batch), gradients(built.loss, wide, wide_batch)
    step = lowtide.fit(built.loss, model, *batch, **ASKED)
    tiles = gradients(step, model, batch)
    torch._dynamo.reset()
    wide_tiles = gradients(lowtide.fit(built.loss, wide, *wide_batch, **ASKED), wide, wide_batch)
    print(f"{target} in {step.plan.decisions.tiles} tiles, torch {torch.__version__}")
    print(f"float64, tiles to eager: {apart(wide_tiles, truth):.1e}")
    print(f"float32, tiles to eager: {apart(tiles, eager):.1e}")
    print(
        f"float32, tiles to float64: {apart(tiles, truth):.1e}; eager to float64: {apart(eager, truth):.1e}"
    )
    if target.startswith("unet"):
        by_hand = gradients(one_by_one, model, batch)
        print(f"float32, eager image by image to eager: {apart(by_hand, eager):.1e}")


if __name__ == "__main__":
    main()
