"""Communications on a lane of their own: three ways to tell the time of a Program, and what plans say of it."""

import random

import msgspec
import pytest

from lowtide.errors import InfeasibleError, PlanError
from lowtide.formats import trace
from lowtide.graph import EXCHANGE, SUM, Graph, Op, Phase, Role, Tensor
from lowtide.plan.bounds.communication import longest_chain
from lowtide.plan.budget import Budget
from lowtide.plan.check.time import seconds_of
from lowtide.plan.make.retimed import retimed
from lowtide.plan.program.copy_lanes import Lanes, Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Fetch, Program, Run, Send
from lowtide.plan.program.simple import store_all
from lowtide.plan.program.simulate import simulate
from lowtide.plan.result.played import plan_step
from lowtide.plan.result.validate import valid_plan
from tests.plan.random_steps import random_step
from tests.planning import plan_for


class Ticks:
    """A Program second by second: operators count down, and beside them the first communication of a queue."""

    def __init__(self, graph, program, seconds, wire):
        self.graph, self.now, self.queue, self.sums = graph, 0, [], {}
        for number, line in enumerate(program.instructions):
            if number == len(program.forward):
                self.until(lambda: not self.pending())
            if isinstance(line, Drop):
                self.until(lambda line=line: not self.pending().intersection(line.tensors))
                continue
            op = graph.ops[line.op]
            self.until(lambda op=op: not self.pending().intersection(op.reads))
            for _ in range(int(seconds[line.op])):
                self.tick()
            if line.op in wire:
                self.queue.append([line.op, int(wire[line.op])])
                if op.kind == EXCHANGE:
                    self.until(lambda k=line.op: k not in [one for one, _ in self.queue])
        self.until(lambda: not self.pending())

    def pending(self):
        while self.queue and not self.queue[0][1]:
            self.queue.pop(0)
        return {t for k, _ in self.queue if self.graph.ops[k].kind == SUM for t in self.graph.ops[k].outputs}

    def until(self, done):
        self.pending()
        while not done():
            self.tick()

    def tick(self):
        self.pending()
        self.now += 1
        if self.queue:
            self.queue[0][1] -= 1
        self.pending()


def talking_step(seed):
    """A random step, some of whose operators are communications, with whole seconds."""
    draw = random.Random(seed)
    graph, seconds, workspace, _ = random_step(seed, charges=False)
    ops, wire = list(graph.ops), {}
    for k, op in enumerate(ops):
        if len(op.outputs) == 1 and graph.tensors[op.outputs[0]].alias is None and draw.random() < 0.4:
            kind = draw.choice([SUM, SUM, EXCHANGE])
            ops[k] = msgspec.structs.replace(op, kind=kind, once=True, random=False)
            wire[k] = float(draw.choice([0, 1, 3, 20]))
    return msgspec.structs.replace(graph, ops=tuple(ops)), tuple(seconds), tuple(workspace), wire


@pytest.mark.parametrize("seed", range(40))
def test_times_are_those_of_a_run_second_by_second(seed):
    graph, seconds, workspace, wire = talking_step(seed)
    costs = Costs(seconds, workspace, wire_seconds=wire)
    plain = store_all(graph)
    shares = (1.0, 0.85, 0.7) if seed < 5 else (1.0,)
    programs = [plain]
    for share in shares:
        try:
            plan = plan_for(graph, costs, Budget(share=share), time_limit=0.1)
        except InfeasibleError:
            continue
        valid_plan(plan)
        assert plan.predicted.seconds == pytest.approx(Ticks(graph, plan.program, seconds, wire).now)
        assert plan.plain.seconds == pytest.approx(Ticks(graph, plain, seconds, wire).now)
        assert plan.bound.seconds <= plan.predicted.seconds
        programs.append(plan.program)
        slower = {k: 2 * one + 1 for k, one in wire.items()}
        again = valid_plan(retimed(plan, slower))
        assert again.predicted.seconds == pytest.approx(Ticks(graph, plan.program, seconds, slower).now)
        assert valid_plan(retimed(again, wire)).predicted == plan.predicted
    for program in programs:
        ticks = Ticks(graph, program, seconds, wire).now
        assert sum(simulate(graph, program, seconds=seconds, lanes=Lanes(graph, None, wire)).seconds) == ticks
        assert seconds_of(graph, program, seconds, {}, None, wire) == ticks
        assert longest_chain(graph, costs, ()) <= ticks


