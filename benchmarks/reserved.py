"""Bytes that a planned step reserves on a CUDA device, with and without CUDA graphs, and what that costs in time.

    python benchmarks/reserved.py [--budgets 100%,50%,25%] [--kernels eager] [--time-limit 5] [--allocators default,expandable]
        [--out FILE] [STEP ...]

STEP is unet, resnet50, gpt2, gpt2-bf16 or llama (benchmarks/architectures/as_users_write.py; llama needs `transformers`);
unet, resnet50, gpt2 and llama by default. Each step runs in two processes, by PyTorch's default allocator and with expandable
segments. "allocated" is the peak of the step planned to the budget without graphs, as PyTorch's allocator counts it; "reserved"
what the allocator has taken from the device at most, together with the memory of the graphs, of both steps. "own" is what the
step with graphs reserves of what it allocates where it is not replayed: its plan leaves some of the budget for the graphs. Ten steps between two
synchronisations, after those that do not count: of the step with graphs the time is told by that of the step without, whose plan is
another one, and by that of its own plan where nothing is replayed. "bits" says whether loss and gradients of two replayed steps are those of the
same step without graphs, which runs five times: some kernels give other bits in every run. PyTorch is asked for deterministic
algorithms, where it has them. Models are moved to the host and back once they are made: half-empty segments in which they were
made are not the step's. Of plans it is told what they do, what they predict, and what was measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

import lowtide
from architectures.as_users_write import CASES
from lowtide.execute.graphs.replay import Replay
from lowtide.files import write_atomically
from plain import machine

STEPS = ("unet", "resnet50", "gpt2", "llama")
ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}
WARM, COUNTED = 5, 10
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 24


def cleared() -> None:
    """Nothing is left on the device that nobody holds."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def digest(x: torch.Tensor) -> list[int]:
    """Two sums over the bits of a tensor, one of them by their places: others, where a bit is another one."""
    found = [0, 0]
    for begin, part in enumerate(x.detach().reshape(-1).view(BITS[x.element_size()]).split(CHUNK)):
        wide = part.to(torch.int64)
        place = torch.arange(1, 1 + wide.numel(), device=wide.device).mul_(2).add_(1 + begin * CHUNK)
        found = [found[0] + int(wide.sum()), found[1] + int(wide.mul_(place).sum())]
    return found


def results(step: Callable[..., Any], model: Any, batch: Any) -> list[list[int]]:
    """The bits of the loss and of all gradients of one step."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    loss = step(model, *batch)
    loss.backward()
    found = [digest(one) for one in (loss, *(p.grad for p in model.parameters()))]
    del loss
    model.zero_grad(set_to_none=True)
    return found


def bits(always: list[list[list[int]]], replayed: list[list[list[int]]]) -> str:
    """Whether replays give what the step gives without them."""
    count = len(always[0])
    changing = {k for k in range(count) if any(one[k] != always[0][k] for one in always)}
    other = {k for k in range(count) if any(one[k] != always[0][k] for one in replayed)}
    if other - changing:
        return f"OTHER in {len(other - changing)} of {count}"
    return f"same, but {len(changing)} of {count} change in every run" if changing else "same"


def measured(step: Any, model: Any, batch: Any, *, compares: bool) -> dict[str, Any]:
    """What steps take once everything is set up."""

    def several(count: int) -> None:
        for _ in range(count):
            model.zero_grad(set_to_none=True)
            step(model, *batch).backward()

    cleared()
    several(1)
    allocated = torch.cuda.max_memory_allocated()
    always = [results(step, model, batch)]  # neither of both is replayed
    several(WARM)
    cleared()
    several(2)
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved() + step.graph_bytes
    seconds = timed(several)
    found = {"allocated": allocated, "reserved": reserved, "ms": 1e3 * seconds}
    if compares:
        told = next((x[11:] for x in step.explain().splitlines() if x.startswith("graphs")), "")
        replayed = [results(step, model, batch) for _ in range(2)]
        for one in gc.get_objects():
            if isinstance(one, Replay):
                one.release("their bits are compared")
        always += [results(step, model, batch) for _ in range(4)]
        several(2)
        found |= {"bits": bits(always, replayed), "graphs": told, "ms_not_replayed": 1e3 * timed(several)}
    decisions = step.plan.decisions
    model.zero_grad(set_to_none=True)  # a gradient that is held counts as memory outside of the next step
    found["plan"] = (
        f"{decisions.recomputed} recomputed, {decisions.offloaded} offloaded, {decisions.tiles} tiles, "
        f"{1e3 * step.plan.predicted.seconds:.1f} ms predicted, {1e3 * seconds:.1f} measured"
    )
    return found


def timed(several: Callable[[int], None]) -> float:
    """Seconds of a step, between two synchronisations."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    several(COUNTED)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / COUNTED


