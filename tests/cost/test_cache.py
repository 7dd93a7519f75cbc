"""The cache on disk: shared by processes, and never trusted."""

import json
import os
import subprocess
import sys

import pytest

from lowtide.cost import Cost, Figure, Origin
from lowtide.cost import cache as files
from lowtide.cost.cache import open_cache
from lowtide.errors import FileError
from tests.cost.plain import environment


def cost(seconds=0.5):
    return Cost(*(Figure(value, Origin.MEASURED) for value in (seconds, 8, 16, 0)))


def filled(folder, **costs):
    cache = open_cache(folder, environment())
    for name, value in costs.items():
        cache.add(name, value)
    cache.save()
    return cache


def test_what_was_added_is_there_next_time(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    filled(folder, a=cost(0.25))
    again = open_cache(folder, environment())
    assert again.get("a") == cost(0.25)
    assert again.get("b") is None
    assert again.problem == ""


def test_a_file_is_read_again_once_it_has_changed(tmp_path, monkeypatch):
    filled(tmp_path, a=cost(0.25))
    read, inner = [], files._parsed
    monkeypatch.setattr(files, "_parsed", lambda *args: read.append(1) or inner(*args))
    first = open_cache(tmp_path, environment())
    first.add("b", cost())  # not saved: nobody else sees it
    again = open_cache(tmp_path, environment())
    assert (again.get("a"), again.get("b"), len(read)) == (cost(0.25), None, 1)
    filled(tmp_path, c=cost(0.5))
    read.clear()
    assert open_cache(tmp_path, environment()).get("c") == cost(0.5)
    assert len(read) == 1


def test_a_file_of_a_version_that_knew_no_disturbances_is_read(tmp_path):
    path = filled(tmp_path, a=cost(0.25)).path
    assert b"disturbed" not in path.read_bytes()
    assert open_cache(tmp_path, environment()).get("a").disturbed is False


def test_every_environment_has_a_file_of_its_own(tmp_path):
    filled(tmp_path, a=cost())
    other = open_cache(tmp_path, environment(threads="3"))
    assert other.get("a") is None
    assert other.problem == ""
    other.add("b", cost())
    other.save()
    assert len(list(tmp_path.glob("costs-*.json"))) == 2
    assert open_cache(tmp_path, environment()).get("b") is None


def changed(change):
    def damage(data):
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return damage


DAMAGE = {
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "not JSON": lambda data: b"\xff\xfe\x00",
    "another version": changed(lambda d: d.update(version=99)),
    "another document": changed(lambda d: d.update(lowtide="step")),
    "another environment": changed(lambda d: d["environment"].update(name="a faster device")),
    "a negative time": changed(lambda d: d["costs"]["a"]["seconds"].update(value=-1)),
    "no time": changed(lambda d: d["costs"]["a"].pop("seconds")),
    "text for a number": changed(lambda d: d["costs"]["a"]["seconds"].update(value="soon")),
    "an unknown field": changed(lambda d: d["costs"]["a"].update(energy=1)),
    "nested deeply": lambda data: b"[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_stale_file_is_noticed_ignored_and_replaced(name, tmp_path):
    path = filled(tmp_path, a=cost()).path
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    cache = open_cache(tmp_path, environment())
    assert cache.get("a") is None
    assert str(path) in cache.problem
    cache.add("b", cost())
    cache.save()
    assert cache.problem == ""
    again = open_cache(tmp_path, environment())
    assert (again.problem, again.get("a"), again.get("b")) == ("", None, cost())


def test_what_cannot_be_read_is_no_reason_to_stop(tmp_path):
    path = filled(tmp_path, a=cost()).path
    path.unlink()
    path.mkdir()
    cache = open_cache(tmp_path, environment())
    assert "not a regular file" in cache.problem
    cache.add("b", cost())
    with pytest.raises(FileError):
        cache.save()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    tmp_path.chmod(0o500)
    cache = open_cache(tmp_path / "cache", environment())
    cache.add("a", cost())
    with pytest.raises(FileError, match="cannot be made"):
        cache.save()


def test_a_file_in_the_place_of_the_folder_is_said(tmp_path):
    (tmp_path / "cache").write_text("")
    cache = open_cache(tmp_path / "cache", environment())
    cache.add("a", cost())
    with pytest.raises(FileError, match="cannot be made"):
        cache.save()


def test_saving_keeps_what_others_saved_meanwhile(tmp_path):
    mine, theirs = (open_cache(tmp_path, environment()) for _ in range(2))
    mine.add("a", cost(1.0))
    theirs.add("b", cost(2.0))
    theirs.save()
    mine.save()
    assert mine.get("b") == cost(2.0)
    again = open_cache(tmp_path, environment())
    assert (again.get("a"), again.get("b")) == (cost(1.0), cost(2.0))


WRITER = """
import sys
from pathlib import Path
from lowtide.cost.cache import open_cache
from tests.cost.test_cache import cost, environment
for k in range(25):
    cache = open_cache(Path(sys.argv[1]), environment())
    assert not cache.problem, cache.problem
    cache.add(f"{sys.argv[2]}{k}", cost(k))
    cache.save()
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    folder = tmp_path / "cache"
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen([*command, name]) for name in "xyz"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    cache = open_cache(folder, environment())
    assert cache.problem == ""
    assert all(cache.get(f"{name}{k}") == cost(k) for name in "xyz" for k in range(25))
    assert {path.suffix for path in folder.iterdir()} == {".json", ".lock"}
