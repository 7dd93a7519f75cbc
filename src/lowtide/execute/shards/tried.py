"""``choose``: how a step is split over devices inside a budget for each, and what other ways would take.

Splits are chosen by estimated times and by bytes that move, for several limits on what a device holds. Each
is then looked at as its devices would run it: their own steps are captured, and where storing everything is
more than the budget, planned inside it. The fastest that fits is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from lowtide.cost.device import Device
from lowtide.cost.estimate import estimate
from lowtide.cost.wire import WireSpeed
from lowtide.errors import InfeasibleError, PlanError
from lowtide.graph import Graph, Role
from lowtide.graph.shards import Mesh, Shards
from lowtide.plan.make.cheapest import MemoryRow, cheapest, fastest
from lowtide.plan.make.make_plan import make_plan, plain_peak
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import PlanRequest
from lowtide.trace.shards.device_step import device_step, likeness
from lowtide.trace.shards.kinds import CUT_KINDS
from lowtide.trace.shards.prices import ShardPrices
from lowtide.trace.shards.ways import ShardWays
from lowtide.trace.step.joint import Joint
from lowtide.units import format_bytes

__all__ = ["FREE", "Chooser", "ShardChoice", "SplitTried", "choose", "compared", "fitting"]

_LIMITS = (0.9, 0.6, 0.4)
"""Shares of the budget to which what a device holds is limited: less of it needs less recomputation."""
_IMAGES = ("batch", "channels", "height", "width")
_SEQUENCES = ("batch", "tokens", "features", "heads")
_SIDE = 4
"""So many dimensions a batch of images has at least."""
FREE = WireSpeed(1e18, 0.0)
"""Where somebody says what to cut, all of that is cut, whatever moving it takes."""
_MEGA = 1e-6
_WATCHED = 4
"""On more devices, the steps of some are looked at: all others are like one of them."""


@dataclass(frozen=True, slots=True)
class SplitTried:
    """A way to split the step, and what it is predicted to take."""

    name: str
    shards: Shards
    seconds: float
    """Of a step, with what runs again."""
    bound: float
    """No split of this sort takes less, by the same costs, whatever its memory."""
    plain_bytes: int
    """The largest device's peak, storing everything."""
    peak_bytes: int
    """The same inside the budget."""
    wire_bytes: int
    """What the device that sends most sends in a step."""
    messages: int
    budget: int | None
    smallest: int = 0
    """Where it does not fit: the smallest budget that a plan is known for."""

    @property
    def fits(self) -> bool:
        """Whether its largest device stays inside the budget."""
        return self.budget is None or self.peak_bytes <= self.budget


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """The split that is taken, and others at the same budget."""

    best: SplitTried
    bound: float
    others: tuple[SplitTried, ...] = ()
    """Data parallel, fully sharded, and the best that cuts one dimension alone; those that can be."""

    @property
    def gap(self) -> float:
        """What may be left to gain by the same costs, as a share of the time."""
        return max(0.0, 1 - self.bound / self.best.seconds) if self.best.seconds else 0.0


