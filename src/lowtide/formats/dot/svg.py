"""Pictures of a step: its Graphviz file laid out and drawn as SVG."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

from lowtide.cost import Step
from lowtide.errors import ConvertError, ToolError
from lowtide.formats.base import Format, Written
from lowtide.formats.dot.folded import BOXES, write_folded
from lowtide.formats.dot.read import read_dot, recognise_dot
from lowtide.formats.dot.write import write_dot
from lowtide.formats.losses import Part, losses_of

__all__ = ["FORMAT", "MAX_NODES", "SVG_FORMAT", "WHOLE", "draw_dot", "draw_svg", "write_svg"]

WHOLE = 40
"""So many tensors and operators are drawn one by one where nobody says how; more are folded."""

MAX_NODES = 2000
"""Layout takes time that grows faster than the graph; larger ones would not end."""

_SECONDS = 120
_DRAW = (
    "import sys, pygraphviz\n"
    "source = sys.stdin.buffer.read().decode()\n"
    "sys.stdout.buffer.write(pygraphviz.AGraph(string=source).draw(format='svg', prog='dot'))\n"
)
_SHOWN = {
    Part.NAMES, Part.ROLES, Part.PHASES, Part.SHAPES, Part.DTYPES, Part.BOXES, Part.PORTS, Part.SHAPE_ONLY,
    Part.CONTROL, Part.COPIES, Part.UPDATES,
}  # fmt: skip
_INSTALL = (
    'pip install "lowtide[svg]", or install Graphviz with the package manager of your system, '
    "so that `dot` is on the PATH"
)


def write_svg(step: Step) -> Written:
    """The graph as an SVG picture, with what of the step it does not show; a large one is folded."""
    return draw_svg(step, BOXES if _nodes(step) > WHOLE and step.graph.ops else None)


def draw_svg(step: Step, boxes: int | None) -> Written:
    """The graph as an SVG picture in at most so many boxes; None draws every tensor and operator."""
    if boxes is not None:
        folded = write_folded(step, boxes)
        return Written(_render(folded.data), folded.losses)
    nodes = _nodes(step)
    if nodes > MAX_NODES:
        raise ConvertError(
            f"a picture of {nodes} tensors and operators cannot be laid out; the limit is {MAX_NODES}. "
            "Draw it folded, with --fold instead of --all"
        )
    losses = losses_of(step, _SHOWN)
    return Written(_render(write_dot(step).data), (*losses, "a picture: it cannot be read back"))


def draw_dot(step: Step, boxes: int | None) -> Written:
    """The Graphviz file of such a picture."""
    return write_dot(step) if boxes is None else write_folded(step, boxes)


def _nodes(step: Step) -> int:
    return len(step.graph.tensors) + len(step.graph.ops)


def _render(dot: bytes) -> bytes:
    command = _command()
    try:
        done = subprocess.run(command, input=dot, capture_output=True, timeout=_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise ToolError(
            f"Graphviz did not lay out the graph within {_SECONDS} seconds. "
            "Draw it in fewer boxes, with --fold"
        ) from None
    except OSError as error:
        raise ToolError(
            f"Graphviz could not be started: {error}; write the graph with --to dot instead"
        ) from None
    start = done.stdout.find(b"<?xml")
    if done.returncode or start < 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else f"exit status {done.returncode}"
        raise ToolError(f"Graphviz failed: {why}; write the graph with --to dot instead")
    return done.stdout[start:]


def _command() -> list[str]:
    """The `dot` program if there is one, else the library inside pygraphviz, in a process of its own."""
    program = shutil.which("dot")
    if program is not None:
        return [program, "-Tsvg"]
    if importlib.util.find_spec("pygraphviz") is None:
        raise ToolError(f"drawing needs Graphviz: {_INSTALL}")
    return [sys.executable, "-c", _DRAW]


FORMAT = Format(
    name="dot",
    title="Graphviz file of the graph",
    recognise=recognise_dot,
    read=read_dot,
    write=write_dot,
    draw=draw_dot,
)
SVG_FORMAT = Format(name="svg", title="picture of the graph", write=write_svg, draw=draw_svg)
