"""One step of VGG-16's body on one very large image, in tiles, inside a budget; its gradients checked on a smaller one.

    python benchmarks/large_image.py [--device cuda] [--size 20480] [--budget 40GB] [--check 1024] [--stream [float32]]

Prints a report and stores it under benchmarks/results/ as large-image-DEVICE.json and .md. Where lightstream can be
imported, it takes part in the check; with --stream it also runs the large image.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lowtide import fit, zoo
from lowtide.cost.watch import watch_cpu
from lowtide.errors import InfeasibleError
from lowtide.execute.planning import plan_step, step_costs
from lowtide.execute.tiling import capture_tiles as cutting
from lowtide.execute.tiling import plan_tiles as tiling
from lowtide.execute.tiling import search as attempts
from lowtide.execute.tiling.geometry import geometry
from lowtide.files import write_atomically
from lowtide.trace.step.capture import capture
from lowtide.trace.tiles.tiling import Tiling
from plain import machine
from streamed import Streamed, available

RESULTS = Path(__file__).parent / "results"
SHRINK = 32
"""Pixels a side of one place of the last map."""
SHARES = ("25%", "18%", "35%", "12%", "50%")
"""Budgets of the check, until one is met in tiles."""
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Gives the loss and adds to the gradients."""


def model_of(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    return zoo.build(f"vgg16body:width={options.width},size=32", device=options.device).model.to(dtype)


def batch_of(size: int, options: argparse.Namespace, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """One image and its labels, made where they are used."""
    generator = torch.Generator(options.device).manual_seed(options.seed)
    place = {"device": options.device, "generator": generator}
    image = torch.randn(1, 3, size, size, **place)
    labels = torch.randint(10, (1, size // SHRINK, size // SHRINK), **place)
    return image.to(dtype), labels


class Clock:
    """Seconds spent in parts of the planning, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return call

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        places = [
            (cutting, "looped", "tiles captured"),
            (step_costs, "measure", "measured"),
            (attempts, "plan_loop", "searched"),
            (plan_step.StepPlanner, "plan", "whole step planned"),
        ]
        with contextlib.ExitStack() as stack:
            for module, name, told in places:
                stack.enter_context(patch.object(module, name, self.timed(told, getattr(module, name))))
            yield


def said(text: str) -> None:
    """How far it is."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def settled(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed(
    step: Step, batch: Sequence[torch.Tensor], parameters: Sequence[Any], options: Any
) -> dict[str, Any]:
    """Peak and seconds of a step, after one that warms up; gradients are left with the parameters."""
    device = options.device
    seconds = []
    for _ in range(options.steps + 1):
        fresh(parameters, device)
        began = time.perf_counter()
        loss = step(*batch)
        settled(device)
        seconds.append(time.perf_counter() - began)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:  # watching takes time there: in a step of its own
        fresh(parameters, device)
        _, seen = watch_cpu(lambda _: step(*batch))
        peak = seen.peak_bytes + sum(t.numel() * t.element_size() for t in (*batch, *parameters))
    return {
        "loss": float(loss),
        "first_seconds": seconds[0],
        "seconds": sum(seconds[1:]) / max(1, len(seconds) - 1),
        "peak_bytes": peak,
    }


def fresh(parameters: Sequence[Any], device: str) -> None:
    """As before a step: no gradients, nothing left to collect, the peak forgotten."""
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    settled(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def gradients(parameters: Sequence[Any]) -> list[torch.Tensor]:
    return [parameter.grad.detach().cpu() for parameter in parameters]


def difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest over all gradients of the largest difference over the largest element."""
    pairs = [(a.double(), b.double()) for a, b in zip(got, want, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) for a, b in pairs)


def stepping(function: Any, model: Any) -> Step:
    def step(image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = function(model, image, labels)
        loss.backward()
        return loss.detach()

    return step


def cut_of(plan: Any, model: Any, batch: Sequence[torch.Tensor]) -> dict[str, Any]:
    """How a plan cuts the step."""
    loop = tiling.loop_of(plan.program)
    if loop is None:
        return {"tiles": 1}
    whole = Tiling(capture(loss_of(), model, *batch).joint, loop.cut)
    boxes = [tile.over for tile in loop.tiles]
    found = geometry(whole, boxes)
    return {
        "tiles": len(boxes),
        "grid": [len({box.lo[axis] for box in boxes}) for axis in range(len(whole.axes))],
        "bodies": len(plan.program.bodies),
        "channels_last": loop.channels_last,
        "overlap": found.overlap,
        "pixels_read": found.read,
        "largest_tensor_elements": found.elements,
        "widest_tile_pixels": max(
            whole.needed(box)[0][t].shape[-1]
            for box in boxes
            for t in whole.needed(box)[0]
            if whole.graph.tensors[t].shape == tuple(batch[0].shape)
        ),
    }


def loss_of() -> Any:
    return zoo.network("vgg16body").loss


def large(options: argparse.Namespace) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The large image in tiles: what planning took, then a step."""
    torch._dynamo.reset()
    model, batch = model_of(options, torch.float32), batch_of(options.size, options, torch.float32)
    row: dict[str, Any] = {"size": options.size, "budget": options.budget, "only": options.only}
    clock = Clock()
    settled(options.device)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with clock.watching():
        fitted = fit(
            loss_of(),
            model,
            *batch,
            budget=options.budget,
            only=options.only,
            cost=options.cost,
            time_limit=options.time_limit,
            cache=False,
        )
    said(f"planned: {fitted.plan.method}")
    row["planning"] = {"seconds": time.perf_counter() - began, "parts": clock.seconds}
    if options.device == "cuda":
        row["planning"]["peak_bytes"] = torch.cuda.max_memory_allocated()
    plan = fitted.plan
    row |= {
        "budget_bytes": plan.budget_bytes,
        "whole_step_bytes": plan.plain.peak_bytes,
        "method": plan.method,
        "decisions": {name: getattr(plan.decisions, name) for name in plan.decisions.__struct_fields__},
        "predicted": {"peak_bytes": plan.predicted.peak_bytes, "seconds": plan.predicted.seconds},
        **cut_of(plan, model, batch),
    }
    row["measured"] = timed(stepping(fitted, model), batch, list(model.parameters()), options)
    row["inside"] = row["measured"]["peak_bytes"] <= plan.budget_bytes
    return row, gradients(list(model.parameters()))


def large_streamed(options: argparse.Namespace, ours: list[torch.Tensor], single: bool) -> dict[str, Any]:
    """The large image by lightstream, and how far its gradients are from ours."""
    torch._dynamo.reset()  # nothing of the step before is kept
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    model, batch = model_of(options, torch.float32), batch_of(options.size, options, torch.float32)
    row = {
        "way": "lightstream, float32" if single else "lightstream as it comes",
        "tile": options.stream_tile,
    }
    began = time.perf_counter()
    streamed = Streamed(model, options.stream_tile, single=single)
    row["setup_seconds"] = time.perf_counter() - began
    row["measured"] = timed(streamed, batch, streamed.parameters(), options)
    row |= _counted(streamed, options.size)
    row["largest_difference_to_ours"] = difference(gradients(streamed.parameters()), ours)
    return row


def _counted(streamed: Streamed, size: int) -> dict[str, Any]:
    share = (streamed.tile / size) ** 2
    return {
        "tiles_forward": streamed.forwards,
        "tiles_backward": streamed.backwards,
        "pixels_forward": streamed.forwards * share,
        "pixels_backward": streamed.backwards * share,
    }


def check(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Gradients of ways to compute a smaller image against those of the untiled step in float64."""
    exact: list[torch.Tensor] = []
    loss = 0.0
    mine: dict[torch.dtype, list[torch.Tensor]] = {}
    rows = []
    for dtype in (torch.float64, torch.float32):
        model, batch = model_of(options, dtype), batch_of(options.check, options, dtype)
        parameters = list(model.parameters())
        kind = str(dtype).removeprefix("torch.")
        row: dict[str, Any] = {"way": "eager, untiled", "dtype": kind}
        row["measured"] = timed(stepping(loss_of(), model), batch, parameters, options)
        eager = gradients(parameters)
        said(f"check, {kind}: eager ran")
        if not exact:
            exact, loss = eager, row["measured"]["loss"]
        rows.append(row | {"largest_difference": difference(eager, exact)})
        rows.append(_check_ours(model, batch, kind, options))
        mine[dtype] = gradients(parameters)
        rows[-1] |= _differences(mine[dtype], exact, eager)
        if not available():
            continue
        ways = (True, False) if options.device == "cuda" and dtype is torch.float32 else (True,)
        for single in ways:
            streamed = Streamed(model, options.check_tile, single=single)
            way = "lightstream" if single else "lightstream as it comes"
            row = {"way": way, "dtype": kind, "tile": options.check_tile}
            row["measured"] = timed(streamed, batch, streamed.parameters(), options)
            got = gradients(streamed.parameters())
            said(f"check, {kind}: {way} ran")
            row |= _counted(streamed, options.check) | _differences(got, exact, eager)
            rows.append(row | {"largest_difference_to_ours": difference(got, mine[dtype])})
    return [row | {"loss_difference": abs(row["measured"]["loss"] / loss - 1)} for row in rows]


def _differences(
    got: list[torch.Tensor], exact: list[torch.Tensor], eager: list[torch.Tensor]
) -> dict[str, float]:
    return {"largest_difference": difference(got, exact), "to_eager_of_this_type": difference(got, eager)}


def _check_ours(model: Any, batch: Any, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """The smaller image with the largest share of its memory that is met in tiles."""
    for share in SHARES:
        torch._dynamo.reset()
        try:
            fitted = fit(
                loss_of(), model, *batch, budget=share, only="recompute,tile", cost="estimated",
                time_limit=2.0, cache=False,
            )  # fmt: skip
        except InfeasibleError:
            said(f"check, {kind}: no plan in {share}")
            continue
        said(f"check, {kind}: {fitted.plan.decisions.tiles} tiles in {share}")
        if fitted.plan.decisions.tiles > 1:
            row = {"way": "lowtide", "dtype": kind, "budget": share, **cut_of(fitted.plan, model, batch)}
            row["measured"] = timed(stepping(fitted, model), batch, list(model.parameters()), options)
            return row
    raise SystemExit(f"no budget cuts the image of {options.check} pixels into tiles; give a larger --check")


def told(report: dict[str, Any]) -> str:
    """The report in words."""
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    lines = [f"# One very large image\n\n`{report['command']}`, {report['date']}; {about}\n"]
    lines.append(f"TF32 in convolutions: {'on' if report['tf32'] else 'off'}; in the check it is off.\n")
    if "large" in report:
        lines += _large_told(report["large"])
    for row in report.get("streamed", ()):
        got = row["measured"]
        lines.append(
            f"- {row['way']}, tiles of {row['tile']} pixels: {got['seconds']:.2f} s a step, {_mib(got['peak_bytes'])};"
            f" {row['tiles_forward']} tiles forward and {row['tiles_backward']} forward and backward, which read"
            f" {row['pixels_forward']:.3f} and {row['pixels_backward']:.3f} times the pixels; gradients differ from"
            f" ours by {row['largest_difference_to_ours']:.1e}; set up in {row['setup_seconds']:.1f} s"
        )
    if "check" in report:
        lines.append(f"\n## Gradients of an image of {report['check_size']} pixels a side\n")
        lines.append(
            "Of the loss, the difference to eager in float64 over the loss; of gradients, the largest difference over the"
            " largest element, over all parameters.\n"
        )
        lines.append(
            "| way | type | tiles | pixels read | loss | to eager, float64 | to eager, same type | to ours | s | MiB |"
        )
        lines.append("| --- | --- " + "| ---: " * 8 + "|")
        lines += [_row(row) for row in report["check"]]
    if not report["lightstream"]:
        lines.append("\nlightstream could not be imported: left out.")
    return "\n".join(lines) + "\n"


def _large_told(row: dict[str, Any]) -> list[str]:
    got, planned_for = row["measured"], row["planning"]
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in planned_for["parts"].items())
    grid = " x ".join(map(str, row.get("grid", ())))
    lines = [
        f"- image of {row['size']} x {row['size']} pixels, budget {row['budget']}, {row['only']}: the whole step would"
        f" take {_mib(row['whole_step_bytes'])}",
        f"- **{got['seconds']:.2f} s a step** (the first {got['first_seconds']:.2f} s), predicted"
        f" {row['predicted']['seconds']:.2f} s",
        f"- **{_mib(got['peak_bytes'])}** at the peak, predicted {_mib(row['predicted']['peak_bytes'])},"
        f" {'inside' if row['inside'] else 'NOT inside'} the budget",
        f"- {row['tiles']} tiles ({grid}), {row.get('bodies', 1)} bodies{', channels last' if row.get('channels_last') else ''}; {row['method']}; {row['decisions']}",
        f"- overlap {row.get('overlap', 1):.4f} (elements computed over those of the whole); tiles read"
        f" {row.get('pixels_read', 1):.4f} times the image",
        f"- planned in {planned_for['seconds']:.1f} s with one step to try: {parts}",
    ]
    if "peak_bytes" in planned_for:
        lines.append(f"- {_mib(planned_for['peak_bytes'])} at the peak while planning and measuring")
    return lines


def _row(row: dict[str, Any]) -> str:
    tiles = row.get("tiles") or "+".join(str(row[k]) for k in ("tiles_forward", "tiles_backward") if k in row)
    read = [row[k] for k in ("pixels_read", "pixels_forward", "pixels_backward") if k in row]
    cells = [
        row["way"],
        row["dtype"],
        str(tiles),
        "+".join(f"{share:.2f}" for share in read),
        f"{row['loss_difference']:.1e}",
        f"{row['largest_difference']:.1e}",
        f"{row['to_eager_of_this_type']:.1e}" if "to_eager_of_this_type" in row else "",
        f"{row['largest_difference_to_ours']:.1e}" if "largest_difference_to_ours" in row else "",
        f"{row['measured']['seconds']:.3f}",
        f"{row['measured']['peak_bytes'] / 2**20:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=20480, help="pixels a side; 0 leaves the large image out")
    parser.add_argument("--budget", default="40GB")
    parser.add_argument("--only", default="recompute,offload,tile")
    parser.add_argument("--cost", default="measured")
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--steps", type=int, default=2, help="timed after the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=1024, help="pixels of the check; 0 leaves it out")
    parser.add_argument("--check-tile", type=int, default=608, help="pixels of lightstream's tiles there")
    parser.add_argument(
        "--stream", nargs="?", const="both", choices=["float32", "bfloat16", "both"],
        help="the large image by lightstream too; its backward pass on CUDA is in bfloat16 as it comes",
    )  # fmt: skip
    parser.add_argument("--stream-tile", type=int, default=0, help="pixels of its tiles; else those of ours")
    parser.add_argument("--name", default="large-image")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": " ".join(["python benchmarks/large_image.py", *sys.argv[1:]]),
        "machine": machine(options.device),
        "tf32": options.device == "cuda" and torch.backends.cudnn.allow_tf32,
        "lightstream": available(),
    }
    if options.size:
        report["large"], ours = large(options)
        _store(report, options)
        if options.stream and available():
            widest = report["large"].get("widest_tile_pixels", options.size)
            options.stream_tile = options.stream_tile or -(-widest // SHRINK) * SHRINK
            ways = {"float32": [True], "bfloat16": [False], "both": [True, False]}[options.stream]
            report["streamed"] = []
            for single in ways if options.device == "cuda" else [True]:
                report["streamed"].append(large_streamed(options, ours, single))
                _store(report, options)
    if options.check:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False):
            report["check_size"], report["check"] = options.check, check(options)
    print(_store(report, options))


def _store(report: dict[str, Any], options: argparse.Namespace) -> str:
    """Written after every part, so that what fails later does not lose it."""
    text = told(report)
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"{options.name}-{options.device}"
    write_atomically(options.output / f"{name}.json", json.dumps(report, indent=2).encode() + b"\n")
    write_atomically(options.output / f"{name}.md", text.encode())
    return text


if __name__ == "__main__":
    main()
