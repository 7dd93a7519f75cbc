"""Pages behind addresses: as many as are live at once, and none behind two that are live together."""

import random

import pytest

from lowtide.execute.graphs.pages import PAGE, Lifetimes, pages_of


def test_bytes_lie_on_the_pages_that_they_touch():
    assert list(pages_of(0, 1)) == [0]
    assert list(pages_of(PAGE, PAGE)) == [1]
    assert list(pages_of(PAGE - 1, 2)) == [0, 1]
    assert list(pages_of(3 * PAGE, 0)) == []


@pytest.mark.parametrize("seed", range(20))
def test_as_many_pages_as_are_live_at_once(seed):
    numbers = random.Random(seed)
    free: list[int] = []
    lifetimes = Lifetimes(free.extend)
    live: list[range] = []
    next_page, most, pages = 0, 0, 0
    for _ in range(60):
        span = range(next_page, next_page + numbers.randrange(6))
        next_page = span.stop
        stay = []
        if len(span) > 1:
            cut = numbers.randrange(1, len(span))
            stay = [span[:cut]] if numbers.random() < 0.7 else [span[:cut], span[cut - 1 :]]
        behind = [free.pop() if free else made for made in range(pages, pages + len(span))]
        pages = max([pages, *(one + 1 for one in behind)])
        lifetimes.ran(span, behind, stay)
        during = {page for one in live for page in one} | set(span)
        memory = [lifetimes.behind[page] for page in during]
        assert len(set(memory)) == len(memory), "one page behind two addresses"
        most = max(most, len(during))
        live += stay
        while live and numbers.random() < 0.5:
            lifetimes.died(live.pop(numbers.randrange(len(live))))
    assert len(lifetimes.used) == most
