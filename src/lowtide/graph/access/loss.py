"""Losses: sums over the batch and its places, forward and backward."""

from __future__ import annotations

from lowtide.graph.access.call import AccessCall, Indices, Rule, broadcast, same
from lowtide.graph.access.index import Same, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]

_NONE, _MEAN = 0, 1
"""How a loss is reduced, as torch numbers it; 2 is the sum."""


def _scores(places: Indices) -> Indices:
    """Scores of all classes at places: (class), (n, class) or (n, class, height, width)."""
    return (*places[:1], Whole(), *places[1:])


def _nll(call: AccessCall) -> list[Relation]:
    """The loss, and the weight that a mean is divided by. Which class is read depends on the target."""
    scores, target, weight, reduction = (call.value(k) for k in range(4))
    places = call.shape(target) or ()
    loss, total = call.outputs
    place = same(len(places))
    labels = [(target, place), (weight, (Whole(),))]
    if reduction == _NONE:
        return [call.relation(loss, [(scores, _scores(place)), *labels]), call.relation(total, [])]
    scaled = reduction == _MEAN
    return [
        call.relation(loss, [(scores, _scores(place)), *labels], sums=places, scaled=scaled),
        call.relation(total, labels, sums=places),
    ]


def _nll_backward(call: AccessCall) -> list[Relation]:
    """The gradient of the scores, which are asked for their shape alone."""
    gradient, _, target, weight, reduction, _, total = (call.value(k) for k in range(7))
    shape = call.outputs[0]
    classes = Same(min(1, len(shape) - 1))
    place: Indices = (Same(0), *same(len(shape) - 2, 2)) if len(shape) > 1 else ()
    reads = [
        (gradient, place if call.shape(gradient) else ()),
        (target, place),
        (weight, (classes,)),
        *([(total, ())] if reduction == _MEAN else []),
    ]
    return [call.relation(shape, reads)]


def _elementwise(position: int) -> Rule:
    """A loss of each element; how they are reduced stands at this position."""

    def rule(call: AccessCall) -> list[Relation]:
        shape, reduction = call.outputs[0], call.value(position, _MEAN)
        tensors = [call.value(k) for k in range(position)]
        extent = call.shape(tensors[0]) or ()
        reads = [(value, broadcast(call.shape(value) or (), extent)) for value in tensors]
        if reduction == _NONE:
            return [call.relation(shape, reads)]
        return [call.relation(shape, reads, sums=extent, scaled=reduction == _MEAN)]

    return rule


def _elementwise_backward(call: AccessCall) -> list[Relation]:
    shape = call.outputs[0]
    return [call.relation(shape, [(v, broadcast(call.shape(v) or (), shape)) for v in call.values()])]


_PAIRS = "mse_loss smooth_l1_loss huber_loss soft_margin_loss"

RULES: dict[str, Rule] = (
    dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll)
    | dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward)
    | dict.fromkeys(_PAIRS.split(), _elementwise(2))
    | {"binary_cross_entropy": _elementwise(3), "binary_cross_entropy_with_logits": _elementwise(4)}
    | dict.fromkeys(
        [f"{name}_backward" for name in (*_PAIRS.split(), "binary_cross_entropy")], _elementwise_backward
    )
)
