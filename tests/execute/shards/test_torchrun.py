"""Scripts that torchrun starts: the example, and one that is killed and goes on from its last checkpoint."""

import re
from pathlib import Path

import pytest

import lowtide
from tests.scripts import torchrun

ROOT = Path(lowtide.__file__).parents[2]
RESUMING = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
import lowtide

folder, killed = Path(sys.argv[1]), sys.argv[2] == "killed"
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.2), nn.Conv2d(4, 2, 3, padding=1))
x = torch.randn(1, 3, 32, 32)

def loss_of(model, x):
    return model(x).square().mean()

step = lowtide.fit(loss_of, model, x, budget=60_000, mesh=2, time_limit=0.3, cost="estimated", verify=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
start = 0
if (folder / "latest.json").exists():
    start = step.load(folder, model, optimizer)["number"] + 1
for number in range(start, 4):
    loss = step(model, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step.save(folder, model, optimizer, number=number)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if killed and first and number == 1 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
total = sum(float(value.double().abs().sum()) for value in model.parameters())
print(f"rank {os.environ['RANK']} began at {start}: {total!r} {loss.item()!r}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.extended
def test_the_example(tmp_path):
    done = torchrun(tmp_path, str(ROOT / "examples" / "shards" / "large_image.py"))
    assert done.returncode == 0, done.stderr
    found = re.findall(  # lines of processes may run together
        r"rank [01]: planned .*? losses within (\S+) and parameters within (\S+) of", done.stdout
    )
    assert len(found) == 2
    assert max(float(one) for pair in found for one in pair) < 1e-5


@pytest.mark.extended
def test_a_restart_goes_on_from_the_last_checkpoint(tmp_path):
    script = tmp_path / "resuming.py"
    script.write_text(RESUMING)
    plain = torchrun(tmp_path, str(script), str(tmp_path / "plain"), "plain")
    assert plain.returncode == 0, plain.stderr
    killed = torchrun(tmp_path, "--max-restarts", "1", str(script), str(tmp_path / "killed"), "killed")
    assert killed.returncode == 0, killed.stderr
    told = [sorted(done.stdout.splitlines()) for done in (plain, killed)]
    assert [line.replace("began at 2", "began at 0") for line in told[1]] == told[0]
    assert all("began at 2" in line for line in told[1])
