"""What a Program needs besides the tensors of its step, counted for the checker alone."""

from __future__ import annotations

from lowtide.graph import Graph
from lowtide.plan.program import Program, Run

__all__ = ["CUDA_GRANULE", "random_again", "restorable_bytes"]

CUDA_GRANULE = 512
"""The allocator gives memory on CUDA in multiples of so many bytes."""


def restorable_bytes(graph: Graph) -> int:
    """What forward updates on its way is copied into one block for each kind of number."""
    blocks: dict[tuple[str, str | None], int] = {}
    for t in graph.attributes.get("updated_early", ()):
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
    twice = [op for op, n in count.items() if n > 1 and graph.ops[op].attributes.get("random")]
    return {op for op in twice if graph.ops[op].device.startswith("cpu")}
