"""The watch on memory, as those who run Programs use it; it lives with the costs, which it measures."""

from __future__ import annotations

from lowtide.cost.watch import Allocations, Marker, watch_cpu, watch_cuda

__all__ = ["Allocations", "Marker", "watch_cpu", "watch_cuda"]
