"""The networks of the zoo inside budgets, each step compared with eager PyTorch bit for bit.

    python benchmarks/exact.py [--device cuda] [NAME ...]

Every network, at a size whose activations outweigh its parameters where it has one, at 70, 50, 35 and 25% of its plain
peak, by recomputation alone and with offload; where no plan fits, once at the smallest budget for which one is known.
On CUDA with deterministic kernels where PyTorch has them; operators for which it says that it has none are stored, and
how many different losses eager PyTorch itself gives in 40 runs from one state. The loss of the U-Net is such an
operator, so that on CUDA the U-Net is compared a second time with its pixels in rows, for which there is a deterministic
kernel ("rows/" before a name). Prints a table and stores it under benchmarks/results/ as exact-DEVICE.json and
exact-DEVICE.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lowtide import zoo
from lowtide.errors import InfeasibleError
from lowtide.execute.compare.compare import compare
from lowtide.files import write_atomically
from lowtide.graph import Graph
from lowtide.plan.make.make_plan import make_plan
from lowtide.plan.program.copy_lanes import Link
from lowtide.plan.program.costs import Costs
from lowtide.plan.request import DeviceRoom, PlanRequest
from lowtide.plan.result.plan import Plan
from lowtide.zoo.base import Built
from lowtide.zoo.unet import IGNORED
from plain import machine

RESULTS = Path(__file__).parent / "results"
TARGETS = (
    "unet:base=4,batch=4,size=188",
    "resnet50:batch=16,size=64,classes=10,width=16",
    "resnet152:batch=16,size=64,classes=10,width=16",
    "resnet50-inference:batch=16,size=64,classes=10,width=16",
    "alexnet:batch=32,size=67",
    "locallyconnected:batch=3,size=17,channels=4,classes=10",
    "convpool",
    "vgg19:batch=32,size=32,classes=10",
    "vgg16body:batch=2,size=64,width=4",
    "densenet161:batch=8,size=64,classes=10,growth=24,layers=12",
    "gpt2:batch=4,layers=4,width=64,heads=4,length=64,vocab=256",
)
ROWS = "rows/"
SHARES = ("70%", "50%", "35%", "25%")
MEANS = ("recompute", "recompute,offload")
_AGAIN = 40
"""Runs of eager PyTorch from one state."""
_NO_KERNEL = re.compile(r"(\w+) does not have a deterministic implementation")
SECONDS = 1e-3


def build(name: str, device: str) -> Built:
    """A step of the zoo; with "rows/" before its name its loss is that of pixels in rows."""
    built = zoo.build(name.removeprefix(ROWS), device=device)
    if not name.startswith(ROWS):
        return built

    def loss(model: nn.Module, image: Tensor, labels: Tensor) -> Tensor:
        scores = model(image).movedim(1, -1)
        return cross_entropy(
            scores.reshape(-1, scores.shape[-1]), labels.long().reshape(-1), ignore_index=IGNORED
        )

    return replace(built, loss=loss, name=ROWS + built.name)


@contextmanager
def no_kernel() -> Iterator[set[str]]:
    """The operators for which PyTorch says that it has no deterministic kernel."""
    found: set[str] = set()
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.set_warn_always(before)
    for one in warned:
        found.update(_NO_KERNEL.findall(str(one.message)))


def planned(graph: Graph, share: str, methods: str, time_limit: float) -> tuple[Plan, bool]:
    """A plan for operators that take a millisecond each; False: at the smallest budget that is known."""
    costs = Costs((SECONDS,) * len(graph.ops))
    size = sum(tensor.bytes for tensor in graph.tensors if tensor.alias is None)
    rate = size / (SECONDS * len(graph.ops))  # all that there is, in the time of a step
    options: dict[str, Any] = {"only": methods, "time_limit": time_limit}
    room = DeviceRoom(link=Link(rate, rate))
    try:
        return make_plan(graph, costs, PlanRequest.of(share, **options), room), True
    except InfeasibleError as error:
        return make_plan(graph, costs, PlanRequest.of(error.smallest_budget, **options), room), False


def row(name: str, share: str, methods: str, device: str, time_limit: float) -> dict[str, Any]:
    """One comparison."""
    torch._dynamo.reset()
    built = build(name, device)
    plans: list[tuple[Plan, bool]] = []

    def planner(graph: Graph) -> Any:
        plans.append(planned(graph, share, methods, time_limit))
        return plans[-1][0].program

    with no_kernel() as warned:
        found = compare(
            built.model,
            built.batch,
            built.loss,
            planner,
            trains=built.trains,
            update=built.ending if device == "cpu" else None,
            repeats=0,
            in_place=False,
        )
    plan, asked = plans[-1]
    return {
        "target": built.name,
        "methods": methods,
        "share": share,
        "fits": asked,
        "plain_bytes": plan.plain.peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "measured_bytes": found.measured.peak_bytes,
        "predicted_bytes": found.predicted_peak_bytes,
        "recomputed": plan.decisions.recomputed,
        "offloaded": plan.decisions.offloaded,
        "runs": found.runs,
        "operators": found.operators,
        "bitwise": found.bitwise,
        "loss_equal": found.loss_equal,
        "max_rel_grad_diff": found.max_rel_grad_diff,
        "no_deterministic_kernel": sorted(warned),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as Markdown."""
    lines = [
        "| target | methods | budget | runs | of operators | away | predicted/measured | bitwise |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in rows:
        share = (
            one["share"] if one["fits"] else f"{one['budget_bytes'] / one['plain_bytes']:.0%}, the smallest"
        )
        ratio = one["predicted_bytes"] / one["measured_bytes"]
        same = "yes" if one["bitwise"] else _difference(one)
        lines.append(
            f"| `{one['target']}` | {one['methods']} | {share} | {one['runs']} | {one['operators']} | "
            f"{one['offloaded']} | {ratio:.4f} | {same} |"
        )
    return "\n".join(lines)


def _difference(one: dict[str, Any]) -> str:
    """What is not equal."""
    most = one["max_rel_grad_diff"]
    gradients = "cannot be compared" if most is None else f"differ by {most:.1e}"
    loss = "the same" if one["loss_equal"] else "another"
    return f"no: gradients {gradients}, loss {loss}"


def about_kernels(rows: list[dict[str, Any]]) -> str:
    """What PyTorch warned of, and what eager PyTorch gives itself, as Markdown."""
    lines = [
        f"| target | no deterministic kernel | losses of eager in {_AGAIN} runs |",
        "| --- | --- | ---: |",
    ]
    for name in dict.fromkeys(one["target"] for one in rows):
        of = [one for one in rows if one["target"] == name]
        kernels = (
            ", ".join(sorted({kernel for one in of for kernel in one["no_deterministic_kernel"]})) or "-"
        )
        lines.append(f"| `{name}` | {kernels} | {max(one['eager_losses'] for one in of)} |")
    return "\n".join(lines)


def eager_losses(name: str, device: str) -> int:
    """How many different losses eager PyTorch gives from one state, drawing the same numbers."""
    built = build(name, device)
    state = {key: value.clone() for key, value in built.model.state_dict().items()}
    found = set()
    for _ in range(_AGAIN):
        built.model.load_state_dict(state)
        torch.manual_seed(0)
        loss = built.loss(built.model, *built.batch)
        found.add(loss.detach().double().cpu().numpy().tobytes())
    return len(found)


def main() -> None:
    """Run and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, default=2.0)
    parser.add_argument("--add", action="store_true", help="keep the stored rows of other targets")
    parser.add_argument("names", nargs="*")
    chosen = parser.parse_args()
    torch.use_deterministic_algorithms(chosen.device == "cuda", warn_only=True)
    on_cuda = (*TARGETS, ROWS + TARGETS[0])
    names = chosen.names or (on_cuda if chosen.device == "cuda" else TARGETS)
    earlier, rows = stored(chosen.device) if chosen.add else [], []
    for name in names:
        losses = eager_losses(name, chosen.device)
        for methods in MEANS:
            for share in SHARES:
                rows.append(row(name, share, methods, chosen.device, chosen.time_limit))
                rows[-1]["eager_losses"] = losses
                sys.stderr.write(table(rows).splitlines()[-1] + "\n")
                if not rows[-1]["fits"]:
                    break
        again = {one["target"] for one in rows}
        earlier = [one for one in earlier if one["target"] not in again]
        store([*earlier, *rows], chosen.device)  # a run that is cut short leaves what it has
    print(store([*earlier, *rows], chosen.device))


def stored(device: str) -> list[dict[str, Any]]:
    """The rows of an earlier run."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"exact-{device}.json").read_bytes())["rows"]
    return rows


def store(rows: list[dict[str, Any]], device: str) -> str:
    """Write what there is, as JSON and as Markdown, which is returned."""
    about = machine(device)
    command = " ".join(["python benchmarks/exact.py", *sys.argv[1:]])
    document = {"date": str(date.today()), "command": command, "machine": about, "rows": rows}
    where = ", ".join(f"{k} {v}" for k, v in about.items())
    equal = sum(one["bitwise"] for one in rows)
    text = (
        f"# Steps inside budgets, bit for bit\n\n`{command}`, {date.today()}; {where}\n\n"
        f"{equal} of {len(rows)} comparisons are bitwise equal to eager PyTorch in loss, gradients and buffers.\n\n"
        f"{table(rows)}\n\n{about_kernels(rows)}\n"
    )
    name = f"exact-{device}"
    write_atomically(RESULTS / f"{name}.json", json.dumps(document, indent=1).encode() + b"\n")
    write_atomically(RESULTS / f"{name}.md", text.encode())
    return text


if __name__ == "__main__":
    main()
