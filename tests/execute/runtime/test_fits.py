"""Nothing runs and nothing is taken from the cache that is not valid; what torch alone knows is looked at too."""

import json

import msgspec
import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.execute.calls.random_state import Drawing
from lowtide.execute.planning.kept import Kept
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.runtime.tile_loop import Copying, _Turn
from lowtide.execute.runtime.witness import Watched
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.plan.check.rules import Rule
from lowtide.plan.program.in_place import with_in_place
from lowtide.plan.program.instructions import Loop, Program, Run
from lowtide.plan.program.simple import offload_all, recompute_all, store_all
from tests import torch_steps
from tests.execute.small import batch, loss_of, network
from tests.torch_steps import MODELS, TILED, alike, captured, eager, subject

replace = msgspec.structs.replace


def refused(name, program):
    with pytest.raises(PlanError) as error:
        subject(name).run(program)
    return error.value.rule


def ops(name, kind):
    return [k for k, op in enumerate(subject(name).joint.graph.ops) if op.kind == kind]


def swapped(program, first, second):
    """The Program with the first runs of two operators in each other's place, and nothing dropped."""
    lines = [line for line in program.forward if isinstance(line, Run)]
    a, b = (next(k for k, line in enumerate(lines) if line.op == op) for op in (first, second))
    lines[a], lines[b] = lines[b], lines[a]
    return replace(program, forward=tuple(lines))


@pytest.mark.parametrize("name", MODELS)
def test_small_steps_leave_behind_what_eager_leaves(name):
    """The reference of all that is run without torch.compile."""
    step, (loss, left, state) = subject(name), eager(name)
    joint, found = step.joint, subject(name).run(store_all(step.joint.graph))
    results = 2 * len(joint.outputs)
    assert torch.equal(found[0], loss)
    assert torch.equal(found[-1], state)
    for k, (tensor, gradient) in enumerate(zip(joint.inputs, joint.gradients, strict=True)):
        label = joint.graph.tensors[tensor].name
        value = found[results + k] if gradient is not None else found[results + len(joint.gradients) + k]
        assert label not in left or torch.equal(value, left[label]), label


@pytest.mark.parametrize("name", TILED)
def test_small_steps_in_tiles_leave_behind_nearly_the_same(name):
    whole = subject(TILED[name][0])
    plain = whole.run(store_all(whole.joint.graph))
    assert alike(subject(name).run(subject(name).tiles), plain, 1e-5)


def test_random_operators_the_other_way_round_are_refused():
    first, second = ops("noisy", "aten.bernoulli") or ops("noisy", "aten.native_dropout")
    plain = store_all(subject("noisy").joint.graph)
    assert refused("noisy", swapped(plain, first, second)) in (Rule.ORDER, Rule.THERE)


def test_a_buffer_is_not_updated_before_its_old_value_is_read():
    graph = subject("counting").joint.graph
    (copy, *_) = (
        k for k, op in enumerate(graph.ops) if op.kind in ("aten.copy_", "aten.mul_") and op.outputs
    )
    forward = [line for line in store_all(graph).forward if isinstance(line, Run)]
    source = graph.ops[copy].inputs[-1]
    ready = next(k for k, line in enumerate(forward) if source in graph.ops[line.op].outputs)
    moved = [line for line in forward if line.op != copy]
    moved.insert(ready + 1, Run(copy))
    readers = [k for k, op in enumerate(graph.ops[:copy]) if graph.ops[copy].inputs[0] in op.inputs]
    assert readers
    wrong = replace(store_all(graph), forward=(*moved[:1], *moved[1:]))
    early = Program((Run(copy), *wrong.forward), wrong.backward)
    assert refused("counting", early) in (Rule.THERE, Rule.VALUES)


def test_a_buffer_that_backward_updates_is_updated():
    """It was lost: backward had a copy of the buffer, and updated that."""
    step = subject("watched")
    seen = next(k for k, t in enumerate(step.joint.inputs) if step.joint.graph.tensors[t].name == "seen")
    for planner in (store_all, recompute_all, offload_all):
        found = step.run(planner(step.joint.graph))
        given = found[2 * len(step.joint.outputs) + len(step.joint.gradients) :]
        assert torch.equal(given[seen], eager("watched")[1]["seen"])


