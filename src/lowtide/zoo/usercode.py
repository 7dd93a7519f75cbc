"""A step from somebody's own file, addressed as ``path/to/file.py:function``.

The function takes nothing and returns ``(model, batch, loss)``: a module, the tuple of example inputs, and a
function such that ``loss(model, *batch)`` is the scalar loss. The file is run, as its owner asks for.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.files import is_file
from lowtide.suggest import did_you_mean
from lowtide.zoo.base import Built, TargetError

__all__ = ["build_code"]

WANTED = "(model, batch, loss): a torch.nn.Module, a tuple of its inputs, a function of model and inputs"


def build_code(path: str, function: str, device: torch.device, seed: int) -> Built:
    """The step that a function of this file returns, with its tensors on the device."""
    name = f"{path}:{function}"
    if not is_file(path):
        raise TargetError(f"{path}: there is no such file; an address is path/to/file.py:function")
    with _own_randomness(device, seed), _beside(path):
        module = _run(path)
        made = _call(module, path, function)
    model, batch, loss = _parts(name, made)
    trains = any(parameter.requires_grad for parameter in model.parameters())
    return Built(model.to(device), tuple(_moved(part, device) for part in batch), loss, name, trains)


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
        raise TargetError(f"{path}: cannot be imported; an address is path/to/file.py:function")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and inspect look a class's module up here.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise TargetError(f"{_where(path, whole, error)}: the file cannot be run: {_said(error)}") from error
    return module


def _call(module: ModuleType, path: str, function: str) -> object:
    known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    made = getattr(module, function, None)
    if not callable(made):
        problem = "is not a function" if hasattr(module, function) else "does not exist"
        raise TargetError(f"{path}: {function!r} {problem} there.{did_you_mean(function, known)}")
    try:
        return made()
    except (Exception, SystemExit) as error:
        place = _where(path, str(Path(path).resolve()), error)
        raise TargetError(f"{place}: {function}() failed: {_said(error)}") from error


def _where(path: str, whole: str, error: BaseException) -> str:
    """The file, with the last of its lines that led to the error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == whole]
    if isinstance(error, SyntaxError) and error.filename == whole:
        lines.append(error.lineno)
    return f"{path}:{lines[-1]}" if lines else path


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _parts(name: str, made: object) -> tuple[nn.Module, tuple[Any, ...], Any]:
    if not isinstance(made, tuple | list) or len(made) != 3:
        count = f" of {len(made)}" if isinstance(made, tuple | list) else ""
        raise TargetError(f"{name}: returned a {type(made).__name__}{count}; wanted {WANTED}")
    model, batch, loss = made
    if not isinstance(model, nn.Module):
        raise TargetError(f"{name}: the model is a {type(model).__name__}; wanted {WANTED}")
    if not isinstance(batch, tuple | list):
        hint = "; write (x,) for a single input" if isinstance(batch, Tensor) else ""
        raise TargetError(f"{name}: the batch is a {type(batch).__name__}{hint}; wanted {WANTED}")
    if not callable(loss):
        raise TargetError(f"{name}: the loss is a {type(loss).__name__}; wanted {WANTED}")
    return model, tuple(batch), loss


def _moved(part: Any, device: torch.device) -> Any:
    """The same with every tensor on the device, inside of tuples, lists and dicts too."""
    if isinstance(part, Tensor):
        moved = part.detach().to(device)
        return moved.requires_grad_(part.requires_grad)
    if isinstance(part, dict):
        return {key: _moved(value, device) for key, value in part.items()}
    if isinstance(part, tuple) and hasattr(part, "_fields"):
        return type(part)(*(_moved(value, device) for value in part))
    if isinstance(part, tuple | list):
        return type(part)(_moved(value, device) for value in part)
    return part
