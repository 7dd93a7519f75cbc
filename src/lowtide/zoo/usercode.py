"""A step from somebody's own file, addressed as ``path/to/file.py:function``.

The function takes nothing and returns what ``lowtide.fit`` takes: ``(loss_of, model, *batch)``, a function, a
module and the batch, such that ``loss_of(model, *batch)`` is the scalar loss. A batch is whatever that
function takes: tensors, and tuples, lists and dicts of them. ``(model, batch, loss)`` is taken as well, where
a tuple or list is spread: ``loss(model, *batch)``. The file is run, as its owner asks for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.files import is_file
from lowtide.nested import mapped
from lowtide.suggest import did_you_mean
from lowtide.zoo.base import Built, TargetError

__all__ = ["build_code"]

WANTED = "(loss_of, model, batch), such that loss_of(model, batch) is the loss and model a torch.nn.Module"


def build_code(path: str, function: str, device: torch.device, seed: int) -> Built:
    """The step that a function of this file returns, with its tensors on the device."""
    name = f"{path}:{function}"
    if not is_file(path):
        raise TargetError(f"{path}: there is no such file; give path/to/file.py:function")
    with _own_randomness(device, seed), _beside(path):
        made, place = _call(_run(path), path, function)
    loss, model, batch = _parts(place, made)
    try:
        model = model.to(device)
        batch = tuple(mapped(lambda part: _moved(part, device), part) for part in batch)
        trains = any(parameter.requires_grad for parameter in model.parameters())
    except Exception as error:
        raise TargetError(
            f"{place}: the step cannot be moved to {device}: {_said(error)}; try --device cpu"
        ) from error
    return Built(model, batch, loss, name, trains)


@contextlib.contextmanager
def _own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch draws from the seed; the state from before is back afterwards."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


@contextlib.contextmanager
def _beside(path: str) -> Iterator[None]:
    """Inside, modules that lie beside the file can be imported, as when it is run as a script."""
    folder = str(Path(path).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _run(path: str) -> ModuleType:
    whole = str(Path(path).resolve())
    digest = hashlib.sha256(os.fsencode(whole)).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"lowtide_target_{digest}", whole)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path}: cannot be imported; give path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and inspect look a class's module up here.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit among them
        del sys.modules[spec.name]
        raise TargetError(f"{_where(path, error)}: the file cannot be run: {_said(error)}") from error
    return module


def _call(module: ModuleType, path: str, function: str) -> tuple[object, str]:
    """What the function returns, and where it is."""
    made = vars(module).get(function)
    if not callable(made):
        problem = "is not a function" if function in vars(module) else "does not exist"
        known = [name for name, value in vars(module).items() if _defined(value, module)]
        there = f" Functions there: {', '.join(known)}" if known else ""
        raise TargetError(f"{path}: {function!r} {problem} there.{did_you_mean(function, known)}{there}")
    line = _first_line(made, path)
    place = f"{path}:{line}" if line else path
    try:
        return made(), f"{place}: {function}()"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        at = _where(path, error)
        at = place if at == path else at  # it was not even entered
        raise TargetError(f"{at}: {function}() failed: {_said(error)}") from error


def _defined(value: object, module: ModuleType) -> bool:
    """Whether it is a function of this file that an address may name."""
    if not isinstance(value, FunctionType) or value.__name__.startswith("_"):
        return False
    return value.__module__ == module.__name__


def _first_line(made: Callable[..., Any], path: str) -> int | None:
    """Where a function of this file begins."""
    code = getattr(inspect.unwrap(made), "__code__", None)
    if not isinstance(code, CodeType) or code.co_filename != str(Path(path).resolve()):
        return None
    return code.co_firstlineno


def _where(path: str, error: BaseException) -> str:
    """The file, with the last of its lines that led to the error."""
    whole = str(Path(path).resolve())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == whole]
    if isinstance(error, SyntaxError) and error.filename == whole:
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else path


def _said(error: BaseException) -> str:
    """The exception in one line."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:  # it cannot even say what it is
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _parts(place: str, made: object) -> tuple[Callable[..., Any], nn.Module, tuple[Any, ...]]:
    """The function that gives the loss, the model, and its arguments behind the model."""
    if not isinstance(made, tuple | list) or len(made) < 2:
        count = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise TargetError(f"{place} returned a {type(made).__name__}{count}; wanted {WANTED}")
    if isinstance(made[1], nn.Module):
        loss, model, *batch = made
    elif isinstance(made[0], nn.Module) and len(made) == 3:
        model, inputs, loss = made
        batch = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    else:
        kinds = ", ".join(type(part).__name__ for part in made)
        raise TargetError(f"{place} returned ({kinds}); wanted {WANTED}")
    if not callable(loss) or isinstance(loss, Tensor):
        raise TargetError(f"{place}: the function of the loss is a {type(loss).__name__}; wanted {WANTED}")
    _check_call(place, loss, model, batch)
    return loss, model, tuple(batch)


def _check_call(place: str, loss: Callable[..., Any], model: nn.Module, batch: Sequence[Any]) -> None:
    """Refuse a loss that takes other arguments than it will get."""
    try:
        signature = inspect.signature(loss)
    except (ValueError, TypeError):  # nobody knows what it takes
        return
    try:
        signature.bind(model, *batch)
    except TypeError as error:
        got = ", ".join(["model", *(type(one).__name__ for one in batch)])
        raise TargetError(
            f"{place}: the function of the loss takes {signature} and gets ({got}): {error}; return loss_of, "
            "model, batch for loss_of(model, batch), or loss_of, model, x, y for loss_of(model, x, y)"
        ) from error


def _moved(part: Any, device: torch.device) -> Any:
    """A tensor or a module on the device; anything else as it is."""
    if isinstance(part, nn.Module):
        return part.to(device)
    if isinstance(part, Tensor):
        return part.detach().to(device).requires_grad_(part.requires_grad)
    return part
