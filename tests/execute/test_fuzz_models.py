"""A few of the cases of ``make fuzz-models``."""

import pytest
import torch

from tests.fuzz_models import quietly, survive

FIRST = 90_100


@pytest.mark.parametrize("part", range(2))
def test_random_steps_are_those_of_eager(part, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", "")  # quietly() has one of its own
    threads = torch.get_num_threads()
    try:
        with quietly():
            found = survive(range(FIRST + 3 * part, FIRST + 3 * part + 3))
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
    assert sum(found.values()) == 3
