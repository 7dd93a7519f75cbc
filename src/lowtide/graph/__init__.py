"""What a step computes: tensors, operators, boxes, lifetimes."""

from lowtide.graph.fields import check_fields
from lowtide.graph.liveness import liveness
from lowtide.graph.rect import Rect
from lowtide.graph.timeline import Lifetime, Recording, Timeline
from lowtide.graph.types import (
    ACCUMULATE,
    DENSE,
    EXCHANGE,
    GROUP,
    LOOP,
    RESIDENT_ROLES,
    SUM,
    Category,
    Graph,
    Kernel,
    Op,
    Phase,
    Role,
    Source,
    Tensor,
)
from lowtide.graph.upgrade import upgraded
from lowtide.graph.validate import MAX_BYTES, validate

__all__ = [
    "ACCUMULATE",
    "DENSE",
    "EXCHANGE",
    "GROUP",
    "LOOP",
    "MAX_BYTES",
    "RESIDENT_ROLES",
    "SUM",
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
    "check_fields",
    "liveness",
    "upgraded",
    "validate",
]
