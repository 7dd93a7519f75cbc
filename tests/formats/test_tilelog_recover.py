"""The input and the kernels worked out from a tile log, and the step computed again from them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lowtide.cost import Step
from lowtide.errors import FormatError
from lowtide.formats import tilelog
from lowtide.formats.tilelog.model import Log, PrintedTensor
from lowtide.formats.tilelog.recover import Recovered, recompute, recover

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
DATA = (DOCUMENTS / "004_45d0f2a7989644f5.txt").read_bytes()
TEXT = DATA.decode()
CONV1, POOL1, CONV2, POOL2 = 139784840008080, 139784840008224, 139783032421920, 139784839957760


@pytest.fixture(scope="module")
def step() -> Step:
    return tilelog.read(DATA)


@pytest.fixture(scope="module")
def log(step: Step) -> Log:
    return tilelog.log_of(step)


@pytest.fixture(scope="module")
def recovered(step: Step) -> Recovered:
    return recover(step)


def array(printed: PrintedTensor) -> np.ndarray:
    return np.array(printed.values).reshape(printed.shape[2:])


def naive_step(image: np.ndarray, kernels: list[np.ndarray]) -> float:
    """The loss with plain loops: convolution with a border of zeros, maximum of four, twice."""
    for kernel in kernels:
        padded = np.pad(image, 1)
        height, width = image.shape
        out = np.zeros_like(image)
        for i, j in itertools.product(range(3), range(3)):
            out += kernel[i, j] * padded[i : i + height, j : j + width]
        image = out.reshape(height // 2, 2, width // 2, 2).max(axis=(1, 3))
    return float(image.sum())


def test_recovered_values_explain_the_log(log, recovered):
    assert recovered.input.shape == (16, 16)
    assert recovered.input.min() > 0
    assert recovered.input.max() < 1
    assert recovered.equations == {CONV1: 256 + 256 + 64, CONV2: 64 + 576}
    assert max(recovered.residuals.values()) < 1e-4
    # the gradient of a lone 1 is the kernel: the corner of the second convolution shows it
    assert recovered.kernels[CONV2][0, 0] == pytest.approx(0.2054, abs=1e-4)


def test_recomputed_step_gives_all_256_printed_gradients(step, log, recovered):
    again = recompute(step, recovered)
    for label in ("input ref grad", "input grad"):
        assert np.abs(again.input_gradient - array(log.printed(label)[0])).max() < 6.5e-5
    assert again.largest_error < 6.5e-5
    assert again.unsettled == ()
    for one in log.operators:
        printed = log.printed("ref grad_input", operator=one.id)[0]
        assert np.abs(again.gradients[one.id] - array(printed)).max() < 1e-4
    assert np.abs(again.outputs[POOL1] - recovered.inputs[CONV2]).max() < 1e-4


def test_gradient_of_a_plain_implementation_is_the_printed_one(log, recovered):
    kernels = [recovered.kernels[CONV1], recovered.kernels[CONV2]]
    printed = array(log.printed("input grad")[0])
    h = 1e-6  # the step is linear between changes of the maxima
    for y, x in itertools.product(range(16), range(16)):
        up, down = recovered.input.copy(), recovered.input.copy()
        up[y, x] += h
        down[y, x] -= h
        slope = (naive_step(up, kernels) - naive_step(down, kernels)) / (2 * h)
        assert slope == pytest.approx(printed[y, x], abs=1e-4)


SCALED = {
    ("ref grad_input", CONV1),
    ("grad_in in conv2d", CONV1),
    ("TiledSplitFunction bwd", None),
    ("TiledSplitFunction.big_grad_in", None),
    ("input ref grad", None),
    ("input grad", None),
}


def doubled(one: PrintedTensor, log: Log, recovered: Recovered) -> PrintedTensor:
    """The tensor as a log prints it in which the first kernel is twice as large."""
    values = one.values
    if (one.label, one.operator) in SCALED:
        values = tuple(2 * value for value in values)
    elif one.label == "local last ++ input":
        record = next(tile for tile in log.tiles if tile.coord == one.tile).forward.of(CONV2)
        padded = np.pad(2 * recovered.inputs[CONV2], 1)
        values = tuple(padded[record.unclamped.shift((1, 1)).slices()].reshape(-1).tolist())
    return msgspec.structs.replace(one, values=values)


def test_another_log_gives_another_kernel(step, log, recovered):
    tensors = [doubled(one, log, recovered) for one in log.tensors]
    plain = msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(log, tensors=tuple(tensors))))
    graph = msgspec.structs.replace(step.graph, attributes={"tilelog": plain})
    text = tilelog.write(msgspec.structs.replace(step, graph=graph)).data
    other_step = tilelog.read(text)
    other = recover(other_step)
    assert np.abs(other.kernels[CONV1] - 2 * recovered.kernels[CONV1]).max() < 2e-4
    assert np.abs(other.kernels[CONV2] - recovered.kernels[CONV2]).max() < 1e-9
    assert recompute(other_step, other).largest_error < 2e-4


def test_another_printed_input_is_another_recovered_input(recovered):
    assert TEXT.count("0.0301") > 1
    other = recover(tilelog.read(TEXT.replace("0.0301", "0.0303").encode()))
    changed = np.argwhere(other.input != recovered.input)
    assert len(changed) == 1
    assert other.input[tuple(changed[0])] == 0.0303


def test_an_input_that_the_tiles_print_differently_is_refused():
    with pytest.raises(FormatError, match=r"input grad .. input.*printed as"):
        tilelog.read(TEXT.replace("0.0301", "0.0401", 1).encode())


def test_gradients_that_no_kernel_explains_are_refused():
    assert TEXT.count("0.2934") == TEXT.count(
        "0.2934,"
    )  # the largest gradient of the input, wherever printed
    step = tilelog.read(TEXT.replace("0.2934", "0.3934").encode())
    with pytest.raises(FormatError, match=f"no kernel of {CONV1} explains"):
        recover(step)


def test_a_gradient_that_is_not_at_the_maximum_is_refused(step, log, recovered):
    image = recovered.input.copy()
    image[:2, :2] = np.flip(image[:2, :2])
    other = Recovered(image, recovered.kernels, recovered.inputs, recovered.equations, recovered.residuals)
    with pytest.raises(FormatError, match="not the largest"):
        recompute(step, other)


def test_kernels_are_not_settled_by_gradients_of_zero():
    zeros = re.sub(r"\b0\.\d{4}\b", "0.0000", re.sub(r"\d\.\d{4}e-\d\d", "0.0000e+00", TEXT))
    step = tilelog.read(zeros.encode())
    with pytest.raises(FormatError, match=f"settle only 0 of 9 elements of the kernel of {CONV1}"):
        recover(step)


def test_maxima_too_close_for_four_digits_are_taken_from_the_log(step, recovered):
    plain = recompute(step, recovered)
    windows = plain.outputs[CONV1].reshape(8, 2, 8, 2).transpose(0, 2, 1, 3).reshape(8, 8, 4)
    order = windows.argsort(axis=-1)
    gap = np.take_along_axis(windows, order, -1)[..., 3] - np.take_along_axis(windows, order, -1)[..., 2]
    row, column = np.unravel_index(gap.argmin(), gap.shape)
    assert 1e-4 < gap.min() < 1e-3  # the log settles all of them, this one barely
    second = int(order[row, column, 2])
    image = recovered.input.copy()
    image[2 * row + second // 2, 2 * column + second % 2] += 1.1 * gap.min() / recovered.kernels[CONV1][1, 1]
    other = Recovered(image, recovered.kernels, recovered.inputs, recovered.equations, recovered.residuals)
    again = recompute(step, other)
    assert again.unsettled == ((POOL1, row, column),)
    assert (again.input_gradient == plain.input_gradient).all()
