"""The address map of a step as SVG: time to the right, memory upwards, a box for every allocation."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from lowtide.printable import printable
from lowtide.units import format_bytes

__all__ = ["addresses_svg"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 960, 480, 24, 66
_MOST = 5_000
"""So many boxes are drawn at most, the largest first."""
_COLOURS = {
    "tensor": "#4c6a92",
    "workspace": "#c2693c",
    "again": "#a08a35",
    "fetched": "#5b8c5a",
    "given": "#7a7a7a",
    "leaf": "#8a5a94",
    "copy": "#7a7a7a",
    "restore": "#7a7a7a",
    "other": "#7a7a7a",
}
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333; }
.title { font-size: 15px; font-weight: 600; }
.box { stroke: #fff; stroke-width: .4; fill-opacity: .85; }
.arena { fill: #f4f1ea; stroke: #888; }
.live { stroke: #b00; stroke-dasharray: 6 4; }
"""


def addresses_svg(view: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The whole file; it needs nothing from anywhere else.

    ``rows`` have ``id``, ``use``, ``birth``, ``death``, ``bytes`` and ``offset``.
    """
    arena, events = max(1, view["arena_bytes"]), max(1, view["events"])
    width, height = _WIDTH + 2 * _LEFT, _TOP + _HEIGHT + 50
    across, up = _WIDTH / events, _HEIGHT / arena
    chosen = sorted(
        (row for row in rows if row["bytes"]), key=lambda row: row["bytes"] * (row["birth"] - row["death"])
    )

    def box(row: dict[str, Any]) -> str:
        x, y = _LEFT + row["birth"] * across, _TOP + _HEIGHT - (row["offset"] + row["bytes"]) * up
        about = (
            f"{row['id']} ({row['use']}): {format_bytes(row['bytes'])} at {row['offset']:,}, "
            f"events {row['birth']} to {row['death']}"
        )
        return (
            f'<rect class="box" x="{x:.2f}" y="{y:.2f}" width="{(row["death"] - row["birth"]) * across:.2f}" '
            f'height="{row["bytes"] * up:.2f}" fill="{_COLOURS[row["use"]]}">'
            f"<title>{escape(printable(about))}</title></rect>"
        )

    drawn = [box(row) for row in chosen[:_MOST]]
    title = f"{printable(view['target'])}: {format_bytes(view['arena_bytes'])} in one arena"
    about = (
        f"dashed: the most that is live at once, {format_bytes(view['live_bytes'])}; "
        f"{view['efficiency']:.2%} of the arena"
    )
    if len(chosen) > _MOST:
        about += f"; the {_MOST:,} largest of {len(chosen):,} allocations"
    line = _TOP + _HEIGHT - view["live_bytes"] * up
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="{_LEFT}" y="26">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="46">{escape(about)}</text>',
        f'<rect class="arena" x="{_LEFT}" y="{_TOP}" width="{_WIDTH}" height="{_HEIGHT}"/>',
        *drawn,
        f'<line class="live" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{line:.2f}" y2="{line:.2f}"/>',
        _legend(chosen, view["clock"], events),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(rows: Sequence[dict[str, Any]], clock: str, events: int) -> str:
    below = _TOP + _HEIGHT + 18
    parts = [f'<text x="{_LEFT}" y="{below}">{events:,} events of the clock: {escape(clock)}</text>']
    uses = [use for use in _COLOURS if any(row["use"] == use for row in rows)]
    for k, use in enumerate(uses):
        x = _LEFT + k * 90
        parts.append(f'<rect x="{x}" y="{below + 10}" width="10" height="10" fill="{_COLOURS[use]}"/>')
        parts.append(f'<text x="{x + 14}" y="{below + 19}">{use}</text>')
    return "".join(parts)
