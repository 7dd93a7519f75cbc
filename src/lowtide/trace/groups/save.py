"""Chooses which tensors of forward are kept for the groups of backward; these compute the others again.

A group of backward that reads a tensor of forward may compute it inside from others, which costs it
registers alone where the operators between are pointwise. What is kept then is the smallest cut, in bytes,
between what only forward can compute and what backward reads. Reductions are kept: they are small, and
computing one again reads all of its input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import fx

from lowtide.trace.groups.form import Forming
from lowtide.trace.groups.fusible import (
    is_part,
    is_reduction,
    owner,
    readers,
    reduces_outermost,
    size_of,
    tensors_read,
    values_of,
)
from lowtide.trace.groups.min_cut import FlowNetwork

__all__ = ["computed_again", "light"]

_ENDLESS = 1 << 60
_WRITTEN = 2
"""What a byte counts that forward would not write to memory otherwise."""
_SOURCES = 2
"""Tensors of its own size that a light one is computed from at most."""
_DEEPEST = 16
"""Operators in a row that are computed again at most."""
_READ = 4
"""A tensor is kept that would be computed from so many times its own bytes: that is no longer cheap."""
_READ_WRITTEN = 2
"""The same of one that forward writes to memory anyway, as the sums over layers that layers hand on."""


def computed_again(
    groups: Sequence[Forming], forward: Collection[fx.Node], returned: Collection[fx.Node]
) -> set[fx.Node]:
    """Tensors of forward that groups of backward compute again inside, wherever they read them."""
    inside = {member: group for group in groups for member in group.members}
    wanted = {
        tensor
        for group in groups
        for member in group.members
        if member not in forward
        for tensor in tensors_read(member)
        if owner(tensor) in forward
    }
    cheap = _cheap(wanted, inside, forward)
    if not cheap:
        return set()
    network = FlowNetwork()
    source, sink = network.node(), network.node()
    ends: dict[fx.Node, tuple[int, int]] = {}

    def ends_of(tensor: fx.Node) -> tuple[int, int]:
        if tensor not in ends:
            start, end = ends[tensor] = network.node(), network.node()
            kept = tensor in returned or _kept_anyway(tensor, inside, forward)
            times = 1 if _written_anyway(tensor, inside, forward) else _WRITTEN
            network.edge(start, end, 0 if kept else times * max(1, size_of(tensor)))
            if tensor not in cheap:
                network.edge(source, start, _ENDLESS)
        return ends[tensor]

    for tensor in wanted:
        network.edge(ends_of(tensor)[1], sink, _ENDLESS)
    for tensor in cheap:
        for read in tensors_read(tensor):
            network.edge(ends_of(read)[1], ends_of(tensor)[0], _ENDLESS)
    behind = network.sink_side(source, sink)
    again = {tensor for tensor in cheap if ends_of(tensor)[0] in behind}
    return _reading_little(again, inside, forward)


def _reading_little(
    again: Collection[fx.Node], inside: Mapping[fx.Node, Forming], forward: Collection[fx.Node]
) -> set[fx.Node]:
    """Those of the tensors that are computed from few bytes, whatever chain of others is between."""
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    in_order = next(iter(again)).graph.nodes if again else ()
    for tensor in (node for node in in_order if node in again):
        found: set[fx.Node] = set()
        for read in tensors_read(tensor):
            found |= sources.get(read, {read})
        most = _READ_WRITTEN if _written_anyway(tensor, inside, forward) else _READ
        size = size_of(tensor)
        if sum(min(size_of(read), size) for read in found) <= most * size:
            sources[tensor] = frozenset(found)
    return set(sources)


def light(groups: Sequence[Forming], forward: Collection[fx.Node]) -> set[fx.Node]:
    """Tensors of backward that another group of it computes again as cheaply as it would read them.

    Pointwise, from no more than two tensors of their size that lie in memory whatever is chosen, and beside a
    sum over the first axis: that ends a group, and the next one goes on from the same tensors.
    """
    inside = {member: group for group in groups for member in group.members}
    sources: dict[fx.Node, frozenset[fx.Node]] = {}
    for group in sorted(groups, key=lambda group: group.at):
        if group.members[0] in forward or not any(map(reduces_outermost, group.members)):
            continue
        for member in group.members:
            if is_reduction(member) or len(values_of(member)) != 1 or member.meta.get("val") is None:
                continue
            found: set[fx.Node] = set()
            for tensor in tensors_read(member):
                if tensor in sources and inside[tensor] is group:
                    found |= sources[tensor]
                elif tensor in sources or inside.get(owner(tensor)) is group:
                    break
                else:
                    found.add(tensor)
            else:
                large = [tensor for tensor in found if 2 * size_of(tensor) >= size_of(member)]
                if len(large) <= _SOURCES:
                    sources[member] = frozenset(found)
    return set(sources)


def _cheap(
    wanted: Collection[fx.Node], inside: Mapping[fx.Node, Forming], forward: Collection[fx.Node]
) -> dict[fx.Node, int]:
    """Tensors that may be computed again, each with how many operators lie between it and its readers."""
    found: dict[fx.Node, int] = {}
    level = [tensor for tensor in wanted if _repeats(tensor, inside, forward)]
    for depth in range(_DEEPEST):
        level = [tensor for tensor in dict.fromkeys(level) if tensor not in found]
        found |= dict.fromkeys(level, depth)
        below = [read for tensor in level for read in tensors_read(tensor)]
        level = [read for read in below if _repeats(read, inside, forward)]
    return found


def _repeats(tensor: fx.Node, inside: Mapping[fx.Node, Forming], forward: Collection[fx.Node]) -> bool:
    """Whether computing a tensor again is as cheap as reading it."""
    return not is_part(tensor) and tensor in inside and tensor in forward and not is_reduction(tensor)


def _kept_anyway(tensor: fx.Node, inside: Mapping[fx.Node, Forming], forward: Collection[fx.Node]) -> bool:
    """Whether a tensor is there in backward whatever is chosen: a leaf, or read by a call of its own."""
    if owner(tensor).op != "call_function":
        return True
    return any(user not in forward and user not in inside and user.op != "output" for user in readers(tensor))


def _written_anyway(tensor: fx.Node, inside: Mapping[fx.Node, Forming], forward: Collection[fx.Node]) -> bool:
    """Whether forward itself puts a tensor into memory: another call makes it, or reads it."""
    group = inside.get(owner(tensor))
    return group is None or any(user in forward and inside.get(user) is not group for user in readers(tensor))
