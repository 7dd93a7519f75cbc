"""One self-contained HTML page: what a step took before, and what it takes inside each budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from lowtide.printable import printable
from lowtide.units import format_bytes, format_seconds

__all__ = ["Case", "page"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 260, 74, 24
_COLOURS = ("#4c6a92", "#c2693c", "#5b8c5a", "#8a5a94", "#a08a35")


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run the step: its figures, and the bytes that were live while each operator ran."""

    name: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int
    seconds: float
    bitwise: bool
    live_bytes: tuple[int, ...]
    resident_bytes: int
    note: str = ""
    difference: float = 0.0
    """The largest relative difference of gradients, where they are not bitwise equal."""
    eager_seconds: float = 0.0
    """What eager PyTorch took in turns with this case, so that both met the same machine."""

    @property
    def over_eager(self) -> str:
        """The time over that of eager PyTorch, where that is known."""
        return f"{self.seconds / self.eager_seconds:.2f} ×" if self.eager_seconds else "–"

    @property
    def result(self) -> str:
        """How the results compare with those of eager PyTorch."""
        return "bitwise equal" if self.bitwise else f"gradients within {self.difference:.0e}"


def page(title: str, about: str, cases: Sequence[Case], command: str) -> str:
    """The page: a table, and the memory of every case on the same scale."""
    most = max((case.peak_bytes for case in cases), default=1)
    rows = "\n".join(map(_row, cases))
    pictures = "\n".join(_picture(case, most, k) for k, case in enumerate(cases))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child {{ text-align: left; }}
figure {{ margin: 1.5rem 0; }}
figcaption {{ font-weight: 600; }}
svg {{ width: 100%; height: auto; }}
svg text {{ font: 12px system-ui, sans-serif; fill: #555; }}
.note {{ color: #666; }}
</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(printable(about))}</p>
<table>
<thead><tr><th>run</th><th>budget</th><th>predicted peak</th><th>measured peak</th>
<th>time</th><th>over eager</th><th>loss, gradients, buffers</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
{pictures}
<p class="note">Made by <code>{escape(command)}</code>. Bytes as the allocator counted them.</p>
</body>
</html>
"""


def _row(case: Case) -> str:
    cells = [
        escape(case.name),
        "–" if case.budget_bytes is None else format_bytes(case.budget_bytes),
        "–" if case.predicted_bytes is None else format_bytes(case.predicted_bytes),
        format_bytes(case.peak_bytes),
        format_seconds(case.seconds),
        case.over_eager,
        case.result,
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _picture(case: Case, most: int, number: int) -> str:
    """Live bytes by operator as an area, leaves darker, the budget as a line; nothing where unknown."""
    if not case.live_bytes:
        return ""
    colour = _COLOURS[number % len(_COLOURS)]
    high, wide = _HEIGHT - _BOTTOM - 10, _WIDTH - _LEFT - 10

    def y(size: float) -> float:
        return round(10 + high * (1 - size / most), 1)

    steps = max(1, len(case.live_bytes))
    points = [f"{_LEFT},{y(0)}"]
    for k, size in enumerate(case.live_bytes):
        left, right = _LEFT + wide * k / steps, _LEFT + wide * (k + 1) / steps
        points += [f"{left:.1f},{y(size)}", f"{right:.1f},{y(size)}"]
    points.append(f"{_LEFT + wide},{y(0)}")
    right = _LEFT + wide
    parts = [f'<polygon points="{" ".join(points)}" fill="{colour}" opacity="0.75"/>']
    parts.append(
        f'<rect x="{_LEFT}" y="{y(case.resident_bytes)}" width="{wide}" '
        f'height="{y(0) - y(case.resident_bytes):.1f}" fill="#222" opacity="0.35"/>'
    )
    if case.budget_bytes is not None and case.budget_bytes <= most:
        line = y(case.budget_bytes)
        parts.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{line}" y2="{line}" stroke="#b00" stroke-dasharray="6 4"/>'
            f'<text x="{right}" y="{line - 4}" text-anchor="end">'
            f"budget {format_bytes(case.budget_bytes)}</text>"
        )
    parts += [
        f'<text x="{_LEFT - 6}" y="{y(most) + 4}" text-anchor="end">{format_bytes(most)}</text>',
        f'<text x="{_LEFT - 6}" y="{y(0)}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{len(case.live_bytes)} operator runs, forward then backward; '
        f"dark: parameters, buffers and inputs ({format_bytes(case.resident_bytes)})</text>",
    ]
    note = f'<p class="note">{escape(case.note)}</p>' if case.note else ""
    label = f"{case.name}: {format_bytes(case.peak_bytes)}"
    return (
        f"<figure><figcaption>{escape(label)}</figcaption>{note}"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)} live bytes">'
        f"{''.join(parts)}</svg></figure>"
    )