def with_body(whole, number, **changes):
    bodies = list(whole.bodies)
    bodies[number] = replace(bodies[number], **changes)
    return replace(whole, bodies=tuple(bodies))


def bodies_of(name):
    """The captured steps of bodies."""
    return [j for c in subject(name).joint.calls if hasattr(c.target, "bodies") for j in c.target.bodies]


@pytest.mark.parametrize("name", ["image in tiles", "image outside", "rows in tiles"])
def test_operators_in_place_inside_tiles_are_looked_at(name):
    """In a body every operator that torch has no such form of is refused, whatever the file says."""
    step = subject(name)
    plain, reference = step.tiles, step.run(step.tiles)
    for number, joint in enumerate(bodies_of(name)):
        body, able = plain.bodies[number], able_in_place(joint)
        right = with_in_place(body.graph, body.program, able)
        assert right != body.program
        assert alike(step.run(with_body(plain, number, program=right, able=tuple(able))), reference)
        assert refused(name, with_body(plain, number, program=right)) == Rule.IN_PLACE_FORM
        everything = tuple(range(len(body.graph.ops)))
        for part in ("forward", "backward"):
            lines = getattr(body.program, part)
            for k, line in enumerate(lines):
                if not isinstance(line, Run) or line.op in able:
                    continue
                changed = (*lines[:k], replace(line, in_place=0), *lines[k + 1 :])
                lying = replace(body.program, **{part: changed})
                rule = refused(name, with_body(plain, number, program=lying, able=everything))
                assert rule in (Rule.IN_PLACE_FORM, Rule.IN_PLACE_STORAGE, Rule.THERE, Rule.FORMS)


def test_a_form_that_torch_does_not_have_is_refused_although_the_file_says_so():
    name = "image in tiles"
    body, joint = subject(name).tiles.bodies[0], bodies_of(name)[0]
    found = set()
    giving = {k for k, op in enumerate(body.graph.ops) if op.outputs}
    for op in giving - able_in_place(joint):
        changed = with_in_place(body.graph, body.program, {op})
        if changed != body.program:
            wrong = with_body(subject(name).tiles, 0, program=changed, able=(op,))
            found.add(refused(name, wrong))
    assert found == {Rule.FORMS}


def test_bodies_of_other_tiles_are_refused():
    name = "image in tiles"
    plain = subject(name).tiles
    loop = plain.forward[0]
    assert isinstance(loop, Loop)
    tiles = (replace(loop.tiles[0], body=1), replace(loop.tiles[1], body=0), *loop.tiles[2:])
    swapped = replace(plain, forward=(replace(loop, tiles=tiles), *plain.forward[1:]))
    assert refused(name, swapped) == Rule.SAME_STEP
    turned = replace(plain, forward=(replace(loop, tiles=loop.tiles[::-1]), *plain.forward[1:]))
    assert refused(name, turned) == Rule.SAME_STEP


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"cut": ("nope",)}, Rule.SAME_STEP),
        ({"cut": ("primals_1",)}, Rule.SAME_STEP),
        ({"end": "nope"}, Rule.SAME_STEP),
        ({"tiles": ()}, Rule.TILES),
        ({"end": ""}, Rule.LOOPS),
        ({"own": "nope"}, Rule.SAME_STEP),
    ],
)
def test_loops_that_the_step_cannot_be_cut_into_are_refused(changes, rule):
    plain, joint = subject("image outside").tiles, subject("image").joint

    def changed(lines):
        return tuple(replace(line, **changes) if isinstance(line, Loop) else line for line in lines)

    wrong = replace(plain, forward=changed(plain.forward), backward=changed(plain.backward))
    with pytest.raises(PlanError) as error:
        Interpreter(with_loop(joint, wrong), wrong)
    assert error.value.rule == rule


