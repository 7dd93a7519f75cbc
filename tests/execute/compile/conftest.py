"""What tests ask for that must not see what others have captured, measured or planned."""

import pytest
import torch


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """With a cache of its own, and nothing that torch has compiled before."""
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
