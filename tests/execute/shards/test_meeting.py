"""What processes tell each other before a tensor moves: threads stand for them here."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lowtide.errors import PlanError, RunError
from lowtide.execute.shards.meeting import Meeting, UnreachableError, within


def meet(count, said, seconds=30.0, absent=()):
    """What ``said(meeting)`` gives or raises in each thread."""
    store = torch.distributed.HashStore()

    def run(rank):
        try:
            return said(Meeting(store, rank, count, seconds))
        except (RunError, ValueError) as error:
            return error

    there = [rank for rank in range(count) if rank not in absent]
    with ThreadPoolExecutor(len(there)) as threads:
        return list(threads.map(run, there))


def test_everybody_hears_everybody_topic_by_topic():
    def said(meeting):
        first = meeting.everybody("one", f"a{meeting.rank}".encode())
        return first, meeting.everybody("two", f"b{meeting.rank}".encode())

    assert meet(3, said) == [([b"a0", b"a1", b"a2"], [b"b0", b"b1", b"b2"])] * 3


def test_what_differs_is_refused_by_all_with_one_message():
    def said(meeting):
        version = "2.11" if meeting.rank == 1 else "2.13"
        meeting.agree("compare versions", {"the mesh": "3", "the version of torch": version}, "Install one")

    found = meet(3, said)
    assert {str(one) for one in found} == {
        "rank 0 and rank 1 differ in the version of torch: 2.13 and 2.11. Install one"
    }
    assert all(isinstance(one, RunError) for one in found)


def test_where_one_fails_all_raise_its_error():
    def said(meeting):
        def work():
            if meeting.rank == 2:
                raise PlanError("no plan fits")
            return meeting.rank

        return meeting.settled("plan", work)

    assert {str(one) for one in meet(3, said)} == {"rank 2: PlanError: no plan fits"}
    assert meet(2, lambda meeting: meeting.settled("plan", lambda: meeting.rank)) == [0, 1]


def test_a_fault_of_ours_stays_one_where_it_is():
    def said(meeting):
        return meeting.settled("plan", lambda: int("x" if meeting.rank else "1"))

    first, second = meet(2, said)
    assert str(first).startswith("rank 1: ValueError: invalid literal")
    assert isinstance(second, ValueError)


def test_one_that_does_not_come_is_named():
    found = meet(3, lambda meeting: meeting.everybody("plan the step", b""), 0.1, absent=[1])
    assert all("rank 1 of 3 has not come to plan the step in 0 s" in str(one) for one in found)


def test_a_store_that_does_not_answer_is_given_up():
    answer = threading.Event()
    with pytest.raises(UnreachableError, match="cannot be reached: no answer for 0 s"):
        within(0.05, answer.wait)
    answer.set()

    def broken():
        raise RuntimeError("Broken pipe\nmore")

    with pytest.raises(UnreachableError, match="cannot be reached: Broken pipe. It runs where"):
        within(5.0, broken)
    waiting = [thread for thread in threading.enumerate() if thread.name == "lowtide store"]
    for thread in waiting:
        thread.join(30)
    assert not any(thread.is_alive() for thread in waiting)


def test_one_that_says_it_is_there_is_waited_for():
    def said(meeting):
        if meeting.rank:
            for number in range(10):  # as while it plans
                meeting.store.set(f"lowtide/beat/{meeting.rank}", str(number))
                time.sleep(0.1)
        return meeting.everybody("plan the step", b"x")

    assert meet(2, said, 0.3) == [[b"x", b"x"]] * 2