def test_a_loop_in_backward_alone_is_refused():
    graph = subject("image").joint.graph
    plain = store_all(graph)
    box = subject("image in tiles").tiles.forward[0]
    wrong = replace(plain, backward=(*plain.backward, replace(box, op=len(graph.ops) - 1)))
    assert refused("image", wrong) == Rule.LOOPS


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Fits a step, and gives what looks for its plan in the cache, with the file that it is in."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    seen = []
    store = Kept.store

    def remembered(self, plan):
        seen.append(self)
        store(self, plan)

    monkeypatch.setattr(Kept, "store", remembered)

    def fit(loss, model, *values, **asked):
        torch._dynamo.reset()
        lowtide.fit(loss, model, *values, time_limit=0.1, cost="estimated", **asked)
        return seen[-1], tmp_path / "plans" / seen[-1].name

    return fit


def damaged(path, *keys, value):
    """Change a value in a file."""
    plan = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(plan))


def test_a_plan_in_the_cache_that_is_not_valid_is_not_used(kept):
    one, path = kept(loss_of, network(), batch(32), budget="75%")
    good = path.read_text()
    assert one.load() is not None
    for keys, value in (
        (("predicted", "seconds"), 0.0),
        (("bound", "seconds"), 1e9),
        (("budget_bytes",), 10**9),
        (("decisions", "kept"), 77),
        (("able",), []),
        (("offload",), ["parameters"]),
    ):
        damaged(path, *keys, value=value)
        assert one.load() is None, keys
        path.write_text(good)
    plan = json.loads(good)
    runs = [line for line in plan["program"]["forward"] if line["type"] == "run"]
    drawn = [k for k, op in enumerate(plan["graph"]["ops"]) if op.get("random")]
    places = [next(k for k, line in enumerate(runs) if line["op"] == op) for op in drawn[:2]]
    runs[places[0]], runs[places[1]] = runs[places[1]], runs[places[0]]
    damaged(path, "program", "forward", value=runs)
    assert one.load() is None
    path.write_text(good)
    assert one.load() is not None


def squared(model, x):
    return model(x).square().mean()


def test_a_plan_in_tiles_with_a_lie_in_a_body_is_not_used(kept):
    torch.manual_seed(0)
    one, path = kept(
        squared, torch_steps.Image(), torch.randn(2, 2, 24, 24), budget="45%", only="recompute,tile"
    )
    good = path.read_text()
    assert one.load().decisions.tiles > 1
    body = json.loads(good)["program"]["bodies"][0]
    kinds, lines = [op["kind"] for op in body["graph"]["ops"]], body["program"]["forward"]
    tried = 0
    for at, line in enumerate(lines):
        for place in (0, 1) if line["type"] == "run" and "in_place" not in line else ():
            damaged(path, "program", "bodies", 0, "able", value=list(range(len(kinds))))
            damaged(path, "program", "bodies", 0, "program", "forward", at, "in_place", value=place)
            assert one.load() is None, (kinds[line["op"]], place)
            path.write_text(good)
            tried += 1
    assert tried > 4
    for name, value in (("cut", ["nope"]), ("tiles", []), ("end", "nope")):
        damaged(path, "program", "forward", 0, name, value=value)
        assert one.load() is None, name
        path.write_text(good)


def test_a_program_from_a_planner_of_the_users_is_checked():
    """compile_with runs what it is given, once it is known to be valid."""
    from lowtide.execute.backend import compile_with

    def planner(graph):
        plain = store_all(graph)
        return replace(plain, forward=plain.forward[1:])

    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    torch._dynamo.reset()
    step = torch.compile(model, backend=lambda m, i: compile_with(m, i, planner), fullgraph=True)
    with pytest.raises(PlanError):
        step(x)


def test_random_operators_run_again_inside_a_body_draw_the_same():
    """A body keeps random states as a step does."""
    step = subject("rows")
    joint = step.joint
    results = []
    for planner in (store_all, recompute_all):
        turn = _Turn(joint, planner(joint.graph), Watched(), Drawing(), Copying())
        torch.manual_seed(3)
        values = [value.clone() for value in step.values]
        with torch.no_grad():
            results.append(turn(values, torch.ones(())))
        results.append(torch.get_rng_state())
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert captured("rows")[2] is step
