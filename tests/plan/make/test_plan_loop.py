"""Programs with a loop: as files, before the checker, in the simulation, and as fit makes them."""

import functools
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError, PlanError
from lowtide.execute.compare.compare import compare
from lowtide.execute.memory.device import Room
from lowtide.execute.tiling import capture_tiles as cutting
from lowtide.execute.tiling import plan_tiles as tiling
from lowtide.execute.tiling import search as attempts
from lowtide.graph import Rect
from lowtide.plan.check.checker import check
from lowtide.plan.make.plan_loop import LoopedStep, TileStep, least_bytes, plan_loop
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Loop, Program, Run
from lowtide.plan.program.simple import offload_all, recompute_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Side
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.loop import TiledRegion, looped
from lowtide.trace.tiles.tiling import Tiling
from tests.execute.tiling.tiles import program_of

replace = msgspec.structs.replace


@functools.cache
def step():
    built = zoo.build("convpool:batch=2,size=12,channels=3")
    return capture(built.loss, built.model, *built.batch).joint


@functools.cache
def cut(parts=(2, 1, 1, 2)):
    """A Program with a loop over a grid of the axes (2, 3, 3, 3), and the graph that it is for."""
    program, whole = program_of(step(), parts)
    return whole.graph, program


def loop_of(program):
    (loop,) = [line for line in program.forward if isinstance(line, Loop)]
    return loop


def with_tiles(program, tiles):
    """The Program with other tiles."""
    lines = (replace(one, tiles=tuple(tiles)) if isinstance(one, Loop) else one for one in program.forward)
    return replace(program, forward=tuple(lines))


def with_body(whole, **changes):
    """The Program with its first body changed."""
    return replace(whole, bodies=(replace(whole.bodies[0], **changes), *whole.bodies[1:]))


def test_a_program_with_bodies_survives_a_file():
    _, program = cut()
    read = msgspec.json.decode(msgspec.json.encode(program), type=Program)
    assert read == program
    assert isinstance(loop_of(read), Loop)
    assert loop_of(read).tiles[1].over == loop_of(program).tiles[1].over
    assert read.bodies[0].program == program.bodies[0].program


def test_a_loop_over_all_boxes_may_run():
    graph, program = cut()
    assert check(graph, program).runs == len([line for line in program.instructions if isinstance(line, Run)])


def moved(tile, **ends):
    return replace(tile, over=Rect(ends.get("lo", tile.over.lo), ends.get("hi", tile.over.hi)))


def damaged(name, tiles):
    first, *others = tiles
    return {
        "twice": [first, *tiles],
        "overlapping": [moved(first, hi=(1, 3, 3, 3)), *others],
        "missing": others,
        "none": [],
        "smaller": [moved(first, hi=(1, 3, 2, 1)), *others],
        "beyond the end": [moved(first, hi=(1, 4, 3, 1)), *others],
        "before the start": [moved(first, lo=(0, -1, 0, 0)), *others],
        "empty": [*tiles, moved(first, hi=(0, 3, 3, 1))],
        "fewer axes": [moved(first, lo=(0, 0, 0), hi=(1, 3, 3)), *others],
        "unknown body": [replace(first, body=len(tiles)), *others],
        "body below zero": [replace(first, body=-1), *others],
    }[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("twice", "turns twice for what"),
        ("overlapping", "turns twice for what"),
        ("missing", r"leaves out parts of axes of \(2, 3, 3, 3\)"),
        ("none", "leaves out parts"),
        ("smaller", "leaves out parts"),
        ("beyond the end", "which is no part of axes"),
        ("before the start", "which is no part of axes"),
        ("empty", "which is no part of axes"),
        ("fewer axes", "which is no part of axes"),
        ("unknown body", "turns body 4; the program has 2"),
        ("body below zero", "turns body -1"),
    ],
)
def test_tiles_that_do_not_cover_the_axes_once_are_refused(name, said):
    graph, program = cut()
    with pytest.raises(PlanError, match=said):
        check(graph, with_tiles(program, damaged(name, loop_of(program).tiles)))


