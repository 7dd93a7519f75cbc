"""Whether a tile log agrees with itself: its records with each other, its tensors with one another.

Every figure of a record follows from its neighbours, and most tensors are printed more than once, so a
damaged figure shows. Each function raises a FormatError at the line that contradicts an earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NoReturn

from lowtide.errors import FormatError
from lowtide.formats.tilelog.model import (
    TILE_KEY,
    Box,
    Log,
    LoggedTile,
    Operator,
    PrintedTensor,
    Record,
    TileInfo,
    extent,
)
from lowtide.formats.tilelog.script import (
    CONV_GRADIENT,
    CONV_INPUT,
    FIRST_INPUT,
    FULL_GRADIENT,
    POOL_INCOMING,
    REFERENCE_IN,
    REFERENCE_OUT,
    REFERENCE_RESULT,
    RESULT,
    TILE_GRADIENT,
)

__all__ = ["UNIT", "assemble", "check_chain", "check_comparison", "check_grid", "check_tensors", "check_tile"]

UNIT = 1e-4
"""The last digit that torch prints by default."""
_SLACK = 1e-9
_END = -99
_FIELD_LINES = (
    "name",
    "otileshape",
    "padding",
    "inpslidx",
    "internal",
    "realidx",
    "ndtsize",
    "local_first",
    "next_id",
)


def check_chain(input_shape: Sequence[int], operators: Sequence[Operator], line: int) -> None:
    """The chain is one that the rest of the log can be read with: pairs of a convolution and a pool."""
    if not operators or len(operators) % 2:
        raise FormatError(
            f"a chain of {len(operators)} operators", expected="pairs of a conv2d and a maxpool2d", line=line
        )
    if tuple(input_shape[:2]) != (1, 1) or min(input_shape) < 1:
        raise FormatError(
            f"an input of shape {tuple(input_shape)}", expected="one image with one channel", line=line
        )
    seen: set[int] = set()
    for k, one in enumerate(operators):
        if one.id in seen:
            raise FormatError(f"operator {one.id} a second time", expected="a new operator id", line=one.line)
        seen.add(one.id)
        kind = "maxpool2d" if k % 2 else "conv2d"
        if one.kind != kind:
            raise FormatError(f"a {one.kind}", expected=f"a {kind}: pairs of both", line=one.line + 1)
        _check_shapes(one)


def _check_shapes(one: Operator) -> None:
    before, after = one.input_shape, one.output_shape
    if not one.pools and after != before:
        raise FormatError(
            f"a convolution from {before} to {after}", expected="the shape kept", line=one.line + 1
        )
    if one.pools and (
        after[:2] != before[:2] or min(after) < 1 or before[2] % after[2] or before[3] % after[3]
    ):
        raise FormatError(
            f"a pool from {before} to {after}",
            expected="height and width divided by whole numbers",
            line=one.line + 1,
        )


def _wrong(record: Record, field: str, found: object, expected: object) -> NoReturn:
    raise FormatError(
        f"{field} {found} in the record of {record.name}, tile {list(record.coord)}",
        expected=str(expected),
        line=record.line + (_FIELD_LINES.index(field) if field in _FIELD_LINES else 0),
    )


def check_tile(tile: LoggedTile, operators: Sequence[Operator]) -> None:
    """The records of a tile agree with the chain of operators and with each other."""
    if (tile.forward.name, tile.backward.name) != ("f_info", "b_info"):
        raise FormatError(
            f"{tile.forward.name} and {tile.backward.name} of a tile",
            expected="f_info, b_info",
            line=tile.line,
        )
    _check_info(tile.forward, tile, operators[::-1])
    _check_info(tile.backward, tile, operators)
    own, end = tile.forward.tile, tile.backward.records[-1].inpslidx
    if own.inpslidx != end:
        _wrong(own, "inpslidx", own.inpslidx, f"{end}, where b_info ends")


def check_grid(tiles: Sequence[LoggedTile], operators: Sequence[Operator], line: int) -> None:
    """The tiles make up the image, and their shares make up the outputs."""
    if not tiles:
        raise FormatError("no tile at all", expected="`coord [0, 0]`", line=line)
    columns = max(1, sum(tile.coord[0] == 0 for tile in tiles))
    _check_parts(tiles, columns, operators[0].input_shape)
    _check_shares(tiles, operators, columns)


def _check_info(info: TileInfo, tile: LoggedTile, walk: Sequence[Operator]) -> None:
    """One record for the tile and one for each operator, in the order of the walk."""
    if len(info.records) != len(walk) + 1:
        raise FormatError(
            f"{len(info.records)} records in {info.name} of tile {list(tile.coord)}",
            expected=f"{len(walk) + 1}: one for the tile and one an operator",
            line=info.line,
        )
    forward, own = info.name == "f_info", info.tile
    expected = (TILE_KEY, "fake" if forward else "fake-bp", TILE_KEY, TILE_KEY, TILE_KEY)
    if (own.key, own.kind, own.depth, own.index, own.next_id) != expected:
        _wrong(own, "name", own.name, f"`{expected[1]}[{TILE_KEY},{TILE_KEY}]` with next_id {TILE_KEY}")
    following = _END
    before: Record | None = None
    for k, record in enumerate(info.records):
        if record.coord != tile.coord:
            _wrong(record, "coord", list(record.coord), list(tile.coord))
        one = walk[k - 1] if k else None
        if one is not None:
            _check_link(record, one, k - 1, following, forward)
            following = record.key
        _check_boxes(record, before, one, forward)
        _check_inside(record, walk, k, forward)
        before = record


def _check_link(record: Record, one: Operator, depth: int, following: int, forward: bool) -> None:
    kind = one.kind if forward else f"bk-{one.kind}"
    index = -1 if one.pools else 0
    if (record.key, record.kind) != (one.id, kind):
        _wrong(record, "name", record.name, f"{kind}{one.id}")
    if (record.depth, record.index) != (depth, index):
        _wrong(record, "position", [record.depth, record.index], [depth, index])
    if record.next_id != following:
        _wrong(record, "next_id", record.next_id, following)
    if record.local_first != (forward and not one.pools):
        _wrong(record, "local_first", record.local_first, forward and not one.pools)


def _check_boxes(record: Record, before: Record | None, one: Operator | None, forward: bool) -> None:
    left, right, top, bottom = box = record.inpslidx
    if right < left or bottom < top:
        _wrong(record, "inpslidx", box, "left <= right and top <= bottom")
    # forward a record writes what the one before it reads; backward it stands for its own region
    written = before.inpslidx if forward and before else box
    if record.otileshape != extent(written):
        _wrong(record, "otileshape", record.otileshape, f"{extent(written)}, the size of {written}")
    if before is None or one is None or one.pools:
        _check_plain(record)
    if before is None or one is None:
        return
    if one.pools:
        read = _pooled(before.inpslidx, one.window, forward)
        if box != read:
            _wrong(record, "inpslidx", box, f"{read}, which belongs to {before.inpslidx}")
        return
    _check_margins(record, before)


def _check_plain(record: Record) -> None:
    """The tile itself and pools read a region as it is."""
    if record.padding or record.internal:
        _wrong(record, "padding" if record.padding else "internal", "", "nothing in the brackets")
    if record.realidx != record.inpslidx:
        _wrong(record, "realidx", record.realidx, f"{record.inpslidx}, as inpslidx")


def _check_margins(record: Record, before: Record) -> None:
    """A convolution reads its margin around the region; padding is the part of it outside the image."""
    if not record.padding or not record.internal:
        _wrong(record, "internal" if record.padding else "padding", "left out", "left,right,top,bottom")
    if min(record.padding) < 0 or min(record.internal) < 0:
        _wrong(record, "padding", record.padding, f"no negative number there or in {record.internal}")
    inside = _shrink(record.realidx, record.padding)
    if record.inpslidx != inside:
        _wrong(record, "inpslidx", record.inpslidx, f"{inside}: realidx without the padding")
    region = _shrink(inside, record.internal)
    if region != before.inpslidx:
        _wrong(record, "realidx", record.realidx, f"{before.inpslidx} with padding and halo around it")


def _check_inside(record: Record, walk: Sequence[Operator], k: int, forward: bool) -> None:
    """The region lies in its tensor; padding starts where the tensor ends."""
    if k:
        shape = walk[k - 1].input_shape if forward else walk[k - 1].output_shape
    else:
        shape = walk[0].output_shape if forward else walk[0].input_shape
    left, right, top, bottom = record.realidx
    image = (max(left, 0), min(right, shape[3] - 1), max(top, 0), min(bottom, shape[2] - 1))
    if record.inpslidx != image:
        _wrong(record, "inpslidx", record.inpslidx, f"{image}: realidx cut to {shape[3]} by {shape[2]}")


def _shrink(box: Box, by: Sequence[int]) -> Box:
    return box[0] + by[0], box[1] - by[1], box[2] + by[2], box[3] - by[3]


def _pooled(box: Box, window: tuple[int, int], forward: bool) -> Box:
    """The input region of an output region, or the outputs that an input region reaches."""
    (left, right, top, bottom), (across, down) = box, window
    if forward:
        return left * across, right * across + across - 1, top * down, bottom * down + down - 1
    return left // across, right // across, top // down, bottom // down


def _check_parts(tiles: Sequence[LoggedTile], columns: int, shape: Sequence[int]) -> None:
    """The tiles come row by row, and their own parts of the input cover it once."""
    for k, tile in enumerate(tiles):
        row, column = divmod(k, columns)
        if tile.coord != (row, column):
            raise FormatError(f"tile {list(tile.coord)}", expected=f"tile [{row}, {column}]", line=tile.line)
        left, _, top, bottom = own = tile.backward.tile.inpslidx
        above = tiles[k - columns].backward.tile.inpslidx if row else (0, 0, 0, -1)
        aside = tiles[k - 1].backward.tile.inpslidx if column else (0, -1, above[3] + 1, bottom)
        if (left, top, bottom) != (aside[1] + 1, aside[2], aside[3]):
            _wrong(tile.backward.tile, "inpslidx", own, f"a part that starts at {aside[1] + 1}, {aside[2]}")
    _, right, _, bottom = tiles[-1].backward.tile.inpslidx
    if len(tiles) % columns or (right, bottom) != (shape[3] - 1, shape[2] - 1):
        raise FormatError(
            f"{len(tiles)} tiles in {columns} columns, the last part of which ends at {right}, {bottom}",
            expected=f"tiles up to {shape[3] - 1}, {shape[2] - 1}; some are missing",
            line=tiles[-1].line,
        )


def _check_shares(tiles: Sequence[LoggedTile], operators: Sequence[Operator], columns: int) -> None:
    """Disjoint shares add up to the outputs; margins are those of the first tile everywhere."""
    rows = len(tiles) // columns
    margins = {one.id: tiles[0].forward.of(one.id).margin for one in operators}
    for tile in tiles:
        for record in (tile.forward.tile, *tile.backward.records):
            if record.ndtsize:
                _wrong(record, "ndtsize", record.ndtsize, "nothing in the brackets")
        for one in operators:
            record = tile.forward.of(one.id)
            share = (one.output_shape[3] // columns, one.output_shape[2] // rows)
            if record.ndtsize != share:
                _wrong(
                    record, "ndtsize", record.ndtsize, f"{share}: the output over {columns} by {rows} tiles"
                )
            for other in (record, tile.backward.of(one.id)):
                if other.margin != margins[one.id]:
                    _wrong(other, "internal", other.internal, f"with the padding {margins[one.id]} in all")


def assemble(shape: Sequence[int], pieces: Iterable[tuple[Box, Box, PrintedTensor]]) -> list[list[float]]:
    """The rows of a tensor of which the tiles print parts that may overlap.

    A piece is the region it prints, the region before it was cut to the image, and its values. What is
    printed twice must agree to the last digit, and what lies outside the image must be zero.
    """
    rows: list[list[float | None]] = [[None] * shape[3] for _ in range(shape[2])]
    for (left, right, top, bottom), (outer_left, _, outer_top, _), printed in pieces:
        before, width = left - outer_left, right - left + 1
        for y, values in enumerate(printed.rows(), start=outer_top):
            inside = values[before : before + width] if top <= y <= bottom else ()
            outside = values[:before] + values[before + width :] if inside else values
            if any(outside):
                _contradiction(printed, "a value that is not zero in the padding", "zeros around the image")
            if inside:
                _lay(rows[y], left, inside, printed)
    return [[0.0 if value is None else value for value in row] for row in rows]


def _lay(row: list[float | None], left: int, values: Sequence[float], printed: PrintedTensor) -> None:
    scientific = printed.style == "scientific"
    for x, value in enumerate(values, start=left):
        known = row[x]
        if known is None:
            row[x] = value
        elif known != value:
            # two prints of one element differ only where one has more digits: below 1, the scientific one
            if abs(known - value) > UNIT / 2 * max(1.0, abs(value)) + _SLACK:
                _contradiction(printed, f"{value} for an element printed as {known} before", "the same value")
            if scientific and abs(value) < 1:
                row[x] = value


def _contradiction(printed: PrintedTensor, problem: str, expected: str) -> NoReturn:
    where = f" of tile {list(printed.tile)}" if printed.tile else ""
    raise FormatError(
        f"the tensor of {printed.label}{where} has {problem}", expected=expected, line=printed.line
    )


def check_tensors(log: Log) -> None:
    """Tensors that are printed more than once are the same each time."""
    for printed in log.tensors:
        if len(printed.values) != math.prod(printed.shape):
            _contradiction(printed, f"{len(printed.values)} values", f"the shape {printed.shape} filled")
    reference_in = {printed.operator: printed for printed in log.printed(REFERENCE_IN)}
    reference_out = {printed.operator: printed for printed in log.printed(REFERENCE_OUT)}
    chain = log.operators
    for one, following in pairwise(chain):
        _same(reference_out[one.id], reference_in[following.id])
    _same(log.printed(REFERENCE_RESULT)[0], reference_in[chain[0].id])
    incoming = {(printed.tile, printed.operator): printed for printed in log.printed(POOL_INCOMING)}
    gradients = {(printed.tile, printed.operator): printed for printed in log.printed(CONV_GRADIENT)}
    parts = {printed.tile: printed for printed in log.printed(TILE_GRADIENT)}
    for tile in log.tiles:
        _same(incoming[tile.coord, chain[-1].id], reference_out[chain[-1].id])
        for one, following in zip(chain[1::2], chain[2::2], strict=False):
            _same(incoming[tile.coord, one.id], gradients[tile.coord, following.id])
        _same(parts[tile.coord], gradients[tile.coord, chain[0].id])
    _check_results(log, parts)
    for one in chain[::2]:
        label = FIRST_INPUT if one is chain[0] else CONV_INPUT
        inputs = {piece.tile: piece for piece in log.printed(label, operator=one.id)}
        records = ((tile.forward.of(one.id), inputs[tile.coord]) for tile in log.tiles)
        assemble(one.input_shape, ((record.inpslidx, record.realidx, piece) for record, piece in records))


def _same(one: PrintedTensor, before: PrintedTensor) -> None:
    if one.values != before.values:
        _contradiction(one, "other values", f"those of {before.label} at line {before.line}")


def _check_results(log: Log, parts: dict[tuple[int, int] | None, PrintedTensor]) -> None:
    """The tiled gradient is made of the tiles'; what is split off last holds the first tile alone."""
    own = [(tile.backward.tile.inpslidx, parts[tile.coord]) for tile in log.tiles]
    for label, pieces in ((RESULT, own), (FULL_GRADIENT, own[:1])):
        printed = log.printed(label)[0]
        rows = assemble(log.input_shape, ((box, box, part) for box, part in pieces))
        if [value for row in rows for value in row] != list(printed.values):
            _contradiction(printed, "other values", "those that the tiles have printed")


def check_comparison(log: Log, line: int) -> None:
    """The last line agrees with the two gradients as far as their printed digits go."""
    last = log.comparison
    ours, reference = log.printed(RESULT)[0].values, log.printed(REFERENCE_RESULT)[0].values
    if last.elements != len(ours):
        raise FormatError(
            f"a comparison of {last.elements} elements", expected=f"{len(ours)} elements", line=line
        )
    differ = sum(abs(a - b) > UNIT + _SLACK for a, b in zip(ours, reference, strict=True))
    if not differ <= last.mismatches <= last.elements:
        raise FormatError(
            f"{last.mismatches} mismatches", expected=f"at least {differ}, as the gradients say", line=line
        )
    fraction = last.mismatches / last.elements
    if min(abs(last.ratio - fraction), abs(last.ratio - 100 * fraction)) > UNIT:
        raise FormatError(f"a ratio of {last.ratio}", expected=f"{fraction}", line=line)
