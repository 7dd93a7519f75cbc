"""Runs commands on damaged steps, plans, programs and caches: ``python -m tests.fuzz_commands --mutations 5000``.

A command ends with 0, or with 2 or 3 and a message; a damaged cache is passed over. Each mutation is made from
its number alone, so that a failure can be looked at again with ``--only``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import lowtide
from lowtide.commands.main import main as lowtide_main
from lowtide.commands.run import _from_file as program_from_file
from lowtide.cost.cache import CostCache, open_cache
from lowtide.cost.device import load_device, store_device
from lowtide.cost.estimate import estimate
from lowtide.cost.signature import signature
from lowtide.cost.step import Step
from lowtide.documents import encode_document
from lowtide.errors import LowtideError
from lowtide.execute.compare.graphs import with_gradients
from lowtide.execute.compare.tiles import plain_tiles
from lowtide.execute.runtime.interpreter import Interpreter
from lowtide.execute.tiling.plan_tiles import with_loop
from lowtide.formats import native
from lowtide.formats.registry import FORMATS
from lowtide.graph.access.rules import _RULES as ACCESS_RULES
from lowtide.plan.check.checker import check
from lowtide.plan.program.simple import recompute_all
from lowtide.trace.step.joint import Joint
from lowtide.trace.tiles.tiling import Tiling
from lowtide.zoo import build
from tests.mutate import mutated
from tests.report.page.cases import measured, sharded
from tests.steps import DEVICE, described, families, families_plan

SECONDS = 60
"""No command may take longer: a damaged file must not ask for endless work."""

_VALUES: list[Any] = [
    0, -1, 1, 2, 3, 7, 2.5, 1e300, 2**31, 2**62, None, True, "", "x", [], [0], [[1]], {}, {"input": 0}, {"input": 9},
]  # fmt: skip
_ALL_KINDS = [f"aten.{kind}" for kind in sorted(ACCESS_RULES)]


def _captured() -> Joint:
    built = build("convpool")
    return lowtide.capture(built.loss, built.model, *with_gradients(built.batch)).joint


@functools.cache
def joint() -> Joint:
    """A captured step that can be cut into tiles, with the gradient of its input."""
    return _captured()


@functools.cache
def document(name: str) -> bytes:
    """The undamaged file of a case."""
    if name == "families":
        return native.write(families()).data
    if name == "chain":
        graph = joint().graph
        return native.write(Step(graph, "capture", estimate(graph, DEVICE))).data
    if name == "plan":
        return encode_document(families_plan())
    if name == "run":
        return encode_document(measured())
    if name == "shards":
        return encode_document(sharded())
    if name == "program":
        return encode_document(recompute_all(joint().graph))
    if name == "loop":
        tiling = Tiling(joint())
        return encode_document(plain_tiles(joint(), tiling.boxes((1, 1, 2)))[0])
    with tempfile.TemporaryDirectory() as folder:
        return _cache_files(Path(folder))[name].read_bytes()


def _cache_files(folder: Path) -> dict[str, Path]:
    step = families()
    cache = open_cache(folder, DEVICE.environment)
    for k, cost in enumerate(step.costs):
        cache.add(signature(step.graph, k), cost)
    cache.save()
    return {"costs": cache.path, "device": store_device(folder, DEVICE)}


def _odd_calls(rng: random.Random, data: bytes) -> bytes:
    """Operators of other kinds, and numbers in arguments, strides, shapes and other fields replaced."""
    root = json.loads(data)
    graph = root["step"]["graph"]
    for _ in range(rng.choice([1, 1, 2, 5])):
        op = rng.choice(graph["ops"])
        how = rng.randrange(6)
        if how == 0:
            op["kind"] = rng.choice(_ALL_KINDS)
        elif how == 1:
            tensor = rng.choice(graph["tensors"])
            shape = tensor.get("shape") or [1]
            shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2, 5, 2**31, 2**59])
            tensor["shape"] = shape
        elif how == 2:
            name = rng.choice(["returned", "updated", "updated_early"])
            graph[name] = rng.choice([*_VALUES, [10**6], [-1]])
        elif how == 3:
            name = rng.choice(
                ["arguments", "options", "strides", "updates", "short", "overload", "differentiates"]
            )
            op[name] = rng.choice([*_VALUES, [3, 4], ["a"]])
        else:
            given = op.get("arguments")
            if not isinstance(given, list) or not given:
                continue
            place = rng.randrange(len(given))
            inner = given[place]
            if isinstance(inner, list) and inner and rng.random() < 0.7:
                inner[rng.randrange(len(inner))] = rng.choice(_VALUES)
            else:
                given[place] = rng.choice(_VALUES)
    return json.dumps(root).encode()


def damaged(name: str, number: int) -> bytes:
    """One mutation of a case's file."""
    rng = random.Random(f"{name} {number}")
    if name in ("families", "chain") and rng.random() < 0.6:
        return _odd_calls(rng, document(name))
    return mutated(rng, document(name), is_json=True)


_TILES = [
    ["--grid", "2x2"], ["--grid", "2x2", "--own", "input"], ["--grid", "2", "--dims", "batch", "--json"],
    ["--grid", "4x4", "--own", "input", "--records"], ["--grid", "3x1", "--until", "conv2"],
]  # fmt: skip


