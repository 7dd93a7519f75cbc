"""Private names of torch for tensors and operators of several processes, under public names.

Each says in which versions of torch it was seen, and handles what differs between them.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "functional_collectives",
    "is_distributed",
    "local_of",
    "several_processes",
    "tensor_holders",
    "with_local",
]

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that have all of their memory themselves."""


def is_distributed(value: object) -> bool:
    """Whether a tensor is spread over processes: a DTensor. Seen in 2.13."""
    return type(value) not in _PLAIN and isinstance(getattr(value, "_local_tensor", None), torch.Tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this process has: of a DTensor its shard, else all of it."""
    local: torch.Tensor = tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]
    return local


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor that is spread like another one, with this part here."""
    like: Any = tensor
    found: torch.Tensor = type(like).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def tensor_holders(tensor: torch.Tensor) -> int:
    """How many in this process hold a tensor, all of Python as one. Seen in 2.13."""
    count: Any = getattr(tensor, "_use_count", None)
    return 1 if count is None else int(count())


def several_processes() -> bool:
    """Whether this process is one of several that talk to each other."""
    found: Any = torch.distributed
    return bool(found.is_available() and found.is_initialized() and found.get_world_size() > 1)


def functional_collectives() -> Any:
    """The operators that a captured graph talks to other processes by. Seen in 2.13."""
    return torch.ops._c10d_functional
