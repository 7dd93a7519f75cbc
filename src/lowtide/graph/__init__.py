"""What a step computes: tensors, operators, boxes, lifetimes."""

from lowtide.graph.attributes import check_attributes
from lowtide.graph.liveness import liveness
from lowtide.graph.rect import Rect
from lowtide.graph.timeline import Lifetime, Recording, Timeline
from lowtide.graph.types import (
    ACCUMULATE,
    LOOP,
    RESIDENT_ROLES,
    Category,
    Graph,
    Kernel,
    Op,
    Phase,
    Role,
    Source,
    Tensor,
)
from lowtide.graph.validate import MAX_BYTES, validate

__all__ = [
    "ACCUMULATE",
    "LOOP",
    "MAX_BYTES",
    "RESIDENT_ROLES",
    "Category",
    "Graph",
    "Kernel",
    "Lifetime",
    "Op",
    "Phase",
    "Recording",
    "Rect",
    "Role",
    "Source",
    "Tensor",
    "Timeline",
    "check_attributes",
    "liveness",
    "validate",
]
