"""``benchmarks/shard_gpu.py`` ends by itself: where a process dies, and where NCCL says nothing."""

import time
from pathlib import Path

import pytest

import lowtide

ROOT = Path(lowtide.__file__).parents[2]
TASK = {
    "target": "unet",
    "processes": 2,
    "cut": "height",
    "numbers": "float32",
    "device": "cpu",
    "graphs": "off",
}
DYING = """
import os, sys, time
print("stage: planning its share", flush=True)
if sys.argv[-2] == "0":
    os.abort()
time.sleep(60)
"""
SILENT = """
import sys, time
print("stage: joining the others by nccl", flush=True)
time.sleep(60)
"""


@pytest.fixture
def shard_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shard_gpu

    monkeypatch.setattr(shard_gpu, "LAST_WORDS_SECONDS", 0.1)
    return shard_gpu


def rowed(shard_gpu, monkeypatch, tmp_path, script, backend):
    worker = tmp_path / "worker.py"
    worker.write_text(script)
    monkeypatch.setattr(shard_gpu, "__file__", str(worker))
    began = time.monotonic()
    found = shard_gpu.row(TASK | {"backend": backend})
    assert time.monotonic() - began < 30
    assert shard_gpu.line(found).count("|") == shard_gpu.HEAD[0].count("|")
    return found["error"]


def test_a_process_that_dies_is_named(shard_gpu, monkeypatch, tmp_path):
    told = rowed(shard_gpu, monkeypatch, tmp_path, DYING, "gloo")
    assert told == "process 0 ended with -6: planning its share / planning its share"


def test_nccl_that_says_nothing_is_left(shard_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(shard_gpu, "NCCL_SECONDS", 3.0)
    told = rowed(shard_gpu, monkeypatch, tmp_path, SILENT, "nccl")
    assert told == "not ended after 3.0 s: joining the others by nccl"