@pytest.mark.parametrize("seed", range(8))
def test_with_copies_beside_them_the_checker_counts_as_the_planner(seed):
    graph, seconds, workspace, wire = talking_step(100 + seed)
    costs, link = Costs(seconds, workspace, wire_seconds=wire), Link(5.0, 7.0, 0.25, 0.01)
    try:
        plan = plan_for(graph, costs, Budget(share=0.7), only=("offload",), link=link, time_limit=0.1)
    except InfeasibleError:
        return
    assert valid_plan(plan) is plan


def gradient_step():
    """x -> y -> loss; the gradient of w is added up while that of x is computed."""
    tensors = (
        Tensor("x", 4, Role.INPUT),
        Tensor("w", 4, Role.PARAMETER),
        Tensor("y", 4),
        Tensor("g", 4, Role.GRADIENT),
        Tensor("own", 4),
        Tensor("dw", 4, Role.GRADIENT, gradient_of=1),
        Tensor("dx", 4, Role.GRADIENT, gradient_of=0),
    )
    backward = Phase.BACKWARD
    ops = (
        Op("f", "f", Phase.FORWARD, (0, 1), (2,)),
        Op("dw", "f", backward, (3, 2), (4,)),
        Op("sum", SUM, backward, (4,), (5,), once=True),
        Op("dx", "f", backward, (3, 1), (6,)),
    )
    return Graph(tensors, ops, returned=(2,))


def test_a_sum_goes_on_while_other_gradients_are_computed():
    graph, seconds = gradient_step(), (1.0, 2.0, 0.5, 4.0)
    program = store_all(graph)
    for wire, took in ((3.0, 7.5), (4.0, 7.5), (6.0, 9.5)):
        found = simulate(graph, program, seconds=seconds, lanes=Lanes(graph, None, {2: wire}))
        assert sum(found.seconds) == took == seconds_of(graph, program, seconds, {}, None, {2: wire})
    assert sum(simulate(graph, program, seconds=seconds).seconds) == 7.5


def test_a_sum_is_waited_for_before_it_is_sent_to_the_host():
    tensors = (Tensor("x", 8, Role.INPUT), Tensor("y", 8), Tensor("z", 8))
    ops = (Op("sum", SUM, Phase.FORWARD, (0,), (1,), once=True), Op("f", "f", Phase.FORWARD, (1,), (2,)))
    graph = Graph(tensors, ops, returned=(2,))
    program = Program((Run(0), Send(1), Drop((1,)), Fetch(1), Run(1)))
    link, seconds, wire = Link(8.0, 8.0), (1.0, 1.0), {0: 5.0}
    # computed at 1, there at 6, on the host at 7, back at 8, read until 9
    assert sum(simulate(graph, program, seconds=seconds, lanes=Lanes(graph, link, wire)).seconds) == 9.0
    assert seconds_of(graph, program, seconds, {}, link, wire) == 9.0


def test_a_plan_shows_communications_on_a_lane_of_their_own():
    graph = gradient_step()
    costs = Costs((1.0, 2.0, 0.5, 4.0), wire_seconds={2: 3.0})
    plan = plan_for(graph, costs, Budget(share=1.0))
    spans = {plan.graph.ops[k].id: span for k, span in enumerate(plan_step(plan).spans)}
    assert [span.lane for span in spans.values()] == ["compute", "compute", "communication", "compute"]
    assert (spans["sum"].start, spans["sum"].end) == (3.5, 6.5)
    assert (spans["dx"].start, spans["dx"].end) == (3.5, 7.5)
    lanes = {
        event["args"]["name"]
        for event in msgspec.json.decode(trace.write(plan_step(plan)).data)["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {"compute", "communication"} <= lanes


def test_times_of_communications_are_amounts_of_operators_that_talk():
    plan = plan_for(gradient_step(), Costs((1.0,) * 4, wire_seconds={2: 3.0}), Budget(share=1.0))
    changed = ({9: 1.0}, {0: 1.0}, {2: -1.0}, {2: 5.0}, {})
    words = ("names operator 9", "talks to nobody", "takes less than no time", "promises", "promises")
    for wire, said in zip(changed, words, strict=True):
        with pytest.raises(PlanError, match=said):
            valid_plan(msgspec.structs.replace(plan, wire_seconds=wire))
