"""What a Program does over time: exact live bytes, instruction by instruction.

Memory is counted in storages. A storage comes into being when an operator writes a new tensor, is shared
by views and by operators that run in place, and is gone when the last tensor on it is dropped. Leaves are
there throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import PlanError
from lowtide.graph import RESIDENT_ROLES, Graph, Role, Timeline
from lowtide.plan.program import Drop, Program, Run

__all__ = ["RANDOM_STATE_BYTES", "simulate"]

RANDOM_STATE_BYTES = 5056
"""The state of torch's generator on the CPU; that of a CUDA device is kept on the host."""


class _Memory:
    """Tensors that are held, the storage each is on, and the bytes of all storages."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.storage_of: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.size: dict[int, int] = {}
        self.live = 0
        self._next = 0

    def hold(self, tensor: int, storage: int | None = None) -> None:
        """Hold a tensor on a storage of its own, or on one that exists."""
        if storage is None:
            storage = self._next
            self._next += 1
            self.size[storage] = self.graph.tensors[tensor].bytes
            self.holders[storage] = 0
            self.live += self.size[storage]
        self.storage_of[tensor] = storage
        self.holders[storage] += 1

    def release(self, tensor: int) -> None:
        """Let go of a tensor, and of its storage if nobody else is on it."""
        if tensor not in self.storage_of:
            raise PlanError(f"the program drops {self.graph.tensors[tensor].label!r}, which it does not hold")
        storage = self.storage_of.pop(tensor)
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.live -= self.size.pop(storage)
            del self.holders[storage]


def simulate(
    graph: Graph, program: Program, *, workspace_bytes: Sequence[int] = (), seconds: Sequence[float] = ()
) -> Timeline:
    """The timeline of a Program, an entry for every Run instruction in order.

    A PlanError says which instruction reads what is not there.
    """
    memory = _Memory(graph)
    for k, tensor in enumerate(graph.tensors):
        if tensor.role in RESIDENT_ROLES and tensor.alias is None:
            memory.hold(k)
    for k in _given(graph):
        if k not in memory.storage_of:
            memory.hold(k)
    live: list[int] = []
    extra: list[int] = []
    took: list[float] = []
    states = _states(graph, program)
    for position, instruction in enumerate(program.instructions):
        if position == len(program.forward):
            memory.live += _copied(graph, program)
        if isinstance(instruction, Drop):
            for dropped in instruction.tensors:
                memory.release(dropped)
            continue
        passing = _run(memory, instruction)
        if instruction.op in states:
            states.discard(instruction.op)
            memory.live += RANDOM_STATE_BYTES
        workspace = workspace_bytes[instruction.op] if workspace_bytes else 0
        live.append(memory.live + passing + workspace)
        extra.append(workspace)
        took.append(seconds[instruction.op] if seconds else 0.0)
    return Timeline(
        tuple(live),
        workspace_bytes=tuple(extra) if workspace_bytes else (),
        seconds=tuple(took) if seconds else (),
    )


def _states(graph: Graph, program: Program) -> set[int]:
    """Random operators on the host that run again: the generator's state before the first run is kept."""
    seen: set[int] = set()
    again: set[int] = set()
    for line in program.instructions:
        if isinstance(line, Run) and graph.ops[line.op].attributes.get("random"):
            (again if line.op in seen else seen).add(line.op)
    return {op for op in again if graph.ops[op].device.startswith("cpu")}


def _copied(graph: Graph, program: Program) -> int:
    """Buffers that backward reads are copied at the end of forward: the step updates them in between."""
    runs = (line for line in program.backward if isinstance(line, Run))
    read = {t for line in runs for t in graph.ops[line.op].reads}
    return sum(graph.tensors[t].bytes for t in read if graph.tensors[t].role is Role.BUFFER)


def _given(graph: Graph) -> list[int]:
    """Tensors that no operator writes: leaves, and the gradient that starts backward."""
    written = {t for op in graph.ops for t in op.outputs}
    return [k for k in range(len(graph.tensors)) if k not in written]


def _run(memory: _Memory, instruction: Run) -> int:
    """Hold what the operator writes; the bytes of what it writes again though it is still held."""
    graph = memory.graph
    op = graph.ops[instruction.op]
    for tensor in op.reads:
        if tensor not in memory.storage_of:
            raise PlanError(
                f"{op.label!r} reads {graph.tensors[tensor].label!r}, which the program does not hold"
            )
    taken = None if instruction.in_place is None else memory.storage_of[op.inputs[instruction.in_place]]
    passing = 0
    for position, tensor in enumerate(op.outputs):
        base = graph.tensors[tensor].alias
        if tensor in memory.storage_of:
            passing += 0 if base is not None or tensor in op.inputs else graph.tensors[tensor].bytes
        elif base is not None:
            memory.hold(tensor, memory.storage_of[base])
        elif position == 0 and taken is not None:
            memory.hold(tensor, taken)
        else:
            memory.hold(tensor)
    return passing
