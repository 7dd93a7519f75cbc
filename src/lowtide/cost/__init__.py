"""What operators take, and a graph together with what is known about running it."""

from lowtide.cost.step import Note, NoteKind, Step
from lowtide.cost.types import Cost, Figure, Origin, Span

__all__ = ["Cost", "Figure", "Note", "NoteKind", "Origin", "Span", "Step"]
