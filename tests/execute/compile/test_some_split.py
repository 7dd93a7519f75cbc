"""Which convolutions run in less memory: those that need it, and those that make a plan faster.

Workspaces and times are made up, so that the tests are about the same convolutions on every machine.
"""

import msgspec
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import lowtide
from lowtide.commands.main import cli
from lowtide.documents import read_document, write_document
from lowtide.errors import InfeasibleError, LowtideError
from lowtide.execute.compare.compare import compare
from lowtide.execute.planning import plan_step
from lowtide.execute.planning.splitting import Splitting, working_sets
from lowtide.graph import Graph, Op, Phase, Role, Tensor
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Program
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.validate import valid_plan
from lowtide.trace.groups.slices import slice_convolutions
from lowtide.trace.step.split_convolutions import ALL

from ..small import loss_of

MIB = 2**20
ONE = "convolution_backward_1"
"""The backward of the second of three convolutions."""
LAST = "convolution_backward"


@pytest.fixture(autouse=True)
def needs(monkeypatch, tmp_path):
    """Workspaces and seconds of operators by id, for a test to fill in."""
    workspace, seconds = {}, {}

    def costs_of(graph, *_, **__):
        return Costs(
            tuple(seconds.get(op.id, 1e-3) for op in graph.ops),
            tuple(workspace.get(op.id, 0) for op in graph.ops),
            "measured",
        )

    monkeypatch.setattr(plan_step, "costs_of", costs_of)
    monkeypatch.setattr("lowtide.trace.groups.slices.slices_for", lambda arguments: 1)
    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", lambda arguments: True)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    return workspace, seconds


def network():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1)), torch.randn(2, 3, 48, 48)


def fit(budget, **options):
    torch._dynamo.reset()
    return lowtide.fit(
        loss_of, *network(), budget=budget, only="recompute", time_limit=0.5, verify=False, **options
    )


def left(step, model, x):
    model.zero_grad()
    loss = step(model, x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def two_calls(graph):
    return [op.id for op in graph.ops if op.kind == "aten.convolution" and op.phase == "backward"]


def run(folder, *options):
    """``lowtide run`` of the step."""
    (folder / "own.py").write_text(
        "from tests.execute.compile.test_some_split import loss_of, network\n\n"
        "def step():\n    model, x = network()\n    return loss_of, model, x\n"
    )
    result = CliRunner().invoke(cli, ["run", f"{folder}/own.py:step", "--repeats", "1", *options])
    assert result.exit_code == 0, result.output


def captures(monkeypatch):
    """What is asked to be split, each time that a step is captured so."""
    from lowtide.execute.compile import aot

    seen, split = [], aot.split_convolutions
    monkeypatch.setattr(aot, "split_convolutions", lambda m, s: seen.append(sorted(s)) or split(m, s))
    return seen


@pytest.mark.parametrize("names", [[ONE], [LAST, ONE]])
def test_only_convolutions_that_need_it_are_split(names, needs, monkeypatch):
    needs[0].update(dict.fromkeys(names, 8 * MIB))
    seen = captures(monkeypatch)
    model, x = network()
    exact = left(loss_of, model, x)
    step = fit(4 * MIB)
    assert seen == [names]
    assert step.plan.program.split == tuple(names)
    assert two_calls(step.plan.graph) == [f"{name}_image" for name in names]
    assert f"{len(names)} convolutions run their backward in two calls" in step.plan.explain()
    assert step.plan.predicted.peak_bytes <= 4 * MIB
    for one, other in zip(left(step, model, x), exact, strict=True):
        torch.testing.assert_close(one, other)


def test_the_bits_are_those_of_eager(needs, monkeypatch):
    from lowtide.cost.split import same_when_split

    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", same_when_split)
    needs[0][ONE] = 8 * MIB
    try:
        plan = fit(4 * MIB).plan
    except InfeasibleError:
        pytest.skip("two calls give other bits on this machine")
    model, x = network()
    found = compare(model, (x,), loss_of, lambda _: plan.program, in_place=False, repeats=0)
    assert found.program == plan.program
    assert found.bitwise


def test_such_a_plan_is_found_again_without_a_search(needs, monkeypatch):
    needs[0][ONE] = 8 * MIB
    plan = fit(4 * MIB).plan
    seen = captures(monkeypatch)
    monkeypatch.setattr(plan_step, "make_plan", None)
    assert fit(4 * MIB).plan == plan
    assert seen == [[ONE]]


def test_the_smallest_budget_is_that_with_all_split(needs, monkeypatch):
    needs[0].update({LAST: 3 * MIB, ONE: 8 * MIB, f"{ONE}_image": 2 * MIB})

    def refused():
        with pytest.raises(InfeasibleError, match="in two calls each") as caught:
            fit("800KiB", cache=False)
        return caught.value.smallest_budget

    some = refused()
    monkeypatch.setattr(Splitting, "_needed", lambda *_: ALL)
    assert some == refused()
    monkeypatch.undo()


def test_a_budget_that_a_refusal_has_named_works(needs):
    needs[0].update({LAST: 3 * MIB, ONE: 8 * MIB, f"{ONE}_image": 2 * MIB})
    with pytest.raises(InfeasibleError) as caught:
        fit("800KiB")
    assert fit(caught.value.smallest_budget).plan.predicted.peak_bytes <= caught.value.smallest_budget


def test_all_are_split_where_another_operator_is_in_the_way(needs, monkeypatch):
    """To split some cannot help then, and the refusal is about the step with all of them split."""
    needs[0].update({ONE: 8 * MIB, "relu": 5 * MIB})
    seen = captures(monkeypatch)
    with pytest.raises(InfeasibleError):
        fit(4 * MIB)
    assert seen == [["*"]]


def test_all_are_split_at_once_where_parameters_and_gradients_alone_do_not_fit(needs, monkeypatch):
    """Nothing fits then: they are split for the smallest budget that the refusal names."""
    seen = captures(monkeypatch)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1))
    parameters = sum(p.nbytes for p in model.parameters())
    needs[0].update(dict.fromkeys((LAST, ONE), MIB))
    with pytest.raises(InfeasibleError):
        lowtide.fit(
            loss_of,
            model,
            torch.randn(2, 3, 6, 6),
            budget=int(1.9 * parameters),
            only="recompute",
            time_limit=0.5,
        )
    assert seen == [["*"]]


