"""Tiles of a step for people and for machines: one view, printed as a table with a picture, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from lowtide.cost.overlap import overlap_of, overlap_of_op
from lowtide.graph import Graph, Rect, Role
from lowtide.graph.tiles import Layer, TileNeeds, TilingNeeds, layers, share
from lowtide.printable import printable

__all__ = ["drawn", "table", "tiles_view"]

_NAME = 34
_COLUMNS, _ROWS = 32, 24


def tiles_view(target: str, graph: Graph, tiling: TilingNeeds) -> dict[str, Any]:
    """All that is said about the tiles: sizes, halo and padding by operator, parts by tile, overlap."""
    by_tile = {tile.coord: layers(graph, tiling, tile) for tile in tiling.tiles}
    by_op: dict[int, list[tuple[TileNeeds, Layer]]] = {k: [] for k in tiling.ops}
    for tile in tiling.tiles:
        for layer in by_tile[tile.coord]:
            by_op[layer.op].append((tile, layer))
    overlap = overlap_of(graph, tiling)
    cut, end = graph.tensors[tiling.tensor], _end(graph, tiling)
    leaf = graph.tensors[tiling.tensor if cut.gradient_of is None else cut.gradient_of]
    return {
        "target": target,
        "own": tiling.own,
        "grid": list(tiling.cut.grid),
        "dims": list(tiling.cut.of(cut.shape or ())),
        "tensor": end if tiling.own == "output" else {"name": leaf.label, "shape": list(leaf.shape or ())},
        "end": end,
        "overlap": {"elements": overlap.elements, "flop": overlap.flop},
        "layers": [_row(graph, tiling, k, by_op[k]) for k in tiling.ops],
        "tiles": [_parts(graph, tile) for tile in tiling.tiles],
        "picture": _picture(graph, tiling),
    }


def _end(graph: Graph, tiling: TilingNeeds) -> dict[str, Any]:
    writer = next(op for op in graph.ops if tiling.end in op.outputs)
    return {"name": writer.label, "shape": list(graph.tensors[tiling.end].shape or ())}


def _row(
    graph: Graph, tiling: TilingNeeds, k: int, found: Sequence[tuple[TileNeeds, Layer]]
) -> dict[str, Any]:
    """One operator: the largest figures of all tiles."""
    op = graph.ops[k]
    tensor = found[0][1].tensor
    axes = range(len(tiling.cut.grid))
    grid, along = _axes(tiling, tensor)
    whole = _extents(graph.tensors[tensor].shape or (), along)
    shares = [max(hi - lo for lo, hi in _shares(n, g)) for n, g in zip(whole, grid, strict=True)]
    sizes = [_extents(layer.written.shape, along) for _, layer in found]
    reads = [read for _, layer in found for read in layer.reads]
    return {
        "operator": op.label,
        "id": op.id,
        "kind": op.kind,
        "phase": op.phase.value,
        "source": f"{op.source.file}:{op.source.line}" if op.source else None,
        "output": whole,
        "share": shares,
        "tile": [max(lengths) for lengths in zip(*sizes, strict=True)],
        "smallest_tile": [min(lengths) for lengths in zip(*sizes, strict=True)],
        "halo": [_largest(read.halo[axis] for read in reads) for axis in axes],
        "padding": [_largest(read.padding[axis] for read in reads) for axis in axes],
        "overlap": overlap_of_op(graph, tiling, k),
    }


def _shares(length: int, parts: int) -> Iterable[tuple[int, int]]:
    return (share(length, parts, place) for place in range(parts))


def _axes(tiling: TilingNeeds, tensor: int) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """The grid, and the dimensions of a tensor for each of its axes; one axis where the two are mixed."""
    grid = tiling.cut.grid
    along = tiling.carried.get(tensor, ((),) * len(grid))
    dims = [d for one in along for d in one]
    if len(set(dims)) == len(dims) and all(len(one) == 1 for one in along):
        return grid, along
    return (prod(grid),), (tuple(sorted(set(dims))),)


def _extents(shape: Sequence[int], along: Sequence[Sequence[int]]) -> list[int]:
    return [prod(shape[d] for d in dims) for dims in along]


def _largest(sides: Iterable[tuple[int, int]]) -> list[int]:
    pairs = list(sides)
    return [max((before for before, _ in pairs), default=0), max((after for _, after in pairs), default=0)]


def _parts(graph: Graph, tile: TileNeeds) -> dict[str, Any]:
    parts = {graph.tensors[t].id: _box(rect) for t, rect in sorted(tile.parts.items())}
    return {"coord": list(tile.coord), "own": _box(tile.own), "parts": parts}


def _box(rect: Rect) -> dict[str, list[int]]:
    return {"lo": list(rect.lo), "hi": list(rect.hi)}


def _picture(graph: Graph, tiling: TilingNeeds) -> dict[str, Any] | None:
    """One tile of the middle of rows and columns, tensor by tensor; inputs of the step come first."""
    if len(tiling.cut.grid) != 2:
        return None
    middle = tuple((n - 1) // 2 for n in tiling.cut.grid)
    tile = next(one for one in tiling.tiles if one.coord == middle)
    panels = []
    for t, tensor in enumerate(graph.tensors):
        if tensor.role is Role.INPUT and t in tile.parts and (panel := _panel(graph, tiling, tile, t)):
            panels.append(panel | {"name": tensor.label, "phase": "input"})
    for layer in layers(graph, tiling, tile):
        op = graph.ops[layer.op]
        panel = _panel(graph, tiling, tile, layer.tensor)
        if panel:
            panels.append(panel | {"name": op.label, "phase": op.phase.value})
    return {"tile": list(middle), "panels": panels}


def _panel(graph: Graph, tiling: TilingNeeds, tile: TileNeeds, tensor: int) -> dict[str, Any] | None:
    """Rows and columns of one tensor: all, the tile's disjoint share, and what the tile needs."""
    along = tiling.carried.get(tensor, ((), ()))
    if any(len(dims) != 1 for dims in along):
        return None
    shape, part = graph.tensors[tensor].shape or (), tile.parts[tensor]
    dims = [d for (d,) in along]
    spans = [share(shape[d], n, k) for d, n, k in zip(dims, tiling.cut.grid, tile.coord, strict=True)]
    return {
        "size": [shape[d] for d in dims],
        "cuts": [[lo for lo, _ in _shares(shape[d], n)] for d, n in zip(dims, tiling.cut.grid, strict=True)],
        "share": [list(span) for span in spans],
        "needed": [[part.lo[d], part.hi[d]] for d in dims],
    }


