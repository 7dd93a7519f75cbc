"""Pictures of a step that is split over devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cost import Step
from lowtide.formats.registry import write_file
from lowtide.graph.shards import Shards

if TYPE_CHECKING:
    from lowtide.trace.step.joint import Joint

__all__ = ["check_drawing", "draw_shards", "drawn_names"]

_FORMATS = {".svg": "svg", ".dot": "dot", ".gv": "dot", ".json": "native"}


def check_drawing(draw: str | None, device: int | None, devices: int) -> None:
    """Refuse a picture that cannot be drawn, before any work is done."""
    if device is not None and draw is None:
        raise click.UsageError("--device says whose picture is drawn; give --draw FILE too")
    if device is not None and device >= devices:
        raise click.UsageError(f"--device {device}: devices are counted from 0 to {devices - 1}")
    if draw is not None and Path(draw).suffix not in _FORMATS:
        raise click.UsageError(f"--draw writes one of {', '.join(_FORMATS)}, by the end of the file's name")


def drawn_names(target: str) -> Mapping[str, str]:
    """What a network of the zoo calls the nodes of its picture."""
    from lowtide.zoo.target import NetworkTarget, parse

    found = parse(target)
    return found.network.drawn if isinstance(found, NetworkTarget) else {}


def draw_shards(joint: Joint, shards: Shards, device: int | None, target: str, draw: str) -> None:
    """Write the picture of a device, or of all."""
    from lowtide.trace.shards.picture import picture, pictures

    names = drawn_names(target)
    alone = 0 if shards.mesh.devices == 1 else device
    if alone is not None:
        graph = picture(joint, shards, alone, names)
    else:
        graph = pictures(joint, shards, range(shards.mesh.devices), names)
    kind = _FORMATS[Path(draw).suffix]
    boxes = None if kind == "native" else "all"
    write_file(Step(graph, format="dataflow"), kind, draw, boxes=boxes)  # type: ignore[arg-type]
