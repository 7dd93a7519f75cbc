"""Checkpoints of a mesh: read on other numbers of devices, by torch's own reader, and never half-written."""

import json
import shutil
from datetime import timedelta
from math import inf
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from lowtide.errors import FileError, LowtideError, RunError
from lowtide.execute.shards.meeting import Meeting
from lowtide.execute.shards.saved.checkpoint import (
    SavedPart,
    load_checkpoint,
    optimizer_groups,
    optimizer_parts,
    save_checkpoint,
)
from lowtide.graph.shards import Mesh, box_of

CUTS = {"weight": (0,), "bias": (None,), "running": (1,)}
SHAPES = {"weight": (7, 3), "bias": (7,), "running": (2, 5)}


def joined(rank, count, folder):
    store = torch.distributed.FileStore(f"{folder}/store{count}", count)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    return Meeting(store, rank, count, 60.0)


def parts_of(rank, count, values):
    """What a process has of a model, and an optimizer of its parameters."""
    found = {}
    for name, shape in SHAPES.items():
        box = box_of(shape, CUTS[name], Mesh((count,)), rank)
        value = values(shape)[box.slices()].clone()
        found[f"model.{name}"] = SavedPart(nn.Parameter(value) if name != "running" else value, box, shape)
    return found, [found[f"model.{name}"].tensor for name in ("weight", "bias")]


def counted(shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def gradient(parts, name, shape):
    return (counted(shape) + 1)[parts[f"model.{name}"].box.slices()]


def updated(parts, parameters, optimizer):
    for name, value in zip(("weight", "bias"), parameters, strict=True):
        value.grad = gradient(parts, name, SHAPES[name])
    optimizer.step()


def saved(rank, folder):
    meeting = joined(rank, 2, folder)
    parts, parameters = parts_of(rank, 2, counted)
    optimizer = torch.optim.Adam(parameters, lr=0.5, betas=(0.8, 0.9))
    for number in range(3):
        updated(parts, parameters, optimizer)
        everything = parts | optimizer_parts(optimizer, parts)
        save_checkpoint(
            Path(folder, "saved"),
            everything,
            meeting,
            optimizer_groups(optimizer),
            {"step": number, "best": inf},
        )
    torch.distributed.destroy_process_group()


def damage(index):
    """Have an index without a part of the bias, and files whose bytes are others."""
    told = json.loads(index.read_text())
    bias = next(one for one in told["tensors"] if one["name"] == "model.bias")
    bias["chunks"][0]["shape"] = [3]
    index.write_text(json.dumps(told))
    for path in index.parent.glob("*.distcp"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def resumed(rank, folder):
    """On three devices: one more update is the fourth of one device."""
    meeting = joined(rank, 3, folder)
    parts, parameters = parts_of(rank, 3, torch.zeros)
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    assert load_checkpoint(Path(folder, "saved"), parts, meeting, optimizer) == {"step": 2, "best": inf}
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    updated(parts, parameters, optimizer)
    alone, values = parts_of(0, 1, counted)
    reference = torch.optim.Adam(values, lr=0.5, betas=(0.8, 0.9))
    for _ in range(4):
        updated(alone, values, reference)
    for name, part in parts.items():
        assert torch.equal(part.tensor, alone[name].tensor[part.box.slices()]), name
    other = {"model.weight": SavedPart(torch.zeros(8, 3), parts["model.weight"].box, (8, 3))}
    with pytest.raises(
        RunError, match="'model.weight' has the shape .7, 3. in the checkpoint, and .8, 3. here"
    ):
        load_checkpoint(Path(folder, "saved"), other, meeting, None)
    with pytest.raises(RunError, match="the checkpoint has no 'model.more'"):
        load_checkpoint(Path(folder, "saved"), {"model.more": SavedPart.whole(torch.zeros(1))}, meeting, None)
    (Path(folder) / f"torch{rank}").mkdir()
    (Path(folder) / f"torch{rank}" / ".metadata").write_bytes(b"")
    with pytest.raises(RunError, match="metadata is a pickle that Lowtide does not load"):
        load_checkpoint(Path(folder, f"torch{rank}"), parts, meeting, None)
    index = Path(folder, "saved", "checkpoint-000003", "index.json")
    assert set(json.loads(index.read_text())) == {"lowtide", "version", "tensors"}
    with pytest.raises(LowtideError, match="latest.json"):
        load_checkpoint(Path(folder, "nothing"), parts, meeting, None)
    meeting.everybody("damage", b"")
    if rank == 0:
        shutil.copytree(Path(folder, "saved"), Path(folder, "damaged"))
        damage(Path(folder, "damaged", "checkpoint-000003", "index.json"))
    meeting.everybody("damaged", b"")
    with pytest.raises(
        RunError, match="the checkpoint has 3 of the 7 elements of 'model.bias' .* is damaged"
    ):
        load_checkpoint(Path(folder, "damaged"), {"model.bias": parts["model.bias"]}, meeting, None)
    with pytest.raises(RunError, match="'model.weight' is not what was written; the file is damaged"):
        load_checkpoint(Path(folder, "damaged"), {"model.weight": parts["model.weight"]}, meeting, None)
    torch.distributed.destroy_process_group()


def test_a_checkpoint_of_two_devices_is_read_on_three_and_on_one(forks, tmp_path):
    forks.spawn(saved, (str(tmp_path),), 2)
    folder = tmp_path / "saved"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["checkpoint-000002", "checkpoint-000003", "latest.json"]
    (folder / ".checkpoint-000004.part").mkdir()  # somebody was killed while writing
    assert json.loads((folder / "latest.json").read_text())["name"] == "checkpoint-000003"
    forks.spawn(resumed, (str(tmp_path),), 3)
    alone, values = parts_of(0, 1, counted)
    reference = torch.optim.Adam(values, lr=0.5, betas=(0.8, 0.9))
    for _ in range(3):
        updated(alone, values, reference)
    plain = {"model": {name: torch.zeros(shape) for name, shape in SHAPES.items()}}
    load(plain, storage_reader=FileSystemReader(folder / "checkpoint-000003"), no_dist=True)
    for name, value in plain["model"].items():
        assert torch.equal(value, alone[f"model.{name}"].tensor)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    meeting = Meeting(torch.distributed.HashStore(), 0, 1, 5.0)
    with pytest.raises(LowtideError, match="file: cannot be written") as caught:
        save_checkpoint(tmp_path / "file", {}, meeting, [], {})
    assert isinstance(caught.value, FileError | RunError)
