"""``emit``: one operator of a step, written into the graph of a tile."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from lowtide.errors import CaptureError, GraphError
from lowtide.graph import Graph, Op, Rect
from lowtide.graph.access import Relation, access
from lowtide.trace.operators.site import InputPart, Site, bind
from lowtide.trace.operators.sums import total_weight
from lowtide.trace.operators.table import ADDS_UP, handler, reason
from lowtide.trace.step.builder import Call

__all__ = ["emit", "loss_total", "supported"]


def supported(op: Op, graph: Graph, wanted: Rect | None = None, output: int = 0) -> str | None:
    """None where the operator can be run on parts of its inputs, else the reason why not, in words.

    With ``wanted``, whether this part of the result can be had: some operators have dimensions that must
    stay whole.
    """
    return reason(op, graph, wanted, output)


def emit(
    target: fx.Graph,
    call: Call,
    op: Op,
    graph: Graph,
    parts: Sequence[InputPart | None],
    wanted: Rect,
    output: int = 0,
    over: Rect | None = None,
    total: fx.Node | None = None,
    *,
    channels_last: bool = False,
    relation: Relation | None = None,
) -> fx.Node:
    """A node with the wanted box of one of the operator's outputs, appended with all that it takes.

    ``parts`` has a InputPart for each of ``op.inputs``: what ``access`` says is needed, or more; None where
    nothing is read. ``over`` is a part of the axes that the access relation sums over: the node then holds
    what this part adds to the output. Of a mean over targets ``total`` is the weight of all of them
    (``loss_total``). With ``channels_last`` images lie in memory that way from the first convolution on.
    ``relation`` is what ``access`` says of this output, where it is known, and that this part is supported.
    """
    why = reason(op, graph, wanted, output) if relation is None else None
    if why is not None:
        raise CaptureError(f"{op.label}: {op.kind} cannot be run on parts: {why}")
    write = handler(op)
    assert write is not None
    relation = relation or access(graph, op).relations[output]
    if wanted.empty or not Rect.of_shape(relation.shape).contains(wanted):
        raise GraphError(f"{op.label}: {wanted} is no part of an output of shape {relation.shape}")
    if over is not None and over.empty:
        raise GraphError(f"{op.label}: nothing is summed over {over}")
    over = None if over == Rect.of_shape(relation.sums) else over
    if over is not None and write not in ADDS_UP:
        raise CaptureError(f"{op.label}: {op.kind} cannot be computed as a sum of parts")
    reach = relation.reach(wanted, over)
    site = Site(
        target,
        call,
        op,
        graph,
        bind(call, op, graph, parts),
        wanted,
        output,
        over,
        total,
        relation.inside(reach),
        reach,
        channels_last,
    )
    return write(site)


def loss_total(
    target: fx.Graph, call: Call, op: Op, graph: Graph, parts: Sequence[InputPart | None]
) -> fx.Node:
    """A node with the weight of all targets of an ``nll_loss``: what its mean is divided by.

    ``parts`` is as for ``emit``; the targets are there as a whole, and so are the weights of classes.
    """
    if not op.kind.startswith("aten.nll_loss"):
        raise CaptureError(f"{op.label}: {op.kind} has no weight of targets")
    relation = access(graph, op).relations[0]
    box = Rect.of_shape(relation.shape)
    arguments = bind(call, op, graph, parts)
    return total_weight(
        Site(target, call, op, graph, arguments, box, 0, None, None, relation.needs(box), relation.reach(box))
    )
