"""Each rule of docs/valid-programs.md: a Program that follows all of them, and one that breaks this rule alone."""

import re
from pathlib import Path

import msgspec
import pytest

from lowtide.errors import PlanError
from lowtide.graph import LOOP, Rect
from lowtide.plan.check.checker import check
from lowtide.plan.check.rules import Rule
from lowtide.plan.program.instructions import Body, Drop, Loop, Program, Run, Send, Tile
from lowtide.plan.program.simple import offload_all
from tests.plan.written import program, step
from tests.symbolic import WrongError, runs_right

replace = msgspec.structs.replace
DOCUMENT = Path(__file__).parents[3] / "docs" / "valid-programs.md"

PLAIN = step(
    "x:input w:parameter",
    "f: x w -> a",
    "g: a -> y",
    "dg: dy a -> da @backward",
    "df: da x -> dw @backward",
    gradients="dw:w",
)
BUFFER = step(
    "x:input b:buffer",
    "f: x b -> a",
    "view: b -> v @view",
    "h: a v -> y",
    "aten.copy_: b x -> b @updates=0",
    "dh: dy a b -> da @backward",
    "dv: da v -> dx @backward",
    updated="b",
    gradients="dx:x",
)
TWICE = step(
    "x:input b:buffer",
    "f: x -> y",
    "aten.add_: b x -> b @updates=0",
    "aten.mul_: b -> b @updates=0",
    updated="b",
)
NOISE = step("x:input", "r: -> m @random", "s: -> n @random", "u: -> o @once", "f: x m n o -> y")
CHAIN = step(
    "x:input w:parameter",
    "f: x -> a",
    "view: a -> v @view",
    "g: a -> b",
    "h: b v -> y",
    "k: x -> z",
    "dk: dy z -> dz @backward",
    "dw: dz -> dw @backward",
    returned="y z",
    gradients="dw:w",
)
SENT = step(
    "x:input p:parameter",
    "f: x p -> a",
    "g: x -> b",
    "h: a b -> y",
    "up: a -> a",
    "k: a -> z",
    returned="y z",
)
NORM = step(
    "x:input s:buffer",
    "norm: x s -> n mean @short=1 updates=1",
    "aten.relu: n -> r",
    "f: r -> y",
    "df: dy r mean -> dx @backward",
    updated="s",
    gradients="dx:x",
)
PART = step("p:input into:input", "f: p -> a", "g: a -> y", "lowtide.accumulate: into a -> @backward")
LATE = step(
    "x:input b:buffer",
    "f: x -> y",
    "df: dy b -> d @backward",
    "aten.copy_: b d -> b @backward updates=0",
    updated="b",
)


def looped(axes=(4,)):
    graph = step("x:input", "loop: x -> a", "f: a -> y", returned="y")
    loop = replace(graph.ops[0], kind=LOOP, axes=tuple(axes))
    return replace(graph, ops=(loop, graph.ops[1]))


def body(text="f, g | lowtide.accumulate", **more):
    return Body(PART, program(PART, text), **{"able": (1,), **more})


def tiles(*ends, bodies=(0, 0, 0, 0)):
    return tuple(Tile(k, Rect((lo,), (hi,))) for (lo, hi), k in zip(ends, bodies, strict=False))


HALVES = tiles((0, 2), (2, 4))


def turned(loop=None, bodies=None, more=()):
    loop = Loop(0, tiles=HALVES) if loop is None else loop
    return Program((loop, Run(1), *more), (), (body(),) if bodies is None else bodies)


def both(**changes):
    """A region that ends before the loss: a loop in forward, and one in backward."""
    graph = step("x:input", "loop: x -> y", "back: dy x -> dx @backward", gradients="dx:x")
    ops = [replace(op, kind=LOOP, axes=(4,)) for op in graph.ops]
    lines = [Loop(k, tiles=HALVES, end="t") for k in (0, 1)]
    lines[1] = replace(lines[1], **changes)
    return replace(graph, ops=tuple(ops)), Program((lines[0],), (lines[1],), (body(),))


