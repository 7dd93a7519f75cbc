"""Two locally connected layers and a softmax, as in the data-flow picture of seed 002.

A locally connected layer is a convolution with a kernel of its own at every output position. Weights have the
seed's eight dimensions: outputs, 1, 1, inputs, kernel height and width, output height and width. Parameters
and modules are named as there. The picture does not say which nonlinearity it has, whether its probabilities
are logarithms, nor what the four values of its evaluation are: here a ReLU, logarithms, samples, hits, hits
among the best five, summed loss.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax, nll_loss

from lowtide.zoo.base import Input, Key, Network, Settings, require, sgd

__all__ = ["LOCALLY_CONNECTED", "LocallyConnected", "untied"]

KERNELS = (9, 7)
LEAST = sum(KERNELS) - 1
"""The smallest image of which the second layer leaves one pixel."""


def untied(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of products with a kernel of its own at every output position.

    Works through the positions of the kernel one by one: no copy is larger than the output or the input,
    while all patches at once take as many times the input as the kernel has positions.
    """
    outputs, _, _, inputs, rows, columns, height, width = weight.shape
    count, places = x.shape[0], height * width
    # By place first, so that each position of the kernel is one batched product over all places.
    pixels = x.permute(2, 3, 0, 1).contiguous()
    kernels = weight.reshape(outputs, inputs, rows * columns, places).permute(2, 3, 1, 0).unbind()
    total = x.new_zeros((places, count, outputs))
    for at, kernel in enumerate(kernels):
        row, column = divmod(at, columns)
        patch = pixels[row : row + height, column : column + width].reshape(places, count, inputs)
        total = torch.baddbmm(total, patch, kernel.contiguous())
    return total.reshape(height, width, count, outputs).permute(2, 3, 0, 1)


class _Filter(nn.Module):
    """Untied kernels."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return untied(x, weight)


class _Scale(nn.Module):
    """One scale, and a bias for every value."""

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return a * x + b


class _Layer(nn.Module):
    """Untied kernels, one scale, a bias for every value, a nonlinearity."""

    def __init__(self, inputs: int, outputs: int, kernel: int, size: int) -> None:
        super().__init__()
        left = size - kernel + 1
        self.W = nn.Parameter(torch.empty(outputs, 1, 1, inputs, kernel, kernel, left, left))
        self.a = nn.Parameter(torch.empty(1))
        self.b = nn.Parameter(torch.empty(1, outputs, left, left))
        self.filter, self.filterA, self.filterNL = _Filter(), _Scale(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.filterNL(self.filterA(self.filter(x, self.W), self.a, self.b))
        return out


class _Linear(nn.Module):
    """Scores without a bias, as an image of one pixel."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x.flatten(1), weight.flatten(1))[:, :, None, None]


