"""Fits random steps by the thousand: ``python -m tests.fuzz_models --cases 2000``.

Each case is a step of :mod:`tests.random_models` with a budget and methods, made from its number alone, so that it
can be looked at again with ``--only``. It is fitted and trained for three steps beside eager PyTorch. Nothing but
Lowtide's own errors may come, every peak stays inside the budget, and what the steps leave behind is that of eager:
bit for bit, or in tiles no further from float64 than a few times what eager is. Cases from 1,000,000 on run in groups
(``kernels="fused"``), whose operators run one by one; from 2,000,000 on groups are compiled, which takes long.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import torch
from torch import nn

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import CaptureError, InfeasibleError, LowtideError
from lowtide.execute.compile.bits import same_bits
from lowtide.execute.kernels import compile_groups
from tests.random_models import Step, random_step

STEPS = 3
BUDGETS = ("100%", "100%", "85%", "70%", "55%", "40%", "smallest")
METHODS = ("auto", "auto", "recompute", "recompute,offload", "recompute,tile", "recompute,offload,tile")
FUSED, COMPILED = 1_000_000, 2_000_000
_RATE = 1e-2
_PART = 100
"""So many cases one process works on."""
_TIMES = 16
"""In tiles, values may be so many times further from float64 than those of eager."""
_LEAST = 64
"""And so many roundings of the largest value besides."""


@dataclass(frozen=True)
class Case:
    step: Step
    budget: str
    only: str
    offload: str
    kernels: str = "eager"


def case(number: int) -> Case:
    """The case of a number; some steps come with several budgets."""
    draw = random.Random(f"case {number}")
    only = draw.choice(METHODS)
    offload = "parameters" if "offload" in only and draw.random() < 0.3 else ""
    kernels = "fused" if number >= FUSED else "eager"
    only = only.removesuffix(",tile") if kernels == "fused" else only
    return Case(random_step(number), draw.choice(BUDGETS), only, offload, kernels)


class WrongError(AssertionError):
    """A promise that was broken."""


def checked(number: int) -> str:
    """How a case ended, in a word; a WrongError says which promise was broken."""
    if FUSED <= number < COMPILED:
        compile_groups.compile_kernels = _not_compiled
    one = case(number)
    step = one.step
    torch._dynamo.reset()
    model = step.build()
    try:
        expected = trained(step, copy.deepcopy(model), step.loss)
    except (RuntimeError, NotImplementedError, IndexError):
        return "refused by eager"
    if not all(
        same_bits(a, b) for a, b in zip(expected, trained(step, copy.deepcopy(model), step.loss), strict=True)
    ):
        return "eager differs from itself"
    try:
        fitted = fit(one, model)
    except InfeasibleError as error:
        return refused(one, model, error)
    except CaptureError:
        return "not captured"
    if fitted.plan.predicted.peak_bytes > fitted.plan.budget_bytes:
        raise WrongError(f"predicted {fitted.plan.predicted.peak_bytes} in {fitted.plan.budget_bytes}")
    inside(one, model, fitted)
    got = trained(step, copy.deepcopy(model), fitted)
    rounded = fitted.plan.decisions.tiles or one.kernels == "fused"
    if not rounded:
        for k, (a, b) in enumerate(zip(expected, got, strict=True)):
            if not same_bits(a, b):
                raise WrongError(f"value {k} of {len(got)} differs: {apart(a, b):.3g}")
        return "bitwise"
    as_exact(step, model, expected, got)
    return "fused" if one.kernels == "fused" else "in tiles"


def _not_compiled(*_: object) -> None:
    raise NotImplementedError("operators run one by one")


def fit(one: Case, model: nn.Module, budget: str | int | None = None) -> lowtide.Fitted:
    """The step inside the budget of the case."""
    torch.manual_seed(0)
    batch = one.step.batch()
    if budget is None and one.budget == "smallest":
        try:
            return fit(one, model, 1)
        except InfeasibleError as error:
            budget = error.smallest_budget
    return lowtide.fit(
        one.step.loss, model, *batch, budget=one.budget if budget is None else budget, only=one.only,
        offload=one.offload, time_limit=0.5, kernels=one.kernels,
    )  # fmt: skip


def refused(one: Case, model: nn.Module, error: InfeasibleError) -> str:
    """A budget that is too small: the one that the error names must work."""
    if error.smallest_budget <= error.budget:
        raise WrongError(f"{error.budget} bytes refused, and {error.smallest_budget} named")
    if one.budget == "smallest":
        raise WrongError(f"the smallest budget that was named is refused, {error.smallest_budget} named next")
    torch._dynamo.reset()
    try:
        fit(one, model, error.smallest_budget)
    except InfeasibleError as again:
        raise WrongError(
            f"{error.smallest_budget} bytes named, then refused: {again.smallest_budget}"
        ) from again
    return "too small"


def trained(step: Step, model: nn.Module, function: object) -> list[torch.Tensor | None]:
    """What some steps of SGD leave behind."""
    found: list[torch.Tensor | None] = []
    for k in range(STEPS):
        torch.manual_seed(k)
        batch = step.batch()
        loss = stepped(step, model, function, batch)
        found += [loss.detach(), torch.get_rng_state(), *(t.grad for t in batch if t.is_floating_point())]
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=_RATE)
    return [*found, *(t.detach().clone() for t in model.state_dict().values())]


def stepped(step: Step, model: nn.Module, function: object, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    result = function(model, *batch)
    # of a result, a gradient that lies as it does: in another layout it would be copied first, and round otherwise
    result.backward(result.detach().clone() if step.outside else None)
    return result


def inside(one: Case, model: nn.Module, fitted: lowtide.Fitted) -> None:
    """The measured peak of a step stays inside the budget."""
    if one.step.outside:
        return  # the loss is not a part of the step
    own = copy.deepcopy(model)
    torch.manual_seed(0)
    batch = one.step.batch()
    # what watches on the CPU knows only memory that was taken while it watched, as that of leaves that come back
    watch_cpu(lambda _: stepped(one.step, own, fitted, batch))
    own.zero_grad(set_to_none=True)
    batch = tuple(t.detach().requires_grad_(t.requires_grad) for t in batch)
    leaves = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in (*own.state_dict().values(), *batch)
    }
    _, seen = watch_cpu(lambda _: stepped(one.step, own, fitted, batch))
    peak, budget = seen.peak_bytes + sum(leaves.values()), fitted.plan.budget_bytes
    if peak > budget:
        raise WrongError(f"measured {peak} in {budget}, predicted {fitted.plan.predicted.peak_bytes}")


def as_exact(step: Step, model: nn.Module, eager: list, got: list) -> None:
    """What tiles leave behind after one step is as near to float64 as what eager leaves."""
    exact = trained_in_double(step, model)
    # a gradient that is zero in exact arithmetic is made of roundings of others
    largest = max((float(t.abs().max()) for t in exact if _is_real(t)), default=0.0)
    for k, (one, other, true) in enumerate(zip(got, eager, exact, strict=False)):
        if not _is_real(true) or one is None or other is None:
            continue
        allowed = _TIMES * apart(other, true) + _LEAST * torch.finfo(one.dtype).eps * max(largest, 1e-3)
        if apart(one, true) > allowed:
            raise WrongError(
                f"value {k}: {apart(one, true):.3g} from float64, eager {apart(other, true):.3g}"
            )


def _is_real(value: torch.Tensor | None) -> bool:
    return value is not None and value.is_floating_point() and value.numel() > 0


def trained_in_double(step: Step, model: nn.Module) -> list[torch.Tensor | None]:
    """What one step of SGD leaves behind in float64, from the same random numbers."""
    own = copy.deepcopy(model).double()
    torch.manual_seed(0)
    batch = tuple(
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in step.batch()
    )
    with torch.autocast("cpu", enabled=False):
        loss = stepped(step, own, step.loss, batch)
    gradients = [t.grad for t in batch if t.is_floating_point()]
    return [loss.detach(), None, *gradients, *(p.grad for p in own.parameters())]


def apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """The largest difference."""
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return float((one.double() - other.double()).abs().nan_to_num(0.0).max()) if one.numel() else 0.0


def survive(numbers: Iterable[int], say: object = None) -> Counter[str]:
    """Check the cases; how they ended, counted. A WrongError or any error that is not Lowtide's is let through."""
    found: Counter[str] = Counter()
    for number in numbers:
        try:
            ended = checked(number)
        except WrongError as error:
            raise WrongError(f"case {number}: {error} ({described(number)})") from error
        except LowtideError as error:
            raise WrongError(
                f"case {number}: {type(error).__name__}: {error} ({described(number)})"
            ) from error
        except Exception as error:
            raise WrongError(f"case {number} raised {error!r} ({described(number)})") from error
        found[ended] += 1
    return found


