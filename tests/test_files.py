import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide.errors import FileError
from lowtide.files import check_outputs, read_bytes, write_atomically, write_together


def test_a_file_is_written_whole_with_ordinary_permissions(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, b"one")
    assert read_bytes(path) == b"one"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    path.chmod(0o600)
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FileError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_a_link_and_what_is_no_file_is_not_replaced(tmp_path):
    target, link, fifo = tmp_path / "target", tmp_path / "link", tmp_path / "fifo"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, "/dev/null"):
        with pytest.raises(FileError, match="not a regular file"):
            write_atomically(path, b"new")
    assert fifo.is_fifo()
    with pytest.raises(FileError, match="no file"):
        write_atomically("", b"new")


def test_what_is_no_regular_file_is_not_read(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, "/dev/zero"):
        with pytest.raises(FileError, match="not a regular file"):
            read_bytes(path)
    with pytest.raises(FileError, match="No such file"):
        read_bytes(tmp_path / "missing")
    with pytest.raises(FileError):
        read_bytes("\0")


def test_an_endless_file_is_not_read(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(FileError, match="more than"):
        read_bytes(path)


def test_files_written_together_are_all_there_or_none(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    with pytest.raises(FileError, match="cannot be written"):
        write_together([(one, b"1"), (tmp_path / "none" / "other", b"2")])
    assert list(tmp_path.iterdir()) == []
    write_together([(one, b"1"), (other, b"2")])
    assert (one.read_bytes(), other.read_bytes()) == (b"1", b"2")
    assert sorted(tmp_path.iterdir()) == [one, other]


def test_outputs_that_are_one_file_are_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    check_outputs(tmp_path / "file", None, tmp_path / "other")
    with pytest.raises(FileError, match="two outputs"):
        check_outputs(tmp_path / "file", tmp_path / "link")
    with pytest.raises(FileError, match="no folder"):
        check_outputs(tmp_path / "none" / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


WRITER = """
import os, signal, sys
from pathlib import Path
from lowtide.files import write_together
kind, moment, *paths = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), getattr(signal, kind))
    signal.pause()
def after(function):
    def call(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return call
if moment == "created":
    os.fdopen = die
elif moment == "written":
    os.fsync = die
elif moment == "before the move":
    Path.replace = die
elif moment == "after the move":
    Path.replace = after(Path.replace)
write_together([(path, b"new" * 100_000) for path in paths])
"""


def killed(kind, moment, *paths):
    command = [sys.executable, "-c", WRITER, kind, moment, *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("moment", ["created", "written", "before the move", "after the move"])
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_a_writer_that_is_killed_leaves_whole_files_and_nothing_for_long(kind, moment, tmp_path):
    path, other = tmp_path / "file", tmp_path / "file.json"
    path.write_bytes(b"old")
    other.write_bytes(b"old")
    assert killed(kind, moment, path, other).returncode == -getattr(signal, kind)
    whole = {b"old", b"new" * 100_000}
    assert {path.read_bytes(), other.read_bytes()} <= whole
    left = [p for p in tmp_path.iterdir() if p not in (path, other)]
    assert bool(left) == (kind != "SIGINT")
    write_together([(path, b"newer"), (other, b"newer")])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"file": b"newer", "file.json": b"newer"}


def test_what_another_writer_has_under_way_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace = Path.replace

    def meanwhile(part, target):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            write_atomically(path, b"in between")
        assert path.read_bytes() == b"in between"
        return replace(part, target)

    (tmp_path / ".file.notes.part").write_bytes(b"somebody's own")
    monkeypatch.setattr(Path, "replace", meanwhile)
    write_atomically(path, b"last")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "file": b"last",
        ".file.notes.part": b"somebody's own",
    }
