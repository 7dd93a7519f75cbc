"""The exceptions a user may meet.

LowtideError
├── GraphError      a graph contradicts itself
├── FormatError     a file is not what its format says
├── ConvertError    a target format cannot hold this step at all
├── CaptureError    a PyTorch step cannot be turned into a graph
│   └── GraphBreakError   it cannot be turned into one graph, though its parts may be
├── PlanError       a program does not fit its graph
│   └── InfeasibleError   a budget is too small for any plan that was found
├── TileError       a step that cannot be cut into tiles this way
├── RunError        a captured step was asked for something it cannot do
│   └── BudgetError       a step that was run took more than its budget
├── FileError       a file cannot be read or written
└── ToolError       a program outside Lowtide is missing or failed

MemoryWarning is no error: a watched step came close to its limit.
"""

from __future__ import annotations

from lowtide.printable import printable

__all__ = [
    "BudgetError",
    "CaptureError",
    "ConvertError",
    "FileError",
    "FormatError",
    "GraphError",
    "InfeasibleError",
    "LowtideError",
    "MemoryWarning",
    "PlanError",
    "RunError",
    "TileError",
    "ToolError",
]


class LowtideError(Exception):
    """Base of every error that Lowtide raises on purpose; the message says what to do next.

    As text it is safe to show on a terminal, whatever it quotes.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), lines=True)


class MemoryWarning(UserWarning):
    """A step that ``lowtide.watch`` looks at took almost its limit, or more."""


class GraphError(LowtideError):
    """A graph that contradicts itself: a dangling tensor, a read before the write, a negative size.

    ``op`` and ``tensor`` are positions in the graph, where one is to blame.
    """

    def __init__(self, problem: str, *, op: int | None = None, tensor: int | None = None) -> None:
        self.op = op
        self.tensor = tensor
        super().__init__(problem)


class ConvertError(LowtideError):
    """The step lacks something that the target format cannot be written without."""


class CaptureError(LowtideError):
    """A PyTorch step that cannot be turned into a graph; names the user's line and the way out.

    ``line`` is the line of the user's, as ``file:line``, that torch could not trace, where it is known.
    """

    line = ""


class GraphBreakError(CaptureError):
    """A PyTorch step that cannot be turned into one graph, though its parts may be."""


class PlanError(LowtideError):
    """A program that does not fit its graph: it reads or drops what it does not hold.

    ``rule`` is the line of docs/valid-programs.md that it breaks, where it breaks one.
    """

    def __init__(self, problem: str, *, rule: int | None = None) -> None:
        self.rule = rule
        super().__init__(problem)


class InfeasibleError(PlanError):
    """A budget that is too small; says which one works.

    ``smallest_budget`` is the smallest for which a plan is known, ``floor`` one below which none exists;
    ``proven`` says that none exists for the budget that was asked for. Both hold for the programs that
    ``holds_for`` names, as ``HoldsFor`` of a plan does. ``plain_peak`` and ``plain_seconds`` are
    what the step takes without a plan, where that is known, and ``solve_seconds`` what the search took.
    ``known`` is the schedule with the smallest peak, where one was looked for, and ``plan`` the Plan for
    ``smallest_budget``.
    """

    def __init__(
        self,
        problem: str,
        *,
        budget: int,
        smallest_budget: int,
        floor: int,
        proven: bool = False,
        holds_for: str = "every order",
        known: object = None,
    ) -> None:
        self.budget = budget
        self.smallest_budget = smallest_budget
        self.floor = floor
        self.proven = proven
        self.holds_for = holds_for
        self.known = known
        self.plan: object = None
        self.plain_peak = 0
        self.plain_seconds = 0.0
        self.solve_seconds = 0.0
        super().__init__(problem)


class TileError(LowtideError):
    """A step that cannot be cut this way; the message names what is in the way.

    ``op`` is the position of the operator that prevents it, where one does.
    """

    def __init__(self, problem: str, *, op: int | None = None) -> None:
        self.op = op
        super().__init__(problem)


class RunError(LowtideError):
    """A captured step was asked for something it cannot do, such as a second backward."""


class BudgetError(RunError):
    """A planned step that was measured to take more than its budget: the plan has not kept its promise."""


class FileError(LowtideError):
    """A file that cannot be read or written, whatever is in it."""


class ToolError(LowtideError):
    """An outside program that was asked for is missing or failed."""


class FormatError(LowtideError):
    """A file that is not what its format says, with the place and what was expected there.

    ``line`` counts from 1, ``byte`` from 0; at least one of them is given.
    """

    def __init__(
        self,
        problem: str,
        *,
        expected: str,
        line: int | None = None,
        byte: int | None = None,
        path: str = "",
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.line = line
        self.byte = byte
        self.path = path
        super().__init__(problem)

    def at(self, path: str) -> FormatError:
        """Name the file the error was met in."""
        self.path = path
        return self

    def __str__(self) -> str:
        where = f"line {self.line}" if self.line is not None else f"byte {self.byte}"
        file = f"{self.path}: " if self.path else ""
        return printable(f"{file}{where}: {self.problem}; expected {self.expected}")
