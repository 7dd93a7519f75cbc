"""How fast devices exchange bytes, and what the communications of a step take by that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.graph import EXCHANGE, SUM, Graph, Op
from lowtide.units import format_bytes, format_seconds

__all__ = ["WireEnd", "WireSpeed", "exchanged_bytes", "item_bytes", "wire_seconds"]


@dataclass(frozen=True, slots=True)
class WireSpeed:
    """How fast devices along an axis exchange bytes.

    A sum over N devices is taken to go around a ring: 2 (N - 1) rounds with their delays, and 2 (N - 1) / N
    of its bytes over the rate. Where sums were measured, the delay of a whole sum and its rate are told.
    """

    bytes_per_second: float = 1e9
    latency: float = 5e-5
    sum_bytes_per_second: float = 0.0
    """What a device moves for a sum, 2 (N - 1) / N of its bytes, a second; 0: as fast as messages."""
    sum_latency: float = -1.0
    """Of a whole sum; below 0: that of its rounds."""

    def seconds(self, moved: float) -> float:
        """That a message takes."""
        return self.latency + moved / self.bytes_per_second if moved else 0.0

    def sum_seconds(self, size: float, devices: int) -> float:
        """That a sum of so many bytes takes."""
        if devices < 2 or not size:
            return 0.0
        delay = self.sum_latency if self.sum_latency >= 0 else 2 * (devices - 1) * self.latency
        rate = self.sum_bytes_per_second or self.bytes_per_second
        return delay + 2 * size * (devices - 1) / devices / rate

    def words(self, devices: int) -> str:
        """The same for people."""
        summing = self.sum_bytes_per_second or self.bytes_per_second
        delays = [format_seconds(one) for one in (self.latency, self.sum_seconds(1, devices))]
        rates = [format_bytes(one) for one in (self.bytes_per_second, summing)]
        return f"a message takes {delays[0]} and {rates[0]}/s, a sum {delays[1]} and {rates[1]}/s"


@dataclass(frozen=True, slots=True)
class WireEnd:
    """One of the devices that a wire connects."""

    speed: WireSpeed
    place: int
    """Which of them it is."""
    devices: int


def wire_seconds(graph: Graph, wires: Mapping[str, WireEnd]) -> dict[int, float]:
    """What communications take, beside what they compute, by operator; those over other wires are left out.

    All messages of an exchange go at once, so it takes what the direction with more bytes takes.
    """
    found: dict[int, float] = {}
    for k, op in enumerate(graph.ops):
        end = wires.get(str(op.arguments[-1])) if op.kind in (EXCHANGE, SUM) and op.arguments else None
        if end is not None:
            found[k] = _taken(graph, op, end)
    return found


def exchanged_bytes(graph: Graph, wires: Mapping[str, WireEnd]) -> dict[int, list[int]]:
    """What an exchange takes beside its result while it is on its way: each part, by operator.

    Those are the parts that it sends, and the parts that come from others.
    """
    found: dict[int, list[int]] = {}
    for k, op in enumerate(graph.ops):
        end = wires.get(str(op.arguments[-1])) if op.kind == EXCHANGE and op.arguments else None
        if end is not None:
            row, (sends, receives) = _exchanged(graph, op)
            pieces = [*_pieces(sends), *(one for one in _pieces(receives) if one[0] != end.place)]
            found[k] = [row * length for _, length in pieces]
    return found


def _taken(graph: Graph, op: Op, end: WireEnd) -> float:
    if op.kind == SUM:
        tensor = graph.tensors[op.inputs[0]]
        size = item_bytes(tensor.dtype) * math.prod(tensor.shape or ())
        return end.speed.sum_seconds(size, end.devices)
    row, both = _exchanged(graph, op)
    return end.speed.seconds(row * max(_lengths(one, end.place) for one in both))


def _exchanged(graph: Graph, op: Op) -> tuple[int, Sequence[Sequence[int]]]:
    """Bytes of a row, and the rows that it sends and receives."""
    tensor, arguments = graph.tensors[op.inputs[0]], op.arguments or ()
    shape = tensor.shape or ()
    dim, *both = arguments[1:4]
    return item_bytes(tensor.dtype) * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :]), both


def _lengths(flat: Sequence[int], place: int) -> int:
    """Of all pieces that go to others, or come from them."""
    return sum(length for other, length in _pieces(flat) if other != place)


def _pieces(flat: Sequence[int]) -> list[tuple[int, int]]:
    """Where each goes to, or comes from, and its length."""
    return [(flat[k], flat[k + 2] - flat[k + 1]) for k in range(0, len(flat), 3)]


def item_bytes(dtype: str | None) -> int:
    """Bytes of an element: of ``float32``, 4."""
    bits = re.search(r"\d+", dtype or "")
    return max(1, int(bits.group()) // 8) if bits else 1
