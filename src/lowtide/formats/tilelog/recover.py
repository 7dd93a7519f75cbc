"""The input and the kernels of a tile log, worked out from what it prints, and the step computed again.

The log prints no kernel, but every convolution prints what a kernel took and what it gave, to four digits:

- the gradient of its input is the gradient of its output correlated with the kernel, in the untiled step
  and again in every tile;
- the maxima of its output are what the next convolution reads, and the gradient of the pool between them is
  zero everywhere but at these maxima.

All of these are linear in the kernel: far more equations than unknowns, solved by least squares. The input
itself is printed in overlapping parts, one a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.cost import Step
from lowtide.errors import FormatError
from lowtide.formats.tilelog.checks import UNIT, assemble
from lowtide.formats.tilelog.document import log_of
from lowtide.formats.tilelog.model import Log, Operator, PrintedTensor
from lowtide.formats.tilelog.script import (
    CONV_GRADIENT,
    CONV_INPUT,
    FIRST_INPUT,
    POOL_GRADIENT,
    REFERENCE_IN,
    REFERENCE_OUT,
    REFERENCE_RESULT,
    RESULT,
)

__all__ = ["Recomputed", "Recovered", "recompute", "recover"]

Array = NDArray[np.float64]
Equations = tuple[Array, Array]
"""A matrix with a column for each element of a kernel, and what it gives; one row an equation."""

_TIE = 10 * UNIT
"""Maxima closer than this may change places when everything is known to four digits only."""


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What the printed text settles about the values of the step."""

    input: Array
    """Height by width."""
    kernels: dict[int, Array]
    """By the id of their convolution."""
    inputs: dict[int, Array]
    """What every convolution reads, as printed, by the id of the convolution."""
    equations: dict[int, int]
    """How many printed relations each kernel was solved from."""
    residuals: dict[int, float]
    """The largest error that each kernel leaves in one of its relations."""


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """The untiled step computed from recovered values."""

    outputs: dict[int, Array]
    """What every operator gives, by its id."""
    gradients: dict[int, Array]
    """The gradient of every operator's input, by its id."""
    input_gradient: Array
    largest_error: float
    """Against both printed gradients of the input, the tiled and the reference."""
    unsettled: tuple[tuple[int, int, int], ...]
    """Maxima (operator, row, column) too close to call from four digits, taken from the log instead."""


def recover(step: Step) -> Recovered:
    """The input and every kernel; a FormatError where the printed tensors contradict each other."""
    log = log_of(step)
    convolutions = [one for one in log.operators if not one.pools]
    inputs = {one.id: _printed_input(log, one) for one in convolutions}
    kernels: dict[int, Array] = {}
    counts: dict[int, int] = {}
    residuals: dict[int, float] = {}
    for one in convolutions:
        relations = [*_reference_relation(log, one), *_tile_relations(log, one)]
        relations += _forward_relation(log, one, inputs)
        matrix = np.concatenate([left for left, _ in relations])
        given = np.concatenate([right for _, right in relations])
        kernels[one.id], residuals[one.id] = _solve(log, one, matrix, given)
        counts[one.id] = len(given)
    return Recovered(inputs[convolutions[0].id], kernels, inputs, counts, residuals)


def _image(printed: PrintedTensor) -> Array:
    return np.array(printed.values, dtype=np.float64).reshape(printed.shape[2:])


def _printed_input(log: Log, one: Operator) -> Array:
    """What a convolution reads, put together from the parts that the tiles print."""
    label = FIRST_INPUT if one is log.operators[0] else CONV_INPUT
    printed = {piece.tile: piece for piece in log.printed(label, operator=one.id)}
    records = [(tile.forward.of(one.id), printed[tile.coord]) for tile in log.tiles]
    return np.array(
        assemble(one.input_shape, ((record.inpslidx, record.realidx, piece) for record, piece in records))
    )


