"""Steps listed by TensorFlow: the reader, the writer, the counts."""

from __future__ import annotations

from typing import Any

from lowtide.cost import Step
from lowtide.formats.base import Format
from lowtide.formats.tensorflow.read import HEAD, read
from lowtide.formats.tensorflow.write import write
from lowtide.graph import Category

__all__ = ["FORMAT", "read", "write"]


def _facts(step: Step) -> dict[str, Any]:
    ops = step.graph.ops
    kernels = [kernel for op in ops for kernel in op.kernels]
    copies = sum(op.category is Category.COPY for op in ops)
    devices: dict[str, int] = {}
    for device in [op.device for op in ops] + [kernel.device for kernel in kernels]:
        devices[device] = devices.get(device, 0) + 1
    return {
        "lines": len(ops) + len(kernels),
        "nodes": len(ops) - copies,
        "kernels": len(kernels),
        "copies": copies,
        "devices": devices,
    }


FORMAT = Format(
    name="tensorflow",
    title="TensorFlow step list",
    recognise=lambda data: HEAD.match(data) is not None,
    read=read,
    write=write,
    facts=_facts,
)