def deterministic(step: Callable[..., Any], model: Any, batch: Any) -> None:
    """Have PyTorch use deterministic algorithms; if the step has an operator without one, where there are any."""
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # it would add kernels
    torch.use_deterministic_algorithms(True)
    try:
        step(model, *batch).backward()
    except RuntimeError:
        torch.use_deterministic_algorithms(True, warn_only=True)
    model.zero_grad(set_to_none=True)


def rows(name: str, chosen: Any) -> Any:
    """Of one step in this process."""
    torch.manual_seed(0)
    model, batch, loss_of = CASES[name]("cuda", False)
    model.cpu()
    cleared()
    model.cuda()
    deterministic(loss_of, model, batch)
    for budget in chosen.budgets.split(","):
        found: dict[str, dict[str, Any]] = {}
        for graphs in ("off", "auto"):
            torch._dynamo.reset()
            cleared()
            try:
                step = lowtide.fit(
                    loss_of, model, *batch, budget=budget, kernels=chosen.kernels, graphs=graphs,
                    time_limit=chosen.time_limit, verify=False,
                )  # fmt: skip
            except lowtide.LowtideError as error:
                yield {"step": name, "budget": budget, "error": str(error).splitlines()[0]}
                break
            found[graphs] = measured(step, model, batch, compares=graphs == "auto")
            del step
        else:
            yield {"step": name, "budget": budget, **found}


def row(allocator: str, one: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [one["step"], one["budget"], allocator]
    if "error" in one:
        return "| " + " | ".join([*cells, one["error"], *[""] * 10]) + " |"
    off, auto = one["off"], one["auto"]
    cells.append(f"{off['allocated'] / 2**20:,.0f}")
    for found in (off, auto):
        cells += [f"{found['reserved'] / 2**20:,.0f}", f"{found['reserved'] / off['allocated']:.3f}"]
    cells.append(f"{auto['reserved'] / auto['allocated']:.3f}")
    cells += [f"{auto['ms'] / ms:.3f}" for ms in (off["ms"], auto["ms_not_replayed"])]
    cells += [auto["bits"], auto["graphs"]]
    cells.append(f"{off['plan']}; {auto['plan']}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budgets", default="100%,50%,25%")
    parser.add_argument("--kernels", default="eager")
    parser.add_argument("--time-limit", type=float, default=5.0)
    parser.add_argument("--allocators", default=",".join(ALLOCATORS))
    parser.add_argument("--here", action="store_true", help="in this process, by the allocator that it has")
    parser.add_argument("--out", type=Path)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    chosen = parser.parse_args()
    steps = chosen.steps or STEPS
    if chosen.here:
        for name in steps:
            for one in rows(name, chosen):
                print("row " + json.dumps(one), flush=True)
        return
    lines = [
        "| step | budget | allocator | allocated MiB | reserved | ratio | with graphs: reserved | ratio | own "
        "| time of that without | of itself, not replayed | bits | graphs | plan without; with |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    told = ", ".join(f"{key} {value}" for key, value in machine("cuda").items())
    command = " ".join(["python benchmarks/reserved.py", *sys.argv[1:]])
    text = f"# Reserved bytes\n\n`{command}`, {date.today()}; {told}\n\n"
    options = [
        "--budgets",
        chosen.budgets,
        "--kernels",
        chosen.kernels,
        "--time-limit",
        str(chosen.time_limit),
    ]
    for name in steps:
        for allocator in chosen.allocators.split(","):
            call = [sys.executable, "-W", "ignore", __file__, "--here", *options, name]
            environment = {
                **os.environ,
                "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator],
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            }
            count = 0
            with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment) as child:
                assert child.stdout is not None
                for one in child.stdout:
                    if one.startswith("row "):
                        count += 1
                        lines.append(row(allocator, json.loads(one[4:])))
                        keep(chosen.out, text, lines)
            if not count:
                failed = {"step": name, "budget": "", "error": f"ended with {child.returncode}"}
                lines.append(row(allocator, failed))
                keep(chosen.out, text, lines)


def keep(out: Path | None, text: str, lines: list[str]) -> None:
    """Print the latest line, and write what is known so far."""
    print(lines[-1], flush=True)
    if out is not None:
        write_atomically(out, (text + "\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    main()