def described(number: int) -> str:
    one = case(number)
    return f"{one.kernels}, {one.budget}, {one.only}{', ' + one.offload if one.offload else ''}; {one.step.words}"


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """With a cache of its own, on one thread, without warnings."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["LOWTIDE_CACHE"] = folder
        yield


def _work(numbers: list[int], told: Connection) -> None:
    """Some cases in a process of their own: tells each number, how it ended, and what went wrong."""
    with quietly():
        for number in numbers:
            told.send((number, "", ""))
            try:
                told.send((number, *survive([number]), ""))
            except WrongError as error:
                said = [str(error)]
                if not isinstance(error.__cause__, WrongError):
                    said += traceback.format_exception(error.__cause__)[-3:]
                told.send((number, "WRONG", "\n".join(said)))
            gc.collect()


def _eager(number: int) -> None:
    """The first step of a case by eager PyTorch alone."""
    with quietly():
        step = case(number).step
        stepped(step, step.build(), step.loss, step.batch())


class _Worker:
    """A process that works on some cases, and may die of one."""

    def __init__(self, numbers: list[int]) -> None:
        self.left, self.at, self.done = list(numbers), -1, False
        context = multiprocessing.get_context("spawn")
        self.told, other = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(numbers, other), daemon=True)
        self.process.start()
        other.close()

    def results(self) -> Iterator[tuple[int, str, str]]:
        """What it has told since; at the end, that it died."""
        try:
            while self.told.poll():
                number, ended, problem = self.told.recv()
                self.at = number
                if ended:
                    self.left.remove(number)
                    yield number, ended, problem
        except EOFError:
            self.done = True
            self.process.join()
            if self.process.exitcode and self.at in self.left:
                self.left.remove(self.at)
                yield self.at, *_died(self.at, self.process.exitcode)


def _died(number: int, code: int) -> tuple[str, str]:
    """Why a process died of a case: eager PyTorch itself may do so."""
    alone = multiprocessing.get_context("spawn").Process(target=_eager, args=(number,))
    alone.start()
    alone.join()
    if alone.exitcode is not None and alone.exitcode < 0:
        return "refused by eager", ""
    return "WRONG", f"case {number} ended the process with {code} ({described(number)})"


def run(numbers: list[int], jobs: int) -> Iterator[tuple[int, str, str]]:
    """Each case as it ends: its number, how it ended, what went wrong."""
    parts = [numbers[k : k + _PART] for k in range(0, len(numbers), _PART)]
    working: list[_Worker] = []
    while parts or working:
        while parts and len(working) < jobs:
            working.append(_Worker(parts.pop(0)))
        wait([worker.told for worker in working])
        for worker in working:
            yield from worker.results()
            if worker.done and worker.left:
                parts.insert(0, worker.left)
        working = [worker for worker in working if not worker.done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="only this case")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.only is not None:
        with quietly():
            sys.stdout.write(f"{described(options.only)}\n{dict(survive([options.only]))}\n")
        return
    start, total = time.perf_counter(), Counter[str]()
    numbers = list(range(options.seed, options.seed + options.cases))
    for _, ended, problem in run(numbers, options.jobs):
        total[ended] += 1
        done = sum(total.values())
        if problem:
            sys.stdout.write(f"{problem}\n")
        if done % 100 == 0 or done == len(numbers):
            took = time.perf_counter() - start
            sys.stdout.write(f"{done} cases, {took:.0f} s: {dict(total.most_common())}\n")
        sys.stdout.flush()
    sys.exit(1 if total["WRONG"] else 0)


if __name__ == "__main__":
    main()
