"""Places of allocations: valid, no lower than what is live, no higher than greedy, and optimal where that is known."""

import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.documents import decode_document, encode_document, kind_of
from lowtide.errors import FormatError, PlanError
from lowtide.plan.address import place as placing
from lowtide.plan.address.boxes import boxes_of, peak_bytes
from lowtide.plan.address.first_fit import ORDERS, first_fit
from lowtide.plan.address.noisy_skyline import raise_highest, search_around
from lowtide.plan.address.place import place
from lowtide.plan.address.skyline import KEYS, skyline, weights
from lowtide.plan.address.types import AddressPlan, Allocation, EventClock
from lowtide.plan.check.addresses import check_addresses
from tests.plan.address.instances import least_arena, most_live, overlaps, random_allocations

replace = msgspec.structs.replace


def greedy_by_size(allocations):
    """The same by the book, over lists."""
    placed = []
    for one in sorted(allocations, key=lambda one: -one.bytes):
        at = 0
        beside = [
            (a, a + b.bytes) for a, b in placed if b.bytes and one.birth < b.death and b.birth < one.death
        ]
        for start, end in sorted(beside):
            if start - at >= one.bytes:
                break
            at = max(at, end)
        placed.append((at, one))
    return max((at + one.bytes for at, one in placed), default=0)


@pytest.mark.parametrize("seed", range(60))
def test_a_placement_is_valid_and_between_its_bounds(seed):
    asked = random_allocations(seed, 30)
    found = place(asked, time_limit=0.05)
    assert not overlaps(found.allocations)
    assert check_addresses(found.allocations, arena_bytes=found.arena_bytes) == most_live(asked)
    assert found.live_bytes == most_live(asked)
    assert found.live_bytes <= found.arena_bytes <= found.greedy_bytes
    assert found.greedy_bytes == greedy_by_size(asked)
    assert [replace(one, pinned=None) for one in asked] == [
        Allocation(one.birth, one.death, one.bytes) for one in found.allocations
    ]


