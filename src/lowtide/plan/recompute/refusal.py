"""The error where no plan was found: the smallest budget for which there is one, and what is proven."""

from __future__ import annotations

from lowtide.errors import InfeasibleError
from lowtide.plan.recompute.smallest_budget import Smallest
from lowtide.units import format_bytes

__all__ = ["refusal"]


def refusal(budget: int, known: Smallest, *, floor: int, proven: bool) -> InfeasibleError:
    """What to say where no plan was found for a budget; ``proven``: none exists, in any order."""
    text = "no plan fits" if proven else "no plan was found for"
    return InfeasibleError(
        f"{text} {format_bytes(budget)}; the smallest budget with a known plan is "
        f"{format_bytes(known.budget)} ({known.budget} bytes)",
        budget=budget,
        smallest_budget=known.budget,
        floor=floor,
        proven=proven,
        known=known,
    )
