"""Rules 23 to 29 of docs/valid-programs.md: a plan file with one figure that is not true of it is refused."""

import functools
import math

import msgspec
import pytest

from lowtide.documents import decode_document, encode_document
from lowtide.errors import PlanError
from lowtide.graph import LOOP, Rect
from lowtide.plan.budget import Budget
from lowtide.plan.check.rules import Rule
from lowtide.plan.make.plan_loop import LoopedStep, TileStep, plan_loop
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Bound, Plan, Side
from lowtide.plan.result.validate import valid_plan
from tests.plan.written import step
from tests.planning import plan_for

replace = msgspec.structs.replace

STEP = step(
    "x:input w:parameter",
    "f: x w -> a",
    "g: a -> b",
    "h: b -> c",
    "k: c -> y",
    "dk: dy c -> dc @backward",
    "dh: dc b -> db @backward",
    "dg: db a -> da @backward",
    "df: da x -> dw @backward",
    gradients="dw:w",
    sizes=[(name, 100) for name in ("a", "b", "c", "da", "db", "dc")],
)


@functools.cache
def plan(*means):
    link = Link(500.0, 400.0, 0.01, 0.001) if "offload" in means else None
    costs = Costs((1.0, 2.0, 3.0, 1.0, 2.0, 2.0, 2.0, 1.0), (3,) * 8, "measured")
    more = {"only": means, "link": link, "able": (5, 6), "outside_bytes": 1000}
    return plan_for(STEP, costs, Budget(share=0.97), time_limit=20.0, **more)


@functools.cache
def tiled():
    graph = step("x:input", "loop: x -> y", "back: dy x -> dx @backward", gradients="dx:x")
    graph = replace(graph, ops=tuple(replace(op, kind=LOOP, axes=(4,)) for op in graph.ops))
    part = step("p:input", "f: p -> a", "g: a -> y", "df: dy a -> dp @backward")
    boxes = [Rect((0,), (2,)), Rect((2,), (4,))]
    steps = [TileStep(part, Costs((1.0,) * 3, (2,) * 3, "measured"), frozenset({1}))]
    costs = Costs((0.0, 0.0), (0, 0), "measured")
    looped = LoopedStep(graph, costs, boxes, [[0, 0], [0, 0]], steps, end="t")
    request = PlanRequest.of(500, only="recompute,tile", time_limit=0.1)
    return plan_loop(looped, Side(600, 9.0), request, DeviceRoom())


PLANS = {
    "recompute": lambda: plan("recompute"),
    "offload": lambda: plan("offload"),
    "tiles": tiled,
}


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
def test_plans_are_valid_as_they_are_made_and_from_a_file(made):
    assert valid_plan(made()) is made()
    valid_plan(decode_document(encode_document(made()), Plan))


def test_the_plans_do_what_they_are_tried_for():
    assert plan("recompute").decisions.recomputed
    assert plan("offload").decisions.offloaded
    assert tiled().decisions.tiles == 2


def changed(made, name, value):
    """The plan with a figure changed; one inside another with a dot."""
    inner, _, last = name.rpartition(".")
    if inner:
        value = replace(getattr(made, inner), **{last: value})
        last = inner
    return replace(made, **{last: value})


