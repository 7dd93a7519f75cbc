"""Where in the user's code a node of a graph comes from."""

from __future__ import annotations

import re

from torch import fx

from lowtide.graph import Source

__all__ = ["annotation_of", "module_path", "source_of", "text", "where"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def module_path(node: fx.Node) -> str:
    """`layer1.0.conv1`, from the innermost module that ran the operator; forward's for its backward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return re.sub(r"^[LG]\['\w+'\]\.?|__\w+__\.?", "", path).replace("['", ".").replace("']", "").strip(".")


def source_of(node: fx.Node) -> Source | None:
    """The innermost line of the user's own code."""
    trace = node.meta.get("stack_trace")
    frames = _FRAME.findall(trace) if trace else []
    for file, line in reversed(frames):
        if "/torch/" not in file:
            return Source(text(file), int(line))
    return Source(text(frames[-1][0]), int(frames[-1][1])) if frames else None


def annotation_of(node: fx.Node) -> dict[str, str]:
    """What the user calls this part of the step, by ``torch.fx.traceback.annotate``."""
    found = node.meta.get("custom") or {}
    return {text(str(key)): text(str(value)) for key, value in found.items()}


def text(name: str) -> str:
    """A name that any file can hold: bytes of a path that are no UTF-8 are spelt out."""
    return name.encode("utf-8", "backslashreplace").decode()


def where(node: fx.Node) -> str:
    """``file:line`` of the user's code."""
    source = source_of(node)
    return f"{source.file}:{source.line}" if source else "the captured step"
