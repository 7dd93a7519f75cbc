"""Something that is run for its figures alone: values and random states are put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch

from lowtide.execute.compile.bits import same_bits

__all__ = ["untouched"]


@contextlib.contextmanager
def untouched(changing: Sequence[torch.Tensor], devices: Iterable[torch.device]) -> Iterator[None]:
    """Afterwards these tensors hold what they held, and so do the generators of the host and the devices."""
    before = [(tensor, tensor.detach().clone()) for tensor in changing]
    drawing = sorted({device for device in devices if device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices=drawing):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if not same_bits(tensor, value):  # BatchNorm in eager changes buffers and does not say so
                        tensor.copy_(value)
