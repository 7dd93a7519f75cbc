"""The nouns of a tile log: operators, tiles with their records, printed tensors, the comparison.

Everything survives a trip through JSON: a :class:`Log` is kept in the attributes of the graph.
Boxes are kept as the log has them, ``left, right, top, bottom`` with both ends included; the properties
that give a :class:`~lowtide.graph.Rect` are half-open, rows first.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from lowtide.graph import Rect

__all__ = [
    "TILE_KEY",
    "Box",
    "EngineCall",
    "InfoName",
    "Log",
    "LogComparison",
    "LoggedTile",
    "Operator",
    "OperatorKind",
    "PrintedTensor",
    "Record",
    "Reprint",
    "Style",
    "TileInfo",
    "extent",
    "rect_of",
]

Box = tuple[int, int, int, int]
"""Left, right, top, bottom; both ends included where it is a region."""
Count = Annotated[int, msgspec.Meta(ge=0)]
InfoName = Literal["f_info", "b_info"]
OperatorKind = Literal["conv2d", "maxpool2d"]
Style = Literal["integer", "fixed", "scientific"]
"""How torch printed the values of a tensor: ``1.``, ``0.1234`` or ``1.2345e-01``."""

TILE_KEY = -11
"""Stands for the tile itself where an operator id is expected."""


def extent(box: Box) -> tuple[int, int]:
    """Width and height of an inclusive box."""
    return box[1] - box[0] + 1, box[3] - box[2] + 1


def rect_of(box: Box) -> Rect:
    """The same region half-open, rows first."""
    left, right, top, bottom = box
    return Rect((top, left), (bottom + 1, right + 1))


class Operator(msgspec.Struct, frozen=True, gc=False):
    """One operator of the chain, in forward order."""

    id: int
    kind: OperatorKind
    input_shape: tuple[Count, Count, Count, Count]
    output_shape: tuple[Count, Count, Count, Count]
    line: Count

    @property
    def pools(self) -> bool:
        """Whether it is a maximum over windows that do not overlap."""
        return self.kind == "maxpool2d"

    @property
    def window(self) -> tuple[int, int]:
        """Columns and rows of the input for each column and row of the output, along each side."""
        return self.input_shape[3] // self.output_shape[3], self.input_shape[2] // self.output_shape[2]


class Record(msgspec.Struct, frozen=True, gc=False):
    """One ``PI``: what one operator reads and writes for one tile. Fields are called as in the log."""

    key: int
    """The operator, or ``-11`` for the tile itself."""
    kind: Literal["fake", "fake-bp", "conv2d", "bk-conv2d", "maxpool2d", "bk-maxpool2d"]
    depth: int
    """Position in the walk over the operators, from 0; ``-11`` for the tile itself."""
    index: int
    """-1 for a pool, 0 for a convolution; ``-11`` for the tile itself."""
    coord: tuple[int, int]
    """Row and column of the tile."""
    otileshape: tuple[int, int]
    """Width and height of what is written."""
    padding: Box | None
    """Zeros to add on each side where the region sticks out; None where the log lists nothing."""
    inpslidx: Box
    """Region that is read, cut to the image."""
    internal: Box | None
    """Halo on each side that belongs to neighbours."""
    realidx: Box
    """Region that is read, before it is cut to the image."""
    ndtsize: tuple[int, int] | None
    """Width and height of the disjoint share of the output; none in ``b_info``."""
    local_first: bool
    """Whether this is the first convolution after a pool; never in ``b_info``."""
    next_id: int
    """The following operator; ``-99`` at the end, ``-11`` for the tile itself."""
    line: Count = 0
    """Where the print starts in the document."""

    @property
    def name(self) -> str:
        """What the log calls it: the kind and the operator's id."""
        return self.kind if self.key == TILE_KEY else f"{self.kind}{self.key}"

    @property
    def region(self) -> Rect:
        """``inpslidx`` half-open, rows first."""
        return rect_of(self.inpslidx)

    @property
    def unclamped(self) -> Rect:
        """``realidx`` half-open, rows first."""
        return rect_of(self.realidx)

    @property
    def margin(self) -> Box:
        """What is read beyond the output region on each side: zeros and halo together."""
        zeros, halo = self.padding or (0, 0, 0, 0), self.internal or (0, 0, 0, 0)
        return zeros[0] + halo[0], zeros[1] + halo[1], zeros[2] + halo[2], zeros[3] + halo[3]