def table(view: dict[str, Any]) -> list[str]:
    """The lines that a person reads."""
    target, cut, last = (printable(n) for n in (view["target"], view["tensor"]["name"], view["end"]["name"]))
    head = f"{target}: {prod(view['grid'])} tiles ({_by(view['grid'])}) of {cut}, "
    head += _by(view["tensor"]["shape"])
    end = f"{last}, {_by(view['end']['shape'])}"
    if view["own"] == "input":
        head += f"; each computes its part of the gradient, from that of {end}"
    columns = ("operator", "kind", "phase", "output", "share", "tile", "halo", "padding", "computed")
    rows = [_cells(row) for row in view["layers"]]
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [head, _line(columns, widths), *(_line(row, widths) for row in rows)]
    more = view["overlap"]
    lines.append(f"overlap: {more['elements']:.3f} times the elements, {more['flop']:.3f} times the FLOP")
    lines.append("tile, halo, padding: the largest of all tiles; halo and padding before+after, by axis")
    return lines


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name, kind = printable(row["operator"]), printable(row["kind"])
    return (
        name if len(name) <= _NAME else f"…{name[1 - _NAME :]}",
        kind.removeprefix("aten.")[:_NAME],
        row["phase"],
        _by(row["output"]),
        _by(row["share"]),
        _by(row["tile"]),
        _sides(row["halo"]),
        _sides(row["padding"]),
        f"{row['overlap']:.2f}x",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    text = [f"{c:<{w}}" if k < 3 else f"{c:>{w}}" for k, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "  " + "  ".join(text).rstrip()


def _by(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def _sides(margin: Sequence[Sequence[int]]) -> str:
    return " ".join(f"{a}+{b}" for a, b in margin) if any(map(any, margin)) else "–"


def drawn(view: dict[str, Any]) -> list[str]:
    """The first tensor of the picture in characters: the tile's share, what it needs beyond, other tiles."""
    picture = view["picture"]
    if picture is None or not picture["panels"]:
        return []
    panel = picture["panels"][0]
    rows, columns = panel["size"]
    scale = max(1, -(-columns // _COLUMNS), -(-rows // _ROWS))
    scaled = f"; a mark is {scale}x{scale} elements" if scale > 1 else ""
    lines = [f"tile {picture['tile']} in {printable(panel['name'])}, {rows}x{columns}{scaled}"]
    for y in range(scale // 2, rows, scale):
        marks = "".join(_mark(panel, y, x) for x in range(scale // 2, columns, scale))
        lines.append(f"  {marks}".rstrip())
    lines.append("  ██ its share   ▒▒ ░░ what it needs of other tiles   ·· and blank: other tiles")
    return lines


def _mark(panel: dict[str, Any], y: int, x: int) -> str:
    """What stands for one element; neighbouring tiles look different."""

    def inside(box: Sequence[Sequence[int]]) -> bool:
        return all(lo <= at < hi for (lo, hi), at in zip(box, (y, x), strict=True))

    if inside(panel["share"]):
        return "██"
    places = [sum(cut <= at for cut in cuts) for cuts, at in zip(panel["cuts"], (y, x), strict=True)]
    odd = sum(places) % 2
    return ("▒▒", "░░")[odd] if inside(panel["needed"]) else ("··", "  ")[odd]
