"""Values inside of tuples, lists and dicts."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest

from lowtide.nested import leaves, mapped

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("value", "flat", "doubled"),
    [
        (1, [1], 2),
        ((), [], ()),
        ((1, [2, 3]), [1, 2, 3], (2, [4, 6])),
        ({"a": 1, "b": {"c": (2,)}}, [1, 2], {"a": 2, "b": {"c": (4,)}}),
        (Pair(1, [2]), [1, 2], Pair(2, [4])),
        (OrderedDict(a=1), [1], OrderedDict(a=2)),
        (defaultdict(list, a=1), [1], defaultdict(list, a=2)),
        (UserDict(a=[1]), [1], UserDict(a=[2])),
        ("text", ["text"], "texttext"),
    ],
)
def test_leaves_and_their_places(value, flat, doubled):
    before = repr(value)
    assert list(leaves(value)) == flat
    made = mapped(lambda leaf: leaf * 2, value)
    assert made == doubled
    assert type(made) is type(value)
    assert repr(value) == before