VALID = {
    "plain": (PLAIN, "f, g | dg, drop a, df"),
    "made again": (PLAIN, "f, g, drop a | f, dg, df"),
    "old values": (BUFFER, "f, view, h, drop v, aten.copy_ | f, dh, view, dv"),
    "a view is made again in backward": (BUFFER, "f, view, h, aten.copy_ | dh, view, dv"),
    "updates in order": (TWICE, "f, aten.add_, aten.mul_"),
    "random numbers in order": (NOISE, "r, s, u, drop m, r, f"),
    "in place": (CHAIN, "f, view, k, g, h | dk, dw*"),
    "sent": (SENT, "f, send a, drop a, g, fetch a, h, up, k"),
    "a leaf away": (SENT, "f, send p, drop p, g, h, up, k, fetch p"),
    "short": (NORM, "norm, aten.relu, f, drop n r | norm~, aten.relu*~, df"),
    "updated in backward": (LATE, "f | df, aten.copy_"),
}


@pytest.mark.parametrize(("graph", "text"), VALID.values(), ids=VALID)
def test_what_follows_the_rules_is_accepted_and_runs_right(graph, text):
    able = range(len(graph.ops))
    right = program(graph, text)
    check(graph, right, able=able, offload=["parameters"])
    runs_right(graph, right, able, right)


def nested():
    """A body with a loop of its own."""
    return Body(looped(), turned(), able=())


