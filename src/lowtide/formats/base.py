"""What a format module offers to the rest: a description, a reader, a writer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowtide.cost import Step

__all__ = ["Format", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """A step in some format, and what of the step that format could not hold (one sentence each)."""

    data: bytes
    losses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Format:
    """One file format. ``read`` is absent where Lowtide only writes it, and the other way round."""

    name: str
    title: str
    recognise: Callable[[bytes], bool] | None = None
    """Whether the first bytes of a file look like this format; cheap, and never raises."""
    read: Callable[[bytes], Step] | None = None
    """The step, or a FormatError; never another exception."""
    write: Callable[[Step], Written] | None = None
    """The file, or a ConvertError when the step lacks what the format cannot do without."""
    draw: Callable[[Step, int | None], Written] | None = None
    """Of pictures: the file with at most so many boxes; None draws every tensor and operator."""
    facts: Callable[[Step], dict[str, Any]] | None = None
    """Counts that only make sense for this format, as plain JSON values."""
