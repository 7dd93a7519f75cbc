"""What all tests of steps in several graphs begin with."""

import pytest
import torch

from lowtide.execute.breaks import subgraph


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One for all: what an operator takes is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _fresh(cache, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(cache))
    monkeypatch.setattr(subgraph, "_SHORTEST", 0.03)  # they are planned many times, and are small
    torch._dynamo.reset()
