"""Where the parts of a checkpoint's tensors are, as JSON.

torch's own metadata says the same as a pickle, which is not loaded: a pickle can run any code. Each part has
a checksum, which is compared before it is read.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from lowtide.distributed_internals import storage_info
from lowtide.documents import read_document, write_document
from lowtide.errors import FileError

__all__ = ["IndexedReader", "checksums", "write_index"]

_NAME = "index.json"
_BLOCK = 1 << 24


class _SavedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor: where it is in the whole, and which bytes of which file."""

    lo: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    checksum: int
    """The CRC-32 of these bytes."""


class _SavedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: list[_SavedChunk]


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All tensors of a checkpoint."""

    tensors: list[_SavedTensor]
    lowtide: Literal["checkpoint-index"] = "checkpoint-index"
    version: Literal[1] = 1


def checksums(folder: Path, metadata: Metadata, prefix: str) -> dict[str, int]:
    """Of the parts in files whose names begin so, by file and place."""
    where: dict[Any, Any] = metadata.storage_data
    own = [info for info in where.values() if info.relative_path.startswith(prefix)]
    return {_key(info): _checksum(folder, info) for info in own}


def _key(info: Any) -> str:
    return f"{info.relative_path}:{info.offset}"


def _checksum(folder: Path, info: Any) -> int:
    """Of the bytes of a part."""
    found, left = 0, int(info.length)
    with (folder / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        while left > 0:
            block = file.read(min(left, _BLOCK))
            if not block:
                break
            found, left = zlib.crc32(block, found), left - len(block)
    return found


def write_index(folder: Path, metadata: Metadata, known: Mapping[str, int]) -> None:
    """Put the index beside what was written, with the checksums of all parts."""
    where: dict[Any, Any] = metadata.storage_data
    tensors = []
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        chunks = []
        for chunk in saved.chunks:
            info = where[MetadataIndex(name, chunk.offsets)]
            lo, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            file, offset, length = info.relative_path, info.offset, info.length
            chunks.append(_SavedChunk(lo, shape, file, offset, length, known[_key(info)]))
        dtype = str(saved.properties.dtype).removeprefix("torch.")
        tensors.append(_SavedTensor(name, dtype, tuple(saved.size), chunks))
    write_document(folder / _NAME, _Index(tensors))


class IndexedReader(FileSystemReader):
    """Reads a checkpoint by its index."""

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What the index says, in torch's words."""
        folder = Path(self.path)
        index = read_document(folder / _NAME, _Index)
        known: dict[str, Any] = {}
        where: dict[MetadataIndex, Any] = {}
        self._sums: dict[str, int] = {}
        for one in index.tensors:
            dtype = getattr(torch, one.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise FileError(
                    f"{folder / _NAME}: {one.name!r} has no dtype {one.dtype!r}; expected one of torch's"
                )
            chunks = [ChunkStorageMetadata(torch.Size(c.lo), torch.Size(c.shape)) for c in one.chunks]
            known[one.name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(one.shape), chunks)
            for chunk in one.chunks:
                if Path(chunk.file).name != chunk.file:
                    raise FileError(
                        f"{folder / _NAME}: {chunk.file!r} is no file of this folder; expected a name alone"
                    )
                key = MetadataIndex(one.name, torch.Size(chunk.lo))
                where[key] = storage_info(chunk.file, chunk.offset, chunk.length)
                self._sums[_key(where[key])] = chunk.checksum
        self._where = where
        return Metadata(known, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Read parts, if they are what was written."""
        folder = Path(self.path)
        for key in {(item.storage_index.fqn, item.storage_index.offset) for item in plan.items}:
            info = self._where[MetadataIndex(*key)]
            if _checksum(folder, info) != self._sums[_key(info)]:
                raise FileError(
                    f"{folder / info.relative_path}: byte {info.offset}: {key[0]!r} is not what was written; "
                    "the file is damaged. Load the checkpoint before it: name that in latest.json"
                )
        return super().read_data(plan, planner)
