"""What the user's own code may do wrong, said in the user's terms: the line, the reason and the way out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import CellType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from lowtide.errors import CaptureError, LowtideError, RunError
from lowtide.execute.memory.out_of_memory import ran_out
from lowtide.torch_internals import BackendCompilerFailed, TorchDynamoException, storage_id, tree_leaves
from lowtide.trace.refusal import translated, users_line

__all__ = [
    "all_leaves",
    "check_loss",
    "check_number",
    "in_the_users_terms",
    "is_given",
    "modules_in",
    "tensors_of",
    "too_large",
    "users_step",
]


@contextlib.contextmanager
def in_the_users_terms() -> Iterator[None]:
    """While a step is captured: what torch or the user's code raises becomes a CaptureError with the line."""
    with _unlogged(), _blaming(CaptureError, "the step cannot be captured as one graph"):
        try:
            yield
        except (LowtideError, BackendCompilerFailed):
            raise  # ours: what torch cannot trace is a CaptureError already
        except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
            raise translated(error) from error


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, torch logs no traceback beside an error of the user's: the error says it all."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno != logging.ERROR

    log.addFilter(quiet)
    try:
        yield
    finally:
        log.removeFilter(quiet)


def users_step() -> contextlib.AbstractContextManager[None]:
    """While the user's step runs as it is: what it raises becomes a RunError with the line."""
    return _blaming(RunError, "the step fails on these inputs")


@contextlib.contextmanager
def _blaming(kind: type[LowtideError], what: str) -> Iterator[None]:
    """What the user's own code raises becomes such an error with its line; faults of ours stay faults."""
    try:
        yield
    except LowtideError:
        raise
    except (Exception, SystemExit) as error:
        if ran_out(error):
            raise too_large(error) from error
        where = users_line(error)
        if not where:
            raise
        raise kind(f"{where}: {what}: {_said(error)}") from error


def too_large(error: BaseException) -> RunError:
    """The device has no room for the step."""
    return RunError(
        f"the step does not fit into the memory of the device: {_first_line(error)}. Take a smaller batch "
        "or plan it: `lowtide run TARGET --budget auto`"
    )


def modules_in(*values: Any) -> list[nn.Module]:
    """Modules among these values, those that they are methods of, and those that functions close over."""
    found: dict[int, nn.Module] = {}
    for value in values:
        owner = getattr(value, "__self__", None)
        cells = getattr(getattr(value, "__func__", value), "__closure__", None) or ()
        inside = [cell.cell_contents for cell in cells if cell != _EMPTY]
        for one in (value, owner, *inside):
            if isinstance(one, nn.Module):
                found[id(one)] = one
    return list(found.values())


def tensors_of(values: Any) -> list[torch.Tensor]:
    """Tensors among these values."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def all_leaves(*values: Any) -> list[torch.Tensor]:
    """Tensors among these values, and parameters of the modules there."""
    parameters = (p for module in modules_in(*values) for p in module.parameters())
    return [*tensors_of(values), *parameters]


_EMPTY = CellType()


def is_given(tensor: torch.Tensor, function: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether a tensor is an argument of a call, or a buffer, or on the memory of one."""
    modules = modules_in(function, *args, *keywords.values())
    buffers = [buffer for module in modules for buffer in module.buffers()]
    given = [one for one in (*tree_leaves((args, keywords)), *buffers) if isinstance(one, torch.Tensor)]
    return any(one.layout is torch.strided and storage_id(one) == storage_id(tensor) for one in given)


def check_loss(result: Any) -> None:
    """Refuse what has no backward pass of its own; a tensor, or anything else that a function may return."""
    if not isinstance(result, torch.Tensor):
        raise RunError(
            f"the loss must be a tensor to have a backward pass; it is a "
            f"{type(result).__name__}; return the loss itself"
        )
    check_number(tuple(result.shape), result.dtype)
    if not result.requires_grad:
        raise RunError(
            "the loss does not depend on any parameter: there is no backward pass; look for detach "
            "and no_grad"
        )


def check_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a loss that is not a single real number."""
    if torch.Size(shape).numel() != 1:
        raise RunError(
            "the loss must be a single number to have a backward pass; it is a tensor of shape "
            f"{shape}; add it up, as in .sum() or .mean()"
        )
    if not dtype.is_floating_point:
        kind = str(dtype).removeprefix("torch.")
        raise RunError(
            f"the loss must be a real number to have a backward pass; it is of type {kind}; "
            "return one that is computed from floating-point values"
        )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
