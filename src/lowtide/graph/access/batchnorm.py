"""Normalisation over the batch: with its own statistics in training, with the running ones in evaluation."""

from __future__ import annotations

from typing import Any

from lowtide.graph.access.call import AccessCall, Reads, Rule, Shape, same, whole
from lowtide.graph.access.index import Same, Whole
from lowtide.graph.access.relation import Relation

__all__ = ["RULES"]


def _forward(*, training: bool | None = None, running: int | None = None) -> Rule:
    """The result, its mean and scale, what a kernel keeps for itself, and new running statistics.

    ``training`` is None where an argument says it; ``running`` is the output with the first of the two new
    running statistics.
    """

    def rule(call: AccessCall) -> list[Relation]:
        given, weight, bias, mean, variance = (call.value(k) for k in range(5))
        if call.op.overload == "no_stats":
            mean, variance, trains = None, None, bool(call.value(3))
        else:
            trains = bool(call.value(5)) if training is None else training
        result, *others = call.outputs
        space = result[2:]
        scales = [(weight, (Same(1),)), (bias, (Same(1),))]
        if trains:
            place: Reads = [(given, (Whole(), Same(1), *whole(space)))]
            statistics: Reads = [(given, (Whole(), Same(0), *whole(space)))]
        else:
            place = [(given, same(len(result))), (mean, (Same(1),)), (variance, (Same(1),))]
            statistics = [(mean, (Same(0),)), (variance, (Same(0),))]
        found = [call.relation(result, [*place, *scales])]
        for k, shape in enumerate(others, start=1):
            if shape != result[1:2]:
                found.append(call.everything(shape))
            elif running is not None and k >= running:
                old = (mean, variance)[k - running]
                found.append(call.relation(shape, [*(statistics if trains else []), (old, (Same(0),))]))
            else:
                found.append(call.relation(shape, statistics))
        return found

    return rule


def _backward(gradient: int, given: int, training: int | None, mask: int | None, reserve: int | None) -> Rule:
    """Gradients of the image, of the weight and of the bias; the figures say where arguments stand."""

    def rule(call: AccessCall) -> list[Relation]:
        one = _Gradients(call, call.value(gradient), call.value(given))
        one.trains = training is None or bool(call.value(training))
        one.reserve = None if reserve is None else call.value(reserve)
        asked = [True] * 3 if mask is None else call.value(mask)
        parts = [p for p, a in zip((one.of_image, one.of_weight, one.of_bias), asked, strict=True) if a]
        return [part(shape) for part, shape in zip(parts, call.outputs, strict=True)]

    return rule


class _Gradients:
    """The three relations of a backward call."""

    def __init__(self, call: AccessCall, gradient: Any, given: Any) -> None:
        self.call, self.gradient, self.given = call, gradient, given
        self.trains, self.reserve = True, None
        self.image = call.shape(given) or ()
        self.place = (Same(1), Same(0), *same(len(self.image) - 2, 2))
        self.sums = (self.image[0], *self.image[2:])

    def of_image(self, shape: Shape) -> Relation:
        """In training the gradient of an element depends on all elements of its channel."""
        call, channel = self.call, (Same(1),)
        if not self.trains:
            reads: Reads = [(self.gradient, same(len(shape))), (call.value(4), channel)]
        else:
            everywhere = (Whole(), Same(1), *whole(shape[2:]))
            reads = [(self.gradient, everywhere), (self.given, everywhere), *self._statistics(channel)]
        return call.relation(shape, [*reads, (call.value(2), channel), *self._kept()])

    def of_weight(self, shape: Shape) -> Relation:
        """A sum over everything but channels, once the statistics are there."""
        told = self._statistics((Same(0),))
        reads = [(self.gradient, self.place), (self.given, self.place), *told, *self._kept()]
        return self.call.relation(shape, reads, sums=self.sums)

    def of_bias(self, shape: Shape) -> Relation:
        """A sum over everything but channels."""
        return self.call.relation(shape, [(self.gradient, self.place)], sums=self.sums)

    def _statistics(self, channel: tuple[Same, ...]) -> list[tuple[Any, tuple[Same, ...]]]:
        """Those of the batch, or the running ones."""
        return [(self.call.value(k), channel) for k in ((5, 6) if self.trains else (3, 4))]

    def _kept(self) -> Reads:
        """What forward's kernel left for this one."""
        return [(self.reserve, whole(self.call.shape(self.reserve) or ()))]


RULES: dict[str, Rule] = {
    "native_batch_norm": _forward(),
    "cudnn_batch_norm": _forward(),
    "_native_batch_norm_legit": _forward(),
    "_native_batch_norm_legit_functional": _forward(running=3),
    "_native_batch_norm_legit_no_training": _forward(training=False),
    "_batch_norm_with_update": _forward(training=True),
    "_batch_norm_with_update_functional": _forward(training=True, running=4),
    "_batch_norm_no_update": _forward(training=False),
    "native_batch_norm_backward": _backward(0, 1, 7, 9, None),
    "batch_norm_backward": _backward(0, 1, 7, 9, 10),
    "cudnn_batch_norm_backward": _backward(1, 0, None, None, 8),
}
