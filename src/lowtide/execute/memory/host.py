"""Memory of the host: what programs could still have, and what a plan takes of it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from lowtide.cost.probe import host_memory
from lowtide.errors import RunError
from lowtide.graph import RESIDENT_ROLES, Graph
from lowtide.plan.program.instructions import Fetch, Program, Send
from lowtide.units import format_bytes

__all__ = ["available_bytes", "fits_host", "refuse_too_much"]

_SHARE = 0.8
"""Of what the host has left, for a plan that could do without."""
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_ADDRESSES = Path("/proc/self/statm")
_KINDS = {
    "": ("", "memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}
"""Control groups of version 2 and 1: their folder, the limit, what is used, and what of that caches files."""


def available_bytes() -> int:
    """What the system could still give, and the limits of this process and of its control groups leave."""
    return max(0, min([_of_system(), *_of_groups(), *_of_process()]))


def refuse_too_much(graph: Graph, program: Program) -> None:
    """Raise a RunError where a program keeps more on the host at once than that has left.

    A system that promises more memory than it has would end the process in the middle of a step.
    """
    most = _host_bytes(graph, program)
    left = available_bytes() if most else 0
    if most > left:
        raise RunError(
            f"the plan keeps {format_bytes(most)} ({most} bytes) on the host at once, which has only "
            f"{format_bytes(left)} left; free memory there, give a larger budget, or plan without offload: "
            "only='recompute'"
        )


def fits_host(graph: Graph, program: Program) -> bool:
    """Whether what a program keeps on the host leaves enough of it to others."""
    most = _host_bytes(graph, program)
    return not most or most <= _SHARE * available_bytes()


def _host_bytes(graph: Graph, program: Program) -> int:
    """The most that a program keeps on the host, with the loops in it."""
    # PyTorch's pool takes a power of two for each
    pinned = sum(count << max(0, size - 1).bit_length() for size, count in _buffers(graph, program).items())
    return _plain_bytes(graph, program) + pinned


def _plain_bytes(graph: Graph, program: Program) -> int:
    """The most that tensors of the CPU take on their other side at once."""
    held: dict[int, int] = {}
    most = 0
    for tensor, sent in _ways(graph, program):
        if sent and not graph.tensors[tensor].device.startswith("cuda"):
            held[tensor] = graph.tensors[tensor].bytes
            most = max(most, sum(held.values()))
        elif not sent:
            held.pop(tensor, None)
    inside = (_plain_bytes(body.graph, body.program) for body in program.bodies)  # one after the other
    return most + max(inside, default=0)


def _buffers(graph: Graph, program: Program) -> dict[int, int]:
    """Pinned buffers that serve step after step: for each size as many as are in use at once."""
    inside: dict[int, int] = {}
    for body in program.bodies:  # one after the other
        for size, count in _buffers(body.graph, body.program).items():
            inside[size] = max(inside.get(size, 0), count)
    held: dict[int, set[int]] = {}
    most: dict[int, int] = {}
    for tensor, sent in _ways(graph, program):
        size = graph.tensors[tensor].bytes
        if sent and graph.tensors[tensor].device.startswith("cuda"):
            held.setdefault(size, set()).add(tensor)
            most[size] = max(most.get(size, 0), len(held[size]))
        elif not sent:
            held.get(size, set()).discard(tensor)
    return {size: most.get(size, 0) + inside.get(size, 0) for size in most.keys() | inside.keys()}


def _ways(graph: Graph, program: Program) -> Iterator[tuple[int, bool]]:
    """Tensors in the order in which they leave for the host (True) and are not needed there any more.

    One copy of a leaf serves the whole step.
    """
    for line in program.instructions:
        if isinstance(line, Send):
            yield line.tensor, True
        elif isinstance(line, Fetch) and graph.tensors[line.tensor].role not in RESIDENT_ROLES:
            yield line.tensor, False


def _of_system() -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return host_memory()  # where the system does not tell what is free: all there is


def _of_process() -> Iterator[int]:
    """What is left of a limit of addresses, as `ulimit -v` sets it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, ValueError):
            yield limit - int(_ADDRESSES.read_text().split()[0]) * resource.getpagesize()


def _of_groups() -> Iterator[int]:
    """What containers and batch systems leave of their limits."""
    with contextlib.suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, _, rest = line.partition(":")
            kind, _, path = rest.partition(":")
            if kind in _KINDS:
                folder, limit, used, caches = _KINDS[kind]
                base = _ROOT / folder
                for group in (base / path.strip("/"), *(base / path.strip("/")).parents):
                    if group.is_relative_to(base):
                        yield from _left(group / limit, group / used, group / "memory.stat", caches)


def _left(limit: Path, used: Path, statistics: Path, caches: tuple[str, ...]) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # no such file, or a limit of "max"
        most, now = int(limit.read_text()), int(used.read_text())
        figures = dict(line.split() for line in statistics.read_text().splitlines())
        yield most - now + sum(int(figures.get(name, 0)) for name in caches)
