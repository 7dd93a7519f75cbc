"""Name and role of what goes into a captured function, from where torch found it."""

from __future__ import annotations

import re

from torch import fx

from lowtide.graph import Role
from lowtide.trace.step.joint import Leaf

__all__ = ["leaves_of"]


def leaves_of(module: fx.GraphModule) -> list[Leaf]:
    """A Leaf for every input of a captured function, in order."""
    leaves = []
    for node in module.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        name = "" if source is None else source.name
        leaves.append(Leaf(_readable(name) or node.name, _role(name)))
    return leaves


def _role(source: str) -> Role:
    if "._parameters[" in source:
        return Role.PARAMETER
    return Role.BUFFER if "._buffers[" in source else Role.INPUT


def _readable(source: str) -> str:
    """``L['self']._modules['conv']._parameters['weight']`` as ``conv.weight``."""
    parts = re.findall(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", source)
    return ".".join(parts) if parts else re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