class TileInfo(msgspec.Struct, frozen=True):
    """``f_info`` or ``b_info`` of a tile: the tile itself, then one record an operator in walking order."""

    name: InfoName
    records: tuple[Record, ...]
    line: Count = 0

    @property
    def tile(self) -> Record:
        """The record of the tile itself."""
        return self.records[0]

    def of(self, operator: int) -> Record:
        """The record of an operator; a KeyError where there is none."""
        for record in self.records:
            if record.key == operator:
                return record
        raise KeyError(operator)


class LoggedTile(msgspec.Struct, frozen=True):
    """One tile: what its forward pass recomputes, and what its backward pass reads."""

    coord: tuple[int, int]
    """Row and column."""
    forward: TileInfo
    backward: TileInfo
    line: Count = 0

    @property
    def part(self) -> Rect:
        """The disjoint part of the input whose gradient this tile computes."""
        return self.backward.tile.region

    @property
    def output(self) -> Rect:
        """The part of the last output that the tile recomputes."""
        return self.forward.tile.region


class PrintedTensor(msgspec.Struct, frozen=True):
    """A tensor that the log prints, with its values row by row."""

    label: str
    line: Count
    shape: tuple[Count, Count, Count, Count]
    values: tuple[float, ...]
    style: Style
    device: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9:]{0,40}\Z")] = ""
    """Empty where the log names none: host memory."""
    tile: tuple[int, int] | None = None
    operator: int | None = None

    def rows(self) -> list[tuple[float, ...]]:
        """The rows of the image."""
        width = self.shape[3]
        return [self.values[k : k + width] for k in range(0, len(self.values), width)]


class Reprint(msgspec.Struct, frozen=True, gc=False):
    """A record that the backward pass of its tile prints a second time."""

    line: Count
    coord: tuple[int, int]
    info: InfoName
    key: int


class EngineCall(msgspec.Struct, frozen=True, gc=False):
    """A message of the autograd engine, which runs in a thread of its own and cuts into other lines.

    ``line`` (from 0) and ``column`` say where it stands in the text without these messages.
    """

    line: Count
    column: Count
    function: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_:]{1,200}\Z")]


class LogComparison(msgspec.Struct, frozen=True, gc=False):
    """The last line: how many elements of the tiled input gradient differ from the reference."""

    mismatches: Count
    elements: Count
    ratio: float


class Log(msgspec.Struct, frozen=True):
    """Everything a tile log says."""

    input_shape: tuple[Count, Count, Count, Count]
    operators: tuple[Operator, ...]
    tiles: tuple[LoggedTile, ...]
    reprints: tuple[Reprint, ...]
    tensors: tuple[PrintedTensor, ...]
    engine_calls: tuple[EngineCall, ...]
    comparison: LogComparison

    def printed(
        self, label: str, *, operator: int | None = None, tile: tuple[int, int] | None = None
    ) -> list[PrintedTensor]:
        """The printed tensors of this label, of one operator or tile where they are given."""
        return [
            one
            for one in self.tensors
            if one.label == label and operator in (None, one.operator) and tile in (None, one.tile)
        ]

    def margin(self, operator: int) -> Box:
        """What a convolution reads beyond its output region on each side."""
        return self.tiles[0].forward.of(operator).margin

    def kernel(self, operator: int) -> tuple[int, int]:
        """Rows and columns of a convolution's kernel, which moves one element at a time."""
        left, right, top, bottom = self.margin(operator)
        return top + bottom + 1, left + right + 1
