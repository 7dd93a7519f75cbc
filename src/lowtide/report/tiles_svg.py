"""A picture of one tile as SVG: every tensor with the cuts, the tile's share, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lowtide.printable import printable

__all__ = ["tiles_svg"]

_SIDE, _GAP, _TEXT, _ACROSS = 150, 34, 34, 6
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333; }
.title { font-size: 15px; font-weight: 600; }
.whole { fill: #f4f1ea; stroke: #888; }
.cut { stroke: #b9b2a3; stroke-width: .6; }
.needed { fill: #c2693c; fill-opacity: .45; }
.share { fill: #4c6a92; fill-opacity: .85; }
"""


def tiles_svg(view: dict[str, Any]) -> str:
    """The whole file; it needs nothing from anywhere else."""
    picture = view["picture"]
    panels = _changes(picture["panels"])
    across = min(_ACROSS, max(1, len(panels)))
    down = -(-len(panels) // across)
    width = across * (_SIDE + _GAP) + _GAP
    height = 60 + down * (_SIDE + _TEXT + _GAP)
    drawn = [
        _panel(panel, _GAP + (k % across) * (_SIDE + _GAP), 60 + (k // across) * (_SIDE + _TEXT + _GAP))
        for k, panel in enumerate(panels)
    ]
    grid = "x".join(map(str, view["grid"]))
    title = f"{printable(view['target'])}: tile {picture['tile']} of {grid}, cut by {view['own']}"
    about = (
        f"blue: its disjoint share; orange: what it needs of other tiles; "
        f"{view['overlap']['elements']:.3f} times the elements of one run"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text class="title" x="{_GAP}" y="26">{escape(title)}</text>\n'
        f'<text x="{_GAP}" y="44">{escape(about)}</text>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _changes(panels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Panels without those that show the same parts as the one before."""
    kept: list[dict[str, Any]] = []
    keys = ("phase", "size", "share", "needed")
    for panel in panels:
        if not kept or any(panel[key] != kept[-1][key] for key in keys):
            kept.append(panel)
    return kept


def _panel(panel: dict[str, Any], x: float, y: float) -> str:
    rows, columns = panel["size"]
    unit = _SIDE / max(rows, columns)

    def rect(kind: str, box: Sequence[Sequence[float]]) -> str:
        (top, bottom), (left, right) = box
        return (
            f'<rect class="{kind}" x="{x + left * unit:.2f}" y="{y + top * unit:.2f}" '
            f'width="{(right - left) * unit:.2f}" height="{(bottom - top) * unit:.2f}"/>'
        )

    def line(a: float, b: float, c: float, d: float) -> str:
        return f'<line class="cut" x1="{a:.2f}" y1="{b:.2f}" x2="{c:.2f}" y2="{d:.2f}"/>'

    across, down = columns * unit, rows * unit
    cuts = [line(x, y + at * unit, x + across, y + at * unit) for at in panel["cuts"][0][1:]]
    cuts += [line(x + at * unit, y, x + at * unit, y + down) for at in panel["cuts"][1][1:]]
    needed = panel["needed"]
    size = "x".join(str(hi - lo) for lo, hi in needed)
    label = f"{printable(panel['name'])} ({panel['phase']})"
    parts = [rect("whole", [(0, rows), (0, columns)]), rect("needed", needed), rect("share", panel["share"])]
    below = y + down + 14
    return (
        f"<g><title>{escape(f'{label}: needs {size} of {rows}x{columns}')}</title>"
        + "".join((*parts, *cuts))
        + f'<text x="{x}" y="{below:.2f}">{escape(_short(label))}</text>'
        f'<text x="{x}" y="{below + 13:.2f}">{size} of {rows}x{columns}</text></g>'
    )


def _short(text: str, most: int = 27) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"
