"""How far gradients of fused kernels are from float64, beside eager PyTorch and torch.compile.

    python benchmarks/fused_rounding.py [--device cpu] [--batches 4] [--budgets 100%,60%,40%] [--out FILE] [STEP ...]

STEP is an address of the zoo; `/autocast` behind it runs it under autocast to bfloat16, `/bfloat16` all of it in
bfloat16. All of the zoo with small sizes by default. BatchNorms train, dropout does not: float64 would draw other masks. A
step whose budget is too small gets the smallest one that is known to do. A distance is the norm of a gradient's difference from
that of the same step in float64, over the norm of the latter; the largest of all parameters counts, and of several
batches the quadratic mean. Each step runs in a process of its own. Left out are gradients that are zero in exact arithmetic, as of a bias in front of a BatchNorm.
Prints a table; with --out it is stored too.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.files import write_atomically
from plain import machine

Gradients = dict[str, Tensor]
VALUED = ("--device", "--batches", "--budgets", "--time-limit")
NOTHING = 1e-10
"""A gradient whose norm is so small a part of the largest one's is zero in exact arithmetic."""
WIDER = {"gpt2": "gpt2:batch=4,layers=2,width=32,heads=4,length=64,vocab=2048"}
"""Sizes where budgets take tiles: those that are small in the zoo do not."""
WRONG = 1000
"""What is so many times as far as eager is no rounding: no ratio is taken to it."""
LAST = ("resnet50", "densenet161", "resnet152")
"""They take longest to compile."""


@dataclass(frozen=True)
class Case:
    """A step, in several batches, with its gradients in float64."""

    name: str
    model: nn.Module
    loss: Callable[..., Tensor]
    batches: list[list[Any]]
    exact: list[Gradients]


def defaults() -> list[str]:
    """All steps of the zoo that have gradients, the decoder in bfloat16 too."""
    names = [name for name in zoo.names() if zoo.network(name).trains and name not in (*WIDER, *LAST)]
    decoder = WIDER["gpt2"]
    return [decoder, f"{decoder}/autocast", f"{decoder}/bfloat16", *map(zoo.small, (*names, *LAST))]


def gradients(step: Callable[..., Tensor], model: nn.Module, batch: Sequence[Any]) -> Gradients:
    """Of one step from scratch, with the buffers as they were."""
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    step(model, *batch).backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
    model.zero_grad(set_to_none=True)
    return found


def prepared(asked: str, device: str, count: int) -> Case:
    """A step with its reference."""
    address, _, precision = asked.partition("/")
    if precision not in ("", "autocast", "bfloat16"):
        raise SystemExit(f"{asked}: behind the / stands autocast or bfloat16")
    built = [zoo.build(address, device=device, seed=seed) for seed in range(count)]
    model, plain = built[0].model.eval(), built[0].loss
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()

    if precision == "bfloat16":
        model = model.bfloat16()

    def half(model: nn.Module, *batch: Any) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return plain(model, *batch)

    wide = copy.deepcopy(model).double()
    kind = torch.bfloat16 if precision == "bfloat16" else torch.float32
    batches = [[as_type(x, kind) for x in one.batch] for one in built]
    exact = [gradients(plain, wide, [as_type(x, torch.float64) for x in batch]) for batch in batches]
    return Case(asked, model, half if precision == "autocast" else plain, batches, exact)


def as_type(value: Any, kind: torch.dtype) -> Any:
    """A tensor of floating point in another type."""
    return value.to(kind) if isinstance(value, Tensor) and value.is_floating_point() else value


def distances(found: Gradients, exact: Gradients) -> dict[str, float]:
    """Of each gradient, as a share of its norm."""
    norms = {name: float(value.norm()) for name, value in exact.items()}
    least = NOTHING * max(norms.values())
    return {k: float((found[k] - exact[k]).norm()) / norms[k] for k in exact if norms[k] > least}


def measured(step: Callable[..., Tensor], case: Case) -> tuple[float, dict[str, float], list[Gradients]]:
    """The distance of a step, that of each gradient, and the gradients."""
    found = [gradients(step, case.model, batch) for batch in case.batches]
    each = [distances(one, exact) for one, exact in zip(found, case.exact, strict=True)]
    names = {name: mean([one[name] for one in each if name in one]) for name in each[0]}
    return mean([max(one.values()) for one in each]), names, found


def mean(values: Sequence[float]) -> float:
    """The quadratic mean."""
    return math.sqrt(sum(value * value for value in values) / len(values))


def same(some: Sequence[Gradients], others: Sequence[Gradients]) -> bool:
    """Whether all gradients have the same bits."""
    return all(
        torch.equal(one[name], other[name]) for one, other in zip(some, others, strict=True) for name in one
    )


