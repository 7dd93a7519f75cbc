"""``torch.compile(..., backend="lowtide")`` with graph breaks: the graphs share the budget from the third call on."""

import copy
import warnings

import pytest
import torch
from torch import nn

from lowtide.cost.watch import watch_cpu
from lowtide.errors import CaptureError, InfeasibleError
from lowtide.execute.breaks.live import LiveStep, live_step
from lowtide.plan.request import PlanRequest
from tests.execute.breaks.test_subgraphs import WIDTH, Block, InLayers, left_behind, loss_of, same


class Broken(nn.Module):
    """A number is read between two graphs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(2), Block(2)

    def forward(self, x):
        y = self.first(x)
        return self.second(y / max(1.0, y.abs().max().item()))


def compiled(budget, **options):
    options = {"budget": budget, "time_limit": 0.3, **options}
    return torch.compile(loss_of, backend="lowtide", options=options)


def peak(model, step, x):
    """What a step takes, with parameters and the batch."""
    model.zero_grad(set_to_none=True)
    _, seen = watch_cpu(lambda _: step(model, x).backward())
    leaves = {t.untyped_storage().data_ptr(): t.nbytes for t in (*model.state_dict().values(), x)}
    return seen.peak_bytes + sum(leaves.values())


class InTwoLayers(InLayers):
    """The first graph is most of the step."""

    def __init__(self):
        super().__init__()
        self.blocks = self.blocks[:2]


@pytest.mark.parametrize("kind", [Broken, InLayers, InTwoLayers])
def test_graphs_share_the_budget(kind):
    torch.manual_seed(3)
    model, x = kind(), torch.randn(256, WIDTH)
    twin = copy.deepcopy(model)
    budget = int(0.7 * peak(copy.deepcopy(model), loss_of, x))
    step = compiled(budget)
    for seed in range(3):
        assert same(left_behind(model, step, x, seed), left_behind(twin, loss_of, x, seed))
    assert peak(model, step, x) <= budget


def test_a_budget_that_is_too_small_is_refused_in_every_call():
    model, x = Broken(), torch.randn(64, WIDTH)
    step = compiled(1000)
    for _ in range(2):  # the first call shows that there are several graphs, the next what they are
        step(model, x).backward()
    for _ in range(2):
        with pytest.raises(InfeasibleError, match="for the . graphs of this step"):
            step(model, x)


def test_what_no_program_runs_is_told_once():
    step = LiveStep({}, PlanRequest.of("60%"))
    with pytest.warns(UserWarning, match="no Program runs a part of the compiled function: it is odd"):
        step.leave("it is odd")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.leave("it is odd")


def test_state_of_an_optimizer_is_for_one_graph():
    model, x = Broken(), torch.randn(64, WIDTH)
    step = compiled("60%", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(CaptureError, match="compiled in several graphs"):
        step(model, x)


def test_shapes_of_one_bucket_share_a_plan():
    options = {"budget": "90%", "time_limit": 0.2, "bucket": 64}
    step = torch.compile(loss_of, backend="lowtide", options=options, fullgraph=True)
    model = nn.Linear(WIDTH, WIDTH)
    for rows in (40, 50):
        step(model, torch.randn(rows, WIDTH)).backward()
    shapes = live_step(options, None, None).shapes.plans
    assert len(shapes._made) == 2
    assert shapes.others([model.weight, model.bias, torch.empty(60, WIDTH)]).near
    assert not shapes.others([model.weight, model.bias, torch.empty(70, WIDTH)]).near
