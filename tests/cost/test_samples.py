"""What a busy machine does to measurements, played by a clock that no machine moves."""

import itertools
import math
import random
import statistics

import pytest

from lowtide.cost import samples
from lowtide.cost.clock import MOST_REPEATS, CpuClock
from lowtide.cost.samples import HostTimer, Sample, judged, settled, timed_call

READS = HostTimer.now, HostTimer.worked, HostTimer.preempted
"""As they are before tests begin (see ``quiet_machine``)."""


@pytest.fixture(autouse=True)
def as_shipped(monkeypatch):
    monkeypatch.setattr(samples, "_SPREAD", 2.0)


class Processor:
    """A thread on a processor: its work moves the clock, and so does what others do there in between."""

    def __init__(self, delays=()):
        self.time = self.work = 0.0
        self.switches = 0
        self.delays = iter(delays)
        self.preempts = True

    def now(self):
        return self.time

    def worked(self):
        return self.work

    def preempted(self):
        return self.switches

    def run(self, seconds):
        """Work for so long; others may run in between."""
        delay = next(self.delays, 0.0)
        self.work += seconds
        self.time += seconds + delay
        self.switches += bool(delay) and self.preempts


@pytest.mark.parametrize(
    ("seconds", "delay", "preempts", "disturbed"),
    [
        (1e-3, 0.0, True, False),
        (1e-3, 1e-5, True, False),  # noise
        (1e-3, 1e-3, True, True),
        (1.0, 0.05, True, False),  # a system has always something to do
        (1.0, 0.2, True, True),
        (1.0, 0.2, False, False),  # it waits for threads of its own
        (1.0, 3.0, False, True),
        (1e-6, 1e-5, True, False),
        (1e-6, 4e-3, True, True),
    ],
)
def test_a_call_is_disturbed_where_it_loses_a_good_part_of_its_time(seconds, delay, preempts, disturbed):
    processor = Processor([delay])
    processor.preempts = preempts
    result, sample = timed_call(processor, lambda: processor.run(seconds) or "result")
    assert result == "result"
    assert sample.seconds == pytest.approx(seconds + delay)
    assert sample.disturbed is disturbed


def reference(found, wanted):
    """The same in the words of the documentation."""
    quiet = [s.seconds for s in found if not s.disturbed]
    agree = quiet and statistics.median(quiet) <= 2 * min(quiet) + 20e-6
    if len(quiet) >= wanted and agree:
        return statistics.median(quiet), False
    return min(s.seconds for s in found), True


def test_figures_come_from_calls_that_agree():
    draw = random.Random(0)
    seen = set()
    for _ in range(2000):
        found = [
            Sample(draw.choice([1e-5, 1e-3, 1.5e-3, 9e-3]), draw.random() < 0.4)
            for _ in range(draw.randint(1, 8))
        ]
        wanted = draw.randint(1, 3)
        figure = judged(found, wanted)
        assert (figure.seconds, figure.disturbed) == reference(found, wanted)
        seen.add(figure.disturbed)
    assert seen == {False, True}


def test_what_is_quiet_is_measured_once():
    assert settled([Sample(1.0)] * 3, lambda: pytest.fail("measured again")).seconds == 1.0


@pytest.mark.parametrize("after", range(5))
def test_what_is_disturbed_is_measured_again_a_few_times(after):
    rounds = itertools.count(1)
    busy, quiet = [Sample(9.0, disturbed=True)] * 3, [Sample(1.0)] * 3
    figure = settled(busy if after else quiet, lambda: quiet if next(rounds) >= after else busy)
    assert figure.disturbed is (after > 3)
    assert figure.seconds == (9.0 if after > 3 else 1.0)
    assert next(rounds) == min(after, 3) + 1


def test_without_time_for_more_it_stays_disturbed():
    figure = settled([Sample(9.0, disturbed=True), Sample(8.0, disturbed=True)], list)
    assert (figure.seconds, figure.disturbed) == (8.0, True)


def test_one_quiet_call_is_enough_where_no_more_are_made_at_once():
    long = [Sample(9.0, disturbed=True)]
    assert settled(long, lambda: [Sample(2.0)]).seconds == 2.0


def measured(processor, seconds, deadline=math.inf):
    clock = CpuClock(processor)

    def take():
        return clock.again(lambda: processor.run(seconds), deadline)[0]

    return settled(take(), take)


def test_a_background_load_does_not_count():
    """Calls of 2 ms, most of which somebody interrupts for several times as long."""
    draw = random.Random(1)
    delays = (draw.choice([0.0, 4e-3, 8e-3, 24e-3]) for _ in itertools.count())
    figure = measured(Processor(delays), 2e-3)
    assert figure.seconds == pytest.approx(2e-3)
    assert not figure.disturbed


def test_a_load_that_never_ends_is_told():
    figure = measured(Processor(itertools.repeat(250e-3)), 2e-3)
    assert figure.disturbed
    assert figure.seconds == pytest.approx(252e-3)


def test_threads_that_others_keep_waiting_are_told_by_how_calls_differ():
    """The thread that asks is never preempted, but it waits in turn for others that are."""
    processor = Processor(itertools.cycle([0.0, 1e-3, 2e-3, 1.5e-3]))
    processor.preempts = False
    processor.worked = processor.now  # it spins while it waits
    figure = measured(processor, 1e-4)
    assert figure.disturbed
    assert figure.seconds == pytest.approx(1e-4)


def test_a_machine_that_is_quiet_gives_the_median():
    draw = random.Random(2)
    sizes = [1e-3 * draw.uniform(1.0, 1.5) for _ in range(MOST_REPEATS)]
    processor, rest = Processor(), iter(sizes)
    figure = judged(CpuClock(processor).again(lambda: processor.run(next(rest)), math.inf)[0])
    assert not figure.disturbed
    assert figure.seconds == pytest.approx(statistics.median(sizes))


def test_the_timer_of_the_system_moves_on():
    timer = HostTimer()
    for read in READS:
        before = read(timer)
        assert read(timer) >= before
    assert READS[1] is not HostTimer.worked, "what all other tests look at is quiet"
