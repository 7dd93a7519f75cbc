"""What the commands share: options, files and targets, printing for people and for machines."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from rich.console import Console

from lowtide.documents import kind_of, read_document
from lowtide.errors import GraphError, PlanError
from lowtide.files import is_file, read_bytes
from lowtide.formats.base import Format
from lowtide.formats.registry import Loaded, read_data
from lowtide.graph import Graph, check_fields
from lowtide.plan.budget import parse_budget
from lowtide.plan.request import KERNELS
from lowtide.plan.result.measured_run import MeasuredRun
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.played import plan_step, run_step
from lowtide.plan.result.validate import check_plan, valid_run
from lowtide.printable import printable
from lowtide.report.rows import SORT_KEYS, Row, grouped
from lowtide.suggest import did_you_mean

__all__ = [
    "SEED",
    "Choice",
    "check_kind",
    "checked_graph",
    "console",
    "default_sort",
    "device_option",
    "is_step_file",
    "json_option",
    "kernels_option",
    "load",
    "offload_option",
    "print_json",
    "read_for",
    "refuse_reserved",
    "say",
    "say_written",
    "select",
    "table_options",
    "target_help",
]

_PIPE_WIDTH = 160
_PLAN = Format(name="plan", title="plan of a step, predicted")
_RUN = Format(name="run", title="measured run of a plan")

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")


SEED = click.IntRange(min=-(2**63), max=2**64 - 1)
"""What torch takes as a seed."""


def _device(_: click.Context, __: click.Parameter, name: str) -> str:
    """A device on which a step can run, by its kind; whether it is there is found when it is used."""
    kinds = ("cpu", "cuda")
    kind = name.partition(":")[0]
    if kind not in kinds:
        raise click.BadParameter(f"a step runs on cpu or cuda, not on {name!r}.{did_you_mean(kind, kinds)}")
    return name


device_option = click.option(
    "--device", default="cpu", metavar="DEVICE", callback=_device, help="cpu or cuda [cpu]."
)


offload_option = click.option(
    "--offload",
    default="",
    metavar="WHAT",
    help="What may wait on the host besides activations: parameters, optimizer, or both: a,b.",
)


_TARGET = """

TARGET is a network of the zoo, as `unet:base=16,batch=2,size=284`, or a function of your own, as
`path/to/file.py:function`. It takes nothing and returns what `lowtide.fit` takes: a function that gives the
loss, the model, and the batch, which may be a tensor or a tuple, list or dict of tensors:

\b
    def step():
        model, batch = MyModel(), {"x": torch.randn(8, 4), "y": torch.zeros(8)}
        return loss_of, model, batch  # the loss is loss_of(model, batch)
"""

_Command = TypeVar("_Command", bound=Callable[..., None])


def target_help(command: _Command) -> _Command:
    """Say in the help of a command what a TARGET is, and what a function of the user's own returns."""
    command.__doc__ = inspect.cleandoc(command.__doc__ or "") + _TARGET
    return command


class Choice(click.Choice[str]):
    """A choice that offers the nearest name for a misspelt one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, if it is one of the choices."""
        if value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}.{hint}", param, ctx)
        return super().convert(value, param, ctx)


kernels_option = click.option(
    "--kernels",
    type=Choice(KERNELS),
    default="eager",
    help="eager: each operator runs eager PyTorch's kernel; fused: groups are compiled [eager].",
)


def checked_graph(graph: Graph, file: str, check: Callable[[Graph], Graph] = check_fields) -> Graph:
    """The graph of a file, or a GraphError that names the file, what is wrong in it, and what to do."""
    try:
        return check(graph)
    except GraphError as error:
        advice = "the file is damaged, or was written by another version; make it again by `lowtide profile`"
        raise GraphError(f"{printable(file)}: {error}: {advice}", op=error.op) from None


def console() -> Console:
    """Where text for people goes: colour only on a terminal, a fixed width elsewhere."""
    out = Console()
    return out if out.is_terminal else Console(width=_PIPE_WIDTH)


