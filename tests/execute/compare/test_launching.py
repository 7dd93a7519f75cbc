"""The host's share of a step."""

import time

import torch

from lowtide.execute.compare import launching as module
from lowtide.execute.compare.launching import launching

STEP, REST = 0.002, 0.02


def test_on_a_cpu_the_host_is_busy_for_all_of_a_step():
    found = launching(lambda: time.sleep(STEP), torch.device("cpu"), 2)
    assert found.host_seconds == found.step_seconds >= STEP


def test_what_a_device_does_after_the_call_is_not_the_hosts(monkeypatch):
    monkeypatch.setattr(module, "_synchronize", lambda device: time.sleep(REST))
    ran = []
    found = launching(lambda: ran.append("step"), torch.device("cuda"), 3, lambda: ran.append("before"))
    assert found.host_seconds < REST / 2 < REST <= found.step_seconds
    assert ran == ["before", "step"] * 3


def test_a_long_step_is_not_repeated(monkeypatch):
    monkeypatch.setattr(module, "_LONG", STEP)
    ran = []
    launching(lambda: (ran.append(1), time.sleep(2 * STEP)), torch.device("cpu"), 5)
    assert len(ran) == 1
