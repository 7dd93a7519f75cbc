"""Buffers of the host are used again as soon as no tensor is on them, and not before."""

import pytest
import torch

from lowtide.execute.memory.pinned import PinnedPool


@pytest.fixture(autouse=True)
def _pinned(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)


def new(made):
    def one(size):
        made.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    return one


def test_a_buffer_serves_again_once_nobody_is_on_it():
    made, pool = [], PinnedPool()
    first, before = pool.take(64, new(made))
    assert before is None
    place = first.data_ptr()
    other, _ = pool.take(64, new(made))
    assert other.data_ptr() != place
    view = first[:8]  # as autograd may keep one
    del first
    third, _ = pool.take(64, new(made))
    assert third.data_ptr() != place
    pool.used(view, "event")
    del view
    again, before = pool.take(64, new(made))
    assert (again.data_ptr(), before) == (place, "event")
    assert made == [64, 64, 64]


def test_sizes_are_kept_apart_and_what_is_unused_can_be_let_go():
    made, pool = [], PinnedPool()
    kept, _ = pool.take(16, new(made))
    pool.take(32, new(made))
    pool.shrink()
    pool.take(32, new(made))
    assert made == [16, 32, 32]
    del kept
    pool.take(16, new(made))
    assert made == [16, 32, 32]


def test_memory_that_is_not_pinned_is_not_kept(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: False)
    made, pool = [], PinnedPool()
    for _ in range(2):
        pool.take(8, new(made))
    assert made == [8, 8]
