"""The clock for a device: it waits longer where the host is late, and remembers for how long."""

import pytest

from lowtide.cost import clock
from lowtide.cost.clock import CudaClock


class Queue(CudaClock):
    """As if the device began too early unless it paused for so many cycles."""

    def __init__(self, needed):
        self.needed, self.pauses = needed, []
        self._pause = clock._PAUSE_CYCLES

    def _queued(self, call, pause):
        self.pauses.append(pause // clock._PAUSE_CYCLES)
        return [float(pause)], pause < self.needed * clock._PAUSE_CYCLES


@pytest.mark.parametrize(
    ("needed", "first", "then"),
    [(1, [1], [1]), (2, [1, 3], [3]), (3, [1, 3], [3]), (5, [1, 3, 9], [8]), (100, [1, 3, 9], [1, 3, 9])],
)
def test_the_pause_grows_until_all_calls_are_queued(needed, first, then):
    queue = Queue(needed)
    assert queue._batch(lambda: None) == [first[-1] * clock._PAUSE_CYCLES]
    assert queue.pauses == first
    queue.pauses.clear()
    queue._batch(lambda: None)
    assert queue.pauses == then
