"""Reads damaged documents by the thousand: ``python -m tests.fuzz --mutations 100000``.

Each mutation is made from its number alone, so that a failure can be looked at again with ``--only``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lowtide.collector import collector_paused
from lowtide.errors import ConvertError, FormatError
from lowtide.formats import chainer, csvfile, dataflow, dot, native
from lowtide.formats.registry import FORMATS, read_file, recognise, write_file
from lowtide.report.summary import summarise
from lowtide.report.terminal import print_summary
from tests.conftest import document_path
from tests.formats.profiles import exported, gpu_events
from tests.formats.snapshots import pickled
from tests.mutate import mutated


@dataclass(frozen=True)
class Case:
    format: str
    is_json: bool = False


CASES = {
    "chainer": Case("chainer"),
    "megengine": Case("megengine", is_json=True),
    "dataflow": Case("dataflow"),
    "tensorflow": Case("tensorflow"),
    "tilelog": Case("tilelog"),
    "csv": Case("csv"),
    "dot": Case("dot"),
    "native": Case("native", is_json=True),
    "snapshot": Case("snapshot"),
    "profiler": Case("profiler", is_json=True),
}

_WRITTEN_OFTEN = 60
"""A mutation in so many is also summarised and written in every format if it was read."""


@functools.cache
def document(name: str) -> bytes:
    """The undamaged file of a case."""
    numbers = {"chainer": "000", "megengine": "001", "dataflow": "002", "tensorflow": "003", "tilelog": "004"}
    if name in numbers:
        return document_path(numbers[name]).read_bytes()
    if name in ("snapshot", "profiler"):
        return pickled() if name == "snapshot" else exported(gpu_events())
    if name == "dot":
        return dot.write(dataflow.read(document("dataflow"))).data
    step = chainer.read(document("chainer"))
    return {"csv": csvfile.write, "native": native.write}[name](step).data


def survive(name: str, mutations: Iterable[int]) -> int:
    """Read the mutations; how many were refused. Anything but a FormatError is let through."""
    case, refused = CASES[name], 0
    format_ = FORMATS[case.format]
    for number in mutations:
        with collector_paused():
            data = mutated(random.Random(f"{name} {number}"), document(name), is_json=case.is_json)
        try:
            with contextlib.suppress(FormatError):
                recognise(data)
            with collector_paused():  # as the registry reads
                step = format_.read(data)
        except FormatError as error:
            assert error.line is not None or error.byte is not None
            assert error.expected
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{name}: mutation {number} raised {error!r}") from error
        if number % _WRITTEN_OFTEN == 0:
            use(step, format_)
    return refused


def use(step, format_) -> None:
    """What was read can be shown, stored and converted, and what was written can be read again."""
    view = summarise(step, format_, FORMATS.get(step.format, format_))
    for width in (40, 80, 160):
        print_summary(Console(file=io.StringIO(), width=width), "file", format_.title, view)
    json.dumps(view, allow_nan=False)
    assert native.read(native.write(step).data) == step
    with tempfile.TemporaryDirectory() as folder:
        for target in FORMATS.values():
            if target.write is None or target.name == "svg":
                continue
            out = Path(folder) / target.name
            try:
                write_file(step, target.name, out)
            except ConvertError:
                assert not out.exists()
                continue
            if target.read is not None:
                read_file(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=100_000, help="how many a format")
    parser.add_argument("--format", choices=CASES, help="only this format")
    parser.add_argument("--only", type=int, help="only this mutation")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    for name in [options.format] if options.format else CASES:
        start = time.perf_counter()
        numbers = range(options.mutations) if options.only is None else [options.only]
        refused = survive(name, numbers)
        took = time.perf_counter() - start
        sys.stdout.write(f"{name}: {len(numbers)} mutations, {refused} refused, {took:.0f} s\n")


if __name__ == "__main__":
    main()
