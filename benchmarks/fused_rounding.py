"""How far gradients of fused kernels are from float64, beside eager PyTorch and torch.compile.

    python benchmarks/fused_rounding.py [--device cpu] [--batches 16] [--budgets 100%,60%,40%] [--layout WAY]
                                        [--patience SECONDS] [--jobs 1] [--out FILE] [STEP ...]

STEP is an address of the zoo; `/autocast` behind it runs it under autocast to bfloat16, `/bfloat16` all of it in
bfloat16. All of the zoo with small sizes by default. BatchNorms train, dropout does not: float64 would draw other masks. A
step whose budget is too small gets the smallest one that is known to do. `--layout channels-last` or `kept` has convolutions
run so, instead of in the layout that is measured to be faster. Each step runs in a process of its own, with an empty
cache of Inductor's, which is ended after --patience seconds; --jobs so many of them side by side.

A distance is the norm of a gradient's difference from that of the same step in float64, over the norm of the latter; the
largest of all parameters counts. One batch says little: a ReLU or a maximum that tips is seen in every gradient before it,
and a gradient whose terms nearly cancel is far by chance. So all figures are geometric means over several batches, and
ratios are those of the same batch, with the standard error of their mean behind +-. "Of all gradients" is the geometric mean
of the ratio of every gradient, "at most" the largest of one gradient, both over the batches. Left out are gradients that
are zero in exact arithmetic, as of a bias in front of a BatchNorm. Prints a table; with --out it is stored too.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide
from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.kernels import layout, ways
from lowtide.files import write_atomically
from plain import machine

Gradients = dict[str, Tensor]
Distances = dict[str, float]
VALUED = ("--device", "--batches", "--budgets", "--time-limit", "--layout")
NOTHING = 1e-10
"""A gradient whose norm is so small a part of the largest one's is zero in exact arithmetic."""
EXACT = 1e-9
"""What is closer is as good as exact: less than a rounding of float32."""
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
    return {k: max(float((found[k] - exact[k]).norm()) / norms[k], EXACT) for k in exact if norms[k] > least}


def measured(step: Callable[..., Tensor], case: Case) -> tuple[list[Distances], list[Gradients]]:
    """The distance of each gradient, batch by batch, and the gradients."""
    found = [gradients(step, case.model, batch) for batch in case.batches]
    return [distances(one, exact) for one, exact in zip(found, case.exact, strict=True)], found


def furthest(each: Sequence[Distances]) -> float:
    """The distance of the furthest gradient: the geometric mean over batches."""
    return math.exp(statistics.fmean(math.log(max(one.values())) for one in each))


@dataclass(frozen=True)
class Ratio:
    """How many times as far as another way gradients are."""

    value: float
    error: float
    """The standard error of its logarithm."""
    all: float
    most: float
    which: str

    def __str__(self) -> str:
        """As columns of the table."""
        return f"{self.value:.3f} ± {self.error * self.value:.3f} | {self.all:.3f} | {self.most:.3f} `{self.which}`"


def ratio(ours: Sequence[Distances], rival: Sequence[Distances]) -> Ratio:
    """Of the same batches, one by one."""
    pairs = list(zip(ours, rival, strict=True))
    logs = [math.log(max(a.values()) / max(b.values())) for a, b in pairs]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    names = [name for name in ours[0] if all(name in a and name in b for a, b in pairs)]
    each = {name: statistics.fmean(math.log(a[name] / b[name]) for a, b in pairs) for name in names}
    which = max(each, key=lambda name: each[name])
    value, everything = (math.exp(statistics.fmean(one)) for one in (logs, each.values()))
    return Ratio(value, error, everything, math.exp(each[which]), which)


def same(some: Sequence[Gradients], others: Sequence[Gradients]) -> bool:
    """Whether all gradients have the same bits."""
    return all(
        torch.equal(one[name], other[name]) for one, other in zip(some, others, strict=True) for name in one
    )


def rows(case: Case, budgets: Sequence[str], time_limit: float, *, detail: bool) -> Any:
    """The rows of one step."""
    eager, _ = measured(case.loss, case)
    torch._dynamo.reset()
    began = time.perf_counter()
    rival, _ = measured(torch.compile(case.loss, dynamic=False), case)
    took = time.perf_counter() - began
    yield row(case.name, "torch.compile", rival, None, f"{took:.0f} s")
    if furthest(rival) > WRONG * furthest(eager):
        torch._dynamo.reset()
        with torch._inductor.config.patch(layout_optimization=False):
            rival, _ = measured(torch.compile(case.loss, dynamic=False), case)
        told = "the one above gives wrong gradients; ratios below are to this one"
        yield row(case.name, "torch.compile, layouts kept", rival, None, told)
    yield row(case.name, "eager", eager, rival, "")
    first: list[Gradients] | None = None
    for budget in budgets:
        torch._dynamo.reset()
        began = time.perf_counter()
        try:
            step = fitted(case, budget, time_limit)
        except lowtide.LowtideError as error:
            yield f"| `{case.name}` | fused, {budget} | {str(error).splitlines()[0]} | | | | |"
            continue
        decisions, plan = step.plan.decisions, step.plan
        ours, found = measured(step, case)
        told = f"{plan.predicted.peak_bytes / 2**20:.2f} MiB, {decisions.tiles} tiles, {decisions.recomputed} recomputed"
        told += f", {'channels-last' if True in CHOSEN else 'layout kept'}" if CHOSEN else ""
        if not decisions.tiles:
            again = [gradients(step, case.model, batch) for batch in case.batches]
            if not same(found, again):
                told += ", its own bits change from run to run"
            elif first is not None:
                told += f", {'same bits' if same(found, first) else 'OTHER BITS'}"
            else:
                first = found
        yield row(case.name, f"fused, {budget}", ours, rival, f"{told}; {time.perf_counter() - began:.0f} s")
        if detail:
            for name in ours[0]:
                both = [
                    math.exp(statistics.fmean(math.log(one[name]) for one in each)) for each in (ours, rival)
                ]
                yield f"    {name}: {both[0]:.2e}, torch.compile {both[1]:.2e}, {both[0] / both[1]:.3f}"


