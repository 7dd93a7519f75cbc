"""Large boxes are placed first, and small ones between them."""

import time
from pathlib import Path

import numpy as np
import pytest

from lowtide.formats import csvfile
from lowtide.plan.address.allocations import graph_allocations
from lowtide.plan.address.boxes import boxes_of
from lowtide.plan.address.large_first import search_large
from lowtide.plan.address.noisy_skyline import raise_highest
from lowtide.plan.address.place import place
from lowtide.plan.address.skyline import KEYS, skyline, weights
from lowtide.plan.address.types import Allocation
from lowtide.plan.check.addresses import check_addresses

MEASURED = Path(__file__).parent / "measured"


def measured(name):
    """What a step asked PyTorch's allocator for on a GPU, by the number of its operators."""
    step = csvfile.read((MEASURED / f"{name}.csv").read_bytes())
    return graph_allocations(step.graph, times=csvfile.times_of(step)[0])


def towers(pairs):
    """Large boxes of three sizes that follow each other, and small ones across."""
    found = [
        Allocation(2 * k, 2 * k + 3, (640 if k % 3 else 960) - 8 * (k % 5), at=(k,)) for k in range(pairs)
    ]
    return found + [Allocation(k, k + 5, 4 + k % 3, at=(k,)) for k in range(2 * pairs)]


def test_a_step_in_tiles_has_an_arena_within_a_percent_of_its_live_bytes():
    """Neither branch and bound nor skylines come closer than two percent to it, however long they look."""
    asked = measured("unet_in_2_tiles")
    assert len(asked) == 648
    found = place(asked, alignment=512, time_limit=10.0)
    assert found.live_bytes / found.arena_bytes > 0.99
    assert check_addresses(found.allocations, arena_bytes=found.arena_bytes) == found.live_bytes


def test_raised_keys_come_within_two_percent_where_keys_as_they_are_do_not():
    """A ResNet-50 with 96 images in a quarter of its memory: no key of a skyline is within five percent."""
    asked = measured("resnet50_at_a_quarter")
    boxes = boxes_of(asked, 512)
    keys = [weights(boxes, key) for key in KEYS]
    first = min(boxes.height(skyline(boxes, one)) for one in keys)
    assert boxes.bound / first < 0.95
    lowest = []

    def take(offsets):
        lowest.append(boxes.height(offsets))
        return lowest[-1] if boxes.bound / lowest[-1] < 0.98 else boxes.bound  # enough

    key = weights(boxes, "lifetime before size")
    assert raise_highest(boxes, key, take, first, deadline=time.perf_counter() + 60) == boxes.bound
    assert boxes.bound / lowest[-1] > 0.98


def looked_for(boxes, search, *, most=500, height=1 << 40, seconds=60.0):
    taken = []

    def take(offsets):
        taken.append(offsets)
        return boxes.height(offsets)

    deadline = time.perf_counter() + seconds
    return search_large(boxes, search, take, height, deadline=deadline, most=most), taken


def on_top_of_each_other(some, seconds):
    """A placement that is valid and high."""
    return np.cumsum(some.size) - some.size


def test_what_is_taken_is_valid_and_lower_each_time():
    boxes, asked = boxes_of(towers(40), 1), towers(40)
    seen = []

    def search(some, seconds):
        seen.append(some)
        return on_top_of_each_other(some, seconds)

    height, taken = looked_for(boxes, search)
    assert len(seen) > 1
    assert [len(one) for one in seen] == sorted({len(one) for one in seen})  # each set but once
    for some in seen:
        assert some.size.min() >= max(boxes.size[~np.isin(boxes.source, some.source)], default=0)
        assert some.bound <= boxes.bound
    heights = [boxes.height(one) for one in taken]
    assert heights == sorted(set(heights), reverse=True)
    assert height == heights[-1]
    for offsets in taken:
        rows = [(one.birth, one.death, at, at + one.bytes) for one, at in zip(asked, offsets, strict=True)]
        for k, (birth, death, low, high) in enumerate(rows):
            for other_birth, other_death, other_low, other_high in rows[:k]:
                beside = birth < other_death and other_birth < death
                assert not beside or high <= other_low or other_high <= low


def test_no_more_boxes_are_searched_than_it_is_told():
    boxes, seen = boxes_of(towers(40), 1), []
    looked_for(boxes, lambda some, seconds: seen.append(len(some)), most=40)
    assert seen == [40]


def test_nothing_is_placed_where_nothing_is_found_or_no_time_is_left():
    boxes = boxes_of(towers(20), 1)
    assert looked_for(boxes, lambda some, seconds: None, height=777) == (777, [])
    assert looked_for(boxes, on_top_of_each_other, height=777, seconds=-1.0) == (777, [])
    assert looked_for(boxes, on_top_of_each_other, height=boxes.bound) == (boxes.bound, [])


@pytest.mark.parametrize("sizes", [[], [5], [5] * 600])
def test_boxes_that_are_none_or_alike_have_no_large_ones(sizes):
    boxes = boxes_of([Allocation(k, k + 2, size) for k, size in enumerate(sizes)], 1)
    assert looked_for(boxes, on_top_of_each_other)[1] == []
