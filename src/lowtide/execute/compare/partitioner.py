"""PyTorch's own partitioner at a memory budget, as a baseline.

It is shown a copy of the captured joint graph and says which values forward saves; the Program keeps those
and makes the rest again where backward first reads it. Its budget is a share of saved bytes, not a peak, so
several are tried. Only its choice is taken over: random operators are replayed by our own interpreter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

from torch import fx

from lowtide.errors import PlanError
from lowtide.plan.baselines import cheapest, keeping
from lowtide.plan.program.instructions import Program
from lowtide.torch_internals import functorch_config, min_cut_partition
from lowtide.trace.step.joint import Joint

__all__ = ["partitioned", "partitioner"]

_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)


def partitioner(
    joint: Joint, seconds: Sequence[float], budget: int, *, workspace_bytes: Sequence[int] = ()
) -> Program:
    """The fastest of its Programs that fits, among eleven shares of the bytes it would save."""
    programs = _programs(joint)
    return cheapest(joint.graph, seconds, budget, programs, workspace_bytes=workspace_bytes)


def partitioned(joint: Joint, share: float) -> Program:
    """The Program that keeps what the partitioner saves at a share; a PlanError where it fails."""
    nodes = {node.name: node for node in joint.tensor_of}
    module = _copied(joint)
    try:
        with functorch_config.patch(activation_memory_budget=share):
            forward, _ = min_cut_partition(
                module, (), num_fwd_outputs=len(joint.outputs), static_lifetime_input_indices=[]
            )
    except Exception as error:  # whatever it raises: it is known to fail on BatchNorm without decompositions
        said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise PlanError(f"PyTorch's partitioner fails at a budget of {share:g}: {said}") from error
    results: Sequence[object] = forward.graph.output_node().args[0]  # type: ignore[assignment]
    names = [node.name for node in results[len(joint.outputs) :] if isinstance(node, fx.Node)]
    unknown = [name for name in names if name not in nodes]
    if unknown:
        raise PlanError(f"PyTorch's partitioner saves {unknown[0]!r}, which is no value of the captured step")
    storage = joint.graph.storages()
    return keeping(joint.graph, {storage[joint.tensor_of[nodes[name]]] for name in names})


def _programs(joint: Joint) -> Iterator[Program]:
    failure: PlanError | None = None
    found = False
    for share in _SHARES:
        try:
            program = partitioned(joint, share)
        except PlanError as error:
            failure = failure or error
            continue
        found = True
        yield program
    if failure is not None and not found:
        raise failure


def _copied(joint: Joint) -> fx.GraphModule:
    """The joint graph to be changed at will: nodes keep their names."""
    graph = next(iter(joint.tensor_of)).graph
    return fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