def _shifted(image: Array, margin: tuple[int, int, int, int], *, backward: bool) -> Iterator[Array]:
    """What each element of a kernel is multiplied with, element by element of the result."""
    left, right, top, bottom = margin
    if backward:
        left, right, top, bottom = right, left, bottom, top
    height, width = image.shape
    padded = np.pad(image, ((top, bottom), (left, right)))
    places = [(y, x) for y in range(top + bottom + 1) for x in range(left + right + 1)]
    for y, x in reversed(places) if backward else places:
        yield padded[y : y + height, x : x + width]


def _columns(log: Log, one: Operator, image: Array, *, backward: bool) -> Array:
    """One plane for each element of the kernel, stacked along the last dimension."""
    return np.stack(list(_shifted(image, log.margin(one.id), backward=backward)), axis=-1)


def _reference_relation(log: Log, one: Operator) -> Iterator[Equations]:
    """The untiled backward pass: the gradient of the input from the gradient of the output."""
    given = _image(log.printed(REFERENCE_IN, operator=one.id)[0])
    planes = _columns(log, one, _image(log.printed(REFERENCE_OUT, operator=one.id)[0]), backward=True)
    yield planes.reshape(given.size, -1), given.reshape(-1)


def _tile_relations(log: Log, one: Operator) -> Iterator[Equations]:
    """The same in every tile, where the gradient outside of the tile's output counts as zero."""
    pool = log.operators[log.operators.index(one) + 1]
    outgoing = {piece.tile: piece for piece in log.printed(POOL_GRADIENT, operator=pool.id)}
    given = {piece.tile: piece for piece in log.printed(CONV_GRADIENT, operator=one.id)}
    for tile in log.tiles:
        whole = np.zeros(one.output_shape[2:])
        whole[tile.forward.of(pool.id).region.slices()] = _image(outgoing[tile.coord])
        planes = _columns(log, one, whole, backward=True)
        region = tile.part if one is log.operators[0] else tile.forward.of(one.id).region
        right = _image(given[tile.coord])
        yield planes[region.slices()].reshape(right.size, -1), right.reshape(-1)


def _forward_relation(log: Log, one: Operator, inputs: dict[int, Array]) -> list[Equations]:
    """The maxima of the output, which the next convolution prints; none for the last one."""
    position = log.operators.index(one)
    pool, following = log.operators[position + 1], log.operators[position + 2 : position + 3]
    if not following:
        return []
    marks = _marks(log, pool)
    planes = _windows(_columns(log, one, inputs[one.id], backward=False), pool)
    chosen = np.take_along_axis(planes, np.maximum(marks, 0)[..., None, None], axis=2)[:, :, 0, :]
    known = marks >= 0
    return [(chosen[known], inputs[following[0].id][known])]


def _windows(planes: Array, pool: Operator) -> Array:
    """Planes by window: rows, columns, elements of the window, planes."""
    across, down = pool.window
    height, width = pool.output_shape[2:]
    split: Array = planes.reshape(height, down, width, across, -1).transpose(0, 2, 1, 3, 4)
    grouped: Array = split.reshape(height, width, down * across, -1)
    return grouped


def _marks(log: Log, pool: Operator) -> NDArray[np.intp]:
    """Which element of every window the log marks as its maximum; -1 where its gradient prints as zero."""
    printed = log.printed(REFERENCE_IN, operator=pool.id)[0]
    marked = _windows(_image(printed)[..., None], pool)[..., 0] != 0
    if (marked.sum(axis=-1) > 1).any():
        raise FormatError(
            f"the gradient of pool {pool.id} is not zero at two elements of one window",
            expected="one maximum a window",
            line=printed.line,
        )
    return np.where(marked.any(axis=-1), marked.argmax(axis=-1), -1)


