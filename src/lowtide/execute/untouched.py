"""Something that is run for its figures alone: values and random states are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

__all__ = ["untouched"]


@contextlib.contextmanager
def untouched(changing: Sequence[torch.Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards these tensors hold what they held, and so do the generators of the host and the devices."""
    before = [(tensor, tensor.detach().clone(), tensor._version) for tensor in changing]
    drawing = sorted({device for device in devices if device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices=drawing):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value, version in before:
                    if tensor._version != version:
                        tensor.copy_(value)
