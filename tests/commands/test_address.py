"""``lowtide address``: documents, plans and tables of allocations."""

import json
import random
import xml.etree.ElementTree as ET

import pytest

from lowtide.documents import encode_document, read_document
from lowtide.formats import csvfile, megengine
from lowtide.formats.registry import read_file
from lowtide.plan.address.types import AddressPlan
from lowtide.plan.check.addresses import check_addresses, check_storages
from lowtide.plan.program.costs import Costs
from lowtide.plan.program.instructions import Send
from lowtide.plan.result.plan import Plan
from lowtide.plan.result.reordered import reordered
from tests.commands.refusal import refused
from tests.commands.test_commands import run
from tests.conftest import document_path
from tests.plan.address.test_reorder import HOLE, in_turn, step_of
from tests.planning import plan_for
from tests.wild_steps import planned, wild_step

DOCUMENTS = {number: document_path(number) for number in ("000", "001", "003")}
TABLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text(TABLE)
    return path


def view_of(*arguments):
    return json.loads(run("address", *map(str, arguments), "--json").stdout)


def test_document_001_is_placed_without_waste(tmp_path):
    out = {name: tmp_path / f"out.{name}" for name in ("csv", "svg", "json", "plan")}
    view = view_of(
        DOCUMENTS["001"],
        "--csv",
        out["csv"],
        "--svg",
        out["svg"],
        "--megengine",
        out["json"],
        "-o",
        out["plan"],
    )
    assert (view["arena_bytes"], view["live_bytes"], view["efficiency"]) == (96_337_920, 96_337_920, 1.0)
    assert view["given_bytes"] == 102_443_008
    assert view["optimal"]
    assert view["checked"]
    again = view_of(out["csv"])
    assert (again["arena_bytes"], again["given_bytes"]) == (96_337_920, 96_337_920)
    picture = ET.fromstring(out["svg"].read_text())
    boxes = [one for one in picture.iter() if one.get("class") == "box"]
    plan = read_document(out["plan"], AddressPlan)
    assert len(boxes) == sum(one.bytes > 0 for one in plan.allocations)
    check_addresses(plan.allocations, arena_bytes=plan.arena_bytes, alignment=512)


def test_a_profile_with_the_planned_addresses_has_chunk_offsets_and_pointers(tmp_path):
    out = tmp_path / "out.json"
    view_of(DOCUMENTS["001"], "--megengine", out)
    before, after = json.loads(DOCUMENTS["001"].read_bytes()), json.loads(out.read_bytes())
    chunks = after["graph_exec"]["mem_chunk"]
    arena = chunks.pop("chkarena")
    assert chunks == before["graph_exec"]["mem_chunk"]
    assert arena["size"] == 96_337_920
    changed = 0
    for name, record in after["graph_exec"]["var"].items():
        old = before["graph_exec"]["var"][name]
        if record == old:
            continue
        changed += 1
        assert record["mem_plan"]["mem_chunk_id"] == "chkarena"
        assert record["prev_dev_ptr"] == arena["dev_ptr"] + record["mem_plan"]["offset_byte"]
        size = old["prev_dev_ptr_end"] - old["prev_dev_ptr"]
        assert record["prev_dev_ptr_end"] - record["prev_dev_ptr"] == size
        assert record["prev_dev_ptr_end"] <= arena["dev_ptr"] + arena["size"]
    assert changed == 182
    leaves = [
        t for t in megengine.read(DOCUMENTS["001"].read_bytes()).graph.tensors if t.role.value == "parameter"
    ]
    assert arena["dev_ptr"] >= max(t.address + t.bytes for t in leaves if t.address is not None)
    shown = json.loads(run("show", str(out), "--json").stdout)["addresses"]
    assert shown == {"touched_bytes": 96_337_920, "live_bytes": 96_337_920, "fragmentation": 0.0}
    step = read_file(out).step
    assert [t.alias for t in step.graph.tensors] == [
        t.alias for t in megengine.read(DOCUMENTS["001"].read_bytes()).graph.tensors
    ]


def test_a_step_from_elsewhere_becomes_a_profile_with_addresses(tmp_path):
    out = tmp_path / "out.json"
    view = view_of(DOCUMENTS["000"], "--megengine", out)
    document = json.loads(out.read_bytes())["graph_exec"]
    assert document["mem_chunk"]["chkarena"]["size"] == view["arena_bytes"]
    placed = [
        one for one in document["var"].values() if (one["mem_plan"] or {}).get("mem_chunk_id") == "chkarena"
    ]
    assert len(placed) == view["allocations"]


def test_a_table_comes_back_with_offsets_in_its_own_order_and_times(table, tmp_path):
    out = tmp_path / "out.csv"
    view = view_of(table, "--csv", out)
    assert (view["arena_bytes"], view["live_bytes"], view["alignment"]) == (12, 12, 1)
    lines = out.read_text().splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    assert [line.rpartition(",")[0] for line in lines[1:]] == TABLE.splitlines()[1:]
    assert csvfile.read(out.read_bytes()).graph.tensors[4].address is not None


def test_pinned_rows_of_a_table_keep_their_offset(tmp_path):
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text("id,lower,upper,size,offset\na,0,2,4,8\nb,1,3,4,\nc,0,3,4,0\n")
    view = view_of(path, "--pinned", "--csv", out)
    assert (view["arena_bytes"], view["given_bytes"]) == (12, None)
    assert out.read_text().splitlines()[1:] == ["a,0,2,4,8", "b,1,3,4,4", "c,0,3,4,0"]
    assert view_of(path)["arena_bytes"] == 12


