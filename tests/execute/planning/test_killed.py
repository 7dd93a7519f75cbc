"""A process that is killed while it fits a step: nothing half-written, and the next one works."""

import json

DRIVER = """
import json, os, signal, sys
from pathlib import Path
import torch
from torch import nn
import lowtide
from lowtide.cost import samples
from lowtide.execute.planning import plan_step

samples.judged = lambda found, wanted=1: samples.Timed(found[0].seconds)  # however busy the machine is
folder = Path(os.environ["LOWTIDE_CACHE"])
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh())))
x = torch.randn(256, 32)

def loss(model, x):
    return model(x).square().mean()

def fit(**options):
    return lowtide.fit(loss, model, x, budget="70%", time_limit=0.2, **options)

def when(function, here):
    def call(*args, **kwargs):
        if here(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

def writing_costs():  # with the lock of the cache held
    os.fsync = when(os.fsync, lambda _: list(folder.glob(".costs-*.part")))

def moving_the_plan():
    Path.replace = when(Path.replace, lambda part, _: part.name.startswith(".plan-"))

ended = {}
for moment in (writing_costs, moving_the_plan):
    child = os.fork()
    if not child:
        moment()
        fit()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    ended[moment.__name__] = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    for file in folder.rglob("*.json"):
        json.loads(file.read_text())
left = [p.name for p in folder.rglob("*.part")]
plan = fit().plan
torch._dynamo.reset()
plan_step.make_plan = None
again = fit().plan
print(json.dumps({
    "ended": ended, "left": len(left), "same": again == plan, "checked": plan.checked,
    "parts": [p.name for p in folder.rglob("*.part")], "plans": len(list(folder.glob("plans/*"))),
}))
"""


def test_a_kill_while_fitting_leaves_nothing_that_disturbs(tmp_path, forks):
    result = forks.run(DRIVER, LOWTIDE_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert all(found["ended"].values()), found["ended"]
    assert found["left"]
    assert found["same"]
    assert found["checked"]
    assert found["parts"] == []
    assert found["plans"] == 1
