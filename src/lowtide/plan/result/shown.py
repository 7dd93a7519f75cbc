"""A plan as the last value of a notebook's cell: what it takes, and its memory before and after."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.errors import LowtideError
from lowtide.notebook import Curve, curves_svg, shown_html
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Program
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.explain import explain
from lowtide.plan.result.plan import HoldsFor, Plan
from lowtide.units import format_bytes, format_cost

__all__ = ["plan_html", "plans_html"]


def plans_html(name: str, plans: Sequence[Plan]) -> str:
    """The plans of a step, of which there are several where it is in several graphs."""
    if not plans:
        return shown_html(name, [("plan", "none yet: call the step once")])
    parts = [f", graph {k + 1} of {len(plans)}" if len(plans) > 1 else "" for k in range(len(plans))]
    return "".join(plan_html(plan, title=name + part) for plan, part in zip(plans, parts, strict=True))


def plan_html(plan: Plan, *, title: str = "Plan") -> str:
    """The summary, the predicted curve with the plain step's behind it, and the plan in words."""
    try:
        picture, words = curves_svg(list(_curves(plan)), limit=plan.budget_bytes), explain(plan)
    except LowtideError as error:  # a plan from somebody's file
        picture, words = "", f"This plan cannot be run: {error}"
    return shown_html(title, _rows(plan), picture, ("what is kept, recomputed and offloaded", words))


def _rows(plan: Plan) -> Iterator[tuple[str, str]]:
    plain, planned, made = plan.plain, plan.predicted, plan.decisions
    yield (
        "budget",
        f"{format_bytes(plan.budget_bytes)}; {format_bytes(plan.smallest_budget_bytes)} is known to work",
    )
    share = f" ({planned.peak_bytes / plain.peak_bytes:.0%})" if plain.peak_bytes else ""
    yield "peak", f"{format_bytes(plain.peak_bytes)} → {format_bytes(planned.peak_bytes)}{share}"
    times = f"{format_cost(plain.seconds, plan.cost)} → {format_cost(planned.seconds, plan.cost)}"
    yield "time", f"{times} ({plan.overhead:+.1%}), {plan.cost} costs"
    yield "left to gain", _gain(plan)
    said = [f"{made.kept} kept", f"{made.recomputed} recomputed", f"{made.offloaded} offloaded"]
    said += [f"{made.in_place} in place", *([f"{made.tiles} tiles"] if made.tiles else [])]
    yield "decisions", ", ".join(said)


def _gain(plan: Plan) -> str:
    """How much faster a plan may be, as far as that is proven."""
    if plan.decisions.tiles or plan.bound.holds_for is HoldsFor.NOTHING:
        return "not known: nothing is proven"
    return "nothing: proven optimal" if plan.gap <= 0 else f"at most {plan.gap:.1%} of the step"


def _curves(plan: Plan) -> Iterator[Curve]:
    """Of a step in tiles, the plain one is not part of the plan."""

    def live(program: Program) -> list[int]:
        timeline = simulate(plan.graph, program, workspace_bytes=plan.workspace_bytes)
        return [plan.beside_bytes + one for one in timeline.live_bytes]

    yield Curve("planned", live(plan.program))
    if not plan.decisions.tiles:
        yield Curve("plain", live(with_in_place(plan.graph, store_all(plan.graph), plan.able)))
