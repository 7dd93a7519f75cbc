"""``torch.compiler.is_compiling()`` inside a step says what it says in eager: no.

Libraries ask it to take another way where they are compiled: Hugging Face builds an attention mask then that
eager leaves out, and attention runs by another kernel, with other last bits and other random numbers. Torch's
own code is told the truth: it leaves out what Dynamo cannot trace. Next they ask whether a stream is being
captured, which Dynamo does not know how to ask: nobody captures one while a step is compiled.

A file whose way of eager cannot be captured is told the truth too, and takes the other.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.torch_internals import ConstantVariable, SkipFunctionVariable

__all__ = ["Answers", "as_in_eager", "asked_by"]

_ANSWERS = "lowtide_answers"
_TORCHS = str(Path(torch.__file__).parent)
_QUESTIONS = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting)
_OF_STREAMS = torch.cuda.is_current_stream_capturing
_SKIPPED = getattr(torch.xpu, "is_current_stream_capturing", _OF_STREAMS)  # torch 2.10 has none
"""The same question, in a file that Dynamo does not look into."""


@dataclass(slots=True)
class Answers:
    """Who is told what while functions are compiled for a backend."""

    everybody: bool = False
    """Whether all are told that they are compiled, as they are for a backend without answers."""
    files: set[str] = field(default_factory=set)
    """Files of code that is told so."""
    asked: set[str] = field(default_factory=set)
    """Files of code that has asked."""

    def given_to(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """The backend, for which these answers are given."""
        setattr(backend, _ANSWERS, self)
        return backend


def asked_by(line: str, answers: Answers) -> str:
    """The file that a line such as ``file:12`` is in, where it has asked and was told no; else nothing."""
    file = line.rpartition(":")[0]
    return file if file in answers.asked - answers.files else ""


def as_in_eager(handlers: MutableMapping[Any, Any], found: Callable[[Any], Any], mark: str) -> None:
    """Change what Dynamo answers; ``found`` gives the backend of ours among those around it, or None."""
    for question in (*_QUESTIONS, _OF_STREAMS):
        handler = handlers.get(question)
        if (question in _QUESTIONS and handler is None) or hasattr(handler, mark):
            continue
        handlers[question] = changed = _answering(handler or _as_torch_does, found)
        setattr(changed, mark, True)
    method = SkipFunctionVariable.call_function
    if not hasattr(method, mark):
        changed = _no_stream(method, found)
        setattr(changed, mark, True)
        setattr(SkipFunctionVariable, "call_function", changed)  # noqa: B010


def _no_stream(method: Callable[..., Any], found: Callable[[Any], Any]) -> Callable[..., Any]:
    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if self.value is _SKIPPED and hasattr(found(tx.output.compiler_fn), _ANSWERS):
            return ConstantVariable.create(False)
        return method(self, tx, *args, **kwargs)

    return call_function


def _as_torch_does(*_: Any) -> None:
    """What Dynamo does with a function that it has no handler for."""


def _answering(handler: Callable[..., Any], found: Callable[[Any], Any]) -> Callable[..., Any]:
    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        said = handler(self, tx, *args, **kwargs)
        backend = found(tx.output.compiler_fn)
        answers: Answers | None = getattr(backend, _ANSWERS, None)
        if tx.export or answers is None or tx.f_code.co_filename.startswith(_TORCHS):
            return said
        files = _asking(tx)
        answers.asked |= files
        return said if answers.everybody or files & answers.files else ConstantVariable.create(False)

    return answer


def _asking(tx: Any) -> set[str]:
    """The file that the question stands in, and the one that calls it: libraries wrap the question."""
    first = file = tx.f_code.co_filename
    while file == first and getattr(tx, "parent", None) is not None:
        tx = tx.parent
        file = tx.f_code.co_filename
    return {first, file}