class _Softmax(nn.Module):
    """Log-probabilities, and the mean cross entropy."""

    def forward(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        probability = log_softmax(scores.flatten(1), 1)
        loss = nll_loss(probability, labels.flatten().long())
        return probability[:, :, None, None], loss.reshape(1, 1, 1, 1)


class _Accuracy(nn.Module):
    """Keeps the share of samples whose label got the best score."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.empty(1), persistent=False)

    def forward(self, values: Tensor) -> None:
        flat = values.flatten()
        self.value.copy_(flat[1:2] / flat[:1])


class _Evaluate(nn.Module):
    """Samples, hits, hits among the best five, summed loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = _Accuracy()

    @torch.no_grad()
    def forward(self, probability: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
        scores, wanted = probability.flatten(1), labels.flatten().long()
        own = scores.gather(1, wanted[:, None])
        # A rank counts the score itself, those equal to it and whatever is not a number: a tie is no hit.
        rank = (~(scores < own)).sum(1)
        hits = torch.stack(((rank <= 1).sum(), (rank <= 5).sum())).to(scores.dtype)
        values = torch.cat((scores.new_full((1,), len(wanted)), hits, -own.sum().reshape(1)))
        kept.copy_(values)
        return values.reshape(4, 1, 1, 1)


class _Classifier(nn.Module):
    """Scores without a bias; ``evaluation`` has samples, hits, hits among the best five, summed loss."""

    evaluation: Tensor

    def __init__(self, inputs: int, classes: int, size: int) -> None:
        super().__init__()
        self.weights1 = nn.Parameter(torch.empty(classes, inputs, size, size))
        self.register_buffer("evaluation", torch.empty(4))
        self.linear1, self.softmax, self.evaluate = _Linear(), _Softmax(), _Evaluate()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear1(x, self.weights1)
        return scores.flatten(1)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy; keeps how good the scores are."""
        probability, loss = self.softmax(scores[:, :, None, None], labels)
        with torch.no_grad():
            self.evaluate.accuracy(self.evaluate(probability, labels, self.evaluation))
        found: Tensor = loss.reshape(())
        return found


class LocallyConnected(nn.Module):
    """Scores of ``classes`` classes for a grey image."""

    def __init__(self, size: int = 41, channels: int = 64, classes: int = 3034) -> None:
        super().__init__()
        first, second = KERNELS
        middle = size - first + 1
        self.L0 = _Layer(1, channels, first, size)
        self.L1 = _Layer(channels, channels, second, middle)
        self.classifier = _Classifier(channels, classes, middle - second + 1)

    def forward(self, data: Tensor) -> Tensor:
        """Scores before the softmax."""
        scores: Tensor = self.classifier(self.L1(self.L0(data)))
        return scores

    def loss(self, data: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy; the buffer ``classifier.evaluation`` says how good the scores were."""
        return self.classifier.loss(self(data), labels)

    def accuracy(self) -> Tensor:
        """The share of samples of the last step whose label got the best score."""
        return self.classifier.evaluate.accuracy.value[0]


def _loss(model: LocallyConnected, data: Tensor, labels: Tensor) -> Tensor:
    return model.loss(data, labels)


def _initialise(model: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(".a"):
            parameter.fill_(1.0)
        elif name.endswith(".b"):
            parameter.zero_()
        else:
            terms = math.prod(parameter.shape[3:6]) if name.endswith(".W") else parameter[0].numel()
            parameter.normal_(0.0, math.sqrt(2.0 / terms), generator=generator)
    for buffer in model.buffers():
        buffer.zero_()


def _check(settings: Settings) -> None:
    why = "kernels of 9 and 7 must leave something"
    require("locallyconnected", "size", settings["size"], lambda size: size >= LEAST, why)


def _inputs(settings: Settings) -> tuple[Input, ...]:
    batch, size = settings["batch"], settings["size"]
    return (
        Input((batch, 1, size, size)),
        Input((batch, 1, 1, 1), classes=settings["classes"], dtype=torch.int32),
    )


DRAWN = {
    "data.output": "data.raw_output",
    "data.output.1": "data.labels_output",
    "data.output->": "raw_data",
    "data.output.1->": "labels",
    "classifier.softmax.output": "classifier.softmax.probability",
    "classifier.softmax.output.1": "classifier.softmax.output",
    "classifier.evaluate.output": "classifier.evaluate.ouptut",
    "classifier.evaluate.output->": "output",
    "update_classifier.weights1": "update_W1",
    "->W": "filters",
    "->weights1": "weights",
    "data.output.1->classifier.softmax": "labels",
    "classifier.softmax.output->classifier.evaluate": "probability",
    "data.output.1->classifier.evaluate": "labels",
}
"""How the picture calls what a drawing calls otherwise; arrows stand for the names of ports."""

LOCALLY_CONNECTED = Network(
    name="locallyconnected",
    summary="untied filters, scale, bias, 3034-way softmax, accuracy, SGD update (seed 002)",
    keys={"batch": Key(256), "size": Key(41), "channels": Key(64), "classes": Key(3034)},
    small="batch=3,size=17,channels=4,classes=10",
    make=lambda settings: LocallyConnected(settings["size"], settings["channels"], settings["classes"]),
    inputs=_inputs,
    loss=_loss,
    initialise=_initialise,
    check=_check,
    update=sgd,
    drawn=DRAWN,
)
