"""The state of a step on a mesh, saved by torch.distributed.checkpoint and read on any number of devices.

A folder has checkpoints side by side, and a file that names the last one. A checkpoint is written under
another name and moved when it is whole; then that file is written. Whoever is killed leaves the one before.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lowtide.documents import read_document, write_document
from lowtide.errors import FileError, RunError
from lowtide.execute.shards.meeting import Meeting
from lowtide.execute.shards.saved.index import IndexedReader, checksums, write_index
from lowtide.graph import Rect
from lowtide.nested import mapped

__all__ = [
    "RANDOM",
    "SavedPart",
    "load_checkpoint",
    "model_parts",
    "optimizer_groups",
    "optimizer_parts",
    "save_checkpoint",
]

RANDOM = "random state"
"""What the state of the generator of random numbers is saved as."""
_KEPT = 2
_FLOAT = "float:"
"""How texts begin that stand for numbers which JSON has not: infinite ones, and NaN."""
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a process has of a tensor."""

    tensor: torch.Tensor
    box: Rect
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> SavedPart:
        """All of a tensor, which all processes have alike."""
        return cls(tensor, Rect.of_shape(tensor.shape), tuple(tensor.shape))

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where it is in the whole."""
        return ChunkStorageMetadata(torch.Size(self.box.lo), torch.Size(self.box.shape))


class _Latest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which checkpoint of a folder is the last one, and what was saved beside its tensors."""

    name: str
    groups: list[dict[str, Any]]
    """Settings of the optimizer, group by group."""
    extra: dict[str, Any]
    lowtide: Literal["checkpoint"] = "checkpoint"
    version: Literal[1] = 1