def test_a_plan_is_placed_instruction_by_instruction(tmp_path):
    plan, out, picture = tmp_path / "plan.json", tmp_path / "out.csv", tmp_path / "out.svg"
    run(
        "plan",
        str(DOCUMENTS["000"]),
        "--budget",
        "60%",
        "--cost",
        "unit",
        "--time-limit",
        "0.5",
        "-o",
        str(plan),
    )
    view = view_of(plan, "--csv", out, "--svg", picture)
    promised = json.loads(plan.read_bytes())
    assert view["clock"] == "instruction"
    assert view["live_bytes"] + promised["resident_bytes"] == promised["predicted"]["peak_bytes"]
    assert view["total_bytes"] == view["arena_bytes"] + promised["resident_bytes"]
    assert view["budget_bytes"] == promised["budget_bytes"]
    assert len(out.read_text().splitlines()) == view["allocations"] + 1
    assert "#2" in out.read_text()
    said = run("address", str(plan)).stdout
    assert "with leaves" in said
    assert "checked" in said


def written_plan(path):
    how = ("--budget", "90%", "--cost", "unit", "--time-limit", "0.2")
    run("plan", str(DOCUMENTS["000"]), *how, "-o", str(path))


def test_bad_input_is_refused_and_nothing_is_written(table, tmp_path, capsys):
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    written_plan(plan)
    broken = tmp_path / "broken.csv"
    broken.write_text("id,lower,upper,size,offset\na,0,2,4,2\nb,1,3,4,4\n")
    cases = [
        ([DOCUMENTS["003"], "--csv", out], "does not say in which order"),
        ([plan, "--megengine", out], "a plan may run it again"),
        ([plan, "--pinned"], "a plan has none"),
        ([DOCUMENTS["001"], "--pinned"], "other files have addresses of their own"),
        ([broken, "--pinned", "--csv", out], "pinned at 2 and 4"),
        ([table, "--csv", table], "this is the file that is read"),
        ([table, "--csv", out, "--svg", out], "two outputs"),
        ([table, "--align", "0"], "--align"),
        ([tmp_path / "missing"], "cannot be read"),
    ]
    for arguments, said in cases:
        assert said in refused("address", *arguments, capsys=capsys), arguments
        assert not out.exists()


def test_a_damaged_plan_is_refused_before_it_is_placed(tmp_path, capsys):
    plan = tmp_path / "plan.json"
    written_plan(plan)
    document = json.loads(plan.read_bytes())
    document["program"]["forward"] = document["program"]["forward"][1:]
    plan.write_text(json.dumps(document))
    assert "docs/valid-programs.md" in refused("address", plan, capsys=capsys)


def test_a_time_limit_that_is_no_number_is_refused(table, capsys):
    assert "give a number of seconds" in refused("address", table, "--time-limit", "nan", capsys=capsys)


def test_a_plan_is_reordered_where_that_takes_less(tmp_path):
    """The arena, the plan that is written, and what is said of it; see tests/plan/address/test_reorder.py."""
    graph, _ = step_of(HOLE)
    costs = Costs((1.0,) * len(graph.ops), (), "imported")
    plan = plan_for(graph, costs, 10**6, time_limit=0.05)
    source, out, addresses = (tmp_path / name for name in ("plan.json", "out.json", "addresses.json"))
    given = reordered(plan, in_turn(graph, range(len(graph.ops))))
    source.write_bytes(encode_document(given))
    view = view_of(source, "--align", 1, "--reorder", out, "-o", addresses, "--time-limit", 2)
    assert (view["in_given_order_bytes"], view["arena_bytes"]) == (12, 11)
    assert view["moved"] > 0
    new = read_document(out, Plan)
    assert json.loads(run("check", str(out), "--json").stdout)["checked"]
    assert new.program != given.program
    assert new.predicted.peak_bytes <= given.predicted.peak_bytes
    assert new.predicted.seconds == given.predicted.seconds
    placed = read_document(addresses, AddressPlan).allocations
    check_storages(placed, new.graph, new.program, workspace_bytes=new.workspace_bytes, able=new.able)
    again = str(tmp_path / "again.json")
    said = run("address", str(source), "--align", "1", "--reorder", again, "--time-limit", "2").stdout
    assert "elsewhere, which takes 1 B less than the 12 B as given" in said
    best = view_of(out, "--align", 1, "--reorder", tmp_path / "best.json", "--time-limit", 0.2)
    assert (best["moved"], best["arena_bytes"]) == (0, 11)
    assert read_document(tmp_path / "best.json", Plan) == new


@pytest.mark.parametrize("seed", [9, 16, 23])
def test_plans_with_copies_are_reordered_into_valid_plans(seed, tmp_path):
    step = wild_step(seed)
    plan = planned(seed, step, random.Random(seed))
    assert any(isinstance(line, Send) for line in plan.program.instructions)
    source, out = tmp_path / "plan.json", tmp_path / "out.json"
    source.write_bytes(encode_document(plan))
    view_of(source, "--align", 1, "--reorder", out, "--time-limit", 0.3)
    new = read_document(out, Plan)
    assert json.loads(run("check", str(out), "--json").stdout)["checked"]
    assert new.predicted.peak_bytes <= plan.predicted.peak_bytes
    assert new.predicted.seconds <= plan.predicted.seconds * (1 + 1e-9)


def test_only_plans_are_reordered(table, tmp_path, capsys):
    assert "--reorder is for plans" in refused("address", table, "--reorder", tmp_path / "x", capsys=capsys)
    assert not (tmp_path / "x").exists()
