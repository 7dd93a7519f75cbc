"""Second runs that are shorter than the first: they start from what the first one found out.

BatchNorm in training reads its input twice, once for mean and deviation and once for its result. Backward
keeps both statistics anyway, so a second run needs the second half alone, and can add a tensor and apply a
ReLU on the way where they follow it. Whether that gives the same bits depends on the kernels of the device:
it is used only where a measurement has found that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["ALONE", "TAILS", "joins", "saved_results", "short_run"]

aten = torch.ops.aten
_BATCH_NORM = (aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default)
_EITHER = (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default)
_TRAINING = 5
_STATISTICS = (1, 2)
ALONE = ""
TAILS = ("relu", "add", "add,relu")
"""What may follow in the same run."""


def saved_results(target: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the results that a short second run reads; none where there is no such run."""
    training = target in _BATCH_NORM or (target in _EITHER and args[_TRAINING] is True)
    return _STATISTICS if training and args[1] is not None and args[2] is not None else ()


def short_run(
    source: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    eps: float,
    other: torch.Tensor | None = None,
    relu: bool = False,
) -> torch.Tensor:
    """The first result of a BatchNorm from its statistics, with what follows it."""
    if source.is_cuda:
        if joins(source):
            from lowtide.cost.normalize import normalized

            return normalized(source, weight, bias, mean, inverse, other, relu)
        made: torch.Tensor = torch.batch_norm_elemt(source, weight, bias, mean, inverse, eps)
    else:
        scale = inverse * weight
        shift = torch.addcmul(bias, mean, scale, value=-1)
        form = [1, -1] + [1] * (source.dim() - 2)
        made = torch.addcmul(shift.view(form), source, scale.view(form))
    made = made if other is None else made.add_(other)
    return made.relu_() if relu else made


def joins(source: torch.Tensor) -> bool:
    """Whether there is one kernel for the BatchNorm of this input and for what follows it."""
    return source.is_cuda and source.is_contiguous() and source.dim() >= 2 and _has_triton()


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