BROKEN = {
    "unknown operator": (Rule.NAMES, PLAIN, Program((Run(0), Run(1)), (Run(9),))),
    "unknown tensor": (Rule.NAMES, PLAIN, Program((Run(0), Run(1), Drop((99,))), (Run(2), Run(3)))),
    "backward in forward": (Rule.PHASES, PLAIN, "f, g, dg | df"),
    "forward in backward": (Rule.PHASES, PLAIN, "f | g, dg, df"),
    "left out": (Rule.COMPLETE, PLAIN, "f, g | dg"),
    "dropped": (Rule.THERE, PLAIN, "f, g, drop a | dg, df"),
    "not made yet": (Rule.THERE, PLAIN, "g, f | dg, df"),
    "written over": (Rule.THERE, CHAIN, "f, view, g*, h, k | dk, dw"),
    "on the host": (Rule.THERE, SENT, "send p, drop p, f, fetch p, g, h, up, k"),
    "a view from forward": (Rule.THERE, BUFFER, "f, view, h, aten.copy_ | dh, dv"),
    "the old value after its update": (Rule.VALUES, BUFFER, "aten.copy_, f, view, h | dh, view, dv"),
    "a second run after an update": (Rule.VALUES, BUFFER, "f, view, h, aten.copy_, drop a, f | dh, view, dv"),
    "updates the other way round": (Rule.VALUES, TWICE, "f, aten.mul_, aten.add_"),
    "read before an update": (Rule.VALUES, SENT, "f, g, h, k, up"),
    "an update of backward first": (Rule.THERE, LATE, "f | aten.copy_, df"),
    "updated twice": (Rule.ONCE, TWICE, "f, aten.add_, aten.add_, aten.mul_"),
    "unknown, twice": (Rule.ONCE, NOISE, "r, s, u, drop o, u, f"),
    "random numbers the other way round": (Rule.ORDER, NOISE, "s, r, u, f"),
    "unknown before random": (Rule.ORDER, NOISE, "r, u, s, f"),
    "in place of another size": (
        Rule.IN_PLACE_FORM,
        step("x:input", "f: x -> a", "g: a -> y", sizes=[("y", 8)]),
        "f, g*",
    ),
    "in place, read twice": (
        Rule.IN_PLACE_FORM,
        step("x:input", "f: x -> a", "view: a -> v @view", "g: a v -> y"),
        "f, view, g*",
    ),
    "in place, though the result is there": (Rule.IN_PLACE_FORM, CHAIN, "f, view, g, h, g*, k | dk, dw"),
    "a view in place": (Rule.IN_PLACE_FORM, CHAIN, "f, view*, g, h, k | dk, dw"),
    "the second input": (Rule.IN_PLACE_FORM, PLAIN, Program((Run(0), Run(1)), (Run(2, in_place=1), Run(3)))),
    "over a leaf": (Rule.IN_PLACE_STORAGE, CHAIN, "f*, view, g, h, k | dk, dw"),
    "over what comes in": (Rule.IN_PLACE_STORAGE, CHAIN, "f, view, g, h, k | dk*, dw"),
    "over a result": (
        Rule.IN_PLACE_STORAGE,
        step("x:input", "f: x -> a", "view: a -> y @view", "g: a -> z", returned="y z"),
        "f, view, g*",
    ),
    "dropped twice": (Rule.DROPS, PLAIN, "f, g | dg, drop a, df, drop a"),
    "a leaf dropped": (Rule.DROPS, PLAIN, "f, g, drop x | dg, df"),
    "a gradient dropped": (Rule.DROPS, PLAIN, "f, g | dg, df, drop dw"),
    "sent, not there": (Rule.SENDS, SENT, "send a, f, g, h, up, k"),
    "a leaf that may not leave": (Rule.SENDS, SENT, "f, g, send x, h, up, k"),
    "what comes in is sent": (Rule.SENDS, PLAIN, "f, g | send dy, dg, df"),
    "sent while it comes back": (Rule.SENDS, SENT, "f, send a, drop a, g, fetch a, send a, h, up, k"),
    "written over while it is sent": (Rule.SENDING, CHAIN, "f, view, send a, g*, h, k | dk, dw"),
    "updated while it is sent": (Rule.SENDING, SENT, "f, g, h, send a, up, drop a, fetch a, k"),
    "fetched, not sent": (Rule.FETCHES, SENT, "f, drop a, fetch a, g, h, up, k"),
    "fetched, there": (Rule.FETCHES, SENT, "f, send a, fetch a, g, h, up, k"),
    "a leaf lost": (Rule.LEAVES_AWAY, SENT, "f, drop p, g, h, up, k"),
    "a leaf away at the end": (Rule.LEAVES_AWAY, SENT, "f, send p, drop p, g, h, up, k"),
    "the first run short": (Rule.SHORT, NORM, "norm~, aten.relu, f | df"),
    "short, without what was saved": (Rule.SHORT, NORM, "norm, aten.relu, f, drop n r mean | norm~, aten.relu, df"),
    "short, though its result is there": (Rule.SHORT, NORM, "norm, aten.relu, f, drop r | norm~, aten.relu*~, df"),
    "a part that does not follow": (Rule.SHORT, NORM, "norm, aten.relu, f, drop n r | norm, aten.relu*~, df"),
    "a part in the other part": (Rule.SHORT, NORM, "norm, aten.relu, f, drop n r, norm~ | aten.relu*~, df"),
    "no loop": (Rule.LOOPS, looped(), Program((Run(0), Run(1)))),
    "a loop of something else": (Rule.LOOPS, PLAIN, Program((Loop(0, tiles=HALVES), Run(1)), (Run(2), Run(3)))),
    "a loop in place": (Rule.LOOPS, looped(), turned(Loop(0, in_place=0, tiles=HALVES))),
    "no tiles": (Rule.TILES, looped(), turned(Loop(0))),
    "a part left out": (Rule.TILES, looped(), turned(Loop(0, tiles=tiles((0, 2))))),
    "a part twice": (Rule.TILES, looped(), turned(Loop(0, tiles=tiles((0, 3), (2, 4))))),
    "an empty box": (Rule.TILES, looped(), turned(Loop(0, tiles=tiles((0, 4), (4, 4))))),
    "beyond the axes": (Rule.TILES, looped(), turned(Loop(0, tiles=tiles((0, 2), (2, 5))))),
    "no such body": (Rule.TILES, looped(), turned(Loop(0, tiles=tiles((0, 2), (2, 4), bodies=(0, 1))))),
    "a loop in backward of a loss": (Rule.REGION, *both(end="")),
    "other boxes": (Rule.REGION, *both(tiles=tiles((0, 1), (1, 4)))),
    "another layout": (Rule.REGION, *both(channels_last=True)),
    "an unused body": (Rule.BODIES, looped(), turned(bodies=(body(), body()))),
    "too few workspaces": (Rule.BODIES, looped(), turned(bodies=(body(workspace_bytes=(1,)),))),
    "too many times": (Rule.BODIES, looped(), turned(bodies=(body(seconds=(1.0,) * 9),))),
    "a body that leaves something out": (Rule.COMPLETE, looped(), turned(bodies=(body("f, g"),))),
    "a body that adds twice": (
        Rule.ONCE,
        looped(),
        turned(bodies=(body("f, g | lowtide.accumulate, lowtide.accumulate"),)),
    ),
    "a body over the caller's part": (
        Rule.IN_PLACE_STORAGE,
        looped(),
        turned(bodies=(body("f*, g | lowtide.accumulate", able=(0, 1)),)),
    ),
    "a body in place without a form": (
        Rule.IN_PLACE_FORM,
        looped(),
        turned(bodies=(body("f, g* | lowtide.accumulate", able=()),)),
    ),
    "a body that reads what it wrote over": (
        Rule.THERE,
        looped(),
        turned(bodies=(body("f, g* | lowtide.accumulate"),)),
    ),
    "no such body inside a body": (
        Rule.TILES,
        looped(),
        turned(bodies=(replace(nested(), program=Program((Loop(0, tiles=tiles((0, 4), bodies=(7,))),))),)),
    ),
    "a body without its result": (
        Rule.DROPS,
        looped(),
        turned(bodies=(body("f, g | lowtide.accumulate, drop y"),)),
    ),
}  # fmt: skip
GRADIENTS = step(
    "x:input w:parameter",
    "f: x -> y",
    "df: dy x -> d @backward",
    "view: d -> dw @backward view",
    "up: d -> d @backward",
    gradients="dw:w",
)
BROKEN["a gradient from before its update"] = (Rule.RESULTS, GRADIENTS, "f | df, view, drop d, df, up")
BROKEN["no result"] = (Rule.RESULTS, step("x:input", "f: x -> a", "view: a -> y @view"), "f")


