"""One small training step through every stage: graph, costs, plan, Program, run.

python examples/how_it_works.py     (seconds, on a CPU; docs/how-it-works.md shows what it prints)
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import lowtide
from lowtide.cost import Cost, Figure
from lowtide.cost.device import Device, Environment
from lowtide.cost.estimate import estimate
from lowtide.cost.probe import environment
from lowtide.execute.compare.compare import compare
from lowtide.execute.compare.profile import measured_profile
from lowtide.execute.runtime.in_place import able_in_place
from lowtide.graph import Graph, Op
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Drop, Run
from lowtide.plan.program.simulate import simulate
from lowtide.plan.request import PlanRequest
from lowtide.plan.result.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
DEVICE = Device(
    Environment("a device made up for this page", "cpu"),
    matrix_flop_per_second={"float32": 1e11},
    bytes_per_second=1e10,
    launch_seconds=1e-6,
    memory_bytes=8 << 30,
)
"""Times are estimated for this device, so that the plan is the same on every machine."""


def loss_of(model: nn.Module, batch: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The step: a loss, on which ``backward`` is called."""
    return nn.functional.cross_entropy(model(batch), labels)


def main() -> None:
    """Print what each stage gives."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32, bias=False), nn.GELU())))
    batch, labels = torch.randn(1024, 32), torch.randint(32, (1024,))

    captured = lowtide.capture(loss_of, model, batch, labels)
    graph = captured.step.graph
    show("graph", graph_lines(graph))

    measured = measured_profile(loss_of, [model, batch, labels], environment("cpu")).step.costs
    estimated = estimate(graph, DEVICE)
    show("costs", cost_lines(graph, measured, estimated))

    seconds = tuple(value_of(cost.seconds) for cost in estimated)
    workspaces = tuple(int(value_of(cost.workspace_bytes)) for cost in measured)
    plan = make_plan(
        graph,
        Costs(seconds, workspaces, "estimated"),
        PlanRequest.of("70%", only="recompute"),
        able=able_in_place(captured.joint),
    )
    show("plan", plan.explain().replace(f"{ROOT}/", "").splitlines())
    show("program", program_lines(plan))

    run = compare(model, [batch, labels], loss_of, lambda _: plan.program, in_place=False, repeats=0)
    show("run", run_lines(plan, run.eager.peak_bytes, run.measured.peak_bytes, run.bitwise))


def show(title: str, lines: list[str]) -> None:
    """Print one stage."""
    print(f"== {title} ==", *lines, "", sep="\n")


def value_of(figure: Figure | None) -> float:
    """The number of a figure; 0 where it is not known."""
    return figure.value if figure is not None else 0


def kind_of(op: Op) -> str:
    """The kind of an operator without its namespace."""
    return op.kind.removeprefix("aten.")


def names(graph: Graph, tensors: tuple[int, ...]) -> str:
    """Tensors by name; a view is in brackets."""
    found = (graph.tensors[t] for t in tensors)
    return ", ".join(f"[{one.label}]" if one.alias is not None else one.label for one in found)


def graph_lines(graph: Graph) -> list[str]:
    """Operators in program order: the bytes of the result, what is read, what is made."""
    found = []
    for k, op in enumerate(graph.ops):
        size = sum(graph.tensors[t].bytes for t in op.outputs)
        made = f"{names(graph, op.inputs)} -> {names(graph, op.outputs)}"
        found.append(f"{k:>2} {op.phase.value:<8} {size:>7,} {kind_of(op):<26} {made}")
    return found


def cost_lines(graph: Graph, measured: tuple[Cost, ...], estimated: tuple[Cost, ...]) -> list[str]:
    """What each operator takes; views take nothing and are left out."""
    found = [f" k {'operator':<26} {'FLOP':>9} {'bytes moved':>11} {'workspace':>9} {'estimated µs':>12}"]
    for k, (op, cost, guess) in enumerate(zip(graph.ops, measured, estimated, strict=True)):
        flop, moved, workspace = (value_of(x) for x in (cost.flop, cost.bytes_moved, cost.workspace_bytes))
        if moved:
            work = f"{flop:>9,} {moved:>11,} {workspace:>9,} {value_of(guess.seconds) * 1e6:>12.1f}"
            found.append(f"{k:>2} {kind_of(op):<26} {work}")
    return found


def program_lines(plan: Plan) -> list[str]:
    """Every instruction; before each Run the bytes that are live while it runs."""
    graph, program = plan.graph, plan.program
    live = iter(simulate(graph, program, workspace_bytes=plan.workspace_bytes).live_bytes)
    ran: set[int] = set()
    found = []
    for part, lines in (("forward", program.forward), ("backward", program.backward)):
        found.append(part)
        for line in lines:
            if isinstance(line, Run):
                op = graph.ops[line.op]
                how = " (in place)" * (line.in_place is not None) + " (again)" * (line.op in ran)
                words = f"{kind_of(op)} -> {names(graph, op.outputs)}{how}"
                found.append(f"{next(live):>9,}  run {line.op:>2} {words}")
                ran.add(line.op)
            elif isinstance(line, Drop):
                found.append(f"{'':>9}  drop {names(graph, line.tensors)}")
    return found


def run_lines(plan: Plan, eager: int, measured: int, bitwise: bool) -> list[str]:
    """Peaks in bytes, and whether anything changed."""
    return [
        f"eager      {eager:>9,} bytes at the peak",
        f"budget     {plan.budget_bytes:>9,}",
        f"predicted  {plan.predicted.peak_bytes:>9,}",
        f"measured   {measured:>9,}",
        f"loss and gradients are those of eager, bit for bit: {bitwise}",
    ]


if __name__ == "__main__":
    main()
