"""The body of VGG-16 by lightstream (pip install --no-deps lightstream), which streams tiles of the image twice.

Once forward, without gradients, for the last map; once forward and backward, with the gradient of the loss there.
Its core alone is loaded: the package itself wants PyTorch Lightning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import warnings
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def available() -> bool:
    """Whether lightstream can be imported."""
    return importlib.util.find_spec("lightstream") is not None


def _streaming() -> Any:
    if "lightstream" not in sys.modules:
        found = importlib.util.find_spec("lightstream")
        assert found is not None
        sys.modules["lightstream"] = importlib.util.module_from_spec(found)  # which is not run
    return importlib.import_module("lightstream.core.scnn.scnn").StreamingCNN


class Streamed:
    """The step of a model with ``features`` and ``score``, with tiles of the image of ``tile`` pixels a side.

    Its backward pass asks for autocast on CUDA, and computes in bfloat16 there, whatever the type of the model.
    ``single`` keeps it from doing so.
    """

    def __init__(self, model: Any, tile: int, *, single: bool) -> None:
        self.score, self.single = model.score, single
        shape = (1, 3, tile, tile)
        layers = [nn.Identity() if isinstance(one, nn.ReLU) else _copied(one) for one in model.features]
        parameter = next(model.parameters())
        features = nn.Sequential(*layers).to(parameter.device, parameter.dtype)
        with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()):
            self.network = _streaming()(features, shape, verbose=False)
        self.features = self.network.stream_module
        for k, layer in enumerate(self.features):
            if isinstance(layer, nn.Identity):  # what it looks for in a network is not disturbed by them
                self.features[k] = nn.ReLU(inplace=True)
        self.tile, self.forwards, self.backwards = tile, 0, 0
        self.features.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self.backwards += 1
        else:
            self.forwards += 1

    def __call__(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss; gradients are added to the parameters."""
        self.forwards = self.backwards = 0
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            last = self.network.forward(image).detach().requires_grad_()
            loss = cross_entropy(self.score(last), labels)
            loss.backward()
            with patch.object(torch, "autocast", _as_it_is) if self.single else contextlib.nullcontext():
                self.network.backward(image, last.grad)
        return loss.detach()

    def parameters(self) -> list[nn.Parameter]:
        """In the order of the model's."""
        return [*self.features.parameters(), *self.score.parameters()]


def _as_it_is(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def _copied(layer: Any) -> nn.Module:
    if isinstance(layer, nn.MaxPool2d):
        return nn.MaxPool2d(layer.kernel_size)
    copy = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, padding=layer.padding)
    copy.load_state_dict(layer.state_dict())
    return copy
