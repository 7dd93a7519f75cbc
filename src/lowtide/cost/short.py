"""Second runs that are shorter than the first: they start from what the first one found out.

BatchNorm in training reads its input twice, once for mean and deviation and once for its result. Backward
keeps both statistics anyway, so a second run needs the second half alone. Whether that gives the same bits
depends on the kernels of the device: it is used only where a measurement has found that it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["saved_results", "short_run"]

aten = torch.ops.aten
_BATCH_NORM = (aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default)
_EITHER = (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default)
_TRAINING = 5
_STATISTICS = (1, 2)


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
) -> torch.Tensor:
    """The first result of a BatchNorm from its statistics, by the kernels that its own second half has."""
    if source.is_cuda:
        made: torch.Tensor = torch.batch_norm_elemt(source, weight, bias, mean, inverse, eps)
        return made
    scale = inverse * weight
    shift = torch.addcmul(bias, mean, scale, value=-1)
    form = [1, -1] + [1] * (source.dim() - 2)
    return torch.addcmul(shift.view(form), source, scale.view(form))
