"""Why a step cannot be captured, in the user's terms: the line, the reason and the way out."""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

from lowtide.errors import CaptureError, GraphBreakError, LowtideError
from lowtide.torch_internals import (
    BackendCompilerFailed,
    RestartAnalysis,
    ShortenTraceback,
    TorchRuntimeError,
)

__all__ = [
    "calls_torch",
    "line_of",
    "place",
    "raise_through",
    "refuse_graph_breaks",
    "refuse_what_depends_on_values",
    "traced",
    "translated",
    "users_line",
    "why_broken",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OURS = str(Path(__file__).parent.parent)
_TORCHS = str(Path(torch.__file__).parent)
_DETECTED = "Error detected in "
"""How the warning begins that tells, beside an error of a backward, which forward call it belongs to."""

_WAY_OUT = "Move it out of the compiled function, or compile the parts before and after it apart"
_BACKWARD = "Return the loss and call its backward outside of the compiled function"
_RAISED = "Observed exception"
"""How torch begins to tell that the user's code raises an exception."""
_HINT = re.compile(r"^\s*Hint: (.*)$", re.MULTILINE)
_EXPLANATION = re.compile(r"^\s*Explanation: (.*)$", re.MULTILINE)
_CONTEXT = re.compile(r"^\s*Developer debug context: (.*)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_NO_HELP = ("report an issue", "fundamental", "torch._dynamo", "torch.cond", "set_stance")
"""Hints that lead away from a captured step, or nowhere."""


def refuse_graph_breaks(module: fx.GraphModule) -> None:
    """Raise a GraphBreakError if torch handed over a part of the function because it could not go on."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is not None and getattr(reason, "graph_break", False):
        where = place(getattr(reason, "user_stack", ())) or "the captured function"
        told = _sentence(where, str(reason.reason))
        raise GraphBreakError(f"{told} lowtide.fit plans such a step graph by graph")


def refuse_what_depends_on_values(module: fx.GraphModule) -> None:
    """Raise a GraphBreakError where sizes of tensors, or numbers, are known only once the function runs."""
    for node in module.graph.nodes:
        if node.meta.get("unbacked_bindings"):
            value = node.meta.get("example_value")
            name = getattr(node.target, "__name__", str(node.target))
            shape = f"the shape of what {name} gives depends on values"
            number = f"the step depends on the number that {name} reads from a tensor"
            where = line_of(node.meta.get("stack_trace") or "") or "the captured function"
            what = shape if isinstance(value, torch.Tensor) else number
            raise GraphBreakError(
                f"{where}: {what}, so no plan can be made for it. Keep it in tensors of a fixed shape "
                "(torch.where, a mask that is multiplied), or leave this part out of the compiled function"
            )


def line_of(stack_trace: str) -> str:
    """``file:line`` of the innermost frame outside of torch in a printed stack."""
    return _last(_FRAME.findall(stack_trace))


def translated(error: Exception) -> CaptureError:
    """The CaptureError for what torch raised while it captured a function in one piece."""
    inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
    text = str(inner)
    where = place(getattr(inner, "real_stack", ())) or _last(_FRAME.findall(text)) or "the captured function"
    if isinstance(inner, TorchRuntimeError):
        found = re.search(r"got \w+\((['\"])(.*)\1\)", text)
        problem = (found.group(2) if found else text.partition("\n")[0]).rstrip(".")
        failed = CaptureError(
            f"{where}: the step fails on these inputs: {problem}. Does it run without capture?"
        )
        failed.line = where
        return failed
    if text.lstrip().startswith(_RAISED):
        return CaptureError(_sentence(where, text))
    broken = GraphBreakError(_sentence(where, text))
    broken.line = where
    return broken


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """While torch traces: what it raises becomes a GraphBreakError, faults of ours stay what they are."""
    told: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            yield
    except (LowtideError, ShortenTraceback, RestartAnalysis):  # the last: torch asks itself to start anew
        raise
    except Exception as error:
        blame = _blamed(error)
        if blame is not None and _is_ours(blame) and blame.f_code not in _CALLING_TORCH:
            raise
        hints = [str(one.message) for one in told if str(one.message).startswith(_DETECTED)]
        frames = _FRAME.findall(str(error)) or _FRAME.findall(hints[-1] if hints else "")
        where = _last(frames) or users_line(error) or "the captured function"
        broken = GraphBreakError(_sentence(where, f"{type(error).__name__}: {error}"))
        broken.line = where
        raise broken from error
    finally:
        for one in told:
            if not str(one.message).startswith(_DETECTED):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


_CALLING_TORCH: set[CodeType] = {inspect.unwrap(traced).__code__}
"""The code of functions of ours that do no more than call torch's tracing."""


def calls_torch(function: _Function) -> _Function:
    """Mark a function that does no more than call torch's tracing: an error there is torch's."""
    _CALLING_TORCH.add(function.__code__)
    return function


def _blamed(error: BaseException) -> FrameType | None:
    """The innermost frame outside of torch that led to the error, and outside of code made on the fly."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith((_TORCHS, "<"))]
    return own[-1] if own else None


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def users_line(error: BaseException) -> str:
    """``file:line`` where the user's own code raised this, or nothing where Lowtide did."""
    frame = _blamed(error)
    if frame is None or _is_ours(frame):
        return ""
    lines = [line for one, line in traceback.walk_tb(error.__traceback__) if one is frame]
    return f"{frame.f_code.co_filename}:{lines[-1]}"


def raise_through(error: LowtideError) -> NoReturn:
    """Raise the error from a backend so that ``torch.compile`` hands it to the user as it is.

    Torch wraps whatever a backend raises in BackendCompilerFailed, except its own ShortenTraceback: the
    error becomes one of those too, and stays what it was.
    """
    kind, text = type(error), str(error)
    methods = {"__module__": kind.__module__, "__str__": lambda _: text}
    both: Any = type(kind.__name__, (kind, ShortenTraceback), methods)
    shown = both.__new__(both, *error.args)
    shown.__dict__.update(error.__dict__, first_useful_frame=inspect.currentframe())
    raise shown from error


def place(stack: Iterable[Any]) -> str:
    """``file:line`` of the innermost frame that is not torch's own, or nothing."""
    return _last((frame.filename, frame.lineno) for frame in stack)


def _last(frames: Iterable[tuple[str, Any]]) -> str:
    places = [(file, line) for file, line in frames if file]
    own = [one for one in places if "/torch/" not in one[0]]
    return "{}:{}".format(*(own or places)[-1]) if places else ""


def why_broken(reason: Any) -> str:
    """Where and why a graph ends, in a line."""
    where = place(getattr(reason, "user_stack", ())) or "somewhere"
    return f"{where}: {_kind(str(reason.reason)).rstrip('.')}"


def _kind(reason: str) -> str:
    kind = reason.strip().partition("\n")[0]
    if kind.startswith("generic_jump"):
        return "Data-dependent branching: which way the code goes depends on the value of a tensor"
    return kind


def _sentence(where: str, reason: str) -> str:
    """The place, what torch says about it in a few words, and what to do."""
    kind = _kind(reason)
    context = _CONTEXT.search(reason)
    if kind == _RAISED and context:
        raised = context.group(1).removeprefix("raised exception ")
        return f"{where}: the step raises {raised} while it is captured. Does it run without capture?"
    explanation = _EXPLANATION.search(reason)
    told = (explanation.group(1).strip() if explanation else "") or (context.group(1) if context else "")
    about = f"{kind}: {told}" if told else kind
    hints = [hint for hint in _HINT.findall(reason) if not any(word in hint for word in _NO_HELP)]
    way_out = _BACKWARD if "Tensor.backward()" in kind else _WAY_OUT
    advice = " ".join([f"{way_out}.", *hints[:2]])
    return f"{where}: the step cannot be captured as one graph here. {about.rstrip('.')}. {advice}"