def _solve(log: Log, one: Operator, matrix: Array, given: Array) -> tuple[Array, float]:
    """The kernel, and the largest error it leaves."""
    line = log.printed(REFERENCE_IN, operator=one.id)[0].line
    solution, _, rank, _ = np.linalg.lstsq(matrix, given, rcond=None)
    if rank < matrix.shape[1]:
        raise FormatError(
            f"the gradients settle only {rank} of {matrix.shape[1]} elements of the kernel of {one.id}",
            expected="gradients that are not all zero",
            line=line,
        )
    residual = float(np.abs(matrix @ solution - given).max())
    # half a digit in what is given, and half a digit in whatever each element was multiplied with
    allowed = UNIT * (1 + float(np.abs(solution).sum()))
    if residual > allowed:
        raise FormatError(
            f"no kernel of {one.id} explains its gradients: the best leaves an error of {residual:.1e}",
            expected=f"an error below {allowed:.1e}",
            line=line,
        )
    kernel: Array = np.asarray(solution, dtype=np.float64).reshape(log.kernel(one.id))
    return kernel, residual


def recompute(step: Step, values: Recovered) -> Recomputed:
    """The untiled step from these values: forward, the sum of its output, and all gradients back.

    Where two elements of a window are too close for four digits, the log's own maximum is taken and named;
    where they are not and the log still marks another one, it contradicts itself: a FormatError.
    """
    log = log_of(step)
    outputs: dict[int, Array] = {}
    chosen: dict[int, NDArray[np.intp]] = {}
    unsettled: list[tuple[int, int, int]] = []
    current = values.input
    for one in log.operators:
        if one.pools:
            windows = _windows(current[..., None], one)[..., 0]
            chosen[one.id], ties = _maxima(log, one, windows)
            unsettled += ties
            current = np.take_along_axis(windows, chosen[one.id][..., None], axis=-1)[..., 0]
        else:
            planes = _columns(log, one, current, backward=False)
            current = planes @ values.kernels[one.id].reshape(-1)
        outputs[one.id] = current
    gradients: dict[int, Array] = {}
    gradient = np.ones_like(current)  # of a sum
    for one in reversed(log.operators):
        if one.pools:
            gradient = _unpool(gradient, chosen[one.id], one)
        else:
            planes = _columns(log, one, gradient, backward=True)
            gradient = planes @ values.kernels[one.id].reshape(-1)
        gradients[one.id] = gradient
    printed = [_image(log.printed(label)[0]) for label in (REFERENCE_RESULT, RESULT)]
    error = max(float(np.abs(gradient - one).max()) for one in printed)
    return Recomputed(outputs, gradients, gradient, error, tuple(unsettled))


def _maxima(log: Log, pool: Operator, windows: Array) -> tuple[NDArray[np.intp], list[tuple[int, int, int]]]:
    """The element that every window gives, and the windows in which the log had to decide."""
    marks, ours = _marks(log, pool), windows.argmax(axis=-1)
    other = (marks >= 0) & (marks != ours)
    lag = windows.max(axis=-1) - np.take_along_axis(windows, np.maximum(marks, 0)[..., None], axis=-1)[..., 0]
    if (other & (lag > _TIE)).any():
        raise FormatError(
            f"pool {pool.id} passes its gradient to an element that is not the largest of its window",
            expected="the gradient at the maximum",
            line=log.printed(REFERENCE_IN, operator=pool.id)[0].line,
        )
    ties = [(pool.id, int(y), int(x)) for y, x in np.argwhere(other)]
    return np.where(other, marks, ours), ties


def _unpool(gradient: Array, chosen: NDArray[np.intp], pool: Operator) -> Array:
    """The gradient of a pool's input: that of its output, at the maxima."""
    across, down = pool.window
    height, width = gradient.shape
    windows = np.zeros((height, width, down * across))
    np.put_along_axis(windows, chosen[..., None], gradient[..., None], axis=-1)
    split = windows.reshape(height, width, down, across).transpose(0, 2, 1, 3)
    whole: Array = split.reshape(pool.input_shape[2:])
    return whole
