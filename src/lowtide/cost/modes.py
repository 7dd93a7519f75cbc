"""Modes of PyTorch that belong to a thread: gradients, autocast, and what the dispatcher leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from lowtide.device_internals import exclude_keys, excluded_keys

__all__ = ["Modes"]


class Modes:
    """Autocast, whether gradients are recorded, and what the dispatcher leaves out, as now in this thread."""

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        self._autocast = [(device, torch.get_autocast_dtype(device)) for device in on]
        self._caches = torch.is_autocast_cache_enabled()
        self._excluded = excluded_keys()
        self._inference = torch.is_inference_mode_enabled()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are as they were."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            for device, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self._caches))
            yield

    @contextlib.contextmanager
    def in_a_thread(self) -> Iterator[None]:
        """The same in a new thread: inside of an operator of a dispatch mode, autograd is left out."""
        inference = torch.inference_mode() if self._inference else contextlib.nullcontext()
        with inference, exclude_keys(self._excluded), self.again():
            yield
