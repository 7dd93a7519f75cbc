"""Plans and runs to report on, made once: with recomputation, with copies to the host, in tiles, of groups."""

from __future__ import annotations

import functools
from dataclasses import replace

import msgspec
import torch

from lowtide import capture, zoo
from lowtide.commands.shard_document import shard_plan
from lowtide.cost.wire import WireSpeed
from lowtide.execute.compare.compare import compare
from lowtide.execute.fit import fit
from lowtide.execute.shards.tried import Chooser, choose
from lowtide.graph import GROUP, Graph, Op, Phase, Role, Tensor
from lowtide.plan.budget import Budget
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.shard_plan import ShardPlan, ShareTaken
from tests.planning import plan_for
from tests.steps import DEVICE, families, families_plan

TILED = "gpt2:batch=4,layers=1,width=16,heads=2,length=32,vocab=512"


def recomputing() -> Plan:
    return families_plan()


@functools.cache
def offloading() -> Plan:
    step = families()
    costs = Costs(tuple(float(cost.seconds.value) for cost in step.costs if cost.seconds), origin="estimated")
    link = Link(1e9, 1e9, 0.0)
    return plan_for(
        step.graph, costs, Budget(share=0.75), only=("recompute", "offload"), link=link, time_limit=1.0
    )


@functools.cache
def tiled() -> Plan:
    torch._dynamo.reset()
    built = zoo.build(TILED)
    only = {"only": "recompute,tile", "cost": "estimated", "cache": False, "verify": False}
    return fit(built.loss, built.model, *built.batch, budget="35%", **only).plan


@functools.cache
def measured() -> MeasuredRun:
    """The plan in tiles, run and compared with eager PyTorch."""
    built, plan = zoo.build(TILED), tiled()
    found = compare(built.model, built.batch, built.loss, lambda _: plan.program, in_place=False, repeats=1)
    return found.as_file(TILED, "cpu", plan)


@functools.cache
def sharded(budget: str = "100%") -> ShardPlan:
    """Two convolutions and a pool, cut by rows over two devices; processes are made up."""
    torch._dynamo.reset()
    built = zoo.build("convpool")
    joint = capture(built.loss, built.model, *built.batch).joint
    chooser = Chooser(joint, 2, DEVICE, WireSpeed(), time_limit=1.0, forced=True)
    choice = choose(chooser, "height")
    found = shard_plan(
        chooser,
        replace(choice, others=(replace(choice.best, name="another"),)),
        "convpool",
        budget,
        [WireSpeed()],
    )
    share = ShareTaken(5000, 6000, 1000, 700, 700, 2e-7, 1e-8, 0.0)
    return msgspec.structs.replace(found, measured=(share, share))


def grouped() -> Graph:
    """Two operators, of which one is a group of three."""
    inner = Graph(
        tensors=tuple(Tensor(f"t{k}", 400, Role.ACTIVATION, shape=(100,), dtype="float32") for k in range(4)),
        ops=tuple(Op(f"inner{k}", "aten.relu", inputs=(k,), outputs=(k + 1,)) for k in range(3)),
        returned=(3,),
    )
    tensors = (
        Tensor("x", 400, Role.INPUT, shape=(100,), dtype="float32"),
        Tensor("y", 400, shape=(100,), dtype="float32"),
        Tensor("z", 400, shape=(100,), dtype="float32"),
    )
    ops = (
        Op("group", GROUP, Phase.FORWARD, (0,), (1,), body=inner),
        Op("last", "aten.relu", Phase.FORWARD, (1,), (2,)),
    )
    return Graph(tensors, ops, returned=(2,))
