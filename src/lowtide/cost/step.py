"""Step: a graph together with everything that is known about running it."""

from __future__ import annotations

import enum

import msgspec

from lowtide.cost.device import Environment
from lowtide.cost.types import Cost, Span
from lowtide.graph import Graph, Timeline, liveness
from lowtide.graph.shown import graph_html

__all__ = ["Note", "NoteKind", "Step"]


class NoteKind(str, enum.Enum):
    """What a reader did to a document beyond reading it."""

    REPAIR = "repair"
    """Text that was damaged and that the rest of the document settles."""
    SKIPPED = "skipped"
    """Text that is no part of the document."""
    ASSUMPTION = "assumption"
    """Something the document does not say and the reader had to decide."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One thing a reader did beyond reading: where, what stood there, what it became, and why."""

    kind: NoteKind
    text: str
    """Why, in words."""
    line: int | None = None
    before: str = ""
    after: str = ""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A graph with its costs, its measured spans, a timeline if one was taken, and the reader's notes."""

    graph: Graph
    format: str = ""
    """The format that the step was first read from, or ``capture``."""
    costs: tuple[Cost, ...] = ()
    """One an operator, or none at all."""
    spans: tuple[Span, ...] = ()
    notes: tuple[Note, ...] = ()
    timeline: Timeline | None = None
    """Taken while running; :meth:`lifetimes` gives the one that follows from the graph."""
    environment: Environment | None = None
    """Where its costs were measured, or what they were estimated for."""

    def _repr_html_(self) -> str:
        """What a notebook shows: the graph, with the measured timeline where there is one."""
        return graph_html(self.graph, self.timeline, title=f"Step ({self.format})" if self.format else "Step")

    def lifetimes(self, *, every_input: bool = False) -> Timeline:
        """The timeline of running the graph in program order with the workspaces that are known."""
        workspace = [int(c.workspace_bytes.value) if c.workspace_bytes else 0 for c in self.costs]
        seconds = [float(c.seconds.value) if c.seconds else 0.0 for c in self.costs]
        return liveness(
            self.graph,
            workspace_bytes=workspace if any(workspace) else (),
            seconds=seconds if any(seconds) else (),
            every_input=every_input,
        )