class _Save(DefaultSavePlanner):
    def __init__(self, parts: Mapping[str, SavedPart]) -> None:
        super().__init__(flatten_state_dict=False, dedup_save_to_lowest_rank=False)
        self._parts = parts

    def create_local_plan(self) -> SavePlan:
        """An item for each part; what several processes have is written once."""
        items = []
        for name, part in self._parts.items():
            data = TensorWriteData(
                part.chunk, TensorProperties.create_from_tensor(part.tensor), torch.Size(part.shape)
            )
            index = MetadataIndex(name, part.chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written under an index."""
        return self._parts[index.fqn].tensor.detach()


class _Load(DefaultLoadPlanner):
    def __init__(self, parts: Mapping[str, SavedPart]) -> None:
        super().__init__(flatten_state_dict=False)
        self._parts = parts

    def create_local_plan(self) -> LoadPlan:
        """Whatever of the saved chunks lies in a part."""
        known = {} if self.metadata is None else self.metadata.state_dict_metadata
        items = []
        for name, part in self._parts.items():
            saved = known.get(name)
            if not isinstance(saved, TensorStorageMetadata):
                raise RunError(f"the checkpoint has no {name!r}; give that of this model and optimizer")
            if tuple(saved.size) != tuple(part.shape):
                raise RunError(
                    f"{name!r} has the shape {list(saved.size)} in the checkpoint, and "
                    f"{list(part.shape)} here; give that of this model"
                )
            read = create_read_items_for_chunk_list(name, saved, [part.chunk])
            found, needed = sum(math.prod(item.lengths) for item in read), math.prod(part.box.shape)
            if found != needed:
                raise RunError(
                    f"the checkpoint has {found} of the {needed} elements of {name!r} that "
                    "are needed here; its index is damaged. Load the checkpoint before it: name that in "
                    "latest.json"
                )
            items += read
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Where what is read goes."""
        return self._parts[index.fqn].tensor.detach()


def save_checkpoint(
    folder: Path,
    parts: Mapping[str, SavedPart],
    meeting: Meeting,
    groups: list[dict[str, Any]],
    extra: Mapping[str, Any],
) -> None:
    """Put a checkpoint into the folder, by all processes together, whole or not at all."""

    def begun() -> str:
        if meeting.rank:
            return ""
        _checked(folder)
        numbers = [int(found.group(1)) for one in folder.iterdir() if (found := _NAME.fullmatch(one.name))]
        return f"checkpoint-{max(numbers, default=0) + 1:06d}"

    told = meeting.settled("begin a checkpoint", begun).encode()
    name = meeting.everybody("begin a checkpoint", told)[0].decode()
    made = folder / f".{name}.part"
    metadata = meeting.settled("save the state", lambda: _written(made, parts))
    own = meeting.settled("sum up files", lambda: checksums(made, metadata, f"__{meeting.rank}_"))
    heard = meeting.everybody("compare checksums", msgspec.json.encode(own))
    known = {key: value for one in heard for key, value in msgspec.json.decode(one).items()}

    def ended() -> None:
        if meeting.rank == 0:
            write_index(made, metadata, known)
            made.rename(folder / name)
            told = mapped(_written_number, dict(extra))
            write_document(folder / "latest.json", _Latest(name, mapped(_written_number, groups), told))
            _sweep(folder, name)

    meeting.settled("end a checkpoint", ended)


def _written_number(value: Any) -> Any:
    """A number as JSON can hold it: of one that is not finite, a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{_FLOAT}{value}"
    return value


def _read_number(value: Any) -> Any:
    named = isinstance(value, str) and value.removeprefix(_FLOAT) in ("inf", "-inf", "nan")
    return float(value.removeprefix(_FLOAT)) if named and value.startswith(_FLOAT) else value


def _written(folder: Path, parts: Mapping[str, SavedPart]) -> Metadata:
    state = {name: part.tensor for name, part in parts.items()}
    try:
        found: Metadata = save(state, storage_writer=FileSystemWriter(folder), planner=_Save(parts))
        return found
    except (Exception, CheckpointException) as error:
        raise FileError(
            f"{folder}: the checkpoint cannot be written: {_reason(error)}; give a folder that all processes "
            "can write to"
        ) from error


def load_checkpoint(
    folder: Path, parts: Mapping[str, SavedPart], meeting: Meeting, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Read the last checkpoint of a folder into the parts, on all processes; gives what was saved beside."""

    def found() -> bytes:
        if meeting.rank:
            return b""
        if (folder / ".metadata").is_file() and not (folder / "latest.json").is_file():
            raise RunError(
                f"{folder}: torch has written this checkpoint, whose metadata is a pickle that Lowtide does "
                "not load. Load it by torch, and give the values to step.load_state(model, state_dict)"
            )
        return msgspec.json.encode(read_document(folder / "latest.json", _Latest))

    told = meeting.everybody("find the checkpoint", meeting.settled("find the checkpoint", found))[0]
    latest = msgspec.json.decode(told, type=_Latest)
    path = folder / latest.name
    wanted = dict(parts)
    if optimizer is not None:
        wanted |= meeting.settled("read the checkpoint", lambda: _load_optimizer(path, optimizer, parts))
        groups = mapped(_read_number, latest.groups)
        for group, settings in zip(optimizer.param_groups, groups, strict=False):
            group.update({key: _like(group.get(key), value) for key, value in settings.items()})
    meeting.settled("read the state", lambda: _read(path, wanted))
    extra: dict[str, Any] = mapped(_read_number, latest.extra)
    return extra


def _read(folder: Path, parts: Mapping[str, SavedPart]) -> None:
    state = {name: part.tensor for name, part in parts.items()}
    try:
        load(state, storage_reader=IndexedReader(folder), planner=_Load(parts))
    except (Exception, CheckpointException) as error:
        raise RunError(f"{folder}: the checkpoint cannot be read: {_reason(error)}") from error


def model_parts(
    model: nn.Module, boxes: Mapping[str, Rect], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, SavedPart]:
    """What this process has of a model, and the state of its random numbers, which all have alike."""
    found = {RANDOM: SavedPart.whole(torch.get_rng_state())}
    for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        cut = name in boxes
        part = SavedPart(value, boxes[name], tuple(shapes[name])) if cut else SavedPart.whole(value)
        found[f"model.{name}"] = part
    return found


def optimizer_parts(optimizer: torch.optim.Optimizer, parts: Mapping[str, SavedPart]) -> dict[str, SavedPart]:
    """The tensors of an optimizer's state: those of the shape of a parameter are cut as it is."""
    found: dict[str, SavedPart] = {}
    for name, part in _parameters(optimizer, parts).items():
        for key, value in optimizer.state.get(part.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                same = value.shape == part.tensor.shape and value.dim()
                found[f"optimizer.{name}.{key}"] = (
                    SavedPart(value, part.box, part.shape) if same else SavedPart.whole(value)
                )
    return found


def _load_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, parts: Mapping[str, SavedPart]
) -> dict[str, SavedPart]:
    """The state that a checkpoint has of each parameter, in new tensors of the optimizer's."""
    known = IndexedReader(folder).read_metadata().state_dict_metadata
    for name, part in _parameters(optimizer, parts).items():
        prefix, state = f"optimizer.{name}.", dict[str, Any]()
        for key, saved in known.items():
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix) or "." in rest or not isinstance(saved, TensorStorageMetadata):
                continue
            shape = part.tensor.shape if saved.size and tuple(saved.size) == part.shape else saved.size
            near = part.tensor.device if saved.size else "cpu"
            state[rest] = torch.zeros(shape, dtype=saved.properties.dtype, device=near)
        if state:
            optimizer.state[part.tensor].update(state)
    return optimizer_parts(optimizer, parts)


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Settings of an optimizer that a file can hold."""
    plain = (bool, int, float, str, type(None), list, tuple)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]


def _parameters(optimizer: torch.optim.Optimizer, parts: Mapping[str, SavedPart]) -> dict[str, SavedPart]:
    """Parts of parameters that the optimizer updates, by name."""
    own = {id(value) for group in optimizer.param_groups for value in group["params"]}
    return {
        name.removeprefix("model."): part
        for name, part in parts.items()
        if name.startswith("model.") and id(part.tensor) in own
    }


def _like(before: Any, value: Any) -> Any:
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value


def _checked(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written: {error.strerror}; give another folder") from error


def _sweep(folder: Path, last: str) -> None:
    """Leave the last checkpoints; others, and what killed processes have left behind, go."""
    names = sorted(one.name for one in folder.iterdir() if _NAME.fullmatch(one.name))
    old = [folder / name for name in names[:-_KEPT] if name != last]
    parts = [one for one in folder.iterdir() if one.name.startswith(".checkpoint-") and one.suffix == ".part"]
    for one in (*old, *parts):
        with contextlib.suppress(OSError):
            shutil.rmtree(one)


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, on whichever process."""
    causes = getattr(error, "failures", None)
    if causes:
        rank, (cause, _) = next(iter(causes.items()))
        return f"rank {rank}: {str(cause).partition(chr(10))[0]}"
    return str(error).partition("\n")[0]
