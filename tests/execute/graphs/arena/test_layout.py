"""Requests of a captured step get places in which nothing lies that is still needed."""

import random

import pytest
from msgspec.structs import replace

from lowtide.device_internals import usual_segments
from lowtide.execute.graphs.arena import layout as arena_layout
from lowtide.execute.graphs.arena.layout import ALIGNMENT, Listed, Requests
from lowtide.execute.graphs.arena.pages import pages_of
from lowtide.plan.address import place as placing

MIB = 1 << 20


def asked(size):
    """What PyTorch's allocator asks for when a tensor of so many bytes is allocated."""
    return 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB


class Step:
    """A random step: operators with results, workspaces and results that share a request."""

    def __init__(self, seed):
        self.numbers, self.requests = random.Random(seed), Requests()
        self.next, self.alive, self.lives = 0, [], []

    def operator(self):
        """One operator; notes what is used where and when, by the request and the bytes in it."""
        now, listed, stay, total = len(self.requests), [], {}, 0
        sizes = [self.numbers.choice([512, 5000, MIB, 3 * MIB, 12 * MIB + 7]) for _ in range(4)]
        for k, size in enumerate(sizes[: self.numbers.randint(1, 4)]):
            listed.append(Listed(self.next, asked(size)))
            self.next += asked(size)
            total += size
            life = [now, k, size, now, None]
            if self.numbers.random() < 0.6:
                stay[listed[-1].address] = size
                self.alive.append((listed[-1].address, life))
            else:
                life[4] = now + 1
            self.lives.append(life)
        older = {address: life[2] for address, life in self.alive[:2]}  # an operator in place returns these
        mine = self.requests.ran(listed, older | stay, allocations=len(listed), taken=total)
        assert mine == frozenset(stay)

    def died(self):
        """A tensor that is alive is freed."""
        if self.alive:
            address, life = self.alive.pop(self.numbers.randrange(len(self.alive)))
            life[4] = len(self.requests)
            self.requests.died(address)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_lies_where_something_is_needed(seed):
    step = Step(seed)
    for _ in range(40):
        step.operator()
        while step.numbers.random() < 0.55:
            step.died()
    layout, end = step.requests.layout(), len(step.requests)
    boxes = []
    for operator, k, size, birth, death in step.lives:
        place = layout.operators[operator][k]
        assert place.size == asked(size)
        assert place.used >= size
        assert place.offset % ALIGNMENT == 0
        assert place.offset + size <= layout.bytes
        assert place.death == (end if death is None else death)
        boxes.append((place.offset, place.offset + size, birth, end if death is None else death))
    for k, (low, high, birth, death) in enumerate(boxes):
        for other_low, other_high, other_birth, other_death in boxes[:k]:
            together = birth < other_death and other_birth < death
            assert not (together and low < other_high and other_low < high)
    most = max(sum(b[1] - b[0] for b in boxes if b[2] <= t < b[3]) for t in range(end))
    assert most <= layout.bytes <= 1.1 * layout.live_bytes


def test_a_result_takes_its_own_bytes_where_each_allocation_has_a_request():
    requests = Requests()
    requests.ran([Listed(0, 20 * MIB)], {0: 3 * MIB}, allocations=1, taken=3 * MIB)
    assert requests.layout().bytes == 3 * MIB


def test_a_result_takes_all_that_was_asked_for_where_memory_was_used_twice():
    """An operator that frees memory and allocates again gets the same, whatever its size."""
    requests = Requests()
    requests.ran([Listed(0, 20 * MIB)], {0: 3 * MIB}, allocations=2, taken=22 * MIB)
    assert requests.layout().bytes == 20 * MIB


def test_a_workspace_takes_no_more_than_was_asked_for_beside_the_results():
    requests = Requests()
    listed = [Listed(0, 20 * MIB), Listed(20 * MIB, 20 * MIB)]
    requests.ran(listed, {0: 3 * MIB}, allocations=2, taken=5 * MIB)
    assert requests.layout().bytes == 5 * MIB


