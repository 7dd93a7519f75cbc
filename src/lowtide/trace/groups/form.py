"""Chooses groups: runs of operators that a compiler fuses, between those that it does not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from lowtide.trace.groups.fusible import (
    is_fusible,
    is_part,
    is_view,
    owner,
    readers,
    reduces_outermost,
    tensors_read,
    values_of,
    writes,
)

__all__ = ["Forming", "form"]

_FAR = 64
"""A group waits for a reader that comes so many operators later at most; what it reads stays for so long."""
_LARGEST = 96
"""Operators in a group at most: compiling takes longer than in proportion."""


@dataclass(eq=False, slots=True)
class Forming:
    """Operators of one phase that run together, in order."""

    members: list[fx.Node] = field(default_factory=list)
    last_reader: int = -1
    """The place of the last operator that may join because it reads one of them."""
    at: float = 0.0
    """Where it runs, among the places of all operators."""


def form(nodes: Sequence[fx.Node], forward: Collection[fx.Node]) -> list[Forming]:
    """Groups of the operators of a graph, with the place where each runs.

    An operator joins the groups that it reads from and that have not run yet; a group runs when an operator
    outside reads it, or when none that could join is left. So nothing outside lies between its members.
    """
    forming = _Former(nodes, forward)
    for k, node in enumerate(nodes):
        if not (is_view(node) or is_part(node) or node.op in ("placeholder", "get_attr")):
            forming.add(k, node)
    forming.close(dict.fromkeys(forming.open.values()), len(nodes))
    return forming.done


class _Former:
    def __init__(self, nodes: Sequence[fx.Node], forward: Collection[fx.Node]) -> None:
        self.place = {node: k for k, node in enumerate(nodes)}
        self.forward = forward
        self.fusible = {node for node in nodes if is_fusible(node)}
        self.open: dict[fx.Node, Forming] = {}
        self.reduced: set[fx.Node] = set()
        """Sums over the first axis, and what is computed from them in their group."""
        self.done: list[Forming] = []

    def close(self, groups: Iterable[Forming], at: float) -> None:
        """Let groups run here."""
        for group in groups:
            group.at = at
            self.done.append(group)
            for member in group.members:
                del self.open[member]

    def add(self, k: int, node: fx.Node) -> None:
        """The next operator."""
        if node.op == "call_function" and writes(node):  # whoever reads what it writes over runs before
            self.close(dict.fromkeys(self.open.values()), k - 0.5)
        read = dict.fromkeys(self.open[p] for p in map(owner, tensors_read(node)) if p in self.open)
        joined = [group for group in read if self._belongs(node, group.members[0])]
        if self._spreads(node):
            joined = []
        if node not in self.fusible or sum(len(group.members) for group in joined) >= _LARGEST:
            joined = []
        if reduces_outermost(node) or any(
            owner(t) in self.reduced and self.open.get(owner(t)) in joined for t in tensors_read(node)
        ):
            self.reduced.add(node)
        self.close([group for group in read if group not in joined], k - 0.5)
        if node in self.fusible:
            group = Forming(
                sorted([*(m for one in joined for m in one.members), node], key=self.place.__getitem__)
            )
            group.last_reader = max(self._last_reader(node, k), *(one.last_reader for one in joined), -1)
            self.open.update(dict.fromkeys(group.members, group))
        late = [group for group in dict.fromkeys(self.open.values()) if group.last_reader <= k]
        self.close(late, k + 0.5)

    def _spreads(self, node: fx.Node) -> bool:
        """Whether an operator gives more values than a sum over the first axis that it reads."""
        size = max((value.numel() for value in values_of(node)), default=0)
        made = [t for t in tensors_read(node) if owner(t) in self.reduced and owner(t) in self.open]
        return any(value.numel() < size for tensor in made for value in values_of(tensor))

    def _belongs(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two operators are of one phase, and of one device."""
        devices = {value.device for one in (node, other) for value in values_of(one)}
        return (node in self.forward) == (other in self.forward) and len(devices) == 1

    def _last_reader(self, node: fx.Node, k: int) -> int:
        """The place of the last operator near by that may join because it reads this one."""
        near = (
            self.place[user] for user in readers(node) if user in self.fusible and self._belongs(user, node)
        )
        return max((place for place in near if place - k <= _FAR), default=-1)
