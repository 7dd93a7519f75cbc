"""The checker of communication against every order of events, and against lists that are wrong on purpose."""

import random

import pytest

from lowtide.errors import PlanError
from lowtide.plan.check.communication import Exchange, Sum, check_communication


def swap(label, to, come, size=4):
    return Exchange(label, ((to, size),), ((come, size),))


def test_a_ring_that_sends_and_receives_at_once_ends():
    check_communication(
        [[swap("ring", (r + 1) % 3, (r - 1) % 3), Sum("total", (0, 1, 2), 8)] for r in range(3)]
    )
    check_communication([[], []])
    check_communication([[Exchange("nothing")], []])


def test_a_ring_that_sends_first_does_not():
    """No message is taken to be buffered: each waits until the next one receives."""
    lists = [
        [Exchange("send", sends=(((r + 1) % 3, 4),)), Exchange("receive", receives=(((r - 1) % 3, 4),))]
        for r in range(3)
    ]
    with pytest.raises(
        PlanError, match="rank 0 in send, which waits for rank 1 in send, which waits for rank 2"
    ):
        check_communication(lists)


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        (
            [
                [Sum("a", (0, 1), 4), Sum("b", (0, 1, 2), 4)],
                [Sum("b", (0, 1, 2), 4), Sum("a", (0, 1), 4)],
                [Sum("b", (0, 1, 2), 4)],
            ],
            "rank 0 in a, which waits for rank 1 in b, which waits for rank 0",
        ),
        ([[swap("halo", 1, 1)], []], "rank 0 in halo, which waits for rank 1, which has ended"),
        ([[Sum("loss", (0, 1), 4)], [swap("halo", 0, 0)]], "rank 0 in loss, which waits for rank 1 in halo"),
        (
            [[swap("halo", 1, 1)], [swap("halo", 0, 0, 8)]],
            "rank 1 sends rank 0 8 bytes in halo, where it expects 4",
        ),
        (
            [[Sum("loss", (0, 1), 4)], [Sum("loss", (0, 1), 8)]],
            "adds 8 bytes up in loss, and rank 0 4 in loss",
        ),
        ([[swap("halo", 2, 2)], []], "waits in halo for rank 2, which does not exist"),
        ([[swap("halo", 0, 0)]], "sends a message to itself"),
        (
            [[Sum("a", (0, 1), 4, "w")], [Sum("a", (0, 1), 4, "b")]],
            "rank 1 adds the gradient of b up where rank 0 does that of w",
        ),
        ([[Sum("loss", (1,), 4)], []], "takes part in loss, a sum over ranks \\[1\\]"),
    ],
)
def test_what_is_wrong_is_named(lists, told):
    with pytest.raises(PlanError, match=told):
        check_communication(lists)


def drawn(draw):
    """Lists that fit together, then sometimes two communications of a rank in the other order."""
    count = draw.randint(2, 3)
    lists = [[] for _ in range(count)]
    for step in range(draw.randint(1, 4)):
        a, b = draw.sample(range(count), 2)
        kind = draw.randrange(4)
        if kind == 0:
            ranks = tuple(sorted(draw.sample(range(count), draw.randint(2, count))))
            for rank in ranks:
                lists[rank].append(Sum(f"s{step}", ranks, 4))
        elif kind == 1:
            lists[a].append(Exchange(f"m{step}", sends=((b, 4),)))
            lists[b].append(Exchange(f"m{step}", receives=((a, 4),)))
        else:
            lists[a].append(swap(f"x{step}", b, b))
            lists[b].append(swap(f"x{step}", a, a))
    for _ in range(draw.randint(0, 2)):
        one = draw.choice(lists)
        if len(one) > 1:
            k = draw.randrange(len(one) - 1)
            one[k], one[k + 1] = one[k + 1], one[k]
    if draw.random() < 0.1:
        draw.choice(lists)[-1:] = []
    return lists


def always_ends(lists):
    """By every order in which single messages can meet: state by state, each rank at the start of an exchange.

    A state is what each rank is at, and which of its messages have met.
    """
    count = len(lists)
    start = tuple((0, frozenset()) for _ in range(count))
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        after = set()
        now = [lists[r][at] if at < len(lists[r]) else None for r, (at, _) in enumerate(state)]
        for a, one in enumerate(now):
            if isinstance(one, Exchange):
                if not one.sends and not one.receives:
                    after.add(moved(state, lists, {a: None}))
                for b, two in enumerate(now):
                    if not isinstance(two, Exchange):
                        continue
                    sends = [
                        k for k, (to, _) in enumerate(one.sends) if to == b and ("s", k) not in state[a][1]
                    ]
                    takes = [
                        k
                        for k, (come, _) in enumerate(two.receives)
                        if come == a and ("r", k) not in state[b][1]
                    ]
                    if sends and takes:
                        after.add(moved(state, lists, {a: ("s", sends[0]), b: ("r", takes[0])}))
            elif isinstance(one, Sum) and all(
                now[r] is not None and isinstance(now[r], Sum) and now[r].ranks == one.ranks
                for r in one.ranks
            ):
                after.add(moved(state, lists, dict.fromkeys(one.ranks)))
        if not after and any(one is not None for one in now):
            return False
        stack += after - seen
        seen |= after
    return True


def moved(state, lists, events):
    found = list(state)
    for rank, event in events.items():
        at, met = found[rank]
        met = met if event is None else met | {event}
        one = lists[rank][at]
        done = isinstance(one, Sum) or len(met) == len(one.sends) + len(one.receives)
        found[rank] = (at + 1, frozenset()) if done else (at, met)
    return tuple(found)


def test_every_order_of_events_ends_where_the_checker_says_so():
    draw, stuck = random.Random(0), 0
    for _ in range(1500):
        lists = drawn(draw)
        if always_ends(lists):
            check_communication(lists)
        else:
            stuck += 1
            with pytest.raises(PlanError, match="wait for each other for ever"):
                check_communication(lists)
    assert 200 < stuck < 1300