@dataclass(slots=True)
class Chooser:
    """Finds splits of one step."""

    joint: Joint
    devices: int
    device: Device
    link: WireSpeed
    budget: int | None = None
    time_limit: float = 10.0
    forced: bool = False
    """Whether all that can be cut is, whatever moving it takes."""
    seconds: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        costs = enumerate(estimate(self.joint.graph, self.device))
        self.seconds = {k: one.seconds.value for k, one in costs if one.seconds}

    def tried(self, name: str) -> Iterator[SplitTried]:
        """Splits of a kind, by what a device may hold."""
        ways = ShardWays(self.joint, self.devices, CUT_KINDS[name])
        prices = ShardPrices(ways, self.seconds, self.link)
        by = ShardPrices(ways, self.seconds, FREE) if self.forced else prices
        limits = [None, *(share * self.budget for share in _LIMITS)] if self.budget is not None else [None]
        seen: set[tuple[int, ...]] = set()
        bound = 0.0
        for most in limits:
            row = None if most is None else MemoryRow(prices.held, prices.copied, most)
            try:
                found = fastest(by.weighted, by.seconds, self.time_limit, row)
            except PlanError:  # none holds so little
                found = cheapest(_scaled(prices.held), _paired(prices), self.time_limit)
            bound = found.bound if most is None else bound
            if found.choices not in seen:
                seen.add(found.choices)
                taken = prices.seconds(found.choices)
                one = self.looked_at(name, ways.shards(found.choices), taken, bound)
                yield one
                if one.plain_bytes <= (self.budget or one.plain_bytes):
                    return  # with less to hold it takes longer

    def looked_at(self, name: str, shards: Shards, seconds: float, bound: float) -> SplitTried:
        """What the devices of a split take."""
        count = self.devices
        ranks = range(count) if count <= _WATCHED else sorted({0, 1, count // 2, count - 1})
        plain = peak = sent = messages = smallest = 0
        more = 0.0
        planned: dict[tuple[int, tuple[float, ...]], int] = {}
        seen: set[Hashable] = set()
        for rank in ranks:
            like = likeness(self.joint, shards, rank) if len(ranks) > 1 else None
            if like in seen:  # it takes what another one takes
                continue
            seen.add(like)
            one = device_step(self.joint, shards, rank)
            told = estimate(one.joint.graph, self.device)
            costs = Costs(tuple(c.seconds.value if c.seconds else 0.0 for c in told), origin="estimated")
            own = plain_peak(one.joint.graph, costs)
            plain, sent, messages = max(plain, own), max(sent, one.wire_bytes), max(messages, one.messages)
            alike = (own, costs.seconds)
            if self.budget is not None and own > self.budget and alike not in planned:
                try:
                    limit = self.time_limit / len(ranks)
                    request = PlanRequest.of(self.budget, only="recompute", time_limit=limit)
                    plan = make_plan(one.joint.graph, costs, request)
                    own = plan.predicted.peak_bytes
                    more = max(more, plan.predicted.seconds - plan.plain.seconds)
                except InfeasibleError as error:
                    smallest = max(smallest, error.smallest_budget or own)
            planned.setdefault(alike, own)
            peak = max(peak, planned[alike])
        return SplitTried(
            name, shards, seconds + more, bound, plain, peak, sent, messages, self.budget, smallest
        )


def choose(chooser: Chooser, kind: str = "any", *, compare: bool = False) -> ShardChoice:
    """The fastest split of a kind that fits; with ``compare``, others beside it.

    A PlanError names the smallest budget of a device that is known to work.
    """
    if chooser.devices == 1:
        alone = chooser.looked_at("any", Shards(Mesh((1,)), {}, {}), sum(chooser.seconds.values()), 0.0)
        return ShardChoice(fitting([alone]), alone.seconds)
    own = list(chooser.tried(kind))
    others = compared(chooser.joint.graph, chooser.tried) if compare else []
    chosen = fitting([*own, *(others if kind == "any" else ())])
    return ShardChoice(chosen, max((one.bound for one in own), default=0.0), tuple(others))


def compared(graph: Graph, tried: Callable[[str], Iterable[SplitTried]]) -> list[SplitTried]:
    """The best of those that are ``tried`` as data parallel, fully sharded, and for one dimension alone."""
    others = [_best(list(tried(name))) for name in ("data parallel", "fully sharded")]
    single = _best([one for name in _kinds(graph) for one in tried(name)])
    return [*others, replace(single, name=f"{single.name} alone")]


def _kinds(graph: Graph) -> tuple[str, ...]:
    """The dimensions that can be cut alone: those of images where the batch has any, else of sequences."""
    given = [len(one.shape or ()) for one in graph.tensors if one.role is Role.INPUT]
    return _IMAGES if max(given, default=0) >= _SIDE else _SEQUENCES


def _scaled(sizes: list[list[float]]) -> list[list[float]]:
    """Bytes as numbers that the solver likes."""
    return [[size * _MEGA for size in some] for some in sizes]


def _paired(prices: ShardPrices) -> dict[tuple[int, int], list[list[float]]]:
    """What two choices take of the memory; infinite where they do not go together."""
    found = {}
    for pair, costs in prices.weighted()[1].items():
        rows = zip(costs, _scaled(prices.copied[pair]), strict=True)
        found[pair] = [
            [inf if cost == inf else size for cost, size in zip(*row, strict=True)] for row in rows
        ]
    return found


def _best(some: list[SplitTried]) -> SplitTried:
    """The fastest that fits, or the one that needs least."""
    fitting = [one for one in some if one.fits]
    return min(fitting, key=lambda one: one.seconds) if fitting else min(some, key=lambda one: one.peak_bytes)


def fitting(some: list[SplitTried]) -> SplitTried:
    """The best of these, or a PlanError that names the smallest budget that is known to work."""
    best = _best(some)
    if not best.fits:
        least = min(one.smallest or one.peak_bytes for one in some)
        raise PlanError(
            f"no split was found whose devices stay inside {format_bytes(best.budget or 0)}; the smallest "
            f"budget of a device that is known to work is {format_bytes(least)} ({least} bytes)"
        )
    return best
