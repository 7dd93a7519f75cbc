"""``torch.compiler.is_compiling()`` inside a step says what it says in eager: no.

Libraries ask it to take another way where they are compiled: Hugging Face builds an attention mask then that
eager leaves out, and attention runs by another kernel, with other last bits and other random numbers. Torch's
own code is told the truth: it leaves out what Dynamo cannot trace. Next they ask whether a stream is being
captured, which Dynamo does not know how to ask: nobody captures one while a step is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch

from lowtide.torch_internals import ConstantVariable

__all__ = ["as_in_eager", "as_when_compiled", "asked_whether_compiling"]

_MARK = "lowtide_says_compiling"
_ASKED = "lowtide_was_asked"
_TORCHS = str(Path(torch.__file__).parent)
_QUESTIONS = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling)
_OF_STREAMS = (torch.cuda.is_current_stream_capturing, torch.xpu.is_current_stream_capturing)


def as_when_compiled(backend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend; functions that are compiled for it are told that they are compiled."""
    setattr(backend, _MARK, True)
    return backend


def asked_whether_compiling(backend: Callable[..., Any]) -> bool:
    """Whether code outside of torch has asked while a function was compiled for this backend."""
    return bool(getattr(backend, _ASKED, False))


def as_in_eager(handlers: MutableMapping[Any, Any], found: Callable[[Any], Any], mark: str) -> None:
    """Change what Dynamo answers; ``found`` gives the backend of ours among those around it, or None."""
    for question in (*_QUESTIONS, *_OF_STREAMS):
        handler = handlers.get(question)
        if (question in _QUESTIONS and handler is None) or hasattr(handler, mark):
            continue
        handlers[question] = changed = _answering(handler or _as_torch_does, found)
        setattr(changed, mark, True)


def _as_torch_does(*_: Any) -> None:
    """What Dynamo does with a function that it has no handler for."""


def _answering(handler: Callable[..., Any], found: Callable[[Any], Any]) -> Callable[..., Any]:
    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        said = handler(self, tx, *args, **kwargs)
        backend = found(tx.output.compiler_fn)
        if tx.export or backend is None or tx.f_code.co_filename.startswith(_TORCHS):
            return said
        setattr(backend, _ASKED, True)
        return said if hasattr(backend, _MARK) else ConstantVariable.create(False)

    return answer