def fitted(case: Case, budget: str, time_limit: float) -> lowtide.Fitted:
    """The step by fused kernels inside a budget, or inside the smallest one."""
    options: dict[str, Any] = {"kernels": "fused", "time_limit": time_limit, "cache": False, "verify": False}
    try:
        return lowtide.fit(case.loss, case.model, *case.batches[0], budget=budget, **options)
    except InfeasibleError as error:
        torch._dynamo.reset()
        return lowtide.fit(case.loss, case.model, *case.batches[0], budget=error.smallest_budget, **options)


def row(name: str, way: str, ours: Sequence[Distances], rival: Sequence[Distances] | None, told: str) -> str:
    against = "1 | 1 | 1" if rival is None else str(ratio(ours, rival))
    return f"| `{name}` | {way} | {furthest(ours):.2e} | {against} | {told} |"


CHOSEN: list[bool] = []
"""Whether convolutions run channels-last, where that was asked."""


def lay_out(way: str) -> None:
    """Have convolutions run in a layout, or in the one that is measured to be faster, and note which."""
    measure = layout.in_faster_layout

    def laid_out(module: Any, arguments: Any, layouts: Any, seconds: float) -> Any:
        if way == "faster":
            changed = measure(module, arguments, layouts, seconds)
        else:
            changed = layout.in_layout(module, arguments, layouts, channels_last=way == "channels-last")
        CHOSEN[:] = [changed is not module]
        return changed

    ways.in_faster_layout = laid_out  # type: ignore[assignment]


def of_step(asked: str, chosen: Any) -> Any:
    """The rows of an address."""
    lay_out(chosen.layout)
    case = prepared(asked, chosen.device, chosen.batches)
    yield from rows(case, chosen.budgets.split(","), chosen.time_limit, detail=chosen.detail)


def alone(asked: str, chosen: Any) -> list[str]:
    """The same in a process of its own: what ran before must not matter.

    Nor what was compiled before: Inductor's kernels on disk are taken whether oneDNN was on or not.
    """
    words = [x for name in VALUED for x in (name, str(getattr(chosen, name[2:].replace("-", "_"))))]
    call = [sys.executable, "-W", "ignore", __file__, "--here", *words, *["--detail"] * chosen.detail, asked]
    ending = ""
    with tempfile.TemporaryDirectory() as fresh:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": fresh}
        try:
            done = subprocess.run(
                call, capture_output=True, text=True, check=False, timeout=chosen.patience, env=environment
            )
            said = done.stdout
            ending = f"ended with {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired as late:
            said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
            ending = f"not done after {chosen.patience:.0f} s"
    found = [line for line in said.splitlines() if line.startswith(("| `", "    "))]
    return [*found, f"| `{asked}` | {ending} | | | | | |"] if ending else found


def each_step(steps: Sequence[str], chosen: Any) -> Iterable[Iterable[str]]:
    """The rows of each step, in order."""
    if chosen.here:
        yield from (of_step(asked, chosen) for asked in steps)
        return
    with ThreadPoolExecutor(chosen.jobs) as several:
        yield from several.map(lambda asked: alone(asked, chosen), steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--budgets", default="100%,60%,40%")
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--layout", choices=("faster", "channels-last", "kept"), default="faster")
    parser.add_argument("--here", action="store_true", help="in this process, with what Inductor has on disk")
    parser.add_argument("--detail", action="store_true", help="print every gradient")
    parser.add_argument("--patience", type=float, default=1800.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    chosen = parser.parse_args()
    lines = [
        "| step | way | distance | of torch.compile's | of all gradients | at most | |",
        "| --- | --- | ---: | ---: | ---: | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    steps = chosen.steps or defaults()
    told = ", ".join(f"{key} {value}" for key, value in machine(chosen.device).items())
    command = " ".join(["python benchmarks/fused_rounding.py", *sys.argv[1:]])
    text = f"# Gradients of fused kernels against float64\n\n`{command}`, {date.today()}; {told}\n\n"
    for found in each_step(steps, chosen):
        for one in found:
            lines.append(one)
            print(one, flush=True)
        if chosen.out is not None:  # step by step: all of the zoo takes an hour
            write_atomically(chosen.out, (text + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
