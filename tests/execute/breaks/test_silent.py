"""Results of a graph whose gradients never come: backward is captured without them, and they may still come."""

import copy

import pytest
import torch
from torch import nn

import lowtide

WIDTH, WORDS = 16, 256


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()


class Language(nn.Module):
    """Gives the loss and what it is made from, as Hugging Face's models do, behind a branch on a value."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WORDS),
        )

    def forward(self, words):
        x = self.middle(self.embed(words)).tanh()
        x = x if x.sum() < 1e9 else x * 2
        scores = self.head(x)
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())
        return {"loss": loss, "scores": scores}


def loss_of(model, words):
    return model(words)["loss"]


def with_scores(model, words, weight):
    """Uses the scores as well, where a weight is given."""
    found = model(words)
    return found["loss"] + (weight * found["scores"].square().mean() if weight.item() else 0)


def gradients(model, step, *batch):
    model.zero_grad()
    step(model, *batch).backward()
    return [p.grad for p in model.parameters()]


def words_of():
    return torch.randint(0, WORDS, (4, 32))


def test_backward_is_captured_without_gradients_that_do_not_come():
    torch.manual_seed(0)
    model, words = Language(), words_of()
    twin = copy.deepcopy(model)
    step = lowtide.fit(loss_of, model, words, budget="100%", time_limit=0.2)
    last = step._subgraphs.made[-1].joint
    assert (len(last.outputs), len(last.tangents)) == (2, 1)
    for one, other in zip(gradients(model, step, words), gradients(twin, loss_of, words), strict=True):
        assert torch.equal(one, other)


def test_gradients_that_come_after_all_count():
    torch.manual_seed(0)
    model, words = Language(), words_of()
    twin = copy.deepcopy(model)
    step = lowtide.fit(with_scores, model, words, torch.tensor(0.0), budget="100%", time_limit=0.2)
    with pytest.warns(UserWarning, match="did not come while the step was planned"):
        found = gradients(model, step, words, torch.tensor(0.5))
    for one, other in zip(found, gradients(twin, with_scores, words, torch.tensor(0.5)), strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)