@pytest.mark.parametrize("seed", range(25))
def test_what_is_called_optimal_is(seed):
    asked = random_allocations(seed, 6)
    found = place(asked, time_limit=1.0)
    assert found.optimal
    assert found.arena_bytes == least_arena(asked)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 300)), max_size=25),
    st.sampled_from([1, 2, 16, 64]),
)
@settings(max_examples=60, deadline=None)
def test_offsets_are_multiples_of_the_alignment(rows, alignment):
    asked = [Allocation(birth, birth + life, size) for birth, life, size in rows]
    found = place(asked, alignment=alignment, time_limit=0.05)
    assert all(one.offset % alignment == 0 for one in found.allocations)
    assert not overlaps(found.allocations)
    assert found.arena_bytes <= found.greedy_bytes
    rounded = [replace(one, bytes=-(-one.bytes // alignment) * alignment) for one in asked]
    assert most_live(rounded) <= found.arena_bytes
    assert found.optimal or found.arena_bytes > most_live(rounded)


@pytest.mark.parametrize("seed", range(30))
def test_pinned_allocations_stay_where_they_are(seed):
    asked = random_allocations(seed, 14, pins=True)
    found = place(asked, time_limit=0.05)
    assert not overlaps(found.allocations)
    for one, two in zip(asked, found.allocations, strict=True):
        assert one.pinned in (None, two.offset)
    assert check_addresses(found.allocations, arena_bytes=found.arena_bytes) == most_live(asked)


def test_a_hole_between_two_pinned_allocations_is_used():
    asked = [Allocation(0, 4, 10, pinned=0), Allocation(0, 4, 10, pinned=30), Allocation(1, 3, 20)]
    found = place(asked)
    assert found.allocations[2].offset == 10
    assert (found.arena_bytes, found.optimal) == (40, True)


@pytest.mark.parametrize(
    ("asked", "options", "said"),
    [
        ([Allocation(0, 2, 8, pinned=0), Allocation(1, 3, 8, pinned=4)], {}, "overlap while both are live"),
        ([Allocation(0, 2, 8, pinned=4)], {"alignment": 8}, "no multiple of the alignment 8"),
        ([Allocation(2, 2, 8)], {}, "must be born before it dies"),
        ([Allocation(0, 2, -1)], {}, "no less than nothing"),
        ([Allocation(0, 2, 8)], {"alignment": 0}, "at least 1"),
        ([Allocation(0, 2, 1 << 61), Allocation(0, 2, 1 << 62)], {}, "at most 2^62"),
    ],
)
def test_what_cannot_be_placed_is_refused(asked, options, said):
    with pytest.raises(PlanError, match=said.replace("^", r"\^")):
        place(asked, **options)


def test_pinned_allocations_may_share_a_place_one_after_the_other():
    found = place([Allocation(0, 2, 8, pinned=0), Allocation(2, 3, 8, pinned=0)])
    assert found.arena_bytes == 8


def test_nothing_needs_no_arena():
    found = place([])
    assert (found.arena_bytes, found.live_bytes, found.efficiency, found.optimal) == (0, 0, 1.0, True)
    assert place([Allocation(0, 1, 0)]).arena_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_way_to_place_is_valid(seed):
    asked = random_allocations(seed, 25)
    boxes = boxes_of(asked, 1)
    ways = [first_fit(boxes, order) for order in ORDERS]
    ways += [skyline(boxes, weights(boxes, key)) for key in KEYS]
    for offsets in ways:
        rows = [_Row(asked[k], int(at)) for k, at in zip(boxes.source, offsets, strict=True)]
        assert not overlaps(rows)
        assert boxes.height(offsets) >= boxes.bound == most_live(asked)


@pytest.mark.parametrize("seed", range(10))
def test_a_placement_that_is_no_better_is_left(seed):
    boxes = boxes_of(random_allocations(seed, 25), 1)
    ways = [lambda stop: first_fit(boxes, "size", stop=stop)]
    ways.append(lambda stop: skyline(boxes, weights(boxes, "area"), stop))
    for way in ways:
        height = boxes.height(way(None))
        assert way(height) is None or not len(boxes)
        assert np.array_equal(way(height + 1), way(None))


@pytest.mark.parametrize("seed", range(10))
def test_skylines_around_good_keys_get_lower_and_stay_valid(seed):
    asked = [replace(one, bytes=one.bytes + k) for k, one in enumerate(random_allocations(seed, 60))]
    boxes = boxes_of(asked, 1)
    keys = weights(boxes, "lifetime")
    first = boxes.height(skyline(boxes, keys))
    taken = []

    def take(offsets):
        rows = [_Row(asked[k], int(at)) for k, at in zip(boxes.source, offsets, strict=True)]
        assert not overlaps(rows)
        taken.append(boxes.height(offsets))
        return taken[-1]

    least = search_around(boxes, [keys], take, first, deadline=time.perf_counter() + 60.0, most=30)
    assert least == min([first, *taken])
    assert sorted({first, *taken}, reverse=True) == [first, *taken]
    assert least >= boxes.bound
    assert search_around(boxes, [keys], take, first, deadline=time.perf_counter() - 1.0) == first


@pytest.mark.parametrize("seed", range(10))
def test_skylines_get_lower_by_raising_what_lies_too_high(seed):
    asked = [replace(one, bytes=one.bytes + k) for k, one in enumerate(random_allocations(seed, 60))]
    boxes = boxes_of(asked, 1)
    keys, first, taken = weights(boxes, "size"), 10 * boxes.bound, []

    def take(offsets):
        rows = [_Row(asked[k], int(at)) for k, at in zip(boxes.source, offsets, strict=True)]
        assert not overlaps(rows)
        taken.append(boxes.height(offsets))
        return taken[-1]

    least = raise_highest(boxes, keys, take, first, deadline=time.perf_counter() + 0.2)
    assert taken[0] == boxes.height(skyline(boxes, keys))
    assert taken == sorted(set(taken), reverse=True)
    assert boxes.bound <= least == taken[-1]
    assert raise_highest(boxes, keys, take, first, deadline=time.perf_counter() - 1.0) == first


def test_more_than_few_allocations_are_searched_by_skylines_too(monkeypatch):
    monkeypatch.setattr(placing, "_FEW", 3)
    for seed in range(6):
        asked = random_allocations(seed, 30)
        found = place(asked, time_limit=0.1)
        assert not overlaps(found.allocations)
        assert found.arena_bytes <= found.greedy_bytes


def test_pairs_that_overlap_in_time_are_counted():
    asked = random_allocations(3, 30)
    boxes = boxes_of(asked, 1)
    rows = [one for one in asked if one.bytes]
    pairs = [(a, b) for k, a in enumerate(rows) for b in rows[:k] if a.birth < b.death and b.birth < a.death]
    assert boxes.conflicts == len(pairs) > 0
    assert peak_bytes(asked) == most_live(asked)


@pytest.mark.parametrize("seed", range(8))
def test_very_many_allocations_are_placed_as_well(seed, monkeypatch):
    """They take another way through the same methods, on which greedy placement may be left early."""
    monkeypatch.setattr(placing, "_MANY", 3)
    asked = random_allocations(seed, 30)
    said = []
    found = place(asked, time_limit=0.1, progress=said.append)
    assert not overlaps(found.allocations)
    assert found.live_bytes <= found.arena_bytes <= greedy_by_size(asked)


def test_progress_is_told(monkeypatch):
    monkeypatch.setattr("lowtide.plan.address.first_fit._SAID_EVERY", 4)
    said = []
    place([Allocation(k % 5, k % 5 + 2, 10 + k) for k in range(12)], progress=said.append)
    assert "greedy: 4 of 12 placed" in said


def test_an_address_plan_survives_a_file():
    found = place([Allocation(0, 2, 8, at=(0,)), Allocation(1, 3, 8, at=(1,))], clock=EventClock.INSTRUCTION)
    data = encode_document(found)
    assert kind_of(data) == "addresses"
    assert decode_document(data, AddressPlan) == found
    assert [one.offset for one in found.taken_by()[(1,)]] == [found.allocations[1].offset]
    with pytest.raises(FormatError, match="version 7"):
        decode_document(data.replace(b'"version":1', b'"version":7'), AddressPlan)


class _Row:
    def __init__(self, one, offset):
        self.birth, self.death, self.bytes, self.offset = one.birth, one.death, one.bytes, offset
