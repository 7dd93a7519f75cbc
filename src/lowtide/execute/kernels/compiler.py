"""Whether there is a compiler for the groups of a step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.inductor_internals import kernel_compiler

__all__ = ["MISSING", "can_compile", "kernel_compiler"]

MISSING = {
    "cpu": "a C++ compiler, for kernels='fused' on the CPU: install g++, or name one by the variable CXX",
    "cuda": "Triton, for kernels='fused' on the GPU: pip install triton",
}
"""What to do where there is none."""


def can_compile(arguments: Sequence[Any]) -> bool:
    """Whether groups can be compiled for a step of these arguments; a warning says what is missing."""
    kinds = {one.device.type for one in arguments if isinstance(one, torch.Tensor)}
    kind = "cuda" if "cuda" in kinds else "cpu"
    if kernel_compiler(kind) is not None:
        return True
    warnings.warn(f"eager kernels are taken, as there is no compiler. Missing: {MISSING[kind]}", stacklevel=2)
    return False