def rows(case: Case, budgets: Sequence[str], time_limit: float, *, detail: bool) -> Any:
    """The rows of one step."""
    eager, of_eager, _ = measured(case.loss, case)
    torch._dynamo.reset()
    began = time.perf_counter()
    rival, of_rival, _ = measured(torch.compile(case.loss, dynamic=False), case)
    took = time.perf_counter() - began
    yield row(case.name, "torch.compile", (rival, rival, 1.0, ""), f"{took:.0f} s")
    if rival > WRONG * eager:
        torch._dynamo.reset()
        with torch._inductor.config.patch(layout_optimization=False):
            rival, of_rival, _ = measured(torch.compile(case.loss, dynamic=False), case)
        told = "the one above gives wrong gradients; ratios below are to this one"
        yield row(case.name, "torch.compile, layouts kept", (rival, rival, 1.0, ""), told)
    yield row(case.name, "eager", (eager, rival, *furthest(of_eager, of_rival)), "")
    first: list[Gradients] | None = None
    for budget in budgets:
        torch._dynamo.reset()
        began = time.perf_counter()
        try:
            step = fitted(case, budget, time_limit)
        except lowtide.LowtideError as error:
            yield f"| {case.name} | fused, {budget} | {str(error).splitlines()[0]} | | |"
            continue
        decisions, plan = step.plan.decisions, step.plan
        ours, of_ours, found = measured(step, case)
        told = f"{plan.predicted.peak_bytes / 2**20:.2f} MiB, {decisions.tiles} tiles, {decisions.recomputed} recomputed"
        if not decisions.tiles:
            told += "" if first is None else f", {'same bits' if same(found, first) else 'OTHER BITS'}"
            first = first or found
        yield row(
            case.name,
            f"fused, {budget}",
            (ours, rival, *furthest(of_ours, of_rival)),
            f"{told}; {time.perf_counter() - began:.0f} s",
        )
        if detail:
            worst = sorted(of_ours, key=lambda name: -of_ours[name])[:8]
            worst += sorted(of_ours, key=lambda name: -of_ours[name] / max(of_rival[name], 1e-30))[:8]
            for name in worst:
                yield f"    {name}: {of_ours[name]:.2e}, torch.compile {of_rival[name]:.2e}, {of_ours[name] / of_rival[name]:.3f}"


def fitted(case: Case, budget: str, time_limit: float) -> lowtide.Fitted:
    """The step by fused kernels inside a budget, or inside the smallest one."""
    options: dict[str, Any] = {"kernels": "fused", "time_limit": time_limit, "cache": False, "verify": False}
    try:
        return lowtide.fit(case.loss, case.model, *case.batches[0], budget=budget, **options)
    except InfeasibleError as error:
        torch._dynamo.reset()
        return lowtide.fit(case.loss, case.model, *case.batches[0], budget=error.smallest_budget, **options)


def furthest(ours: dict[str, float], rival: dict[str, float]) -> tuple[float, str]:
    """The largest ratio of a gradient's two distances, and which gradient that is."""
    return max((ours[name] / max(rival[name], 1e-30), name) for name in ours)


def row(name: str, way: str, found: tuple[float, float, float, str], told: str) -> str:
    distance, rival, most, where = found
    which = f"{most:.3f} `{where}`" if where else f"{most:.3f}"
    return f"| `{name}` | {way} | {distance:.2e} | {distance / rival:.3f} | {which} | {told} |"


def of_step(asked: str, chosen: Any) -> Any:
    """The rows of an address."""
    case = prepared(asked, chosen.device, chosen.batches)
    yield from rows(case, chosen.budgets.split(","), chosen.time_limit, detail=chosen.detail)


def alone(asked: str, chosen: Any) -> list[str]:
    """The same in a process of its own: what ran before must not matter."""
    words = [x for name in VALUED for x in (name, str(getattr(chosen, name[2:].replace("-", "_"))))]
    call = [sys.executable, "-W", "ignore", __file__, *words, asked]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(("| `", "    "))]
    return found if not done.returncode else [*found, f"| `{asked}` | ended with {done.returncode} | | | | |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--budgets", default="100%,60%,40%")
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--detail", action="store_true", help="print the gradients that are furthest")
    parser.add_argument("--out", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    chosen = parser.parse_args()
    lines = [
        "| step | way | distance | of torch.compile's | of any gradient at most | |",
        "| --- | --- | ---: | ---: | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    steps = chosen.steps or defaults()
    for asked in steps:
        for one in alone(asked, chosen) if len(steps) > 1 else of_step(asked, chosen):
            lines.append(one)
            print(one, flush=True)
    told = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    command = " ".join(["python benchmarks/fused_rounding.py", *sys.argv[1:]])
    if chosen.out is not None:
        text = f"# Gradients of fused kernels against float64\n\n`{command}`, {date.today()}; {told}\n\n"
        write_atomically(chosen.out, (text + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
