"""The ``lowtide`` command: finds the subcommand, maps errors to exit codes."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from lowtide import __version__
from lowtide.commands.address import address
from lowtide.commands.check import check
from lowtide.commands.common import say
from lowtide.commands.convert import convert
from lowtide.commands.demo import demo
from lowtide.commands.diff import diff
from lowtide.commands.doctor import doctor
from lowtide.commands.formats import formats
from lowtide.commands.plan import plan
from lowtide.commands.profile import profile
from lowtide.commands.report import report
from lowtide.commands.run import run
from lowtide.commands.shard import shard
from lowtide.commands.show import show
from lowtide.commands.tile import tile
from lowtide.commands.top import top
from lowtide.errors import BudgetError, InfeasibleError, LowtideError
from lowtide.suggest import did_you_mean

__all__ = ["EXIT_BAD_INPUT", "EXIT_INFEASIBLE", "EXIT_INTERRUPTED", "EXIT_OVER_BUDGET", "cli", "main"]

EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_OVER_BUDGET = 4
EXIT_INTERRUPTED = 130


class _Group(click.Group):
    """A group that offers the nearest command for a misspelt one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            known = self.list_commands(ctx)
            hint = did_you_mean(args[0], known)
            ctx.fail(f"no command {args[0]!r}.{hint} Commands: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class _Progress(logging.Handler):
    """What long work says of itself, on standard error; nothing beside JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        context = click.get_current_context(silent=True)
        if context is None or not context.params.get("as_json"):
            say(f"{record.getMessage()} …", err=True, over=True)


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done; 1 fault in lowtide itself; 2 bad input or usage; 3 budget too small; "
    "4 more than the budget was measured; 130 interrupted.",
)
@click.version_option(__version__, prog_name="lowtide")
def cli() -> None:
    """Train the model you have in the memory you have.

    Lowtide captures a PyTorch training step, plans it inside a memory budget, runs it with the same loss and
    gradients, and says where its memory and time go. It also reads, analyses, plans and converts steps that
    other frameworks have dumped, without torch and without a GPU.

    \b
    lowtide demo                              a network in less and less memory
    lowtide run train.py:step --budget 50%    a step of your own inside half of its memory
    lowtide plan train.py:step --sweep        what every budget costs in time
    lowtide show FILE                         where the memory of a dump goes
    lowtide report FILE                       a page on it, to look at and to show to others
    """
    log = logging.getLogger("lowtide")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.handlers[:] = [_Progress()]


for command in (
    demo,
    show,
    top,
    diff,
    convert,
    formats,
    profile,
    doctor,
    run,
    plan,
    check,
    tile,
    address,
    shard,
    report,
):
    cli.add_command(command)


_ALLOCATOR = "expandable_segments:True"
"""For torch, before it is imported: it may count up to 1 MiB more for a block that it reuses without this."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit with its code."""
    if arguments is None:
        _behave_like_a_filter()
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", _ALLOCATOR)
    try:
        cli.main(
            args=None if arguments is None else list(arguments), prog_name="lowtide", standalone_mode=False
        )
        _flush()
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        say(text.getvalue().rstrip("\n"), err=True)
        sys.exit(EXIT_BAD_INPUT)
    except InfeasibleError as error:
        say(f"Error: {error}", err=True)
        sys.exit(EXIT_INFEASIBLE)
    except BudgetError as error:
        say(f"Error: {error}", err=True)
        sys.exit(EXIT_OVER_BUDGET)
    except LowtideError as error:
        say(f"Error: {error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except OSError as error:
        if not _while_printing(error):
            raise
        say(f"Error: the output cannot be written: {error.strerror or error}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt) as error:
        said = str(error.__cause__ or error)  # click ends the line and raises an error of its own
        say(f"Interrupted: {said}" if said else "Interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except MemoryError:
        say("Error: the host has no memory left for this; free some, or take a smaller step", err=True)
        sys.exit(EXIT_BAD_INPUT)
    sys.exit(0)


def _flush() -> None:
    sys.stdout.flush()


def _while_printing(error: OSError) -> bool:
    """Whether it was standard output that could not be written."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    printing = any(name == "click.utils" or name.partition(".")[0] == "rich" for name in modules)
    return printing or any(frame.f_code is _flush.__code__ for frame in frames)


def _behave_like_a_filter() -> None:
    """End quietly when the reader of our output goes away; print what a terminal cannot show as `?`."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
