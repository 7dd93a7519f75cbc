"""Signatures: operators that do the same work on the same sort of data have the same one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from lowtide.graph import Graph, Op, Tensor

__all__ = ["device_kind", "signature"]

_VERSION = 1
"""Raised when something new goes into a signature, so that figures under old ones are not taken for it."""


def signature(graph: Graph, op: int) -> str:
    """The kind and a digest of all that decides how long an operator takes and what it allocates.

    Kind and overload, shape, type, strides and sort of device of every input, and the arguments that are no
    tensors. Names, phases and places in the graph do not count. The same in every process and release.
    """
    one = graph.ops[op]
    strides = one.strides or [None] * len(one.inputs)
    parts = [
        _VERSION,
        one.kind,
        one.overload if one.arguments is not None else None,
        [_tensor(graph.tensors[t], strides[k]) for k, t in enumerate(one.inputs)],
        one.arguments,
        one.options or None,
        _device(graph, one),
    ]
    if one.body is not None:
        parts.append(msgspec.to_builtins(one.body))
    if one.in_place:
        parts.append("in place")
    text = json.dumps(_without_index(parts), sort_keys=True, separators=(",", ":"))
    return f"{one.kind}/{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def device_kind(device: str) -> str:
    """``cuda`` for ``cuda:1``: devices of one sort share their figures."""
    return device.partition(":")[0]


def _tensor(tensor: Tensor, strides: Sequence[int] | None) -> list[Any]:
    shape = None if tensor.shape is None else list(tensor.shape)
    size = tensor.bytes if shape is None else None
    return [shape, tensor.dtype, strides, device_kind(tensor.device), size]


def _device(graph: Graph, op: Op) -> str:
    """Where the operator runs: its own device, for one without inputs that is all there is."""
    return device_kind(op.device or (graph.tensors[op.outputs[0]].device if op.outputs else ""))


def _without_index(value: Any) -> Any:
    """``cuda:1`` among the arguments is ``cuda`` too."""
    if isinstance(value, list | tuple):
        return [_without_index(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_index(item) for key, item in value.items()}
    return "cuda" if isinstance(value, str) and value.startswith("cuda:") else value
