"""Graphs of a step in tiles: where no other plan fits."""

import copy

import pytest
import torch

import lowtide
from lowtide.errors import InfeasibleError
from tests.execute.breaks.test_silent import Language, loss_of

SHARE = "40%"


def words_of():
    return torch.randint(0, 256, (8, 64))


def test_a_loss_over_many_words_runs_in_tiles_behind_a_break():
    torch.manual_seed(0)
    model, words = Language(), words_of()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, words, budget=SHARE, time_limit=0.5)
    assert any(plan.decisions.tiles for plan in step.plans)
    assert " tiles, " in step.explain()
    found = step._subgraphs
    assert found.measured_bytes <= found.budget_bytes < 0.5 * found.plain_bytes
    words = words_of()
    for one, function in ((model, step), (twin, loss_of)):
        function(one, words).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_without_tiles_it_is_refused():
    with pytest.raises(InfeasibleError, match="for the . graphs of this step") as refused:
        lowtide.fit(loss_of, Language(), words_of(), budget=SHARE, time_limit=0.5, only="recompute")
    assert "tiles:" not in str(refused.value)


def test_it_is_said_why_tiles_do_not_help():
    with pytest.raises(InfeasibleError, match="for the . graphs of this step.*\ntiles: "):
        lowtide.fit(loss_of, Language(), words_of(), budget=1000, time_limit=0.3)
