"""A clock for tests that plays a machine which is busy for a while."""

import math


class Ticking:
    """Every look at the clock moves it by a millisecond; until a moment all of it belongs to others."""

    tick = 1e-3

    def __init__(self, busy_until=math.inf):
        self.time, self.busy_until = 0.0, busy_until

    def now(self):
        self.time += self.tick
        return self.time

    def worked(self):
        return max(0.0, self.time - self.busy_until)

    def preempted(self):
        return 0
