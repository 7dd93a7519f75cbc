"""What each process of ``lowtide shard --run`` runs, by ``python -m``: its share of a step."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lowtide.commands.shard_task import (
    REFUSED,
    BudgetRefused,
    ShardTask,
    built_step,
    captured_step,
    update_of,
)
from lowtide.cost.wire import WireSpeed
from lowtide.errors import InfeasibleError, LowtideError, RunError
from lowtide.files import write_atomically

if TYPE_CHECKING:
    from lowtide.trace.step.joint import Joint
    from lowtide.zoo.base import Built

__all__ = ["main"]


def main() -> None:
    """Plan, run and compare this process's share; what it took goes to a file."""
    task_file, out, port, rank, devices = sys.argv[1:]
    task = msgspec.json.decode(Path(task_file).read_bytes(), type=ShardTask)
    from lowtide.execute.compare.shards import measure_share
    from lowtide.execute.shards.meshes import connected
    from lowtide.execute.shards.ranks import one_of_several

    with one_of_several(int(port), int(rank), int(devices), task.seconds) as store:
        links = [WireSpeed(*one) for one in task.links]
        here = connected(task.shards.mesh.sizes, store, links)
        built, joint = here.meeting.settled("capture the step", lambda: _captured(task))
        options = {"budget": task.budget, "kernels": task.kernels, "time_limit": task.time_limit}
        try:
            found = measure_share(
                joint, task.shards, built.model, here, Path(task.folder), update_of(built), **options
            )
        except RunError as error:
            if isinstance(why := error.__cause__, InfeasibleError):
                refused = BudgetRefused(int(rank), str(why), why.budget, why.smallest_budget, why.floor)
                write_atomically(Path(out, REFUSED), msgspec.json.encode(refused))
            raise
        here.watch.close()
    write_atomically(Path(out, f"{rank}.json"), msgspec.json.encode(found))


def _captured(task: ShardTask) -> tuple[Built, Joint]:
    """The step without any values: memory that nobody writes to is not taken."""
    from lowtide.execute.shards.values import without_values

    built = built_step(task.target, task.seed, task.double, "meta")
    model, batch = without_values(built.model, built.batch)
    built = replace(built, model=model, batch=batch)
    joint, said = captured_step(built)
    if said != task.graph:
        raise RunError(
            "another step than the one that was split was captured here; use the same versions of lowtide "
            "and torch, and the same network, in all processes"
        )
    return built, joint


if __name__ == "__main__":
    try:
        main()
    except LowtideError as error:
        sys.exit(f"{type(error).__name__}: {error}")
