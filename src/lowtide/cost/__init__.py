"""What operators take, and a graph together with what is known about running it."""

from lowtide.cost.step import Note, NoteKind, Step
from lowtide.cost.types import Cost, Figure, Origin, Span
from lowtide.cost.validate import MAX_SECONDS, validate_step

__all__ = ["MAX_SECONDS", "Cost", "Figure", "Note", "NoteKind", "Origin", "Span", "Step", "validate_step"]
