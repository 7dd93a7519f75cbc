"""Addresses of a device: they are given back by the process that reserved them alone."""

import os

import pytest

from lowtide.execute.graphs.arena import driver
from lowtide.execute.graphs.arena.driver import Addresses
from lowtide.execute.graphs.arena.pages import PAGE
from lowtide.execute.memory.reserved import counted_bytes


@pytest.mark.parametrize("forked", [False, True])
def test_addresses_are_given_back_where_they_were_reserved(forked, monkeypatch):
    called = []
    monkeypatch.setattr(driver, "call", lambda name, *_: called.append(name))
    addresses = Addresses()
    assert called == ["cuMemAddressReserve"]
    addresses.mapped.update([0, 1, 5])
    called.clear()
    if forked:
        mine = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: mine + 1)
    addresses.unmap(keep=[5])
    assert called == ([] if forked else ["cuCtxSynchronize", "cuMemUnmap"])
    del addresses
    assert ("cuMemAddressFree" in called) is not forked


@pytest.mark.parametrize("kept", [[], [1, 5]])
def test_what_is_left_behind_addresses_is_counted_as_long_as_it_is_there(kept, monkeypatch):
    monkeypatch.setattr(driver, "call", lambda *_: None)
    before = counted_bytes(3)
    addresses = Addresses()
    addresses.mapped.update([0, 1, 5])
    addresses.leave(kept, 3)
    assert addresses.mapped == set(kept)
    assert counted_bytes(3) == before + PAGE * len(kept)
    del addresses
    assert counted_bytes(3) == before
