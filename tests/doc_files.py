"""Files that commands of the pages read, where no command before them writes these."""

from pathlib import Path

from lowtide.documents import encode_document
from lowtide.plan.program.costs import Costs
from lowtide.plan.result.reordered import reordered
from tests.formats.snapshots import pickled
from tests.plan.address.test_reorder import HOLE, step_of
from tests.planning import plan_for


def _plan_with_a_hole(folder: Path) -> None:
    graph, program = step_of(HOLE)
    plan = plan_for(graph, Costs((1.0,) * len(graph.ops), (), "imported"), 10**6, time_limit=0.05)
    (folder / "plan.json").write_bytes(encode_document(reordered(plan, program)))


def _snapshot(folder: Path) -> None:
    (folder / "snapshot.pickle").write_bytes(pickled())


FILES = {"a plan with a hole": _plan_with_a_hole, "a snapshot": _snapshot}
"""What the mark `given NAME` makes."""
