"""How fast devices exchange bytes, and what the communications of a step take by that."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.graph import EXCHANGE, SUM, Graph, Op
from lowtide.units import format_bytes, format_seconds

__all__ = ["WireEnd", "WireSpeed", "item_bytes", "wire_seconds"]


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


def _taken(graph: Graph, op: Op, end: WireEnd) -> float:
    tensor, arguments = graph.tensors[op.inputs[0]], op.arguments or ()
    shape, item = tensor.shape or (), item_bytes(tensor.dtype)
    if op.kind == SUM:
        return end.speed.sum_seconds(item * math.prod(shape), end.devices)
    dim, *flat = arguments[1:4]
    row = item * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return end.speed.seconds(row * max(_lengths(one, end.place) for one in flat))


def _lengths(flat: Sequence[int], place: int) -> int:
    """Of all pieces that go to others, or come from them."""
    return sum(flat[k + 2] - flat[k + 1] for k in range(0, len(flat), 3) if flat[k] != place)


def item_bytes(dtype: str | None) -> int:
    """Bytes of an element: of ``float32``, 4."""
    bits = re.search(r"\d+", dtype or "")
    return max(1, int(bits.group()) // 8) if bits else 1
