"""Where the parts of a checkpoint's tensors are, as JSON.

torch's own metadata says the same as a pickle, which is not loaded: a pickle can run any code.
"""

from __future__ import annotations

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

from lowtide.distributed_internals import storage_info
from lowtide.documents import read_document, write_document
from lowtide.errors import FileError

__all__ = ["IndexedReader", "write_index"]

_NAME = "index.json"


class _SavedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor: where it is in the whole, and which bytes of which file."""

    lo: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


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


def write_index(folder: Path, metadata: Metadata) -> None:
    """Put the index beside what was written."""
    where: dict[Any, Any] = metadata.storage_data
    tensors = []
    for name, saved in metadata.state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        chunks = []
        for chunk in saved.chunks:
            info = where[MetadataIndex(name, chunk.offsets)]
            lo, shape = tuple(chunk.offsets), tuple(chunk.sizes)
            chunks.append(_SavedChunk(lo, shape, info.relative_path, info.offset, info.length))
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
        return Metadata(known, storage_data=where, storage_meta=StorageMeta(load_id=self.load_id))
