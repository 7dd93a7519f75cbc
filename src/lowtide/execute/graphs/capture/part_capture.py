"""A captured part as graphs, one after the other, and what the host does between them: communications.

Other processes decide when a communication ends, so it is no part of a graph: one graph ends before it, and
the next one begins behind it. All of them use the same memory, as one graph would.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lowtide.device_internals import release_pool
from lowtide.execute.graphs.capture.memsets import has_nodes
from lowtide.execute.graphs.capture.recorder import Recorder

__all__ = ["CapturedPart", "PartCapture", "Replayable"]


class Replayable(Protocol):
    """A captured part."""

    @property
    def graphs(self) -> int:
        """How many graphs it is."""

    def replay(self) -> None:
        """Run it."""


class CapturedPart:
    """Graphs and calls of the host, in order."""

    def __init__(self) -> None:
        self.graphs = 0
        self._steps: list[Callable[[], None]] = []

    def add_graph(self, graph: Any) -> None:
        """One more graph."""
        self.graphs += 1
        self._steps.append(graph.replay)

    def add_call(self, call: Callable[[], None]) -> None:
        """The host does this next, in every replay."""
        self._steps.append(call)

    def replay(self) -> None:
        """Run all of it."""
        for step in self._steps:
            step()


class PartCapture:
    """Captures graphs one after the other, in one pool; ``between`` ends one and begins the next."""

    def __init__(
        self,
        index: int,
        pool: Any,
        recorder: Recorder,
        generators: Sequence[torch.Generator],
        complete: Callable[[Any], None],
    ) -> None:
        """Random numbers come from ``generators`` too. ``complete`` makes a graph ready to be replayed."""
        self._index, self._pool, self._recorder = index, pool, recorder
        self._generators, self._complete = generators, complete
        self._graph: Any = None
        """The one that is captured now."""
        self._found: list[Any] = []
        """Graphs, and between them what the host does."""

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, whatever runs is captured."""
        self._begin()
        try:
            yield
        except BaseException:
            if self._graph is not None:
                with contextlib.suppress(Exception):
                    self._end()
            raise
        self._end()

    def between(self, call: Callable[[], None]) -> None:
        """Have the host do this in every replay, behind what was captured and before what will be."""
        with self._recorder.aside():
            self._end()
            self._found.append(call)
            self._begin()

    def part(self) -> CapturedPart:
        """What was captured, ready to be replayed."""
        part = CapturedPart()
        for one in self._found:
            if isinstance(one, torch.cuda.CUDAGraph):
                self._complete(one)
                part.add_graph(one)
            else:
                part.add_call(one)
        return part

    def _begin(self) -> None:
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)
        for one in self._generators:
            graph.register_generator_state(one)
        self._recorder.begins()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self) -> None:
        graph, self._graph = self._graph, None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                graph.capture_end()
        finally:
            if self._recorder.has_begun_own:
                self._recorder.has_begun_own = False
                release_pool(self._index, self._pool)
        if has_nodes(graph.raw_cuda_graph()):  # as where one communication follows another
            self._found.append(graph)
