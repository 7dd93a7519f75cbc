"""How a step is split over devices, in words and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.execute.shards.tried import ShardChoice, SplitTried
    from lowtide.trace.step.joint import Joint

__all__ = ["split_text", "split_view"]

_NO_BOUND = ("no bound was found in time", "planned axis by axis; no bound is known for all")


def split_view(joint: Joint, choice: ShardChoice) -> dict[str, Any]:
    """What is cut where, what it is predicted to take, and what others would."""
    graph, best, shards = joint.graph, choice.best, choice.best.shards
    forward = [k for k, op in enumerate(graph.ops) if op.phase.value == "forward"]
    view: dict[str, Any] = {
        "devices": shards.mesh.devices,
        "operators": len(forward),
        "split_operators": len(shards.operators),
        "predicted_seconds": best.seconds,
        "bound_seconds": choice.bound or None,
        "gap": choice.gap if choice.bound else None,
        "predicted_peak_bytes": best.peak_bytes,
        "predicted_plain_peak_bytes": best.plain_bytes,
        "predicted_wire_bytes": best.wire_bytes,
        "predicted_messages": best.messages,
        "parameters": {
            graph.tensors[t].label: _along(cut)
            for t, cut in shards.leaves.items()
            if any(dim is not None for dim in cut)
        },
        "results": [
            {
                "operator": graph.ops[k].label,
                "kind": graph.ops[k].kind,
                "cut": _along(share.cut),
                "summed_over": _along(share.over),
            }
            for k, share in sorted(shards.operators.items())
        ],
    }
    if len(shards.mesh.sizes) > 1:
        view["mesh"] = list(shards.mesh.sizes)
    if choice.others:
        view["compared"] = [_row(one) for one in choice.others]
    return view


def _along(some: Sequence[int | None]) -> int | list[int | None] | None:
    """What is cut along the only axis of a mesh, or along each of several."""
    return some[0] if len(some) == 1 else list(some)


def _told(what: str, found: int | list[int | None] | None) -> list[str]:
    """The same in words; nothing where nothing is cut."""
    if not isinstance(found, list):
        return [] if found is None else [f"{what} {found}"]
    return [f"{what} {one} along axis {axis}" for axis, one in enumerate(found) if one is not None]


def _row(one: SplitTried) -> dict[str, Any]:
    return {
        "split": one.name,
        "fits": one.fits,
        "predicted_seconds": one.seconds,
        "predicted_peak_bytes": one.peak_bytes,
        "predicted_plain_peak_bytes": one.plain_bytes,
        "predicted_wire_bytes": one.wire_bytes,
    }


def split_text(view: dict[str, Any]) -> str:
    """The same for people."""
    mesh = f", mesh {'x'.join(map(str, view['mesh']))}" if "mesh" in view else ""
    split = f"{view['split_operators']} of {view['operators']} operators of forward are split"
    lines = [f"{view['devices']} devices{mesh}: {split}"]
    for one in view["results"]:
        how = [*_told("dimension", one["cut"]), *_told("a part of sum", one["summed_over"])]
        lines.append(f"  {one['operator']:<32.32} {one['kind']:<36.36} {', '.join(how)}")
    for name, dim in view["parameters"].items():
        lines.append(f"  {name:<32.32} {'input or parameter':<36} {', '.join(_told('dimension', dim))}")
    bound = view["bound_seconds"]
    none = (
        f"none takes less than {format_seconds(bound)} by these costs" if bound else _NO_BOUND["mesh" in view]
    )
    lines.append(_line("estimated", view, none))
    compared = view.get("compared", ())
    lines += [_line(one["split"], one, "" if one["fits"] else "does not fit") for one in compared]
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any], more: str) -> str:
    peak, plain = row["predicted_peak_bytes"], row["predicted_plain_peak_bytes"]
    again = f" (storing everything {format_bytes(plain)})" if plain != peak else ""
    sent = format_bytes(row["predicted_wire_bytes"])
    said = f"{format_seconds(row['predicted_seconds'])}, {format_bytes(peak)} a device{again}, {sent} sent"
    return f"{name:<18} {said}{'; ' + more if more else ''}"
