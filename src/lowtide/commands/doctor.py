"""``lowtide doctor``."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from lowtide import __version__
from lowtide.commands.common import Choice, json_option, print_json, say
from lowtide.cost.device import Device, cache_folder, load_device, store_device
from lowtide.errors import FileError, ToolError
from lowtide.needs import INSTALL_TORCH, needs_torch
from lowtide.plan.recompute.annealing import kernel
from lowtide.printable import printable
from lowtide.units import format_bytes, format_rate, format_seconds

__all__ = ["doctor"]

_NO_PLANNER = (
    "the planner's compiled kernel, without which plans take much longer: install a C compiler, and then "
    "lowtide again"
)


@click.command()
@click.option("--device", type=Choice(["cpu", "cuda"]), help="Default: cuda where there is one.")
@click.option("--measure", is_flag=True, help="Measure the device again, though it was measured before.")
@json_option
def doctor(device: str | None, measure: bool, as_json: bool) -> None:
    """Say what this machine can do, and measure its device once.

    The rates of matrix products, memory and host link are kept in the cache folder; estimates use them.
    """
    view: dict[str, Any] = {
        "lowtide": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "torch": None,
        "kernels": {},
        "planner": "compiled" if kernel.COMPILED else "in Python",
        "graphviz": _graphviz(),
        "cache": {"folder": str(cache_folder()), "writable": _writable(cache_folder())},
        "device": None,
        "missing": [],
    }
    if not kernel.COMPILED:
        view["missing"].append(_NO_PLANNER)
    if view["graphviz"] is None:
        view["missing"].append('Graphviz, to draw graphs: pip install "lowtide[svg]"')
    try:
        with needs_torch("measuring"):
            from lowtide.cost.probe import best_device, torch_facts
        view["torch"] = torch_facts()
    except ToolError as error:
        if device is not None or measure:
            raise
        view["missing"].append(f"PyTorch, to capture and measure steps: {INSTALL_TORCH} ({error.__cause__})")
    else:
        from lowtide.execute.kernels.compiler import MISSING, kernel_compiler

        view["kernels"] = {
            kind: kernel_compiler(kind) for kind in ("cpu", *(("cuda",) if view["torch"]["gpus"] else ()))
        }
        view["missing"] += [MISSING[kind] for kind, found in view["kernels"].items() if found is None]
        found, problem = _device(device or best_device(), measure)
        view["device"] = msgspec.to_builtins(found)
        view["missing"] += [problem] if problem else []
    if as_json:
        print_json(view)
    else:
        for line in _lines(view):
            say(printable(line))


def _device(kind: str, again: bool) -> tuple[Device, str]:
    """The device, measured now or before, and why it could not be kept."""
    from lowtide.cost.probe import environment, measure_device

    folder = cache_folder()
    known = None if again else load_device(folder, environment(kind))
    if known is not None:
        return known, ""
    device = measure_device(kind)
    try:
        store_device(folder, device)
    except FileError as error:
        return device, f"a place to keep measurements: {error}"
    return device, ""


def _graphviz() -> str | None:
    """How graphs are drawn here."""
    program = shutil.which("dot")
    if program is not None:
        return program
    return "pygraphviz" if importlib.util.find_spec("pygraphviz") is not None else None


def _writable(folder: Path) -> bool:
    """Whether the folder, or the first above it that exists, can be written to."""
    with contextlib.suppress(OSError):  # no folder can have such a name
        existing = next((one for one in (folder, *folder.absolute().parents) if one.exists()), folder)
        return existing.is_dir() and os.access(existing, os.W_OK)
    return False


def _lines(view: dict[str, Any]) -> Iterator[str]:
    yield f"lowtide {view['lowtide']}, Python {view['python']} on {view['system']}"
    torch = view["torch"]
    if torch is None:
        yield "  torch       missing"
    else:
        yield f"  torch       {torch['version']}, {torch['threads']} threads"
        yield f"  CUDA        {torch['cuda'] or 'not in this build of torch'}"
        for gpu in torch["gpus"] or ():
            yield f"  GPU         {gpu['name']}, {format_bytes(gpu['memory_bytes'])}"
        if not torch["gpus"]:
            yield "  GPU         none that torch can use"
    for kind, compiler in view["kernels"].items():
        yield f"  kernels     {kind}: {compiler or 'no compiler'}"
    yield f"  planner     {view['planner']}"
    yield f"  Graphviz    {view['graphviz'] or 'missing'}"
    unusable = "" if view["cache"]["writable"] else " (cannot be written)"
    yield f"  cache       {view['cache']['folder']}{unusable}"
    if view["device"] is not None:
        yield from _device_lines(view["device"])
    for one in view["missing"]:
        yield f"missing: {one}"


def _device_lines(device: dict[str, Any]) -> Iterator[str]:
    name, kind = device["environment"]["name"], device["environment"]["kind"]
    yield f"  device      {name} ({kind}), {format_bytes(device['memory_bytes'])}"
    rates = device["matrix_flop_per_second"].items()
    yield "  matrices    " + ", ".join(f"{dtype} {format_rate(rate, 'FLOP')}" for dtype, rate in rates)
    yield f"  memory      {format_rate(device['bytes_per_second'], 'B')}"
    up, down = device["to_device_bytes_per_second"], device["from_device_bytes_per_second"]
    if up is not None and down is not None:
        yield f"  host link   {format_rate(up, 'B')} to the device, {format_rate(down, 'B')} back"
        if device["handover_seconds"] is not None:
            took = format_seconds(device["handover_seconds"])
            yield f"              {took} of the computation's time a copy"
    yield f"  launch      {format_seconds(device['launch_seconds'])} an operator"
