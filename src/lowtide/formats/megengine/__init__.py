"""Execution profiles of MegEngine: the reader, the writer, the counts."""

from __future__ import annotations

from typing import Any

from lowtide.cost import Step
from lowtide.formats.base import Format
from lowtide.formats.megengine.read import HEAD, read
from lowtide.formats.megengine.write import own_sections, write
from lowtide.graph import Role

__all__ = ["FORMAT", "read", "write"]


def _facts(step: Step) -> dict[str, Any]:
    own = own_sections(step)
    tensors = step.graph.tensors
    placed = [t for t in tensors if t.address is not None and t.role in (Role.ACTIVATION, Role.WORKSPACE)]
    workspaces = [t.bytes for t in placed if t.role is Role.WORKSPACE]
    chunks = own.get("chunks", {})
    return {
        "operators": len(step.graph.ops),
        "operators_not_run": len(own.get("idle", {})),
        "variables": len(tensors),
        "chunks": {"count": len(chunks), "bytes": sum(chunk["size"] for chunk in chunks.values())},
        "operators_without_flop": sum(cost.flop is None for cost in step.costs),
        "activations_and_workspaces": {"count": len(placed), "bytes": sum(t.bytes for t in placed)},
        "workspaces": {"count": len(workspaces), "largest_bytes": max(workspaces, default=0)},
    }


FORMAT = Format(
    name="megengine",
    title="MegEngine execution profile",
    recognise=lambda data: HEAD.match(data) is not None,
    read=read,
    write=write,
    facts=_facts,
)