def _commands(number: int, bad: str, good: str, folder: Path) -> Iterator[list[str]]:
    """Some command lines that read a damaged step; which, its number says."""
    rng = random.Random(number)
    yield ["show", bad, *rng.choice([[], ["--json"]])]
    yield ["tile", bad, *rng.choice(_TILES), *rng.choice([[], ["--svg", str(folder / "tile.svg")]])]
    picked = rng.randrange(6)
    if picked == 0:
        yield ["top", bad, *rng.choice([["--by", "type"], ["--json"], ["--host"], ["--sort", "workspace"]])]
    elif picked == 1:
        yield ["diff", *rng.sample([bad, good], 2), *rng.choice([[], ["--json"], ["--by", "type"]])]
    elif picked == 2:
        targets = [f.name for f in FORMATS.values() if f.write is not None and f.name != "svg"]
        yield ["convert", bad, "--to", rng.choice(targets), "-o", str(folder / "out")]
    elif picked == 3:
        cost = rng.choice(["unit", "measured", "estimated"])
        budget = rng.choice(["95%", "100%", "80%"])
        yield ["plan", bad, "--cost", cost, "--budget", budget, "--time-limit", "0.1", "--explain"]
    elif picked == 4:
        yield ["plan", good, "--cost", bad, "--budget", "100%", "--time-limit", "0.1"]
    else:
        yield [
            "report",
            bad,
            *rng.choice([[], [good]]),
            "-o",
            str(folder / rng.choice(["out.html", "out.json"])),
        ]


class TooLongError(Exception):
    """A command that did not end in time."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Inside, what takes too long is ended."""

    def late(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_command(arguments: Iterable[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that is run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), in_time():
        try:
            lowtide_main(list(arguments))
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), err.getvalue()
    raise AssertionError("a command ended without an exit code")


@contextlib.contextmanager
def _own_cache(folder: Path) -> Iterator[None]:
    """Inside, caches are in a folder where the device is described already: nothing is measured."""
    described(folder)
    with mock.patch.dict(os.environ, {"LOWTIDE_CACHE": str(folder)}):
        yield


def _on_steps(name: str, number: int, data: bytes, folder: Path) -> bool:
    with _own_cache(folder / "cache"):
        return _all_commands(name, number, data, folder)


def _all_commands(name: str, number: int, data: bytes, folder: Path) -> bool:
    good, bad = folder / "good.json", folder / "bad.json"
    good.write_bytes(document(name))
    bad.write_bytes(data)
    refused = False
    for arguments in _commands(number, str(bad), str(good), folder):
        code, _, said = run_command(arguments)
        assert code in (0, 2, 3), f"{arguments} ended with {code}"
        assert (code == 0) or said.startswith(("Error: ", "Usage: ")), said
        assert "Traceback" not in said, said
        refused |= code != 0
    assert bad.read_bytes() == data
    return refused


def _on_plans(name: str, number: int, data: bytes, folder: Path) -> bool:
    bad = folder / "plan.json"
    bad.write_bytes(data)
    code, _, said = run_command(["check", str(bad), *(["--json"] if number % 2 else [])])
    assert code in (0, 2), said
    shown, _, why = run_command(["report", str(bad), "-o", str(folder / "out.html"), "--rivals", "0"])
    assert shown == code, f"{said} {why}"
    return code != 0


def _on_runs(name: str, number: int, data: bytes, folder: Path) -> bool:
    bad = folder / "run.json"
    bad.write_bytes(data)
    code, _, said = run_command(["report", str(bad), "-o", str(folder / "out.html"), "--rivals", "0"])
    assert code in (0, 2), said
    assert "Traceback" not in said, said
    return code != 0


def _on_programs(name: str, number: int, data: bytes, folder: Path) -> bool:
    """As ``lowtide run --program`` takes it, up to the first operator."""
    bad = folder / "program.json"
    bad.write_bytes(data)
    try:
        with in_time():
            step = joint()
            program = program_from_file(str(bad), ("plain",))(step.graph)
            whole = with_loop(step, program)
            check(whole.graph, program, offload=("parameters",))
            Interpreter(whole, program)
    except LowtideError:
        return True
    return False


def _on_caches(name: str, number: int, data: bytes, folder: Path) -> bool:
    path = _cache_files(folder)[name]
    path.write_bytes(data)
    if name == "device":
        return load_device(folder, DEVICE.environment) is None
    cache: CostCache = open_cache(folder, DEVICE.environment)
    cache.add("new", families().costs[0])
    cache.save()
    assert open_cache(folder, DEVICE.environment).get("new") == families().costs[0]
    return len(cache) == 1


Runner = Callable[[str, int, bytes, Path], bool]
CASES: dict[str, Runner] = {
    "families": _on_steps,
    "chain": _on_steps,
    "plan": _on_plans,
    "run": _on_runs,
    "shards": _on_runs,
    "program": _on_programs,
    "loop": _on_programs,
    "costs": _on_caches,
    "device": _on_caches,
}


def survive(name: str, numbers: Iterable[int]) -> int:
    """Use the mutations; how many were refused."""
    refused = 0
    for number in numbers:
        data = damaged(name, number)
        with tempfile.TemporaryDirectory() as folder:
            try:
                refused += CASES[name](name, number, data, Path(folder))
            except Exception as error:
                raise AssertionError(f"{name}: mutation {number} raised {error!r}") from error
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=2000, help="how many a case")
    parser.add_argument("--case", choices=CASES, help="only this case")
    parser.add_argument("--only", type=int, help="only this mutation")
    parser.add_argument("--start", type=int, default=0, help="the first mutation")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in [options.case] if options.case else CASES:
        start = time.perf_counter()
        end = options.start + options.mutations
        numbers = range(options.start, end) if options.only is None else [options.only]
        refused = survive(name, numbers)
        took = time.perf_counter() - start
        sys.stdout.write(f"{name}: {len(numbers)} mutations, {refused} refused, {took:.0f} s\n")


if __name__ == "__main__":
    main()
