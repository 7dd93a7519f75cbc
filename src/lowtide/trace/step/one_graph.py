"""A function compiled as one graph: by the way of eager, or as libraries are written to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lowtide.errors import CaptureError
from lowtide.trace.eager.dynamo import fresh, lowtides
from lowtide.trace.eager.is_compiling import Answers, asked_by

__all__ = ["one_graph", "with_answers"]

_RETRIES = 12
"""So many ways are tried at most: each file that asks whether it is compiled may be told so."""


def one_graph(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    answers: Answers,
    *,
    dynamic: bool | None = False,
) -> Callable[..., Any]:
    """The function compiled whole for a backend of Lowtide's, with these answers."""
    ours = answers.given_to(lowtides(backend))
    return torch.compile(fresh(function), backend=ours, fullgraph=True, dynamic=dynamic)


def with_answers(attempt: Callable[[Answers], None], answers: Answers | None = None) -> None:
    """Attempt a capture with the answers of eager, then with others as far as it is refused.

    A file whose way of eager cannot be captured is told that it is compiled, then all are. A CaptureError:
    no way can be captured.
    """
    answers = answers or Answers()
    for left in reversed(range(_RETRIES)):
        try:
            attempt(answers)
        except CaptureError as error:  # noqa: PERF203
            file = asked_by(error.line, answers)
            if file and left > 1:
                answers = replace(answers, files={*answers.files, file})
            elif answers.asked and not answers.everybody and left:
                answers = Answers(everybody=True)
            else:
                raise
        else:
            return
