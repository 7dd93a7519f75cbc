"""Private names of torch for tensors and operators of several processes, under public names.

Each says in which versions of torch it was seen, and handles what differs between them.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "backend_of",
    "default_store",
    "functional_collectives",
    "group_seconds",
    "is_distributed",
    "local_of",
    "may_be_answered_for",
    "several_processes",
    "storage_info",
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


def may_be_answered_for() -> bool:
    """Whether a dispatch mode may answer for other processes, as while a step is tried out. Seen in 2.13."""
    return bool(torch._C._len_torch_dispatch_stack())


def several_processes() -> bool:
    """Whether this process is one of several that talk to each other."""
    found: Any = torch.distributed
    return bool(found.is_available() and found.is_initialized() and found.get_world_size() > 1)


def functional_collectives() -> Any:
    """The operators that a captured graph talks to other processes by. Seen in 2.13."""
    return torch.ops._c10d_functional


def default_store() -> Any:
    """The store by which the processes of torch.distributed have met. Seen in 2.13."""
    return torch.distributed.distributed_c10d._get_default_store()


def backend_of(group: Any, device: torch.device) -> str:
    """What sends tensors of a device for a group: gloo, nccl. Seen in 2.13."""
    return str(group._get_backend(device).name())


def group_seconds(group: Any) -> float:
    """After how long a communication of a group fails. Seen in 2.13."""
    device = torch.device("cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    return 1800.0 if timeout is None else float(timeout.total_seconds())


def storage_info(file: str, offset: int, length: int) -> Any:
    """Where a part of a checkpoint is in its files, for torch's reader. Seen in 2.10 to 2.13."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
