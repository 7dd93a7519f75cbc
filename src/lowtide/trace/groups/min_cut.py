"""The smallest cut of a network, by Dinic's algorithm."""

from __future__ import annotations

from collections import deque

__all__ = ["FlowNetwork"]


class FlowNetwork:
    """Directed edges with capacities, between nodes that are numbered as they come."""

    def __init__(self) -> None:
        self._edges: list[list[int]] = []
        """By node: its edges, each the place of one in ``_to``; every edge is followed by its reverse."""
        self._to: list[int] = []
        self._room: list[int] = []

    def node(self) -> int:
        """A new node."""
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, start: int, end: int, capacity: int) -> None:
        """An edge from one node to another."""
        for here, there, room in ((start, end, capacity), (end, start, 0)):
            self._edges[here].append(len(self._to))
            self._to.append(there)
            self._room.append(room)

    def sink_side(self, source: int, sink: int) -> set[int]:
        """The nodes behind the smallest cut, of several the one nearest to the sink."""
        while (level := self._levels(source, sink)) is not None:
            done = [0] * len(self._edges)
            while self._pushed(source, sink, level, done):
                pass
        found, stack = {sink}, [sink]
        while stack:
            for edge in self._edges[stack.pop()]:
                before = self._to[edge]
                if self._room[edge ^ 1] and before not in found:
                    found.add(before)
                    stack.append(before)
        return found

    def _levels(self, source: int, sink: int) -> list[int] | None:
        """How far each node is from the source; None where the sink cannot be reached any more."""
        level = [-1] * len(self._edges)
        level[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self._edges[node]:
                if self._room[edge] and level[self._to[edge]] < 0:
                    level[self._to[edge]] = level[node] + 1
                    queue.append(self._to[edge])
        return level if level[sink] >= 0 else None

    def _pushed(self, source: int, sink: int, level: list[int], done: list[int]) -> int:
        """Push along one path; 0 where there is none. ``done`` counts the spent edges of each node."""
        path: list[int] = []
        node = source
        while node != sink:
            edges = self._edges[node]
            while done[node] < len(edges):
                edge = edges[done[node]]
                if self._room[edge] and level[self._to[edge]] == level[node] + 1:
                    break
                done[node] += 1
            else:
                if not path:
                    return 0
                node = self._to[path.pop() ^ 1]
                done[node] += 1
                continue
            path.append(edge)
            node = self._to[edge]
        room = min(self._room[edge] for edge in path)
        for edge in path:
            self._room[edge] -= room
            self._room[edge ^ 1] += room
        return room
