"""Processes that are forked from one that has imported torch, which takes seconds.

Nothing else has happened in them: no step was compiled, no backward was run. A process that must import torch by
itself is started as any other.
"""

import gc
import multiprocessing
import os
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import torch

from tests.unlogged import UNLOGGED

_PRELOADED = (
    "lowtide.execute.fit",
    "tests.forked",
    "torch._dynamo.backends.common",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_worker",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Forks:
    """Starts processes; what they print is kept in a folder."""

    folder: Path

    def run(self, text, **environment):
        """Run a text as ``python -c`` does, with these variables besides those of this process."""
        multiprocessing.set_forkserver_preload(list(_PRELOADED))
        place = os.environ | environment, str(self.folder)
        process = multiprocessing.get_context("forkserver").Process(target=_run, args=(place, text))
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.kill()
        return Ended(process.exitcode, *self.printed())

    def spawn(self, function, args=(), nprocs=1):
        """As ``torch.multiprocessing.spawn``."""
        multiprocessing.set_forkserver_preload(list(_PRELOADED))
        place = dict(os.environ), str(self.folder)
        given = place, function, args
        torch.multiprocessing.start_processes(_run_rank, given, nprocs, start_method="forkserver")

    def printed(self):
        """What all processes so far printed, and what they told as errors."""
        files = (self.folder / name for name in ("stdout", "stderr"))
        return tuple(file.read_text() if file.exists() else "" for file in files)


def stop():
    """End the process that others are forked from, if there is one."""
    forkserver._forkserver._stop()


def _settle(environment, folder):
    """The first process has the environment and the output of the test that started it."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()  # as in tests/conftest.py
    gc.set_threshold(50_000, 10, 50)
    for owner, attribute, instead in UNLOGGED:
        setattr(owner, attribute, instead)
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def _run(place, text):
    _settle(*place)
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})


def _run_rank(rank, place, function, args):
    _settle(*place)
    function(rank, *args)
