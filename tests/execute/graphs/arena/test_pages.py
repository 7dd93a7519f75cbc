"""Pages of memory by their numbers."""

from lowtide.execute.graphs.arena.pages import PAGE, pages_of


def test_bytes_lie_on_the_pages_that_they_touch():
    assert list(pages_of(0, 1)) == [0]
    assert list(pages_of(PAGE, PAGE)) == [1]
    assert list(pages_of(PAGE - 1, 2)) == [0, 1]
    assert list(pages_of(3 * PAGE, 0)) == []
