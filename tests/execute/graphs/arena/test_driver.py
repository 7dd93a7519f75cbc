"""Addresses of a device: they are given back by the process that reserved them alone."""

import os

import pytest

from lowtide.execute.graphs.arena import driver
from lowtide.execute.graphs.arena.driver import Addresses


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
