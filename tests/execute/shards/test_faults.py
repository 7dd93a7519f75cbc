"""A process that dies or hangs is named by all others, with what it was at, and they end."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta

import torch

from lowtide.errors import RunError
from lowtide.execute.shards.faults import RankWatch, where_is
from lowtide.execute.shards.wires import ProcessWire
from tests import forked

LABELS = ["conv1 (forward)", "conv2 (forward)", "the gradient of conv1.weight"]
SECONDS = 2.0


def share(rank, place, count, port, fault):
    """One of several processes that add up three times, also beside each other; one does not get to the last."""
    forked._settle(*place)
    distributed, limit = torch.distributed, timedelta(seconds=SECONDS)
    store = distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
    watch = RankWatch(store, rank, count)
    wire = ProcessWire(distributed.group.WORLD, watch)
    watch.begin(LABELS)
    fault, _, beside = fault.partition(" ")
    sums = []
    try:
        for number in range(len(LABELS)):
            if rank == 1 and number == 2:
                time.sleep(0.6)  # it has said where it is
                if fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(30)
            if beside:
                sums.append(wire.begin_sum(torch.ones(4)))
            else:
                wire.add_up(torch.ones(4))
        for wait in sums:
            wait()
    except RunError as error:
        os.write(1, f"{rank} {error}\n".encode())
        raise SystemExit(3) from None


DIES, HANGS = "rank 1 has died, or cannot be reached: it was", "rank 1 does not go on: it is"
FAULTS = {"dies": DIES, "hangs": HANGS, "dies beside": DIES, "hangs beside": HANGS}


def test_the_one_to_blame_is_named_with_its_operator(tmp_path, fork_server):
    multiprocessing.set_forkserver_preload(list(forked._PRELOADED))
    context, count = multiprocessing.get_context("forkserver"), 3
    running = {}
    for fault in FAULTS:  # all at once: most of it is waiting
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        (tmp_path / fault).mkdir()
        given = (dict(os.environ), str(tmp_path / fault)), count, store.port, fault
        ranks = [context.Process(target=share, args=(rank, *given)) for rank in range(count)]
        for one in ranks:
            one.start()
        running[fault] = store, ranks
    try:
        for _, ranks in running.values():
            ranks[0].join(60)
            ranks[2].join(60)
            assert [ranks[0].exitcode, ranks[2].exitcode] == [3, 3]
    finally:
        for _, ranks in running.values():
            for one in ranks:
                one.kill()
                one.join()
    where = "behind conv2 (forward), on the way to the gradient of conv1.weight"
    for fault, (store, _) in running.items():
        said = sorted((tmp_path / fault / "stdout").read_text().splitlines())
        assert [line[0] for line in said] == ["0", "2"]
        assert len({line[2:] for line in said}) == 1, "both say the same"
        assert said[0][2:].startswith(f"{FAULTS[fault]} {where}. Rank ")
        assert "waited in the gradient of conv1.weight" in said[0]
        assert where_is(store, 1) == where
