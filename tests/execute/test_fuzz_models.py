"""A few of the cases of ``make fuzz-models``."""

import pytest
import torch

from tests.fuzz_models import quietly, survive

FIRST = 90_100
MENDED = {
    "an operator in place before tiles lies as it does without them": 42115,
    "autograd's copy of a gradient is counted": 41779,
    "a BatchNorm that runs again has statistics of its own": 46980,
}


def survived(numbers, monkeypatch):
    """How these cases ended."""
    monkeypatch.setenv("LOWTIDE_CACHE", "")  # quietly() has one of its own
    threads = torch.get_num_threads()
    try:
        with quietly():
            return survive(numbers)
    finally:
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def test_random_steps_are_those_of_eager(monkeypatch):
    assert sum(survived(range(FIRST, FIRST + 2), monkeypatch).values()) == 2


@pytest.mark.parametrize("what", MENDED)
def test_what_was_wrong_once(what, monkeypatch):
    assert sum(survived([MENDED[what]], monkeypatch).values()) == 1
