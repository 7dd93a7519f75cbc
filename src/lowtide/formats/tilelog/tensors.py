"""Tensors as torch prints them: read from their lines, and laid out again as torch does.

    tensor([[[[ 0.2054, -0.0533],
              [ 0.0000,  0.2210]]]], device='cuda:0')

Only what a tile log prints: four dimensions of which the first two have length one, and at most the
thousand elements that torch prints without leaving any out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lowtide.errors import FormatError
from lowtide.formats.text import shorten
from lowtide.formats.tilelog.model import PrintedTensor, Style

__all__ = ["OPENING", "format_tensor", "parse_tensor"]

OPENING = "tensor("
_LINE_WIDTH = 80  # torch's default
_INDENT = len(OPENING) + 3  # of a row inside three brackets

_TOKENS: dict[Style, str] = {
    "integer": r"-?(?:0|[1-9][0-9]{0,8})\.",
    "fixed": r"-?(?:0|[1-9][0-9]{0,8})\.[0-9]{4}",
    "scientific": r"-?(?:0\.0000e\+00|[1-9]\.[0-9]{4}e[-+][0-9]{2})",
}
_TOKEN = {style: re.compile(token, re.ASCII) for style, token in _TOKENS.items()}
_ROW = {style: re.compile(f"(?:{token},)*{token}", re.ASCII) for style, token in _TOKENS.items()}
_FILL = re.compile(r"(?<=[,\[]) +")
_SUFFIX = re.compile(r"(?:,device='([A-Za-z0-9:]{1,40})')?\)", re.ASCII)
_FORMATS: dict[Style, str] = {"integer": "{:.0f}.", "fixed": "{:.4f}", "scientific": "{:.4e}"}


def parse_tensor(
    lines: Sequence[str], numbers: Sequence[int], label: str, shape: tuple[int, int, int, int]
) -> PrintedTensor:
    """The tensor of this shape printed in these lines, from ``tensor(`` to its closing parenthesis.

    ``numbers`` are the numbers of the lines in their document.
    """
    line = numbers[0]
    body = _FILL.sub("", "".join([text.strip(" \t\r") for text in lines]))
    end = body.find("]]]]")
    if not body.startswith(f"{OPENING}[[[[") or end < 0:
        raise FormatError(
            f"the tensor of {label} has no `[[[[` or no `]]]]`",
            expected="four brackets around the rows, and four behind them",
            line=line,
        )
    suffix = _SUFFIX.fullmatch(body, end + 4)
    if suffix is None:
        raise FormatError(
            f"{shorten(body[end + 4 :])} behind the tensor of {label}",
            expected="`)` or `, device='…')`",
            line=numbers[-1],
        )
    rows = body[len(OPENING) + 4 : end].split("],[")
    style = _style(rows[0].split(",", 1)[0], label, line)
    if len(rows) != shape[2]:
        raise FormatError(
            f"the tensor of {label} has {len(rows)} rows", expected=f"{shape[2]} rows", line=line
        )
    values: list[float] = []
    for row in rows:
        if not _ROW[style].fullmatch(row):
            token = next((t for t in row.split(",") if not _TOKEN[style].fullmatch(t)), row)
            at = next((n for text, n in zip(lines, numbers, strict=True) if token in text), line)
            raise FormatError(
                f"{shorten(token)} in the tensor of {label}",
                expected=f"a number in {style} notation, as the first one of the tensor",
                line=at,
            )
        texts = row.split(",")
        if len(texts) != shape[3]:
            raise FormatError(
                f"a row of {len(texts)} values in the tensor of {label}",
                expected=f"{shape[3]} values",
                line=line,
            )
        values.extend(map(float, texts))
    return PrintedTensor(label, line, shape, tuple(values), style, suffix.group(1) or "")


def _style(token: str, label: str, line: int) -> Style:
    for style, pattern in _TOKEN.items():
        if pattern.fullmatch(token):
            return style
    raise FormatError(
        f"{shorten(token)} in the tensor of {label}",
        expected="a number as torch prints it, such as `1.`, `0.1234` or `1.2345e-01`",
        line=line,
    )


def format_tensor(tensor: PrintedTensor) -> str:
    """The text torch prints for it, from ``tensor(`` to the closing parenthesis."""
    rows = _rows(tensor)
    text = f"{OPENING}[[[[" + f"],\n{' ' * _INDENT}[".join(rows) + "]]]]"
    if tensor.device:
        suffix = f"device='{tensor.device}'"
        # torch counts the last line two characters too long, and the parenthesis with it
        last = len(text) - text.rfind("\n") + 1
        wraps = last + len(suffix) + 2 > _LINE_WIDTH
        text += (",\n" + " " * len(OPENING) if wraps else ", ") + suffix
    return text + ")"


def _rows(tensor: PrintedTensor) -> list[str]:
    """The rows without their brackets, broken into lines where torch does."""
    form = _FORMATS[tensor.style].format
    texts = [form(value) for value in tensor.values]
    # torch takes the width from the values that are not zero
    width = max((len(t) for t, value in zip(texts, tensor.values, strict=True) if value), default=0)
    texts = [text.rjust(width) for text in texts]
    columns = tensor.shape[3]
    a_line = max(1, (_LINE_WIDTH - _INDENT) // (width + 2))
    glue = ",\n" + " " * (_INDENT + 1)
    if columns <= a_line:
        return [", ".join(texts[k : k + columns]) for k in range(0, len(texts), columns)]
    return [
        glue.join(", ".join(texts[j : min(j + a_line, k + columns)]) for j in range(k, k + columns, a_line))
        for k in range(0, len(texts), columns)
    ]
