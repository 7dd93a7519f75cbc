"""Steps whose parameters are spread over processes: what cannot be planned there, and the way out."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lowtide.distributed_internals import is_distributed
from lowtide.errors import CaptureError
from lowtide.trace.distributed.collectives import is_collective

__all__ = ["refuse_distributed_parts", "refuse_sharded", "refuse_unfinished", "unsynchronised"]

_SYNCHRONISES = ("require_backward_grad_sync", "require_forward_param_sync")
"""What DistributedDataParallel is told by, as its ``no_sync`` does."""


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


def refuse_unfinished(values: Iterable[Any]) -> None:
    """Refuse tensors that a collective has not given yet."""
    kinds = _kinds("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if kinds and any(isinstance(value, kinds) for value in values):
        raise CaptureError(
            "an argument of the step is the result of a collective that is still under way "
            "(AsyncCollectiveTensor): call its `wait()`, and pass what that returns"
        )


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


@contextlib.contextmanager
def unsynchronised(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, DistributedDataParallel averages no gradients and sends no buffers.

    A step that is planned runs as often as the budget of each process asks for.
    """
    kinds = _kinds("torch.nn.parallel", "DistributedDataParallel")
    inside = (one for module in modules for one in module.modules()) if kinds else ()
    found = {id(one): one for one in inside if isinstance(one, kinds)}
    before = {key: {name: getattr(one, name) for name in _SYNCHRONISES} for key, one in found.items()}
    try:
        for one in found.values():
            for name in _SYNCHRONISES:
                setattr(one, name, False)
        yield
    finally:
        for key, one in found.items():
            for name, value in before[key].items():
                setattr(one, name, value)


def _meshes(parameter: Any) -> int:
    """Over how many dimensions of a mesh a parameter is spread."""
    return len(parameter.placements) if is_distributed(parameter) else 0


def _kinds(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module of torch; none where nobody has imported it, so that there is nothing of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