def test_two_results_on_one_request_are_needed_until_both_are_gone():
    requests = Requests()
    requests.ran([Listed(0, 20 * MIB)], {0: 2 * MIB, 4 * MIB: 2 * MIB}, allocations=3, taken=6 * MIB)
    requests.died(0)
    requests.ran([], {}, allocations=0, taken=0)
    requests.died(4 * MIB)
    requests.ran([], {}, allocations=0, taken=0)
    (place,) = requests.layout().operators[0]
    assert (place.used, place.death) == (6 * MIB, 2)


def used(sizes, taken, allocations=None, stay=()):
    requests, addresses = Requests(), [100 * MIB * k for k in range(len(sizes))]
    listed = [Listed(address, size * MIB) for address, size in zip(addresses, sizes, strict=True)]
    kept = {addresses[k]: int(size * MIB) for k, size in stay}
    requests.ran(listed, kept, allocations=allocations or len(sizes), taken=int(taken * MIB))
    return [place.used / MIB for place in requests.layout().operators[0]]


def test_workspaces_share_what_was_taken_beside_the_results():
    """As the backward of a convolution has asked for it: one tensor of 1 MiB at most, two of 36.9 MiB."""
    found = used([2, 20, 34], 37.4, stay=[(0, 0.5)])
    assert found == pytest.approx([0.5, 4.9, 34], abs=1e-6)


def test_more_tensors_than_requests_are_not_taken_to_be_small():
    assert used([2, 20], 5, allocations=3) == [2, 5]
    assert used([2, 20], 5, allocations=2) == [1, 5]


def test_a_request_that_is_larger_than_usual_is_not_taken_to_be_full():
    """PyTorch can be told to ask for larger segments: then nothing is known of what is in which."""
    assert used([64, 34], 4 + 33) == [37, 34]


def test_nothing_is_known_of_segments_whose_sizes_were_set():
    """A tensor of 1.5 MiB in a segment of 64 MiB, and one of 19 MiB in the memory that was taken before."""
    requests = Requests(usual=False)
    listed = [Listed(0, 64 * MIB), Listed(64 * MIB, 20 * MIB)]
    requests.ran(listed, {}, allocations=5, taken=int(77.5 * MIB))
    assert [place.used for place in requests.layout().operators[0]] == [64 * MIB, 20 * MIB]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_segments_are_seen(name, monkeypatch):
    assert usual_segments()
    monkeypatch.setenv(name, "expandable_segments:True,large_segment_size_mb:64")
    assert not usual_segments()


def test_what_lies_in_a_request_is_inside_of_it():
    assert used([20], 3, allocations=1, stay=[(0, 5)]) == [5]


def test_small_gradients_lie_together():
    """Users hold them between steps, and with each the pages that it lies on."""
    requests, held = Requests(), []
    for k in range(100):
        listed = [Listed(100 * k * MIB, 40 * MIB), Listed((100 * k + 50) * MIB, 2 * MIB)]
        stay = {listed[0].address: 40 * MIB, listed[1].address: 5000}
        requests.ran(listed, stay, allocations=2, taken=40 * MIB + 5000)
        requests.died(listed[0].address)
    layout = requests.layout()
    for _, place in layout.operators:
        held += pages_of(place.offset, place.used)
    assert len(set(held)) <= 2
    assert layout.bytes <= 41 * MIB


def test_places_are_looked_for_again_where_there_is_no_room(monkeypatch):
    """And not where there can be none, or nobody says how much there is."""
    limits = []

    def place(allocations, *, time_limit, **options):
        limits.append(time_limit)
        found = placing.place(allocations, time_limit=0.1, **options)
        return found if len(limits) % 2 == 0 else replace(found, arena_bytes=found.arena_bytes + 4 * MIB)

    monkeypatch.setattr(arena_layout, "place", place)
    requests = Requests()
    for address in (0, 20 * MIB):
        requests.ran([Listed(address, 8 * MIB)], {address: 8 * MIB}, allocations=1, taken=8 * MIB)
    once, twice = [20 * MIB], [20 * MIB, 16 * MIB]
    for room, sizes in (
        (None, once),
        (20 * MIB, once),
        (18 * MIB, twice),
        (16 * MIB, twice),
        (8 * MIB, once),
    ):
        limits.clear()
        assert requests.layout(room).bytes == sizes[-1]
        assert limits == list(arena_layout._TIME_LIMITS[: len(sizes)])
