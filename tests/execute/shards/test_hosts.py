"""Ranks on hosts of their own: network namespaces of this machine, with addresses, whose links can be cut."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lowtide

pytestmark = pytest.mark.extended
SOURCE = str(Path(lowtide.__file__).parents[1])
SECONDS = 8
TRAINING = f"""
import sys
from datetime import timedelta
import torch
from torch import nn
import lowtide

torch.distributed.init_process_group("gloo", timeout=timedelta(seconds={SECONDS}))
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
x = torch.randn(1, 3, 33, 32)
expected = float(model(x).square().mean())

def loss_of(model, x):
    return model(x).square().mean()

step = lowtide.fit(loss_of, model, x, budget=28_000, mesh=3, time_limit=0.3, cost="estimated", verify=False)
assert step.planned_wire_bytes > 0
number = 0
while True:
    loss = step(model, x)
    loss.backward()
    if not number:
        assert abs(float(loss.detach()) - expected) < 1e-6
    model.zero_grad()
    number += 1
    print("step", number, flush=True)
"""


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """Namespaces on one switch, which is a namespace too."""

    def __init__(self, count):
        self.prefix, self.count, self.running = f"lt{os.getpid()}", count, []
        self.names = [f"{self.prefix}h{k}" for k in range(count)]
        self.switch = f"{self.prefix}sw"

    def up(self):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        for k, name in enumerate(self.names):
            ip("netns", "add", name)
            ip(
                "-n",
                self.switch,
                "link",
                "add",
                f"port{k}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            ip("-n", self.switch, "link", "set", f"port{k}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def down(self):
        for one, _ in self.running:
            if one.poll() is None:
                one.kill()
            one.wait()
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self, k):
        ip("-n", self.switch, "link", "set", f"port{k}", "down")

    def start(self, rank, script, folder):
        known = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": "eth0",
            "LOWTIDE_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": SOURCE,
        }
        log = (folder / f"rank{rank}").open("w")
        call = ["ip", "netns", "exec", self.names[rank], sys.executable, "-W", "ignore", str(script)]
        self.running.append(
            (subprocess.Popen(call, env=known, stdout=log, stderr=log), folder / f"rank{rank}")
        )

    def said(self, rank):
        return self.running[rank][1].read_text()

    def wait(self, ranks, seconds):
        """Their exit codes, once they have ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(self.running[k][0].poll() is None for k in ranks):
            time.sleep(0.1)
        return [self.running[k][0].poll() for k in ranks]


@pytest.fixture
def hosts():
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need the command ip and root")
    found = Hosts(3)
    try:
        found.up()
    except OSError as error:
        found.down()
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield found
    found.down()


def training(hosts, folder):
    """All hosts in the middle of training."""
    script = folder / "training.py"
    script.write_text(TRAINING)
    for rank in range(3):
        hosts.start(rank, script, folder)
    until = time.monotonic() + 200
    while not all("step 3" in hosts.said(rank) for rank in range(3)):
        assert time.monotonic() < until, [hosts.said(rank) for rank in range(3)]
        assert hosts.wait(range(3), 0) == [None] * 3, [hosts.said(rank) for rank in range(3)]
        time.sleep(0.2)


def told(hosts, rank):
    return [line for line in hosts.said(rank).splitlines() if "RunError: " in line][-1].partition(
        "RunError: "
    )[2]


def test_a_link_that_is_cut(hosts, tmp_path):
    training(hosts, tmp_path)
    hosts.cut(2)
    assert all(code not in (None, 0) for code in hosts.wait(range(3), 90)), [hosts.said(k) for k in range(3)]
    first = told(hosts, 0)
    assert first.startswith("rank 2 has died, or cannot be reached: it was ")
    assert told(hosts, 1) == first
    assert "the store of torch.distributed, by which processes meet, cannot be reached" in told(hosts, 2)


def test_a_rank_that_is_killed(hosts, tmp_path):
    training(hosts, tmp_path)
    process = hosts.running[1][0]
    os.kill(process.pid, signal.SIGKILL)  # `ip netns exec` has become the process itself
    assert all(code not in (None, 0) for code in hosts.wait(range(3), 60)), [hosts.said(k) for k in range(3)]
    first = told(hosts, 0)
    assert first.startswith("rank 1 has died, or cannot be reached: it was ")
    assert told(hosts, 2) == first


def test_a_host_that_cannot_be_reached(hosts, tmp_path):
    """Nobody waits longer than the time-out, and nothing has run."""
    script, line = tmp_path / "training.py", TRAINING.splitlines()[7]
    assert line.startswith("torch.distributed.init_process_group")
    set_limit = f"import lowtide.execute.shards.meshes as meshes\nmeshes._JOINING = {SECONDS}"
    script.write_text(TRAINING.replace(line, set_limit))
    hosts.cut(2)
    for rank in range(3):
        hosts.start(rank, script, tmp_path)
    assert all(code not in (None, 0) for code in hosts.wait(range(3), 90)), [hosts.said(k) for k in range(3)]
    for rank in range(3):
        assert told(hosts, rank).startswith(f"rank {rank} of 3 cannot join the others at 10.77.0.1:29500: ")
        assert "step 1" not in hosts.said(rank)
