"""How fast processes of this machine are connected, measured before a step is split over them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lowtide.cost.wire import WireSpeed
from lowtide.errors import LowtideError
from lowtide.files import write_atomically

__all__ = ["main", "measured_links"]


def measured_links(sizes: Sequence[int], seconds: float) -> tuple[WireSpeed, ...]:
    """Along each axis of a mesh, whose processes are started for that and end again."""
    from math import prod

    from lowtide.execute.shards.ranks import on_ranks

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "links.json")
        words = [str(out), "x".join(map(str, sizes)), str(seconds)]
        on_ranks("lowtide.commands.shard_links", words, prod(sizes), seconds)
        return msgspec.json.decode(out.read_bytes(), type=tuple[WireSpeed, ...])


def main() -> None:
    """One of the processes, by ``python -m``."""
    out, sizes, seconds, port, rank, devices = sys.argv[1:]
    from lowtide.execute.shards.meshes import connected
    from lowtide.execute.shards.ranks import one_of_several

    with one_of_several(int(port), int(rank), int(devices), float(seconds)) as store:
        here = connected(tuple(map(int, sizes.split("x"))), store)
        here.watch.close()
    if not here.rank:
        write_atomically(Path(out), msgspec.json.encode(here.speeds))


if __name__ == "__main__":
    try:
        main()
    except LowtideError as error:
        sys.exit(f"{type(error).__name__}: {error}")
