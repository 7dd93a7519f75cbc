"""What differs between the versions of torch and Python that are supported, in one place."""

from __future__ import annotations

import sys
from typing import Any

import torch._dynamo.config

__all__ = ["trust_no_dict_versions"]


def trust_no_dict_versions(python: tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    """On Python 3.13.0, have torch check all it assumed about a model before it runs a compiled function.

    There a dictionary that changes may keep its version (github.com/python/cpython/issues/125608), by which
    torch 2.10 and 2.11 tell that nothing changed: after ``model.eval()`` it would go on training.
    """
    config: Any = torch._dynamo.config
    if python == (3, 13, 0) and getattr(config, "use_recursive_dict_tags_for_guards", False):
        config.use_recursive_dict_tags_for_guards = False