@pytest.mark.parametrize(("rule", "graph", "wrong"), BROKEN.values(), ids=BROKEN)
def test_what_breaks_a_rule_is_refused_by_its_number(rule, graph, wrong):
    wrong = program(graph, wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(PlanError, match=rf"rule {rule.value} of docs/valid-programs") as refused:
        check(graph, wrong, able=range(len(graph.ops)), offload=["parameters"])
    assert refused.value.rule == rule


def test_an_operator_runs_after_those_it_waits_for():
    graph = step("x:input", "f: x -> y", "g: x -> z", returned="y z")
    waiting = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], after=(0,))))
    check(waiting, program(waiting, "f, g"))
    check(graph, program(graph, "g, f"))
    with pytest.raises(PlanError, match="which it waits for") as refused:
        check(waiting, program(waiting, "g, f"))
    assert refused.value.rule == Rule.ORDER


def test_a_loop_that_draws_random_numbers_keeps_its_place_and_runs_once():
    drawing = step("p:input", "r: -> m @random", "f: p m -> y")
    inside = Body(drawing, program(drawing, "r, f"))
    graph = step(
        "x:input",
        "s: -> n @random",
        "loop: x -> a",
        "f: a n -> y",
        "df: dy a -> dx @backward",
        gradients="dx:x",
    )
    graph = replace(
        graph,
        ops=tuple(replace(op, kind=LOOP, axes=(4,)) if k == 1 else op for k, op in enumerate(graph.ops)),
    )
    loop = Loop(1, tiles=tiles((0, 4)))
    check(graph, Program((Run(0), loop, Run(2)), (Run(3),), (inside,)))
    for forward, backward in (
        ((loop, Run(0), Run(2)), (Run(3),)),
        ((Run(0), loop, Run(2), Drop((2,))), (loop, Run(3))),
    ):
        with pytest.raises(PlanError) as refused:
            check(graph, Program(forward, backward, (inside,)))
        assert refused.value.rule == Rule.ORDER


