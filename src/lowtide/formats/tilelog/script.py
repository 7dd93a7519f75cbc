"""What a tile log prints around its records and tensors, line by line.

Every line of a log follows from the chain of operators and the records of the tiles, but for the
tensors. The functions here say which lines those are, with a :class:`Slot` where a tensor stands. The
reader holds the document against them and the writer prints them, so that both mean the same format.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.formats.tilelog.model import (
    Box,
    InfoName,
    Log,
    LogComparison,
    LoggedTile,
    Operator,
    Record,
    extent,
)
from lowtide.formats.tilelog.records import format_record

__all__ = [
    "AFTER",
    "BACKWARD_RULE",
    "CONV_GRADIENT",
    "CONV_INPUT",
    "FIRST_INPUT",
    "FULL_GRADIENT",
    "HEAD",
    "INFO_RULE",
    "INPUT_LINE",
    "OPERATOR",
    "POOL_GRADIENT",
    "POOL_INCOMING",
    "REFERENCE_IN",
    "REFERENCE_OUT",
    "REFERENCE_RESULT",
    "RESULT",
    "TILE_GRADIENT",
    "Again",
    "Item",
    "Slot",
    "comparison_line",
    "dashed",
    "head_lines",
    "tail_items",
    "tile_forward",
    "tile_head",
]

_BANNER = "&" * 38
_HASHES = "#" * 14
INFO_RULE = "-" * 30
BACKWARD_RULE = "+" * 48
HEAD = ("", _BANNER, "")
INPUT_LINE = "Input "
OPERATOR = "L-->R current op "
AFTER = "after "

REFERENCE_OUT = "ref grad_output"
REFERENCE_IN = "ref grad_input"
POOL_INCOMING = "grad_out"
POOL_GRADIENT = "grad_in in maxp"
CONV_GRADIENT = "grad_in in conv2d"
CONV_INPUT = "local last ++ input"
FIRST_INPUT = "input grad ++ input"
TILE_GRADIENT = "TiledSplitFunction bwd"
FULL_GRADIENT = "TiledSplitFunction.big_grad_in"
REFERENCE_RESULT = "input ref grad"
RESULT = "input grad"

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a printed tensor: what stands before it on its line, and what it is."""

    prefix: str
    label: str
    shape: Shape
    tile: tuple[int, int] | None = None
    operator: int | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The place of a record that ``f_info`` or ``b_info`` has printed before."""

    prefix: str
    info: InfoName
    record: Record

    def lines(self) -> list[str]:
        """The lines it takes."""
        return f"{self.prefix}{format_record(self.record)}".split("\n")


Item = str | Slot | Again


def dashed(shape: Sequence[int]) -> str:
    """A shape as the chain of operators has it: ``1x1x16x16``."""
    return "x".join(map(str, shape))


def _size(width_height: tuple[int, int]) -> str:
    return f"torch.Size([1, 1, {width_height[1]}, {width_height[0]}])"


def _torch_size(shape: Sequence[int]) -> str:
    return f"torch.Size([{', '.join(map(str, shape))}])"


def _image(width_height: tuple[int, int]) -> Shape:
    return 1, 1, width_height[1], width_height[0]


def _listed(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def head_lines(input_shape: Shape, operators: Sequence[Operator]) -> Iterator[str]:
    """The opening and the chain of operators."""
    yield from HEAD
    yield f"{INPUT_LINE}{dashed(input_shape)}"
    for one in operators:
        yield f"{OPERATOR}{one.id}"
        yield f"{AFTER}{one.kind} {dashed(one.output_shape)}"


def tile_head(tile: LoggedTile, last: Operator) -> list[str]:
    """What stands before ``f_info``."""
    width, height = tile.forward.tile.otileshape
    share = tile.forward.of(last.id).ndtsize or ()
    return [
        f"coord {_listed(tile.coord)}",
        f"bwd_out_shape  ({width}, {height})",
        f"fwd_out_shape  ({', '.join(map(str, share))})",
        "Yes, fwd is smaller",
        INFO_RULE,
    ]


def tile_forward(tile: LoggedTile, operators: Sequence[Operator]) -> Iterator[str]:
    """What the forward pass of a tile prints, after ``b_info``."""
    first = tile.forward.of(operators[0].id)
    yield BACKWARD_RULE
    yield f"***input tile {_size(extent(first.inpslidx))}"
    convolutions = pools = 0
    for one in operators:
        record = tile.forward.of(one.id)
        width, height = record.otileshape
        if not one.pools:
            convolutions += 1
            yield f"id {one.id}"
            yield "== tiled conv2d forward"
            yield f"input shape {_size(extent(record.inpslidx))}"
            yield "shape input_tile_for_next"
            yield f" {_size(record.otileshape)}"
            yield f"{convolutions} out_temp {_size(record.otileshape)}"
            continue
        pools += 1
        # the last pool drops a dimension before it is printed
        shape = (1, height, width) if one is operators[-1] else (1, 1, height, width)
        yield f"max {pools} {_torch_size(shape)}"
    width, height = tile.forward.tile.otileshape
    box = _listed(tile.forward.tile.inpslidx)
    yield f"({width}, {height}) [{width}, {height}] {box}"
    yield f"coord {box}"
    yield f"out_temp {_size((width, height))}"


def tail_items(log: Log) -> Iterator[Item]:
    """Everything after the forward passes but the last line: the reference and the tiles' backward passes."""
    yield from ("", _BANNER, "", "done")
    for one in reversed(log.operators):
        yield from _reference(one)
    yield from ("", _BANNER, "", "", _BANNER, "")
    for tile in reversed(log.tiles):
        for one in reversed(log.operators):
            yield from _pool_backward(tile, one, log) if one.pools else _conv_backward(tile, one, log)
    yield Slot(f"{FULL_GRADIENT} ", FULL_GRADIENT, log.input_shape)
    yield Slot(f"{REFERENCE_RESULT} ", REFERENCE_RESULT, log.input_shape)
    yield Slot(f"{RESULT} ", RESULT, log.input_shape)