def say(text: str, *, err: bool = False, over: bool = False) -> None:
    """Text for people, whatever it quotes, on standard output or on standard error.

    It is written ``over`` a line of progress that has not ended.
    """
    start = "\r\x1b[K" if over and sys.stderr.isatty() else ""
    click.echo(start + printable(text, lines=True), err=err)


def say_written(*files: str | None, report: str | None = None) -> None:
    """Which files were written, and how to look at one of them."""
    for file in files:
        if file is not None:
            say(f"Wrote {printable(file)}")
    if report is not None:
        say(f"Next: lowtide report {printable(report)}")


def print_json(value: Any) -> None:
    """One JSON document in ASCII on standard output; values stay as they are, control characters escaped."""
    text = json.dumps(value, indent=2, allow_nan=False)
    click.echo(text.replace("\x7f", "\\u007f"))  # the one that JSON lets pass


def is_step_file(target: str) -> bool:
    """Whether a FILE|TARGET is a file with a step, neither a network of the zoo nor somebody's code."""
    return is_file(target) and not target.endswith(".py")


def read_for(target: str) -> str | None:
    """The file that is read for a FILE|TARGET; None for a network of the zoo."""
    code = target.rpartition(":")[0]
    if code.endswith(".py"):
        return code
    return target if is_step_file(target) else None


def load(file: str) -> Loaded:
    """A step in any format, or a plan or a measured run as the step that it is."""
    data = read_bytes(file)
    kind = kind_of(data) if b'"plan"' in data or b'"run"' in data else ""
    if kind not in ("plan", "run"):
        return read_data(data, file)
    try:
        if kind == "run":
            return Loaded(run_step(valid_run(read_document(file, MeasuredRun))), _RUN, file)
        plan = read_document(file, Plan)
        check_plan(plan)
        return Loaded(plan_step(plan), _PLAN, file)
    except PlanError as error:
        raise PlanError(f"{printable(file)}: {error}", rule=error.rule) from error


def table_options(command: Any) -> Any:
    """The options of ``top`` and ``diff``, which show the same table."""
    options = [
        click.option(
            "--by",
            type=Choice(["type", "name"]),
            default="name",
            help="A row an operator, or a row a type.",
        ),
        click.option(
            "--sort",
            type=Choice(list(SORT_KEYS)),
            help="Largest first by this; default: time if known, else bytes.",
        ),
        click.option("--filter", "pattern", metavar="REGEX", help="Only operators whose name matches."),
        click.option("--type", "kind", metavar="TYPE", help="Only operators of this type."),
        click.option(
            "--limit",
            type=click.IntRange(min=0),
            default=20,
            show_default=True,
            help="At most so many rows; 0 for all.",
        ),
        click.option("--host", is_flag=True, help="Times of the issuing thread instead of the device."),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


def check_kind(kind: str | None, rows: Iterable[Row]) -> None:
    """Refuse a type that no operator has."""
    known = {row.kind for row in rows}
    if kind is not None and kind not in known:
        hint = did_you_mean(kind, known)
        raise click.BadParameter(f"no operator has the type {kind!r}.{hint}", param_hint="--type")


def select(rows: Iterable[Row], *, by: str, pattern: str | None, kind: str | None) -> list[Row]:
    """The rows asked for, grouped if asked."""
    chosen = [row for row in rows if kind is None or row.kind == kind]
    if pattern is not None:
        try:
            matcher = re.compile(pattern)
        except re.error as error:
            raise click.BadParameter(
                f"{pattern!r} is no regular expression: {error}", param_hint="--filter"
            ) from None
        chosen = [row for row in chosen if matcher.search(row.name)]
    return grouped(chosen) if by == "type" else chosen


def default_sort(*tables: Iterable[Row]) -> str:
    """By time where every table knows some, else by bytes."""
    return "time" if all(any(row.seconds is not None for row in rows) for rows in tables) else "bytes"


def refuse_reserved(budget: str | None) -> None:
    """Refuse a budget of reserved bytes: commands hold no limit while somebody trains."""
    if budget is not None and parse_budget(budget).reserved:
        raise click.UsageError(
            f"--budget {budget!r}: a budget of reserved bytes is for `lowtide.fit`, which limits PyTorch's "
            "allocator while you train; leave out `reserved`"
        )