@pytest.mark.parametrize(
    ("name", "value"),
    [("updates", (7,)), ("axes", (-1,)), ("short", (1,)), ("short", (True,))],
)
def test_fields_that_list_nothing_are_refused(name, value):
    graph = looped() if name == "axes" else PLAIN
    wrong = replace(graph, ops=(replace(graph.ops[0], **{name: value}), *graph.ops[1:]))
    with pytest.raises(PlanError) as refused:
        check(wrong, turned() if name == "axes" else program(PLAIN, "f, g | dg, df"))
    assert refused.value.rule == Rule.GRAPH


def test_a_body_whose_graph_contradicts_itself_is_refused():
    wrong = replace(PART, ops=(replace(PART.ops[0], inputs=(99,)), *PART.ops[1:]))
    with pytest.raises(PlanError) as refused:
        check(looped(), turned(bodies=(replace(body(), graph=wrong),)))
    assert refused.value.rule == Rule.GRAPH


def test_tensors_that_two_operators_make_are_refused():
    graph = step("x:input", "f: x -> y", "g: x -> y")
    with pytest.raises(PlanError, match="which another operator makes"):
        check(graph, program(graph, "f, g"))


def test_a_program_takes_no_more_than_its_budget():
    peak = check(PLAIN, program(PLAIN, "f, g | dg, df")).peak_bytes
    check(PLAIN, program(PLAIN, "f, g | dg, df"), budget=peak)
    with pytest.raises(PlanError, match="more than the budget") as refused:
        check(PLAIN, program(PLAIN, "f, g | dg, df"), budget=peak - 1)
    assert refused.value.rule == Rule.BUDGET


def test_the_checker_finds_the_wrong_ones_that_do_not_run_right():
    """Of the rules that are about values, the broken programs give something else, or cannot run at all."""
    rules = {
        Rule.VALUES,
        Rule.ORDER,
        Rule.ONCE,
        Rule.IN_PLACE_STORAGE,
        Rule.THERE,
        Rule.SENDING,
        Rule.RESULTS,
    }
    for name, (rule, graph, wrong) in BROKEN.items():
        if rule in rules and not name.startswith("a body"):
            changed = program(graph, wrong) if isinstance(wrong, str) else wrong
            with pytest.raises(WrongError):
                runs_right(graph, changed, range(len(graph.ops)), changed)


def test_every_rule_has_its_line_and_its_number():
    lines = re.findall(r"^(\d+)\. \*\*(\w+)\.\*\*", DOCUMENT.read_text(), re.MULTILINE)
    assert [(int(number), name) for number, name in lines] == [(rule.value, rule.name) for rule in Rule]
    programs = {rule for rule in Rule if rule <= Rule.BUDGET}
    assert programs - {rule for rule, _, _ in BROKEN.values()} == {
        Rule.GRAPH,
        Rule.BUDGET,
    }  # tests of their own


def test_what_lies_on_the_host_anyway_is_not_sent_there():
    graph = step(
        "x:input",
        "f: x -> a",
        "g: a -> y",
        "dg: dy a -> da @backward",
        "df: da x -> dx @backward",
        gradients="dx:x",
    )
    tensors = [replace(one, device="cpu" if one.id == "a" else "cuda:0") for one in graph.tensors]
    graph = replace(graph, tensors=tuple(tensors))
    assert not any(isinstance(line, Send) for line in offload_all(graph).instructions)
    with pytest.raises(PlanError, match="to the host, where it is") as refused:
        check(graph, program(graph, "f, send a, g | dg, df"))
    assert refused.value.rule == Rule.SENDS
