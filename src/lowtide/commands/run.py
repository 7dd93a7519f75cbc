"""``lowtide run``."""

from __future__ import annotations

from typing import Any

import click

from lowtide.commands.common import Choice, json_option, needs_torch, print_json
from lowtide.units import format_bytes, format_seconds

__all__ = ["run"]


@click.command()
@click.argument("target")
@click.option(
    "--program", type=Choice(["plain", "recompute-all"]), default="plain", help="What runs the step [plain]."
)
@click.option("--device", default="cpu", metavar="DEVICE", help="cpu or cuda [cpu].")
@click.option("--seed", type=int, default=0, help="Of the parameters, the batch and the step [0].")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="Timed steps each way [5].")
@json_option
def run(target: str, program: str, device: str, seed: int, repeats: int, as_json: bool) -> None:
    """Run a step in eager PyTorch and as a program, and compare.

    TARGET is a network of the zoo, `unet:base=16,batch=2,size=284`, or `path/to/file.py:function`.
    """
    with needs_torch("running a step"):
        from lowtide import zoo
        from lowtide.execute.backend import PROGRAMS
        from lowtide.execute.compare import compare

    built = zoo.build(target, device=device, seed=seed)
    found = compare(
        built.model,
        built.batch,
        built.loss,
        PROGRAMS[program],
        trains=built.trains,
        seed=seed,
        repeats=repeats,
        progress=lambda text: None if as_json else click.echo(f"{text} …", err=True),
    )
    view: dict[str, Any] = {"target": built.name, "program": program, "device": device, **found.as_json()}
    if as_json:
        print_json(view)
        return
    click.echo(
        f"{built.name} on {device}, program {program}: {found.runs} runs of {found.operators} operators"
    )
    eager, ours = found.eager, found.measured
    click.echo(f"  eager     {format_bytes(eager.peak_bytes):>12}  {format_seconds(eager.seconds):>12}")
    click.echo(f"  program   {format_bytes(ours.peak_bytes):>12}  {format_seconds(ours.seconds):>12}")
    click.echo(f"  predicted {format_bytes(found.predicted_peak_bytes):>12}")
    verdict = "bitwise equal" if found.bitwise else f"differ by up to {found.max_rel_grad_diff:.1e}"
    click.echo(f"  loss, gradients and buffers: {verdict}")