def _reference(one: Operator) -> Iterator[Item]:
    yield f"Inside {'MaxPool2d' if one.pools else 'Conv2d'} backward"
    yield f"grad_output size :  {_torch_size(one.output_shape)}"
    yield f"{REFERENCE_OUT}  :"
    yield Slot("  ", REFERENCE_OUT, one.output_shape, operator=one.id)
    yield f"grad_input size :  {_torch_size(one.input_shape)}"
    yield f"{REFERENCE_IN}  : "
    yield Slot(" ", REFERENCE_IN, one.input_shape, operator=one.id)


def _pool_backward(tile: LoggedTile, one: Operator, log: Log) -> Iterator[Item]:
    record = tile.forward.of(one.id)
    last = one is log.operators[-1]
    region = _image(extent(record.inpslidx))
    # the gradient of the whole output comes in; every later one is that of the tile alone
    incoming = one.output_shape if last else _image(record.otileshape)
    yield ""
    yield "^^^^^cMaxPool2dFunction bwd"
    yield f"input size {_torch_size(region)}"
    yield Slot(f"{POOL_INCOMING} size {_torch_size(incoming)} ", POOL_INCOMING, incoming, tile.coord, one.id)
    yield f"arg size {_size(record.otileshape)}"
    yield Again("", "f_info", record)
    yield ""
    yield Again("", "b_info", tile.backward.of(one.id))
    yield ""
    if last:
        yield f"new_grad_out {_size(record.otileshape)}"
    yield Slot(f"{_HASHES}{POOL_GRADIENT} {_torch_size(region)} ", POOL_GRADIENT, region, tile.coord, one.id)


def _conv_backward(tile: LoggedTile, one: Operator, log: Log) -> Iterator[Item]:
    record = tile.forward.of(one.id)
    first = one is log.operators[0]
    label = FIRST_INPUT if first else CONV_INPUT
    padded = extent(record.realidx)
    yield "@@@ using cudnn bkw"
    yield f"{label} shape {_size(padded)}"
    yield Slot(f"{label} ", label, _image(padded), tile.coord, one.id)
    yield f"weight shape {_torch_size((1, 1, *log.kernel(one.id)))}"
    yield f"grad_output shape {_size(record.otileshape)}"
    yield f"{'final' if first else 'grad_input'} {_size(padded)}"
    yield f"padding info :: {_listed(record.padding or ())}"
    if not first:
        region = extent(record.inpslidx)
        yield f"new grad_input {_size(region)}"
        yield Slot(f"{_HASHES}{CONV_GRADIENT} ", CONV_GRADIENT, _image(region), tile.coord, one.id)
        return
    yield Again("f_info :: ", "f_info", record)
    yield Again(" ", "b_info", tile.backward.tile)
    yield ""
    yield from _crop(record.inpslidx, tile.backward.tile.inpslidx)
    part = _image(tile.backward.tile.otileshape)
    yield f"after crop g_in {_torch_size(part)}"
    yield Slot(f"{_HASHES}{CONV_GRADIENT} ", CONV_GRADIENT, part, tile.coord, one.id)
    yield Slot(f"{TILE_GRADIENT} ", TILE_GRADIENT, part, tile.coord)


def _crop(region: Box, part: Box) -> Iterator[str]:
    """Where the tile's own part lies in the region that was computed: margins, then rows and columns."""
    left, top = part[0] - region[0], part[2] - region[2]
    width, height = extent(part)
    yield f"crop {_listed((left, region[1] - part[1], top, region[3] - part[3]))}"
    yield f"## {top} {top + height} {left} {left + width}"


def comparison_line(comparison: LogComparison) -> str:
    """The last line."""
    return f" precentile {comparison.mismatches} / {comparison.elements} = {comparison.ratio}"
