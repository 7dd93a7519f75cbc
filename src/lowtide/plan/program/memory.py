"""Which tensors a Program holds at some instant, and on which storages.

A storage comes into being when an operator writes a new tensor, is shared by views and by operators that
run in place, and is gone when the last tensor on it is let go. Leaves are there throughout, but for those
that are sent to the host: dropping one takes its memory away under all of its views, until it is fetched.
"""

from __future__ import annotations

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph, Op, Tensor
from lowtide.plan.program.instructions import Drop, Fetch, Run, Send

__all__ = ["CUDA_BLOCK_BYTES", "Memory", "allocated_bytes", "on_host", "rounded", "saved_for"]

CUDA_BLOCK_BYTES = 512


def allocated_bytes(tensor: Tensor) -> int:
    """What the allocator takes for a tensor."""
    return rounded(tensor.bytes, tensor.device)


def rounded(size: int, device: str) -> int:
    """What the allocator of a device takes for so many bytes: CUDA's rounds up to whole blocks."""
    return -(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if device.startswith("cuda") else size


def on_host(graph: Graph, tensor: int) -> bool:
    """Whether a tensor of a step on CUDA lies on the host all the time, as seeds of random numbers do."""
    there = graph.tensors[tensor].device.startswith("cpu")
    return there and any(one.device.startswith("cuda") for one in graph.tensors)


class Memory:
    """Tensors that are held, the storage each is on, and the bytes of all storages."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storage_of: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.live = 0
        self.away: set[int] = set()
        """Storages of leaves that are on the host alone."""
        self._next = 0
        for k, tensor in enumerate(graph.tensors):
            if tensor.role in RESIDENT_ROLES and tensor.alias is None:
                self.hold(k)
        self.resident_bytes = self.live
        """Leaves: what is there throughout, unless it is sent away."""
        for k in _given(graph):
            if k not in self.storage_of:
                self.hold(k)

    def hold(self, tensor: int, storage: int | None = None) -> None:
        """Hold a tensor on a storage of its own, or on one that exists."""
        if storage is None:
            storage = self._next
            self._next += 1
            self.size[storage] = allocated_bytes(self.graph.tensors[tensor])
            self.holders[storage] = 0
            self.live += self.size[storage]
        self.storage_of[tensor] = storage
        self.holders[storage] += 1

    def release(self, tensor: int) -> None:
        """Let go of a tensor, and of its storage if nobody else is on it."""
        if tensor not in self.storage_of:
            raise PlanError(f"the program drops {self.graph.tensors[tensor].label!r}, which it does not hold")
        if self.is_leaf(tensor):
            self._take_away(tensor)
            return
        storage = self.storage_of.pop(tensor)
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.live -= self.size.pop(storage)
            del self.holders[storage]

    def move(self, instruction: Drop | Send | Fetch) -> None:
        """Let go of tensors, or hold what comes back from the host; what is sent stays until dropped."""
        if isinstance(instruction, Drop):
            for tensor in instruction.tensors:
                self.release(tensor)
        elif isinstance(instruction, Fetch):
            if self.is_leaf(instruction.tensor):
                self._bring_back(instruction.tensor)
            else:
                self.hold(instruction.tensor)

    def is_leaf(self, tensor: int) -> bool:
        """Whether a tensor is a leaf and owns its storage."""
        one = self.graph.tensors[tensor]
        return one.role in RESIDENT_ROLES and one.alias is None

    def is_here(self, tensor: int) -> bool:
        """Whether a tensor is held, and its memory is on the device."""
        return tensor in self.storage_of and self.storage_of[tensor] not in self.away

    def _take_away(self, leaf: int) -> None:
        storage = self.storage_of[leaf]
        if storage in self.away:
            raise PlanError(f"the program drops {self.graph.tensors[leaf].label!r}, which is on the host")
        self.away.add(storage)
        self.live -= self.size[storage]

    def _bring_back(self, leaf: int) -> None:
        storage = self.storage_of[leaf]
        if storage not in self.away:
            raise PlanError(f"the program fetches {self.graph.tensors[leaf].label!r}, which is there")
        self.away.discard(storage)
        self.live += self.size[storage]

    def run(self, instruction: Run) -> int:
        """Hold what the operator writes; the bytes of what it writes again though it is still held."""
        graph = self.graph
        op = graph.ops[instruction.op]
        for tensor in (*op.reads, *(saved_for(op) if instruction.short else ())):
            if tensor not in self.storage_of:
                what = graph.tensors[tensor].label
                raise PlanError(f"{op.label!r} reads {what!r}, which the program does not hold")
            if self.away and self.storage_of[tensor] in self.away:
                what = graph.tensors[tensor].label
                raise PlanError(f"{op.label!r} reads {what!r}, which is on the host")
        taken = None if instruction.in_place is None else self.storage_of[op.inputs[instruction.in_place]]
        passing = 0
        for position, tensor in enumerate(op.outputs[:1] if instruction.short else op.outputs):
            base = graph.tensors[tensor].alias
            if tensor in self.storage_of:
                again = base is None and tensor not in op.inputs
                passing += allocated_bytes(graph.tensors[tensor]) if again else 0
            elif base is not None:
                if base not in self.storage_of:
                    what = graph.tensors[base].label
                    raise PlanError(f"{op.label!r} gives a view of {what!r}, which the program does not hold")
                self.hold(tensor, self.storage_of[base])
            elif position == 0 and taken is not None:
                self.hold(tensor, taken)
            else:
                self.hold(tensor)
        return passing


def saved_for(op: Op) -> tuple[int, ...]:
    """Outputs of its first run that a short second run of an operator reads."""
    return tuple(op.outputs[k] for k in op.short)


def _given(graph: Graph) -> list[int]:
    """Tensors that no operator writes: leaves, and the gradient that starts backward."""
    written = {t for op in graph.ops for t in op.outputs}
    return [k for k in range(len(graph.tensors)) if k not in written]
