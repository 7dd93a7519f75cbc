"""What tests of execution share."""

import pytest

from lowtide.execute.kernels import compile_groups


@pytest.fixture
def one_by_one(monkeypatch):
    """Groups run operator by operator: nothing is compiled."""

    def refused(*_):
        raise RuntimeError("there is no compiler")

    monkeypatch.setattr(compile_groups, "compile_kernels", refused)
    monkeypatch.setattr(compile_groups, "_warn", lambda label, why: None)