def test_a_body_that_cannot_run_is_refused():
    graph, program = cut()
    body = program.bodies[0].program
    with pytest.raises(PlanError, match="which is not there"):
        check(graph, with_body(program, program=replace(body, forward=tuple(reversed(body.forward)))))
    with pytest.raises(PlanError, match="never ran"):
        check(graph, with_body(program, program=replace(body, forward=())))


def test_a_body_adds_to_every_gradient_once():
    graph, program = cut()
    body = program.bodies[0]
    adding = [k for k, op in enumerate(body.graph.ops) if op.kind == "lowtide.accumulate"]
    assert len(adding) == 2
    for op in adding:
        lines = body.program.backward
        at = lines.index(Run(op))
        never, twice = (*lines[:at], *lines[at + 1 :]), (*lines[:at], Run(op), *lines[at:])
        with pytest.raises(PlanError, match="never runs 1 operators"):
            check(graph, with_body(program, program=replace(body.program, backward=never)))
        with pytest.raises(PlanError, match="again, which changes its input"):
            check(graph, with_body(program, program=replace(body.program, backward=twice)))


def test_a_body_that_takes_more_than_the_budget_is_refused():
    graph, program = cut()
    peak = check(graph, program).peak_bytes
    assert check(graph, program, budget=peak).peak_bytes == peak
    with pytest.raises(PlanError, match="more than the budget"):
        check(graph, program, budget=peak - 1)
    hungry = with_body(program, workspace_bytes=(peak,) * len(program.bodies[0].graph.ops))
    assert check(graph, hungry).peak_bytes > peak
    with pytest.raises(PlanError, match="more than the budget"):
        check(graph, hungry, budget=peak)


def stored(graph):
    return None


@pytest.mark.parametrize("parts", [(1, 1, 1, 1), (2, 1, 1, 2), (1, 1, 3, 2)])
@pytest.mark.parametrize("inside", [stored, recompute_all, offload_all])
def test_simulation_and_checker_count_the_same(parts, inside):
    graph, program = cut(parts)
    bodies = []
    for body in program.bodies:
        workspace = tuple(97 * k % 1013 for k in range(len(body.graph.ops)))
        chosen = inside(body.graph) or body.program
        bodies.append(replace(body, program=chosen, workspace_bytes=workspace))
    changed = replace(program, bodies=tuple(bodies))
    workspaces = [31 * k for k in range(len(graph.ops))]
    timeline = simulate(graph, changed, workspace_bytes=workspaces)
    checked = check(graph, changed, workspace_bytes=workspaces)
    assert timeline.peak_bytes == checked.peak_bytes
    assert checked.peak_bytes != check(graph, program).peak_bytes


def test_smaller_tiles_take_less():
    peaks = [check(*cut(parts)).peak_bytes for parts in ((1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 3, 3))]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]


def squares(model, x):
    return model(x).square().mean()


def test_fit_reaches_with_tiles_what_recomputation_cannot(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1))
    step = squares, model, torch.randn(2, 1, 96, 96)
    asked = {"budget": "50%", "time_limit": 0.5}
    with pytest.raises(InfeasibleError, match="what would help: tiles"):
        lowtide.fit(*step, only="recompute", **asked)
    torch._dynamo.reset()
    plan = lowtide.fit(*step, only="recompute,tile", **asked).plan
    assert plan.decisions.tiles == len(loop_of(plan.program).tiles) > 1
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert plan.cost == "measured"
    assert (plan.bound.seconds, plan.gap) == (0, 1)  # nothing is proven for tiles
    assert "nothing is proven" in plan.explain()
    found = compare(model, step[2:], squares, lambda _: plan.program, repeats=0)
    assert found.measured.peak_bytes <= 1.005 * plan.budget_bytes
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    assert plan.predicted.peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    assert found.max_rel_grad_diff < 1e-4


