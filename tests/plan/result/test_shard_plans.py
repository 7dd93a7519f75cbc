"""Files of split steps: what is written is read back, and what contradicts itself is refused."""

import msgspec
import pytest

from lowtide.documents import decode_document, encode_document
from lowtide.errors import FormatError, GraphError, PlanError
from lowtide.graph import Rect
from lowtide.graph.shards import Mesh, OperatorShare, Shards
from lowtide.plan.result.shard_plan import ShardPlan, valid_shard_plan
from tests.report.page.cases import sharded

replace = msgspec.structs.replace


def test_it_is_read_as_it_was_written():
    plan = sharded()
    found = valid_shard_plan(decode_document(encode_document(plan), ShardPlan))
    assert encode_document(found) == encode_document(plan)
    assert found.shards == plan.shards


def with_shards(**changes):
    return lambda plan: replace(plan, shards=replace(plan.shards, **changes))


def with_move(**changes):
    return lambda plan: replace(plan, moves=(replace(plan.moves[0], **changes), *plan.moves[1:]))


def with_box(plan):
    picture = plan.pictures[0]
    first, *rest = picture.graph.tensors
    first = replace(first, boxes={"read_rect": Rect((3,), (1,))})
    graph = replace(picture.graph, tensors=(first, *rest))
    return replace(plan, pictures=(replace(picture, graph=graph),))


DAMAGE = {
    "a device that there is not": lambda plan: replace(plan, ranks=(0, 5)),
    "no devices": lambda plan: replace(plan, ranks=()),
    "too many devices": with_shards(mesh=Mesh((1 << 40,))),
    "times for others": lambda plan: replace(plan, seconds=(*plan.seconds, 1.0)),
    "less than no time": lambda plan: replace(plan, latency=-1.0),
    "no amount": lambda plan: replace(plan, split=replace(plan.split, seconds=float("nan"))),
    "fewer than no bytes": lambda plan: replace(plan, others=(replace(plan.split, wire_bytes=-1),)),
    "a leaf that there is not": with_shards(leaves={10**6: (0,)}),
    "a leaf that is none": lambda plan: replace(
        plan, shards=replace(plan.shards, leaves={plan.graph.ops[0].outputs[0]: (0,)})
    ),
    "an operator that there is not": with_shards(operators={-1: OperatorShare((0,), (None,))}),
    "a dimension that there is not": with_shards(operators={0: OperatorShare((9,), (None,))}),
    "another mesh": with_shards(operators={0: OperatorShare((0, 1), (None, None))}),
    "too few elements": with_shards(operators={0: OperatorShare((0,), (None,))}),
    "a tensor that moves and that there is not": with_move(tensor=10**6),
    "an axis that there is not": with_move(axis=3),
    "bytes of other devices": with_move(sent_bytes=(1,)),
    "a box without extent": with_box,
    "processes of other devices": lambda plan: replace(plan, measured=plan.measured[:1]),
    "a plan that is damaged": lambda plan: replace(plan, plan=replace(plan.plan, budget_bytes=-1)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage):
    with pytest.raises((PlanError, GraphError), match=r"\w"):
        valid_shard_plan(DAMAGE[damage](sharded()))


def test_a_refusal_says_what_to_do():
    with pytest.raises(PlanError, match=r"device 5 of 2: the file is damaged.*lowtide shard TARGET"):
        valid_shard_plan(replace(sharded(), ranks=(0, 5)))


def test_other_files_are_refused():
    data = encode_document(sharded())
    with pytest.raises(FormatError, match="has version 2"):
        decode_document(data.replace(b'"version":1}\n', b'"version":2}\n'), ShardPlan)
    with pytest.raises(FormatError):
        decode_document(data[: len(data) // 2], ShardPlan)


def test_a_split_of_nothing_is_one():
    plan = sharded()
    whole = replace(plan, shards=Shards(plan.shards.mesh, {}, {}))
    assert valid_shard_plan(whole) is whole
