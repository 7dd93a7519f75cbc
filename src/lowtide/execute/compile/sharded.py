"""Steps whose parameters are spread over processes: what cannot be planned there, and the way out."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from lowtide.errors import CaptureError

__all__ = ["refuse_distributed_tensors", "refuse_sharded"]


def refuse_sharded(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that torch shards, or that hold tensors of several processes.

    A plan runs the step several times, and measures its operators one by one, as often as the clock asks for.
    Processes would then wait for each other in different collectives.
    """
    kinds = _kinds("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    for module in modules:
        sharded = next((one for one in module.modules() if isinstance(one, kinds)), None) if kinds else None
        if sharded is not None:
            raise CaptureError(
                f"{type(sharded).__name__} is sharded over processes, which would wait for each other while "
                "one of them plans. Fit each block before it is sharded: `block.forward = "
                "lowtide.fit(block.forward, x, budget=...)`, then `fully_shard(block)`; it runs by its plan "
                "between the hooks that gather its parameters (docs/integrations.md)"
            )
        refuse_distributed_tensors(module.parameters())


def refuse_distributed_tensors(values: Iterable[Any]) -> None:
    """Refuse tensors that are spread over several processes."""
    kinds = _kinds("torch.distributed.tensor", "DTensor")
    if kinds and any(isinstance(value, kinds) for value in values):
        raise CaptureError(
            "a tensor of the step is a DTensor, as tensor parallelism (parallelize_module) makes them: its "
            "operators talk to other processes, which would wait for each other while one of them plans. Fit "
            "the parts of the model whose parameters are plain tensors, or train with fully_shard or "
            "DistributedDataParallel (docs/integrations.md)"
        )


def _kinds(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module of torch; none where nobody has imported it, so that there is nothing of them."""
    loaded = sys.modules.get(module)
    return tuple(getattr(loaded, name) for name in names if hasattr(loaded, name))
