"""Steps in several graphs are planned many times: short searches do for small ones."""

import pytest

from lowtide.execute.breaks import subgraph


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    monkeypatch.setattr(subgraph, "_SHORTEST", 0.03)
