"""``retimed``: a plan that was made before, with what communications take now."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lowtide.plan.bounds.communication import longest_chain
from lowtide.plan.bounds.relaxation import skippable
from lowtide.plan.check.time import seconds_of
from lowtide.plan.make.candidates import plain_time
from lowtide.plan.program.costs import Costs
from lowtide.plan.result.plan import Bound, HoldsFor, Plan, Side

__all__ = ["retimed"]

_ROUNDING = 1e-6


def retimed(plan: Plan, wire_seconds: Mapping[int, float]) -> Plan:
    """The same program with times, overheads and a bound that follow from these communications."""
    if dict(wire_seconds) == plan.wire_seconds or not plan.seconds or plan.decisions.tiles:
        return plan
    graph, left_out = plan.graph, skippable(plan.graph)
    before, now = (Costs(plan.seconds, wire_seconds=one) for one in (plan.wire_seconds, wire_seconds))
    planned = seconds_of(graph, plan.program, plan.seconds, plan.short, plan.link, wire_seconds)
    plain = plain_time(graph, now, plan.able)
    bound = plan.bound.seconds
    if bound <= longest_chain(graph, before, left_out) * (1 + _ROUNDING):  # it was that of communications
        bound = sum(one for k, one in enumerate(plan.seconds) if k not in left_out)
    bound = min(planned, max(bound, longest_chain(graph, now, left_out)))
    if plan.bound.holds_for is HoldsFor.NOTHING:
        bound = min(planned, plan.bound.seconds)
    gap = (planned - bound) / planned if planned else 0.0
    return msgspec.structs.replace(
        plan,
        wire_seconds=dict(wire_seconds),
        plain=Side(plan.plain.peak_bytes, plain),
        predicted=Side(plan.predicted.peak_bytes, planned),
        overhead=(planned - plain) / (plain or 1.0),
        bound=Bound(bound, (bound - plain) / (plain or 1.0), plan.bound.holds_for),
        gap=gap if gap > _ROUNDING else 0.0,
    )
