"""What each process of ``lowtide shard --run`` runs, by ``python -m``: its share of a step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from lowtide.commands.shard_task import ShardTask, step_of
from lowtide.errors import LowtideError, RunError
from lowtide.files import write_atomically

__all__ = ["main"]


def main() -> None:
    """Plan, run and compare this process's share; what it took goes to a file."""
    task_file, out, store, rank, devices = sys.argv[1:]
    task = msgspec.json.decode(Path(task_file).read_bytes(), type=ShardTask)
    from lowtide.execute.shards.compare import measure_share
    from lowtide.execute.shards.ranks import one_of_several
    from lowtide.zoo import build

    def whole() -> tuple[Any, Any, Any]:
        built = build(task.target, seed=task.seed)
        if not task.double:
            return built.model, built.batch, built.loss
        values = [x.double() if x.is_floating_point() else x for x in built.batch]
        return built.model.double(), values, built.loss

    joint, said = step_of(task.target, task.seed, task.double)
    if said != task.graph:
        raise RunError(
            f"rank {rank} has captured another step than the one that was split; use the same versions of "
            "lowtide and torch, and the same network, in all processes"
        )
    with one_of_several(store, int(rank), int(devices), task.seconds):
        options = {"budget": task.budget, "kernels": task.kernels, "time_limit": task.time_limit}
        found = measure_share(joint, task.shards, whole, int(rank), **options)
    write_atomically(Path(out, f"{rank}.json"), msgspec.json.encode(found))


if __name__ == "__main__":
    try:
        main()
    except LowtideError as error:
        sys.exit(f"{type(error).__name__}: {error}")
