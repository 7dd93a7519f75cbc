"""The ``PI`` record of a tile log: one read from its nine lines, one printed again character for character.

maxpool2d139784839957760[0,-1] PI( <0,0,>,      kind, operator, [depth, index], tile
 <otileshape 2,2,>,
 <padding >,
 <inpslidx 0,3,0,3,>,
 <internal >,
 <realidx 0,3,0,3,>,
 <ndtsize 1,1,>,
  local_first False
 next_id -99)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from lowtide.errors import FormatError
from lowtide.formats.text import shorten
from lowtide.formats.tilelog.model import TILE_KEY, InfoName, Record, TileInfo

__all__ = ["LINES_A_RECORD", "format_info", "format_record", "parse_info", "parse_record"]

_INT = r"(?:0|-?[1-9][0-9]{0,17})"
_PAIR = rf"({_INT}),({_INT}),"
_FOUR = rf"({_INT}),({_INT}),({_INT}),({_INT}),"
_KIND = r"(fake-bp|fake|bk-conv2d|bk-maxpool2d|conv2d|maxpool2d)"
_PATTERNS = (
    rf"{_KIND}([1-9][0-9]{{0,17}})?\[({_INT}),({_INT})\] PI\( <{_PAIR}>,",
    rf" <otileshape {_PAIR}>,",
    rf" <padding (?:{_FOUR})?>,",
    rf" <inpslidx {_FOUR}>,",
    rf" <internal (?:{_FOUR})?>,",
    rf" <realidx {_FOUR}>,",
    rf" <ndtsize (?:{_PAIR})?>,",
    r"  local_first (True|False)",
    rf" next_id ({_INT})\)",
)
_EXPECTED = (
    "`kind<id>[depth,index] PI( <row,column,>,`",
    "` <otileshape width,height,>,`",
    "` <padding left,right,top,bottom,>,` or ` <padding >,`",
    "` <inpslidx left,right,top,bottom,>,`",
    "` <internal left,right,top,bottom,>,` or ` <internal >,`",
    "` <realidx left,right,top,bottom,>,`",
    "` <ndtsize width,height,>,` or ` <ndtsize >,`",
    "`  local_first True` or `  local_first False`",
    "` next_id <id>)`",
)
_BLANKS = r"[ \t\r]*"
_RECORD = re.compile(rf"{_BLANKS}\n".join(_PATTERNS) + _BLANKS, re.ASCII)
_ONE_LINE = tuple(re.compile(pattern + _BLANKS, re.ASCII) for pattern in _PATTERNS)
_PREFIX = re.compile(rf"(?:(f_info|b_info) \{{|, )({_INT}): ", re.ASCII)

LINES_A_RECORD = len(_PATTERNS)


def parse_record(text: str, line: int = 1) -> Record:
    """The record printed in these nine lines, the first of which is ``line`` of its document."""
    match = _RECORD.fullmatch(text)
    if match is None:
        _blame(text, line)
    field = match.group
    kind, key = field(1), field(2)
    if (key is None) != kind.startswith("fake"):
        raise FormatError(
            f"a record of kind {kind} {'without' if key is None else 'with'} an operator's id",
            expected="an id after an operator's kind, and none after `fake`",
            line=line,
        )
    groups: Any = match.groups()
    return Record(
        key=TILE_KEY if key is None else int(key),
        kind=groups[0],
        depth=int(groups[2]),
        index=int(groups[3]),
        coord=_numbers(groups[4:6]),
        otileshape=_numbers(groups[6:8]),
        padding=_numbers(groups[8:12]),
        inpslidx=_numbers(groups[12:16]),
        internal=_numbers(groups[16:20]),
        realidx=_numbers(groups[20:24]),
        ndtsize=_numbers(groups[24:26]),
        local_first=groups[26] == "True",
        next_id=int(groups[27]),
        line=line,
    )


def _numbers(texts: Sequence[Any]) -> Any:
    """The numbers as a tuple; None where the log lists none."""
    return None if texts[0] is None else tuple(map(int, texts))


def _blame(text: str, line: int) -> NoReturn:
    """Raise the error of the first line that does not look like its part of a record."""
    lines = text.split("\n")
    for k, (pattern, expected) in enumerate(zip(_ONE_LINE, _EXPECTED, strict=True)):
        if k >= len(lines):
            raise FormatError("the record ends here", expected=expected, line=line + k)
        if not pattern.fullmatch(lines[k]):
            raise FormatError(shorten(lines[k]), expected=expected, line=line + k)
    raise FormatError("text after the record", expected="nine lines", line=line + LINES_A_RECORD)


def parse_info(name: InfoName, lines: Sequence[str], numbers: Sequence[int]) -> TileInfo:
    """The records of ``f_info`` or ``b_info``, from nine lines each; ``numbers`` are their line numbers."""
    records = []
    for start in range(0, len(lines), LINES_A_RECORD):
        first, number = lines[start], numbers[start]
        prefix = _PREFIX.match(first)
        if prefix is None or prefix.group(1) != (None if start else name):
            expected = "`, <id>: ` and a record" if start else f"`{name} {{{TILE_KEY}: ` and a record"
            raise FormatError(shorten(first), expected=expected, line=number)
        text = "\n".join((first[prefix.end() :], *lines[start + 1 : start + LINES_A_RECORD]))
        record = parse_record(text, number)
        if record.key != int(prefix.group(2)):
            raise FormatError(
                f"the record of {record.name} under the key {prefix.group(2)}",
                expected=f"the key {record.key}",
                line=number,
            )
        records.append(record)
    return TileInfo(name, tuple(records), numbers[0])


def format_record(record: Record) -> str:
    """The record as the log prints it, without the line feed behind it."""
    return (
        f"{record.name}[{record.depth},{record.index}] PI( <{_listed(record.coord)}>,\n"
        f" <otileshape {_listed(record.otileshape)}>,\n"
        f" <padding {_listed(record.padding)}>,\n"
        f" <inpslidx {_listed(record.inpslidx)}>, \n"
        f" <internal {_listed(record.internal)}>, \n"
        f" <realidx {_listed(record.realidx)}>, \n"
        f" <ndtsize {_listed(record.ndtsize)}>, \n"
        f"  local_first {record.local_first}\n"
        f" next_id {record.next_id})"
    )


def _listed(numbers: Sequence[int] | None) -> str:
    return "".join([f"{number}," for number in numbers or ()])


def format_info(info: TileInfo) -> str:
    """The text from ``f_info {`` or ``b_info {`` to its closing brace, as the log prints it."""
    records = [f"{record.key}: {format_record(record)}\n" for record in info.records]
    return f"{info.name} {{{', '.join(records)}}}"
