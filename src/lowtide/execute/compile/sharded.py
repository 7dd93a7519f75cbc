"""Steps whose parameters are spread over processes: what cannot be planned there, and the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from lowtide.distributed_internals import is_distributed
from lowtide.errors import CaptureError
from lowtide.trace.distributed.collectives import is_collective

__all__ = ["refuse_distributed_parts", "refuse_sharded"]


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that ``fully_shard`` has sharded: hooks gather their parameters around each forward.

    A plan runs the step several times, as often as the clock asks for. Processes would then wait for each
    other in different collectives.
    """
    kinds = _kinds("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    for module in modules:
        sharded = next((one for one in module.modules() if isinstance(one, kinds)), None) if kinds else None
        if sharded is None:
            continue
        told = (
            f"{type(sharded).__name__} is sharded over processes, which would wait for each other while one "
            "of them plans. Fit each block before it is sharded: `block.forward = lowtide.fit(block.forward, "
            "x, budget=...)`, then `fully_shard(block)`; it runs by its plan between the hooks that gather "
            "its parameters (docs/integrations.md)"
        )
        if any(_meshes(parameter) > 1 for parameter in module.parameters()):
            told = (
                f"{type(sharded).__name__} is sharded by fully_shard and split by tensor parallelism, which "
                "cannot be planned together: take one of the two. With parallelize_module alone, "
                "`lowtide.fit` plans the model as a whole; with fully_shard alone, fit each block before it "
                "is sharded (docs/integrations.md)"
            )
        raise CaptureError(told)


def refuse_distributed_parts(values: Iterable[Any], targets: Iterable[Any] = (), why: str = "") -> None:
    """Refuse tensors that are spread over processes, and collectives, in a step of several graphs.

    Its forward runs while it is planned, as often as the budget of each process asks for.
    """
    if any(map(is_distributed, values)) or any(map(is_collective, targets)):
        because = f"{why.rstrip('.')}. " if why else ""
        raise CaptureError(
            f"{because}A step with collectives, such as those of DTensors (parallelize_module), must be "
            "captured as one graph: several graphs run while one process plans and the others do not. Take "
            "out what breaks the graph (`lowtide.fit(..., fullgraph=True)` names its line), or fit the parts "
            "before and after it by themselves (docs/integrations.md)"
        )


def _meshes(parameter: Any) -> int:
    """Over how many dimensions of a mesh a parameter is spread."""
    return len(parameter.placements) if is_distributed(parameter) else 0


def _kinds(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module of torch; none where nobody has imported it, so that there is nothing of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
