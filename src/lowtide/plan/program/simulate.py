"""What a Program does over time: exact live bytes, instruction by instruction.

Memory is counted in storages. A storage comes into being when an operator writes a new tensor, is shared
by views and by operators that run in place, and is gone when the last tensor on it is dropped. Leaves are
there throughout, unless they are sent to the host; what is there between two runs counts with the later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.graph import LOOP, Graph, Phase, Role, Timeline
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.instructions import Body, Drop, Fetch, Loop, Program, Run, Send
from lowtide.plan.program.memory import CUDA_BLOCK_BYTES, Memory, allocated_bytes, rounded
from lowtide.plan.program.under_way import UnderWay

__all__ = [
    "RANDOM_STATE_BYTES",
    "autograd_bytes",
    "copied_before",
    "inside_bytes",
    "kept_to_restore",
    "run_again_on_host",
    "simulate",
]

_SCALARS = 4
"""Scalars that autograd keeps beside the program: the loss and its gradient, before and after its checks.

In a loop of an evaluation they stand for what its tiles add to the loss."""
_SCALAR_BYTES = 8
"""What one takes on the host at most."""
RANDOM_STATE_BYTES = 2 * 5056
"""The state of torch's generator on the CPU, and the one that is put aside while an operator runs again.

That of a CUDA device is kept on the host."""


def simulate(
    graph: Graph,
    program: Program,
    *,
    workspace_bytes: Sequence[int] = (),
    seconds: Sequence[float] = (),
    short: Mapping[int, float] | None = None,
    link: Link | None = None,
    lanes: Lanes | None = None,
) -> Timeline:
    """The timeline of a Program, an entry for every Run instruction in order.

    With a ``link``, copies to and from the host take time on lanes of their own, first in, first out; what an
    operator waits for them counts as part of it. ``lanes`` take the place of those of the link, know what
    communications take, and who was waited for. ``short`` says what short second runs take. A PlanError says
    which instruction reads what is not there.
    """
    memory = Memory(graph)
    resident = memory.resident_bytes
    memory.live += autograd_bytes(graph)
    live: list[int] = []
    extra: list[int] = []
    took: list[float] = []
    states = run_again_on_host(graph, program)
    before = kept_to_restore(graph)
    copies = (allocated_bytes(graph.tensors[t]) for t in copied_before(graph, program))
    memory.live += sum(copies) + before
    lanes = lanes or Lanes(graph, link)
    storage = graph.storages() if _moves_leaves(memory, program) else []
    between = memory.live if storage else 0
    talks, under_way = lanes.wire_seconds, UnderWay(graph)
    for position, instruction in enumerate(program.instructions):
        if position == len(program.forward):
            memory.live -= before + under_way.end()
            lanes.settle()
        memory.live -= under_way.ended_before(instruction)
        if not isinstance(instruction, Run):
            memory.move(instruction)
            if isinstance(instruction, Drop):
                lanes.drop(instruction.tensors, memory.is_here)
            elif isinstance(instruction, Send):
                lanes.send(instruction.tensor, memory.is_here)
            elif isinstance(instruction, Fetch):
                lanes.fetch(instruction.tensor)
                between = max(between, memory.live)
            continue
        passing = memory.run(instruction)
        if instruction.op in states:
            states.discard(instruction.op)
            memory.live += RANDOM_STATE_BYTES
        workspace = max(workspace_bytes[instruction.op] if workspace_bytes else 0, instruction.beside)
        if isinstance(instruction, Loop):
            workspace = max(inside_bytes(program.bodies[k]) for k in {t.body for t in instruction.tiles})
        live.append(max(memory.live + passing + workspace, between))
        between = 0
        extra.append(workspace)
        memory.live += under_way.begin(instruction)
        reads = graph.ops[instruction.op].reads
        if storage:  # a leaf is waited for whichever of its views is read
            reads += tuple(storage[t] for t in graph.ops[instruction.op].inputs)
        took.append(lanes.work(instruction, reads, _spent(instruction, seconds, short or {})))
    if live:
        live[-1] = max(live[-1], between)
    if live and (storage or talks):
        lanes.settle()
        took[-1] += lanes.run(set(storage), 0.0)  # a step ends with everything back
    return Timeline(
        tuple(live),
        workspace_bytes=tuple(extra) if workspace_bytes else (),
        seconds=tuple(took) if seconds else (),
        resident_bytes=resident,
    )


def _spent(run: Run, seconds: Sequence[float], short: Mapping[int, float]) -> float:
    own = seconds[run.op] if seconds else 0.0
    return short.get(run.op, own) if run.short else own


def inside_bytes(body: Body) -> int:
    """The most that a tile takes besides what goes into it."""
    timeline = simulate(body.graph, body.program, workspace_bytes=body.workspace_bytes)
    return timeline.peak_bytes - timeline.resident_bytes


def _moves_leaves(memory: Memory, program: Program) -> bool:
    sent = (line.tensor for line in program.instructions if isinstance(line, Send))
    return any(memory.is_leaf(t) for t in sent if 0 <= t < len(memory.graph.tensors))


def autograd_bytes(graph: Graph) -> int:
    """Scalars of autograd, and of a loop, on the device of a program; a document may say nothing of one."""
    devices = {op.device for op in graph.ops if op.phase is not Phase.FORWARD or op.kind == LOOP}
    if any(device.startswith("cuda") for device in devices):
        return _SCALARS * CUDA_BLOCK_BYTES
    return _SCALARS * _SCALAR_BYTES if "cpu" in devices else 0


def run_again_on_host(graph: Graph, program: Program) -> set[int]:
    """Random operators on the host that run again: the generator's state before the first run is kept."""
    seen: set[int] = set()
    again: set[int] = set()
    for line in program.instructions:
        if isinstance(line, Run) and graph.ops[line.op].random:
            (again if line.op in seen else seen).add(line.op)
    return {op for op in again if graph.ops[op].device.startswith("cpu")}


def copied_before(graph: Graph, program: Program) -> list[int]:
    """Leaves that backward reads and the step updates in between are copied before forward."""
    updated = set(graph.updated)
    runs = (line for line in program.backward if isinstance(line, Run))
    read = {t for line in runs for t in graph.ops[line.op].reads_again}
    return sorted(t for t in read if t in updated or graph.tensors[t].role is Role.BUFFER)


def kept_to_restore(graph: Graph) -> int:
    """What forward updates on its way is kept until it has succeeded: one block for each type of number."""
    blocks: dict[tuple[str, str | None], int] = {}
    for t in graph.updated_early:
        tensor = graph.tensors[t]
        blocks[tensor.device, tensor.dtype] = blocks.get((tensor.device, tensor.dtype), 0) + tensor.bytes
    return sum(rounded(size, device) for (device, _), size in blocks.items())
