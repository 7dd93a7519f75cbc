"""Training graphs dumped from Chainer for recomputation planners: the reader, the writer, the counts."""

from __future__ import annotations

from typing import Any

from lowtide.cost import Step
from lowtide.formats.base import Format
from lowtide.formats.chainer.read import HEAD, read
from lowtide.formats.chainer.write import write
from lowtide.graph import Role

__all__ = ["FORMAT", "read", "write"]


def _facts(step: Step) -> dict[str, Any]:
    graph = step.graph
    variables = [t for t in graph.tensors if t.gradient_of is None]
    return {
        "variables": len(variables),
        "functions": len(graph.ops),
        "parameters": sum(t.role is Role.PARAMETER for t in variables),
        "inputs": [t.bytes for t in variables if t.role is Role.INPUT],
        "activations": sum(t.role is Role.ACTIVATION for t in variables),
    }


FORMAT = Format(
    name="chainer",
    title="Chainer training graph",
    recognise=lambda data: HEAD.match(data) is not None,
    read=read,
    write=write,
    facts=_facts,
)
