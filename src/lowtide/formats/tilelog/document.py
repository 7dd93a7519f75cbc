"""Logs of a training step run in spatial tiles with exact gradients.

    Input 1x1x16x16                       the chain of operators, with output shapes
    L-->R current op 139784840008080
    after conv2d 1x1x16x16
    …
    coord [0, 0]                          for each tile: what every operator reads and writes
    f_info {-11: fake[-11,-11] PI( …      from the tile's output back to its input
    b_info {-11: fake-bp[-11,-11] PI( …   from its part of the input forward to the output
    …
    Inside MaxPool2d backward             the untiled step: gradients of every operator
    …
    ^^^^^cMaxPool2dFunction bwd           the tiles backwards: records again, inputs, gradients
    …
    input ref grad tensor(…               both results, and in how many elements they differ
    input grad tensor(…
     precentile 0 / 256 = 0.0

Everything but the tensors follows from the chain and the records (see :mod:`.script`), so a
document is read by holding it against what it should say, and written back byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from lowtide.cost import Step
from lowtide.errors import ConvertError, FormatError, GraphError
from lowtide.formats.base import Format, Written
from lowtide.formats.losses import Part, losses_of
from lowtide.formats.text import decimal, decode, shorten, whole
from lowtide.formats.tilelog.checks import (
    check_chain,
    check_comparison,
    check_grid,
    check_tensors,
    check_tile,
)
from lowtide.formats.tilelog.engine import Clean, weave
from lowtide.formats.tilelog.graph import ATTRIBUTE, graph_of, notes_of
from lowtide.formats.tilelog.model import (
    InfoName,
    Log,
    LogComparison,
    LoggedTile,
    Operator,
    OperatorKind,
    PrintedTensor,
    Record,
    Reprint,
    TileInfo,
)
from lowtide.formats.tilelog.records import LINES_A_RECORD, format_info, parse_info
from lowtide.formats.tilelog.script import (
    AFTER,
    HEAD,
    INFO_RULE,
    INPUT_LINE,
    OPERATOR,
    Again,
    Slot,
    comparison_line,
    head_lines,
    tail_items,
    tile_forward,
    tile_head,
)
from lowtide.formats.tilelog.tensors import OPENING, format_tensor, parse_tensor
from lowtide.graph import validate

__all__ = [
    "FORMAT",
    "Log",
    "LogComparison",
    "LoggedTile",
    "PrintedTensor",
    "Record",
    "TileInfo",
    "facts",
    "format_info",
    "log_of",
    "read",
    "recognise",
    "tiles",
    "write",
]

_MARK = re.compile(rb"(?:\A|\n)Input [0-9x]{1,99}\s*\nL-->R current op [0-9]")
_LOOK = 4096
_COORD = re.compile(r"coord \[([0-9]{1,9}), ([0-9]{1,9})\]", re.ASCII)
_SHAPE = re.compile(r"[1-9][0-9]{0,8}(?:x[1-9][0-9]{0,8}){3}", re.ASCII)
_KINDS = ("conv2d", "maxpool2d")
_HEAD_LINES = 5
_MAX_ID = 10**18
_COMPARISON = " precentile "
_HOLDS = (
    Part.NAMES,
    Part.ROLES,
    Part.PHASES,
    Part.SHAPES,
    Part.DTYPES,
    Part.DEVICES,
    Part.PORTS,
    Part.NOTES,
    Part.EXTRAS,
)

Shape = tuple[int, int, int, int]


def recognise(data: bytes) -> bool:
    """Whether the first lines name an input and a chain of operators as a tile log does."""
    return _MARK.search(data[:_LOOK]) is not None


def read(data: bytes) -> Step:
    """The untiled step as a graph; :func:`log_of` and :func:`tiles` give what else the log says."""
    lines = Clean(decode(data))
    input_shape, operators = _chain(lines)
    found: list[LoggedTile] = []
    while (lines.peek() or "").startswith("coord ["):
        found.append(_tile(lines, operators))
    check_grid(found, operators, lines.line)
    log = Log(input_shape, operators, tuple(found), (), (), lines.calls, LogComparison(0, 0, 0.0))
    log = _tail(lines, log)
    cut = lines.cut
    step = Step(
        graph=graph_of(log), format=FORMAT.name, notes=notes_of(log, len(cut), cut[0] if cut else None)
    )
    try:
        validate(step.graph)
    except GraphError as error:
        raise FormatError(str(error), expected="a chain that can run", line=1) from None
    return step


def _chain(lines: Clean) -> tuple[Shape, tuple[Operator, ...]]:
    """The shape of the input, and the operators in forward order."""
    lines.expect(HEAD)
    text = lines.take(f"`{INPUT_LINE}` and a shape")
    if not text.startswith(INPUT_LINE):
        raise lines.fail(shorten(text), f"`{INPUT_LINE}` and a shape such as 1x1x16x16")
    shape = input_shape = _shape(text[len(INPUT_LINE) :], lines)
    start = lines.line
    operators = []
    while (lines.peek() or "").startswith(OPERATOR):
        text, line = lines.take(OPERATOR)[len(OPERATOR) :], lines.line
        number = whole(text, line, "operator id")
        if number >= _MAX_ID or str(number) != text:
            raise lines.fail(f"operator {shorten(text)}", "an id of at most 18 digits without leading zeros")
        words = lines.take(f"`{AFTER}<kind> <shape>`").split(" ")
        if len(words) != 3 or words[0] != AFTER.strip() or words[1] not in _KINDS:
            raise lines.fail(shorten(" ".join(words)), f"`{AFTER}<kind> <shape>`, a kind of {_KINDS}")
        output = _shape(words[2], lines)
        kind: OperatorKind = "conv2d" if words[1] == "conv2d" else "maxpool2d"
        operators.append(Operator(number, kind, shape, output, line))
        shape = output
    check_chain(input_shape, operators, start)
    return input_shape, tuple(operators)


def _shape(text: str, lines: Clean) -> Shape:
    if not _SHAPE.fullmatch(text):
        raise lines.fail(shorten(text), "a shape such as 1x1x16x16")
    images, channels, height, width = map(int, text.split("x"))
    return images, channels, height, width


def _tile(lines: Clean, operators: tuple[Operator, ...]) -> LoggedTile:
    """One tile from its ``coord`` line to the end of its forward pass."""
    head = lines.number
    match = _COORD.fullmatch(lines.take("`coord [row, column]`"))
    if match is None:
        raise lines.fail("the tile's place", "`coord [row, column]`")
    line = lines.line
    lines.take_many(_HEAD_LINES - 1, "the records of a tile")
    forward = _info("f_info", lines, operators)
    lines.expect(("}", INFO_RULE))
    backward = _info("b_info", lines, operators)
    lines.expect(("}",))
    tile = LoggedTile((int(match.group(1)), int(match.group(2))), forward, backward, line)
    check_tile(tile, operators)
    end = lines.number
    lines.number = head  # what stands before the records follows from them
    lines.expect(tile_head(tile, operators[-1]))
    lines.number = end
    lines.expect(list(tile_forward(tile, operators)))
    return tile


def _info(name: InfoName, lines: Clean, operators: tuple[Operator, ...]) -> TileInfo:
    count = LINES_A_RECORD * (len(operators) + 1)
    return parse_info(name, *lines.take_many(count, f"the records of {name}"))


def _tail(lines: Clean, log: Log) -> Log:
    """The log with what stands after the forward passes."""
    tensors: list[PrintedTensor] = []
    reprints: list[Reprint] = []
    for item in tail_items(log):
        if isinstance(item, str):
            lines.expect((item,))
        elif isinstance(item, Slot):
            tensors.append(_tensor(lines, item))
        else:
            lines.expect(item.lines())
            line = lines.line_of(lines.number - LINES_A_RECORD)
            reprints.append(Reprint(line, item.record.coord, item.info, item.record.key))
    log = msgspec.structs.replace(
        log, reprints=tuple(reprints), tensors=tuple(tensors), comparison=_comparison(lines)
    )
    check_tensors(log)
    check_comparison(log, lines.line)
    if lines.left:
        raise lines.fail(f"{lines.left} lines after the comparison", "the end of the file")
    return log


def _tensor(lines: Clean, slot: Slot) -> PrintedTensor:
    """The tensor at this place, over as many lines as it takes."""
    first = lines.take(f"`{slot.prefix}{OPENING}…`")
    start = lines.number - 1
    if not first.startswith(slot.prefix + OPENING):
        raise lines.fail(shorten(first), f"`{slot.prefix}{OPENING}…`")
    text = first
    while not text.endswith(")"):
        text = lines.peek() or ""
        if not text.startswith(" "):
            raise lines.fail(f"the tensor of {slot.label} is not closed", "further values or `]]]])`")
        lines.number += 1
    lines.number, end = start, lines.number
    texts, numbers = lines.take_many(end - start, "a tensor")
    texts[0] = first[len(slot.prefix) :]
    printed = parse_tensor(texts, numbers, slot.label, slot.shape)
    return msgspec.structs.replace(printed, tile=slot.tile, operator=slot.operator)


def _comparison(lines: Clean) -> LogComparison:
    text = lines.take(f"`{_COMPARISON}<mismatches> / <elements> = <ratio>`")
    words = text.split(" ")
    if not text.startswith(_COMPARISON) or len(words) != 7 or (words[3], words[5]) != ("/", "="):
        raise lines.fail(shorten(text), f"`{_COMPARISON}<mismatches> / <elements> = <ratio>`")
    line = lines.line
    mismatches, elements = (whole(words[k], line, "count") for k in (2, 4))
    comparison = LogComparison(mismatches, elements, decimal(words[6], line, "ratio"))
    if comparison_line(comparison) != text:
        raise lines.fail(shorten(text), f"`{comparison_line(comparison)}`: plain numbers")
    return comparison


def log_of(step: Step) -> Log:
    """Everything the log says, typed and checked; a ConvertError for a step that has no tile log."""
    plain = step.graph.attributes.get(ATTRIBUTE)
    if plain is None:
        raise ConvertError(
            "this step has no tile records: a tile log holds the boxes of every operator of every tile; "
            "read the step from a tile log to write one"
        )
    try:
        log = msgspec.convert(plain, Log)
    except msgspec.ValidationError as error:
        raise ConvertError(
            f"the tile records of this step are damaged: {error}; read the tile log again"
        ) from None
    _check(log)
    return log


def tiles(step: Step) -> list[LoggedTile]:
    """The tiles in the order of the log, row by row, with their records and boxes."""
    return list(log_of(step).tiles)


def write(step: Step) -> Written:
    """The whole log again; what was read from one comes out byte for byte."""
    log = log_of(step)
    text = "\n".join(_lines(log)) + "\n"
    losses = losses_of(step, _HOLDS)
    if graph_of(log) != step.graph:
        losses += ("changes to the graph: only what the log says about the tiles is written",)
    return Written(weave(text, log.engine_calls).encode(), losses)


def _check(log: Log) -> None:
    """A ConvertError where the reader would not accept the log."""
    try:
        check_chain(log.input_shape, log.operators, 1)
        for tile in log.tiles:
            check_tile(tile, log.operators)
        check_grid(log.tiles, log.operators, 1)
        slots = [item for item in tail_items(log) if isinstance(item, Slot)]
        wanted = [(one.label, one.shape, one.tile, one.operator) for one in slots]
        if wanted != [(one.label, one.shape, one.tile, one.operator) for one in log.tensors]:
            raise ConvertError(
                f"the step has {len(log.tensors)} printed tensors where a log of {len(log.tiles)} tiles "
                f"prints {len(slots)}, in its own order; read the tile log again"
            )
        check_tensors(log)
        check_comparison(log, 1)
    except FormatError as error:
        raise ConvertError(
            f"the tile records of this step contradict each other: {error.problem}, "
            f"expected {error.expected}; read the tile log again"
        ) from None


def _lines(log: Log) -> Iterator[str]:
    """The lines of the log without the engine's messages; some items are several lines."""
    yield from head_lines(log.input_shape, log.operators)
    for tile in log.tiles:
        yield from tile_head(tile, log.operators[-1])
        yield format_info(tile.forward)
        yield INFO_RULE
        yield format_info(tile.backward)
        yield from tile_forward(tile, log.operators)
    tensors = iter(log.tensors)
    for item in tail_items(log):
        if isinstance(item, Slot):
            yield item.prefix + format_tensor(next(tensors))
        elif isinstance(item, Again):
            yield from item.lines()
        else:
            yield item
    yield comparison_line(log.comparison)


def facts(step: Step) -> dict[str, Any]:
    """How many tiles, records, tensors and operators the log has, and what its comparison found."""
    log = log_of(step)
    distinct = sum(len(info.records) for tile in log.tiles for info in (tile.forward, tile.backward))
    return {
        "tiles": {
            "count": len(log.tiles),
            "mismatches": log.comparison.mismatches,
            "elements": log.comparison.elements,
        },
        "records": distinct + len(log.reprints),
        "distinct_records": distinct,
        "printed_tensors": len(log.tensors),
        "operators": len(log.operators),
        "engine_calls": len(log.engine_calls),
    }


FORMAT = Format(
    name="tilelog",
    title="Log of a step run in spatial tiles",
    recognise=recognise,
    read=read,
    write=write,
    facts=facts,
)
