"""What a notebook shows of a value: a summary as a table and a curve as a picture, in one piece of HTML.

It needs nothing from anywhere else and runs no script. Colours suit light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from lowtide.printable import printable
from lowtide.units import format_bytes

__all__ = ["Curve", "curves_svg", "shown_html"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 640, 150, 74, 14, 20
_POINTS = 320
_COLOURS = ("#4c78a8", "#9a9a9a")
_LIMIT = "#d1495b"
_CELL = "text-align:left;padding:1px 12px 1px 0;border:none;background:none;color:inherit"


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes over the operators of a step."""

    name: str
    bytes: Sequence[int]


def shown_html(
    title: str, rows: Iterable[tuple[str, str]], picture: str = "", more: tuple[str, str] = ("", "")
) -> str:
    """A title, a row for each name and value, a picture, and ``more`` text behind a heading to click on."""
    cells = "".join(
        f'<tr style="background:none"><td style="{_CELL};opacity:.7">{_safe(name)}</td>'
        f'<td style="{_CELL}">{_safe(value)}</td></tr>'
        for name, value in rows
    )
    heading, text = more
    details = (
        f"<details><summary>{_safe(heading)}</summary>"
        f'<pre style="font-size:12px;overflow-x:auto">{escape(printable(text, lines=True))}</pre></details>'
        if text
        else ""
    )
    return (
        f'<div style="max-width:{_WIDTH}px"><strong>{_safe(title)}</strong>'
        f'<table style="border-collapse:collapse;font-size:13px;margin:4px 0"><tbody>{cells}</tbody></table>'
        f"{picture}{details}</div>"
    )


def curves_svg(curves: Sequence[Curve], *, limit: int | None = None, limit_name: str = "budget") -> str:
    """The curves on one scale that starts at zero, the first one filled, and a limit as a line."""
    drawn = [curve for curve in curves if curve.bytes]
    if not drawn:
        return ""
    most = max(1, limit or 0, *(max(curve.bytes) for curve in drawn))
    height = _TOP + _HEIGHT + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'style="width:100%;height:auto" font-family="sans-serif" font-size="11" fill="currentColor">'
    ]
    paths = [_path(curve, most, _COLOURS[k % len(_COLOURS)], filled=k == 0) for k, curve in enumerate(drawn)]
    parts += reversed(paths)
    parts.append(_label(_LEFT - 6, _y(most, most) + 4, format_bytes(most), "end"))
    parts.append(_label(_LEFT - 6, _y(0, most) + 2, "0 B", "end"))
    if limit is not None:
        y = _y(limit, most)
        ends = f'x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="{_LIMIT}" stroke-dasharray="5 4"/>')
    x: float = _LEFT
    for k, curve in enumerate(drawn):
        x = _legend(parts, x, curve.name, _COLOURS[k % len(_COLOURS)])
    if limit is not None:
        _legend(parts, x, f"{limit_name} {format_bytes(limit)}", _LIMIT)
    return "".join((*parts, "</svg>"))


def _safe(text: str) -> str:
    return escape(printable(text))


def _y(value: float, most: int) -> float:
    return _TOP + _HEIGHT * (1 - value / most)


def _path(curve: Curve, most: int, colour: str, *, filled: bool) -> str:
    """Steps from left to right; of many operators the largest of each few."""
    each = max(1, -(-len(curve.bytes) // _POINTS))
    values = [max(curve.bytes[k : k + each]) for k in range(0, len(curve.bytes), each)]
    across = (_WIDTH - _LEFT) / len(values)
    points = [
        f"{_LEFT + x * across:.1f},{_y(value, most):.1f}"
        for k, value in enumerate(values)
        for x in (k, k + 1)
    ]
    if filled:
        points = [f"{_LEFT},{_y(0, most):.1f}", *points, f"{_WIDTH},{_y(0, most):.1f}"]
        return f'<polygon points="{" ".join(points)}" fill="{colour}" fill-opacity=".55" stroke="{colour}"/>'
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'


def _label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_safe(text)}</text>'


def _legend(parts: list[str], x: float, text: str, colour: str) -> float:
    y = _TOP + _HEIGHT + _BOTTOM - 4
    parts.append(f'<rect x="{x:.0f}" y="{y - 8}" width="10" height="8" fill="{colour}"/>')
    parts.append(_label(x + 14, y, text))
    return x + 14 + 6.5 * len(text) + 16