def test_tiles_take_no_less_than_the_host_takes_to_hand_them_over():
    def costs(graph):
        return Costs((1e-6,) * len(graph.ops), (0,) * len(graph.ops), "estimated")

    boxes = Tiling(step()).boxes((2, 1, 1, 1))
    whole = looped(step(), boxes)
    region = next(call.target for call in whole.calls if isinstance(call.target, TiledRegion))
    (body,) = region.bodies
    made = [
        plan_loop(
            LoopedStep(
                whole.graph,
                costs(whole.graph),
                boxes,
                [[0, 0]],
                [TileStep(body.graph, costs(body.graph), issue=issue)],
            ),
            Side(10**6, 1.0),
            PlanRequest.of(10**9, only="recompute,tile", time_limit=0.1),
            DeviceRoom(),
        )
        for issue in (0.0, 1e-7, 1.0)
    ]
    around = 1e-6 * (len(whole.graph.ops) - 1)
    seconds = [plan.predicted.seconds - around for plan in made]
    assert seconds == pytest.approx([2e-6 * len(body.graph.ops)] * 2 + [2.0 * len(body.graph.ops)])


def rows_of_64():
    net, x = nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)), torch.randn(64, 8)
    torch._dynamo.reset()
    return capture(lambda net, x: net(x).square().mean(), net, x).joint


def test_all_ways_to_cut_share_one_time_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    now, asked = [0.0], []

    def nothing_found(_, __, request, ___):
        asked.append(request.limits.time_limit)
        now[0] += request.limits.time_limit
        raise InfeasibleError("", budget=0, smallest_budget=1 << (60 - len(asked)), floor=0)

    def uncut(cutter, *_):
        return cutting.Way(cutter.joint, [], [], [], False)

    monkeypatch.setattr(cutting.Cutter, "cut_up", uncut)
    monkeypatch.setattr(attempts, "plan_loop", nothing_found)
    monkeypatch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(attempts, "_CERTAIN", 0.0)  # all ways are tried
    request = PlanRequest.of(1 << 40, only="recompute,tile", cost="estimated", time_limit=10.0)
    with pytest.raises(InfeasibleError, match="none that was tried fits"):
        tiling.in_tiles(rows_of_64(), (), Room(()), request, Side(1 << 41, 1.0))
    assert len(asked) > 12
    assert sum(asked) <= 11.0  # a little more where there is no plan yet


def test_no_tiles_are_tried_where_gradients_alone_are_too_much(monkeypatch):
    joint = rows_of_64()
    least = least_bytes(joint.graph)
    # parameters, their gradients, the input and the loss
    assert least == 4 * (2 * (2 * 8 * 512 + 512 + 8) + 64 * 8 + 1)
    monkeypatch.setattr(cutting, "looped", None)
    request = PlanRequest.of(least - 1, only="recompute,tile", cost="estimated")
    with pytest.raises(InfeasibleError, match="gradients alone take") as error:
        tiling.in_tiles(joint, (), Room(()), request, Side(2 * least, 1.0))
    assert error.value.proven
    assert error.value.smallest_budget == error.value.floor == least


@pytest.mark.parametrize(("graph_bytes", "only", "offloads"), [
    (0, "auto", True), (1, "auto", True), (1, "recompute,tile", False),
])  # fmt: skip
def test_tiles_of_graphs_offload_as_others_do(graph_bytes, only, offloads, monkeypatch):
    asked = []
    monkeypatch.setattr(tiling, "Cutter", lambda joint, arguments, room, request: asked.append(request))
    joint, room = rows_of_64(), Room(())
    room.graph_bytes = graph_bytes
    request = PlanRequest.of(1 << 40, only=only, graphs="auto").on("cuda")
    monkeypatch.setattr(tiling, "Search", None)
    with pytest.raises(TypeError):
        tiling.in_tiles(joint, (), room, request, Side(1 << 41, 1.0))
    assert [("offload" in one.methods, "tile" in one.methods) for one in asked] == [(offloads, True)]
