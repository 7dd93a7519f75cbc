"""What a step is predicted to take on many devices, planned axis by axis; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.cost.device import Device
    from lowtide.cost.wire import WireSpeed
    from lowtide.trace.step.joint import Joint

__all__ = ["LINK", "MESH", "simulated_text", "simulated_view"]

_FORM = re.compile(
    r"\s*(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?B)/s\s*,\s*(?P<delay>\d+(?:\.\d+)?)\s*us\s*"
)
_UNITS = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


class _Link(click.ParamType[tuple[float, float]]):
    """Bytes a second and seconds a message, as ``10GB/s,20us``."""

    name = "link"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Both numbers."""
        if isinstance(value, tuple):
            return value
        found = _FORM.fullmatch(str(value))
        if found is None or not float(found["rate"]):
            self.fail(
                f"{value!r} says no speed; write bytes a second and a delay, as 10GB/s,20us", param, ctx
            )
        return float(found["rate"]) * _UNITS[found["unit"]], float(found["delay"]) * 1e-6


class _Mesh(click.ParamType[tuple[int, ...]]):
    """Devices along each axis, as ``2x4``."""

    name = "mesh"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The numbers."""
        if isinstance(value, tuple):
            return value
        if re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", str(value)) is None:
            self.fail(f"{value!r} is no mesh; write devices along each axis, as 2x4", param, ctx)
        return tuple(map(int, str(value).split("x")))


LINK, MESH = _Link(), _Mesh()


def simulated_view(
    joint: Joint,
    sizes: Sequence[int],
    cut: str,
    device: Device,
    links: Sequence[WireSpeed],
    time_limit: float,
) -> dict[str, Any]:
    """The split over a mesh, or over as many devices, and what one of them is predicted to take."""
    from lowtide.cost.estimate import estimate
    from lowtide.execute.shards.axes import axes_of, split_axes
    from lowtide.graph.shards import Mesh
    from lowtide.trace.shards.kinds import CUT_KINDS

    costs = enumerate(estimate(joint.graph, device))
    seconds = {k: one.seconds.value for k, one in costs if one.seconds}
    mesh = Mesh(axes_of(sizes[0]) if len(sizes) == 1 else tuple(sizes))
    devices = mesh.devices
    found = split_axes(joint, mesh, seconds, links, CUT_KINDS[cut], time_limit)
    forward = sum(op.phase.value == "forward" for op in joint.graph.ops)
    return {
        "devices": devices,
        "mesh": list(mesh.sizes),
        "operators": forward,
        "split_operators": len(found.shards.operators),
        "predicted_seconds": found.seconds,
        "predicted_compute_seconds": found.compute_seconds,
        "predicted_wire_seconds": found.wire_seconds,
        "predicted_wire_bytes_per_device": found.wire_bytes,
        "predicted_wire_bytes": found.wire_bytes * devices,
        "predicted_held_bytes_per_device": found.held_bytes,
        "planning_seconds": found.planning_seconds,
    }


def simulated_text(view: dict[str, Any]) -> str:
    """The same for people."""
    mesh = "x".join(map(str, view["mesh"]))
    split = f"{view['split_operators']} of {view['operators']} operators of forward are split"
    moved = format_bytes(view["predicted_wire_bytes_per_device"])
    both = [format_seconds(view[f"predicted_{key}_seconds"]) for key in ("compute", "wire")]
    whole = format_seconds(view["predicted_seconds"])
    return "\n".join(
        [
            f"{view['devices']} devices, mesh {mesh}: {split}",
            f"estimated  {whole} a step: {both[0]} computing, {both[1]} moving",
            f"a device   moves {moved}, and holds {format_bytes(view['predicted_held_bytes_per_device'])}",
            f"planned in {format_seconds(view['planning_seconds'])}, axis by axis; no bound is known for all",
        ]
    )