WRONG = [
    ("predicted.peak_bytes", lambda x: x - 1, Rule.PREDICTED),
    ("predicted.peak_bytes", lambda x: x + 1, Rule.PREDICTED),
    ("predicted.seconds", lambda x: x * 0.9, Rule.PREDICTED),
    ("predicted.seconds", lambda x: x * 1.1, Rule.PREDICTED),
    ("seconds", lambda x: (*x[:-1], x[-1] + 1), Rule.PREDICTED),
    ("beside_bytes", lambda x: x + 1, Rule.PREDICTED),
    ("bound.seconds", lambda x: x + 100, Rule.RATIOS),
    ("bound.overhead", lambda x: x + 0.1, Rule.RATIOS),
    ("overhead", lambda x: x + 0.01, Rule.RATIOS),
    ("gap", lambda x: x + 0.01, Rule.RATIOS),
    ("smallest_budget_bytes", lambda x: x + 10**6, Rule.SMALLEST),
    ("smallest_budget_bytes", lambda _: 1, Rule.SMALLEST),
    ("resident_bytes", lambda x: x + 1, Rule.SMALLEST),
    ("decisions.kept", lambda x: x + 1, Rule.DECISIONS),
    ("decisions.recomputed", lambda x: x + 1, Rule.DECISIONS),
    ("decisions.offloaded", lambda x: x + 1, Rule.DECISIONS),
    ("decisions.in_place", lambda x: x + 1, Rule.DECISIONS),
    ("decisions.tiles", lambda x: x + 1, Rule.DECISIONS),
    ("budget_bytes", lambda _: 1, Rule.BUDGET),
    ("budget_bytes", lambda _: -1, Rule.AMOUNTS),
    ("budget_bytes", lambda _: 10**30, Rule.AMOUNTS),
    ("solve_seconds", lambda _: math.nan, Rule.AMOUNTS),
    ("solve_seconds", lambda _: -1.0, Rule.AMOUNTS),
    ("plain.seconds", lambda _: math.inf, Rule.AMOUNTS),
    ("predicted.seconds", lambda _: math.nan, Rule.AMOUNTS),
    ("bound.seconds", lambda _: -1.0, Rule.AMOUNTS),
    ("gap", lambda _: math.nan, Rule.AMOUNTS),
    ("workspace_bytes", lambda x: x[1:], Rule.AMOUNTS),
    ("seconds", lambda x: (math.nan, *x[1:]), Rule.AMOUNTS),
    ("able", lambda _: (99,), Rule.WORDS),
    ("able", lambda _: (-1,), Rule.WORDS),
    ("short", lambda _: {99: 1.0}, Rule.WORDS),
    ("offload", lambda _: ("zzz",), Rule.WORDS),
    ("only", lambda x: (*x, "zzz"), Rule.WORDS),
]


@pytest.mark.parametrize("made", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize(("name", "change", "rule"), WRONG)
def test_a_figure_that_is_not_true_is_refused(made, name, change, rule):
    before = made()
    value = before
    for part in name.split("."):
        value = getattr(value, part)
    with pytest.raises(PlanError, match=f"rule {rule.value} of") as refused:
        valid_plan(changed(before, name, change(value)))
    assert refused.value.rule == rule


@pytest.mark.parametrize("means", [("recompute",), ("offload",)])
@pytest.mark.parametrize("name", ["plain.peak_bytes", "plain.seconds"])
def test_what_storing_everything_takes_is_counted_again(means, name):
    made = plan(*means)
    for by in (-1, 1):
        inner, last = name.split(".")
        with pytest.raises(PlanError) as refused:
            valid_plan(changed(made, name, getattr(getattr(made, inner), last) + by))
        assert refused.value.rule == Rule.PLAIN


def test_means_that_a_plan_was_not_to_use_are_refused():
    for made, only in ((plan("offload"), ("recompute",)), (tiled(), ("recompute",))):
        with pytest.raises(PlanError, match="not among its methods"):
            valid_plan(replace(made, only=only))


def test_what_a_loop_takes_is_what_its_tiles_take():
    made = tiled()
    with pytest.raises(PlanError, match="takes 10 bytes, and not 11|bytes, and not"):
        valid_plan(replace(made, workspace_bytes=tuple(size + 1 for size in made.workspace_bytes)))
    less = tuple(seconds / 2 for seconds in made.seconds)
    half = Side(made.predicted.peak_bytes, made.predicted.seconds / 2)
    halved = replace(made, seconds=less, predicted=half, overhead=half.seconds / made.plain.seconds - 1)
    with pytest.raises(PlanError, match=r"the loop 'loop' takes 6.0 seconds, and not 3.0"):
        valid_plan(halved)


def test_a_bound_above_the_plan_is_refused_even_where_the_rest_follows_from_it():
    made = plan("recompute")
    above = made.predicted.seconds + 7
    everything = sum(made.seconds)
    bound = Bound(above, (above - everything) / everything)
    with pytest.raises(PlanError, match="is above the") as refused:
        valid_plan(replace(made, bound=bound, gap=0.0))
    assert refused.value.rule == Rule.RATIOS


def test_short_runs_without_a_time_are_refused():
    norm = step(
        "x:input s:buffer",
        "norm: x s -> n mean @short=1 updates=1",
        "f: n -> b",
        "g: b -> y",
        "dg: dy b -> db @backward",
        "df: db n mean -> dx @backward",
        gradients="dx:x",
        updated="s",
        sizes=[("n", 50)],
    )
    costs = Costs((5.0, 1.0, 1.0, 1.0, 1.0), (0, 0, 40, 40, 0), "measured", short={0: 1.0})
    made = plan_for(norm, costs, Budget(share=0.8), time_limit=20.0)
    assert any(getattr(line, "short", False) for line in made.program.instructions)
    valid_plan(made)
    with pytest.raises(PlanError, match="without a time for that"):
        valid_plan(replace(made, short={}))
