"""What a Program needs besides the tensors of its step, counted for the checker alone."""

from __future__ import annotations

from lowtide.graph import EXCHANGE, LOOP, SUM, Graph, Phase, Role
from lowtide.plan.check.graph import CUDA_GRANULE, Facts
from lowtide.plan.program.instructions import Drop, Instruction, Program, Run

__all__ = ["STATE_BYTES", "OnItsWay", "beside_bytes", "random_again", "restorable_bytes"]

STATE_BYTES = 2 * 5056
"""The state of a generator on the host."""


def restorable_bytes(graph: Graph) -> int:
    """What forward updates on its way is copied into one block for each kind of number."""
    blocks: dict[tuple[str, str | None], int] = {}
    for t in graph.updated_early:
        one = graph.tensors[t]
        blocks[one.device, one.dtype] = blocks.get((one.device, one.dtype), 0) + one.bytes
    cuda = {key: -(-size // CUDA_GRANULE) * CUDA_GRANULE for key, size in blocks.items()}
    return sum(cuda[key] if key[0].startswith("cuda") else size for key, size in blocks.items())


def random_again(graph: Graph, program: Program) -> set[int]:
    """Random operators on the host that run twice: the generator's state is kept from their first run."""
    count: dict[int, int] = {}
    for line in program.instructions:
        if isinstance(line, Run) and 0 <= line.op < len(graph.ops):
            count[line.op] = count.get(line.op, 0) + 1
    twice = [op for op, n in count.items() if n > 1 and graph.ops[op].random]
    return {op for op in twice if graph.ops[op].device.startswith("cpu")}


def beside_bytes(facts: Facts, program: Program) -> int:
    """Scalars of autograd and of loops, and old values of leaves that backward reads after an update."""
    graph = facts.graph
    looped = (op for op in graph.ops if op.phase is not Phase.FORWARD or op.kind == LOOP)
    behind = {op.device.partition(":")[0] for op in looped}
    scalar = CUDA_GRANULE if "cuda" in behind else 8 if "cpu" in behind else 0
    updated = set(graph.updated)
    old: set[int] = set()
    for line in program.backward:
        if isinstance(line, Run) and 0 <= line.op < len(graph.ops):
            op = graph.ops[line.op]
            passed = {op.inputs[k] for k in op.updates}
            reads = set(op.reads) - passed
            old |= {t for t in reads if t in updated or graph.tensors[t].role is Role.BUFFER}
    return 4 * scalar + sum(facts.size[t] for t in old)


class OnItsWay:
    """One at a time is on its way, and takes what the Program says."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._result: set[int] = set()
        """Storages of its result."""
        self._held = 0

    def start(self, op: int, size: int) -> None:
        """It goes on beside what comes next."""
        owner = self._graph.storages()
        self._result, self._held = {owner[t] for t in self._graph.ops[op].outputs}, size

    def ended(self) -> int:
        """It is waited for; the bytes that it has held."""
        held, self._held = self._held, 0
        self._result = set()
        return held

    def hinders(self, line: Instruction) -> bool:
        """Whether an instruction has to wait for it: it touches the result, or communicates itself."""
        if not self._result:
            return False
        ops, owner = self._graph.ops, self._graph.storages()
        if isinstance(line, Run):
            op = ops[line.op] if 0 <= line.op < len(ops) else None
            if op is None or op.kind in (EXCHANGE, SUM):
                return op is not None
            tensors = [*op.inputs, *op.outputs]
        else:
            tensors = [*line.tensors] if isinstance(line, Drop) else [line.tensor]
        return not self._result.isdisjoint(owner[t] for t in tensors if 0 <= t < len(owner))
