"""The records of a tile log for a captured step: what the log's authors printed, from our own tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import ConvertError
from lowtide.formats.tilelog.model import TILE_KEY, Box, LoggedTile, OperatorKind, Record, TileInfo
from lowtide.formats.tilelog.records import format_info
from lowtide.formats.tilelog.script import INFO_RULE
from lowtide.graph import Graph, Op, Phase, Rect
from lowtide.graph.tiles import Layer, Read, TileNeeds, TilingNeeds, layers, share

__all__ = ["format_tiles", "tile_records"]

_KINDS: dict[str, OperatorKind] = {
    "aten.convolution": "conv2d",
    "aten.max_pool2d_with_indices": "maxpool2d",
}
_BACKWARD = "_backward"
_END = -99


@dataclass(frozen=True, slots=True)
class _Link:
    """One operator of the chain with its backward; ``key`` is what the records call it."""

    key: int
    kind: OperatorKind
    forward: int
    backward: int
    first: bool
    """Whether it is a convolution that no other convolution feeds."""


def format_tiles(tiles: Sequence[LoggedTile]) -> str:
    """The records of all tiles, each tile as the log prints it."""
    lines = []
    for tile in tiles:
        row, column = tile.coord
        lines += [f"coord [{row}, {column}]", INFO_RULE, format_info(tile.forward), INFO_RULE]
        lines.append(format_info(tile.backward))
    return "\n".join(lines)


def tile_records(graph: Graph, tiling: TilingNeeds) -> tuple[LoggedTile, ...]:
    """``f_info`` and ``b_info`` of every tile of an input; operators are numbered from 1 as they run.

    A ConvertError where the step is no chain of convolutions and pools, which are all that a log knows.
    """
    if tiling.own != "input" or len(tiling.cut.grid) != 2:
        raise ConvertError(
            "a tile log has the tiles of an input in rows and columns; cut the input by a grid"
        )
    chain = _chain(graph, tiling)
    return tuple(_tile(graph, tiling, chain, one) for one in tiling.tiles)


def _chain(graph: Graph, tiling: TilingNeeds) -> list[_Link]:
    """The operators in forward order."""
    backward = {k: graph.ops[k] for k in tiling.ops if graph.ops[k].phase is Phase.BACKWARD}
    chain: list[_Link] = []
    for k in tiling.ops:
        op = graph.ops[k]
        if op.phase is not Phase.FORWARD:
            continue
        kind = _KINDS.get(op.kind)
        pairs = [b for b, other in backward.items() if _is_backward(other, op)]
        if kind is None or len(pairs) != 1 or (chain and not _feeds(graph.ops[chain[-1].forward], op)):
            raise ConvertError(
                f"a tile log knows chains of convolutions and maximum pools, no {op.kind} "
                f"({op.label}); leave out --records"
            )
        first = kind == "conv2d" and not (chain and chain[-1].kind == kind)
        chain.append(_Link(len(chain) + 1, kind, k, pairs[0], first))
    if len(chain) != len(backward):
        raise ConvertError(
            "a tile log knows chains of operators; this step computes more on its way back: leave "
            "out --records"
        )
    return chain


def _is_backward(other: Op, op: Op) -> bool:
    return other.kind == op.kind + _BACKWARD and op.inputs[0] in other.inputs


def _feeds(op: Op, following: Op) -> bool:
    return op.outputs[0] == following.inputs[0]


def _tile(graph: Graph, tiling: TilingNeeds, chain: Sequence[_Link], tile: TileNeeds) -> LoggedTile:
    found = {layer.op: layer for layer in layers(graph, tiling, tile)}
    for link in chain:
        if any(k not in found or not found[k].reads for k in (link.forward, link.backward)):
            label = graph.ops[link.forward].label
            raise ConvertError(
                f"a tile log has what every operator reads; {label!r} reads nothing for a tile; take "
                "a coarser grid"
            )
    row, column = tile.coord
    return LoggedTile(
        (row, column), _forward(graph, tiling, chain, tile, found), _backward(chain, tile, found)
    )


def _forward(
    graph: Graph, tiling: TilingNeeds, chain: Sequence[_Link], tile: TileNeeds, found: dict[int, Layer]
) -> TileInfo:
    """From the last result back to the input."""
    records = [_record(None, "fake", tile, found[chain[-1].forward].written)]
    for depth, link in enumerate(reversed(chain)):
        layer = found[link.forward]
        shape = graph.tensors[layer.tensor].shape or ()
        spans = map(share, shape[-2:], tiling.cut.grid, tile.coord)
        height, width = (hi - lo for lo, hi in spans)
        records.append(
            _record(
                link,
                link.kind,
                tile,
                layer.written,
                layer.reads[0],
                depth=depth,
                share=(width, height),
                next_id=records[-1].key if depth else _END,
            )
        )
    return TileInfo("f_info", tuple(records))


def _backward(chain: Sequence[_Link], tile: TileNeeds, found: dict[int, Layer]) -> TileInfo:
    """From the part of the input forward to the gradient of the last result."""
    records = [_record(None, "fake-bp", tile, tile.own)]
    for depth, link in enumerate(chain):
        read = found[link.backward].reads[0]
        kind = f"bk-{link.kind}"
        following = records[-1].key if depth else _END
        records.append(_record(link, kind, tile, read.region, read, depth=depth, next_id=following))
    return TileInfo("b_info", tuple(records))


def _record(
    link: _Link | None,
    kind: str,
    tile: TileNeeds,
    written: Rect,
    read: Read | None = None,
    *,
    depth: int = TILE_KEY,
    share: tuple[int, int] | None = None,
    next_id: int = TILE_KEY,
) -> Record:
    height, width = written.shape[-2:]
    windows = link is not None and link.kind == "conv2d" and read is not None
    row, column = tile.coord
    return Record(
        key=link.key if link else TILE_KEY,
        kind=kind,  # type: ignore[arg-type]
        depth=depth,
        index=TILE_KEY if link is None else (0 if link.kind == "conv2d" else -1),
        coord=(row, column),
        otileshape=(width, height),
        padding=_sides(read.padding) if windows and read else None,
        inpslidx=_box(read.region if read else written),
        internal=_sides(read.halo) if windows and read else None,
        realidx=_box(read.reach if read else written),
        ndtsize=share,
        local_first=share is not None and link is not None and link.first,
        next_id=next_id,
    )


def _box(rect: Rect) -> Box:
    """Columns, then rows, both ends included."""
    top, left = rect.lo[-2:]
    bottom, right = rect.hi[-2:]
    return left, right - 1, top, bottom - 1


def _sides(margin: Sequence[tuple[int, int]]) -> Box:
    (top, bottom), (left, right) = margin
    return left, right, top, bottom
