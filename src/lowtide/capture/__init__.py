"""A PyTorch step as a Graph: ``lowtide.capture(function, *example)``.

The package and the function share their name, and importing any module of the package binds that name in
``lowtide`` to the package. So the package itself is what is called; it imports torch when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowtide.needs import needs_torch

if TYPE_CHECKING:
    from lowtide.capture.step import Captured


class _Capture(ModuleType):
    """A package that can be called."""

    def __call__(self, function: Callable[..., Any], /, *example: Any, **keywords: Any) -> Captured:
        """As :func:`lowtide.capture.step.capture`, which has the words."""
        with needs_torch("capturing a step"):
            from lowtide.capture.step import capture
        return capture(function, *example, **keywords)


sys.modules[__name__].__class__ = _Capture