def test_a_program_with_some_split_runs_from_a_file(needs, tmp_path):
    needs[0][ONE] = 8 * MIB
    plan = fit(4 * MIB).plan
    write_document(tmp_path / "program.json", plan.program)
    run(tmp_path, "--program", f"{tmp_path}/program.json", "--save-program", f"{tmp_path}/again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "program.json").read_text()


def test_a_step_with_some_split_is_planned_and_run_by_the_command(needs, tmp_path):
    needs[0][ONE] = 8 * MIB
    run(tmp_path, "--budget", "4MiB", "--only", "recompute", "--save-program", f"{tmp_path}/program.json")
    assert read_document(tmp_path / "program.json", Program).split == (ONE,)


def test_a_step_with_graph_breaks_keeps_its_convolutions_whole(needs, monkeypatch):
    needs[0].update({LAST: 8 * MIB, ONE: 8 * MIB})
    needs[1].update({"convolution": 5e-3, "convolution_1": 5e-3})
    seen = captures(monkeypatch)

    def parted(model, x):
        x = model[:3](x)
        torch._dynamo.graph_break()
        return model[3:](x).square().mean()

    model, x = network()
    step = lowtide.fit(parted, model, x, budget=11 * MIB, only="recompute", time_limit=0.5, verify=False)
    assert seen == []
    for one, other in zip(left(step, model, x), left(parted, model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_a_shape_that_comes_later_is_split_too(needs, monkeypatch):
    model, x = network()
    step = lowtide.fit(loss_of, model, x, budget=4 * MIB, only="recompute", time_limit=0.5, verify=False)
    needs[0][ONE] = 8 * MIB
    seen = captures(monkeypatch)
    for batch in (3, 4):  # the latter is traced with symbols
        x = torch.randn(batch, 3, 48, 48)
        for one, other in zip(left(step, model, x), left(loss_of, model, x), strict=True):
            torch.testing.assert_close(one, other)
    assert seen == [[ONE], [ONE]]


def test_such_a_plan_comes_back_from_a_file(needs, tmp_path):
    needs[0][ONE] = 8 * MIB
    plan = fit(4 * MIB).plan
    write_document(tmp_path / "plan.json", plan)
    again = read_document(tmp_path / "plan.json", Plan)
    assert again == plan
    assert again.program.split == (ONE,)
    valid_plan(again)


def test_a_convolution_that_needs_it_runs_in_slices(needs, monkeypatch):
    """Its Program is of the step with slices, though it could run the step without as well."""
    monkeypatch.setattr("lowtide.trace.groups.slices.slices_for", lambda arguments: len(arguments[0]))
    needs[0]["convolution_1"] = 8 * MIB
    plan = fit(4 * MIB).plan
    assert plan.program.split == ("convolution_1",)
    assert "1 convolutions run in slices" in plan.explain()
    assert not two_calls(plan.graph)
    assert sum(op.kind == "aten.convolution" for op in plan.graph.ops) == 2
    ran, slices = [], "lowtide.execute.compile.aot.slice_convolutions"
    monkeypatch.setattr(slices, lambda m, n, s: ran.append(sorted(s)) or slice_convolutions(m, n, s))
    model, x = network()
    found = compare(model, (x,), loss_of, lambda _: plan.program, in_place=False, repeats=0)
    assert found.program == plan.program
    assert ran == [["convolution_1"]]


def test_a_program_of_an_older_version_is_of_none_or_all(needs, monkeypatch):
    monkeypatch.setattr(Splitting, "_needed", lambda *_: ALL)
    needs[0][ONE] = 8 * MIB
    program = fit(4 * MIB).plan.program
    assert program.split == ("*",)
    unsaid = msgspec.structs.replace(program, split=())
    model, x = network()
    found = compare(model, (x,), loss_of, lambda _: unsaid, in_place=False, repeats=0)
    assert found.program == unsaid


def test_a_program_with_convolutions_split_that_are_not_there_is_refused(needs):
    needs[0][ONE] = 8 * MIB
    program = msgspec.structs.replace(fit(4 * MIB).plan.program, split=("convolution_backward_7",))
    model, x = network()
    with pytest.raises(LowtideError):
        compare(model, (x,), loss_of, lambda _: program, in_place=False, repeats=0)


def slow(needs, monkeypatch):
    """A budget in which the step fits with whole convolutions, but runs much of it again."""
    needs[0][LAST] = 8 * MIB
    needs[1].update({LAST: 1e-3, "convolution": 5e-3, "convolution_1": 5e-3})
    with monkeypatch.context() as patched:
        patched.setattr(Splitting, "faster", lambda *_: None)
        budget = fit("100%", cache=False).plan.plain.peak_bytes - 1
        plan = fit(budget, cache=False).plan
    assert plan.overhead > 0.1
    assert not plan.program.split
    return budget, plan


def test_a_plan_that_recomputes_much_is_held_against_one_with_split_convolutions(needs, monkeypatch):
    budget, plan = slow(needs, monkeypatch)
    found = fit(budget).plan
    assert found.program.split == (LAST,)
    assert found.predicted.seconds < plan.predicted.seconds
    assert found.budget_bytes == budget
    monkeypatch.setattr(plan_step, "make_plan", None)
    assert fit(budget).plan == found


def test_convolutions_stay_whole_where_that_is_faster(needs, monkeypatch):
    budget, plan = slow(needs, monkeypatch)
    needs[1].update({f"{LAST}_image": 1.0, f"{LAST}_parameters": 1.0})
    seen = captures(monkeypatch)
    found = fit(budget)
    assert found.plan.program == plan.program
    assert seen == [[LAST]]
    model, x = network()
    for one, other in zip(left(found, model, x), left(loss_of, model, x), strict=True):
        torch.testing.assert_close(one, other)
    monkeypatch.setattr(plan_step, "make_plan", None)
    assert fit(budget).plan == found.plan
    assert seen == [[LAST]]  # it was tried once


def test_an_interrupt_leaves_the_plan_with_whole_convolutions(needs, monkeypatch):
    budget, plan = slow(needs, monkeypatch)
    make_plan = plan_step.make_plan

    def interrupted(graph, *arguments, **options):
        if two_calls(graph):
            raise KeyboardInterrupt
        return make_plan(graph, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(plan_step, "make_plan", interrupted)
        with pytest.warns(UserWarning, match="interrupted"):
            step = fit(budget)
    assert step.plan.program == plan.program
    assert fit(budget).plan.program.split == (LAST,)  # it is tried again


def test_nothing_is_tried_where_it_cannot_help(needs, monkeypatch):
    needs[0]["relu"] = 8 * MIB
    seen = captures(monkeypatch)
    fit("100%")
    budget, _ = slow(needs, monkeypatch)
    monkeypatch.setattr("lowtide.trace.step.split_convolutions.same_when_split", lambda arguments: False)
    fit(budget)
    assert seen == []


def test_the_working_set_of_an_operator():
    def tensor(size, role=Role.ACTIVATION, alias=None):
        return Tensor(id=f"t{size}{alias}", bytes=size, role=role, alias=alias)

    tensors = tensor(1, Role.PARAMETER), tensor(10, Role.INPUT), tensor(100), tensor(0, alias=2), tensor(1000)
    ops = (
        Op(id="a", kind="a", phase=Phase.FORWARD, inputs=(1,), outputs=(2,)),
        Op(id="b", kind="b", phase=Phase.FORWARD, inputs=(3, 2), outputs=(4,)),
    )
    graph = Graph(tensors=tensors, ops=ops)
    assert working_sets(graph, (0, 5000)) == [111, 6111]
    assert working_sets(graph, (), leaves_stay=False) == [110, 1100]
