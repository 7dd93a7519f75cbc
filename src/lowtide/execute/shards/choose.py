"""``choose_shards``: how a step is split over the devices of a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from lowtide.cost.estimate import estimate
from lowtide.cost.wire import WireSpeed
from lowtide.errors import PlanError
from lowtide.execute.planning.step_costs import described
from lowtide.execute.shards.axes import Prices, split_axes
from lowtide.execute.shards.meeting import Meeting
from lowtide.execute.shards.tried import FREE, Chooser, ShardChoice, SplitTried, choose, compared, fitting
from lowtide.graph.shards import Cut, Mesh, Shards
from lowtide.plan.make.cheapest import Chosen, cheapest, cost_of, fastest
from lowtide.trace.shards.kinds import CUT_KINDS, CutKind
from lowtide.trace.shards.prices import ShardPrices
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.joint import Joint

__all__ = ["choose_on_mesh", "choose_shards", "smallest_budget"]

_TRYING = 1.0
"""Seconds of a search from which on splits are looked at as devices would run them, which takes as long."""
_ROOM = 0.75
"""Of a budget, what estimates may take: they know nothing of workspaces."""
_DEAR = 1e-6
"""Seconds for a byte that a device holds, where the fastest choice does not fit: more than any move takes."""


def choose_shards(
    joint: Joint,
    mesh: Mesh,
    time_limit: float,
    kind: CutKind = CUT_KINDS["any"],
    held: Mapping[int, Cut] | None = None,
    budget_bytes: int | None = None,
    links: Sequence[WireSpeed] = (),
) -> tuple[Shards, Chosen]:
    """The cheapest by estimated times; of another ``kind`` than any, all is cut that can be.

    ``held`` says how tensors are cut that are there already. Where parameters, inputs and what backward reads
    take more than three quarters of the budget of a device, which leaves room for workspaces, splits are
    tried for the fastest that fits; where none does, or in less than a second, it is the one that takes
    least. ``links`` connect the devices along each axis.
    """
    device = described("cuda" if any(op.device.startswith("cuda") for op in joint.graph.ops) else "cpu")
    seconds = {k: one.seconds.value for k, one in enumerate(estimate(joint.graph, device)) if one.seconds}
    links = list(links) or [WireSpeed()] * len(mesh.sizes)
    priced = links if kind is CUT_KINDS["any"] else [FREE] * len(links)
    room = None if budget_bytes is None else int(_ROOM * budget_bytes)
    chooser = Chooser(joint, mesh.devices, device, links[0], room, time_limit)

    def fits(shards: Shards, least: float) -> bool:
        if room is None or time_limit < _TRYING:
            return room is None or least <= room
        return least <= room and chooser.looked_at("any", shards, 0.0, 0.0).fits

    if len(mesh.sizes) > 1:
        split = split_axes(joint, mesh, seconds, priced, kind, time_limit, held)
        if not fits(split.shards, split.held_bytes):
            dear = [WireSpeed(1 / _DEAR, 0.0)] * len(links)
            split = split_axes(joint, mesh, seconds, dear, kind, time_limit, held, Prices(dear, _DEAR))
        return split.shards, Chosen((), split.seconds, 0.0)

    def chosen(link: WireSpeed, price: float) -> tuple[Shards, Chosen, float]:
        ways = ShardWays(joint, mesh.devices, kind)
        ways.hold({t: cut[0] for t, cut in (held or {}).items()})
        prices = ShardPrices(ways, seconds, link)
        if price:
            found = cheapest(*prices.priced(price), time_limit)
        else:
            found = fastest(prices.weighted, prices.seconds, time_limit)
        return ways.shards(found.choices), found, cost_of(found.choices, prices.held, {})

    shards, found, taken = chosen(priced[0], 0.0)
    if fits(shards, taken):
        return shards, found
    if not held and time_limit >= _TRYING:
        with contextlib.suppress(PlanError):
            return choose(chooser).best.shards, found
    return chosen(WireSpeed(1 / _DEAR, 0.0), _DEAR)[:2]  # what arrives takes memory too


def smallest_budget(own: int | None, meeting: Meeting) -> int | None:
    """That of all processes, for which splits are chosen; None where none is known in bytes."""
    told = meeting.everybody("compare budgets", msgspec.json.encode(own))
    known = [msgspec.json.decode(one, type=int | None) for one in told]
    return min((one for one in known if one is not None), default=None)


def choose_on_mesh(
    chooser: Chooser, mesh: Mesh, links: Sequence[WireSpeed], kind: str, *, compare: bool = False
) -> ShardChoice:
    """The split over a mesh of several axes, planned axis by axis; there is no bound for all of them.

    With ``compare``, others beside it. A PlanError names the smallest budget that is known to work.
    """

    dear = Prices([WireSpeed(1 / _DEAR, 0.0)] * len(links), _DEAR)

    def tried(name: str, first: Prices | None = None) -> Iterator[SplitTried]:
        """The fastest of a kind, and where a device would hold too much, the one that holds least."""
        for prices in (first, dear):
            joint, seconds, limit, cut = chooser.joint, chooser.seconds, chooser.time_limit, CUT_KINDS[name]
            found = split_axes(joint, mesh, seconds, links, cut, limit, prices=prices)
            one = chooser.looked_at(name, found.shards, found.seconds, 0.0)
            yield one
            if one.fits:
                return

    own = list(tried(kind, Prices([FREE] * len(links)) if chooser.forced else None))
    others = compared(chooser.joint.graph, tried) if compare else []
    return ShardChoice(fitting([*own, *(others if kind == "any" else ())]), 0.0, tuple(others))
