"""A part that is captured: an error puts nothing back, as nothing was computed."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.execute.runtime import interpreter as interpreters
from lowtide.execute.runtime.snapshot import Snapshot


def test_an_error_while_nothing_computes_puts_nothing_back(monkeypatch):
    made, begun = [], interpreters.Interpreter.__init__
    monkeypatch.setattr(
        interpreters.Interpreter, "__init__", lambda self, *rest: made.append(self) or begun(self, *rest)
    )
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    lowtide.fit(lambda m, x: m(x).square().mean(), model, x, budget="100%", cost="estimated", time_limit=0.2)
    restored = []
    monkeypatch.setattr(Snapshot, "restore", lambda self: restored.append(self))
    with made[-1].lent(computes=False), pytest.raises(ValueError, match="zip"):
        made[-1].run_forward([])
    assert not restored
    with pytest.raises(ValueError, match="zip"):
        made[-1].run_forward([])
    assert len(restored) == 1
