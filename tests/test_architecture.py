"""The layers stay one-way, torch stays where it belongs, and the public names are pinned."""

import ast
import functools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import lowtide

SOURCE = Path(lowtide.__file__).parent

BASE = {
    "errors",
    "printable",
    "units",
    "suggest",
    "files",
    "documents",
    "collector",
    "needs",
    "nested",
    "notebook",
    "pace",
    "cores",
}
MAY_IMPORT = {
    "printable": set(),
    "errors": {"printable"},
    "units": set(),
    "suggest": set(),
    "collector": set(),
    "nested": set(),
    "pace": set(),
    "cores": set(),
    "notebook": {"printable", "units"},
    "files": {"errors", "printable"},
    "documents": {"errors", "files"},
    "needs": {"errors"},
    "distributed_internals": BASE,
    "torch_internals": BASE | {"distributed_internals"},
    "inductor_internals": BASE | {"torch_internals"},
    "dynamo_internals": BASE,
    "device_internals": BASE,
    "graph": BASE,
    "cost": BASE | {"graph", "torch_internals", "device_internals"},
    "trace": BASE | {"graph", "cost", "torch_internals", "dynamo_internals", "distributed_internals"},
    "plan": BASE | {"graph", "cost"},
    "execute": BASE
    | {"graph", "cost", "trace", "plan", "torch_internals", "inductor_internals", "device_internals"}
    | {"distributed_internals", "dynamo_internals"},
    "integrations": {"errors", "execute"},
    "zoo": BASE | {"torch_internals"},
    "formats": BASE | {"graph", "cost"},
    "report": BASE | {"graph", "cost", "formats", "plan"},
    "commands": BASE | {"graph", "cost", "formats", "report", "trace", "plan", "execute", "zoo", "__init__"},
    "__init__": BASE | {"graph", "cost", "formats", "trace", "execute"},
    "__main__": {"commands"},
}
"""Each part of the package, and which other parts it may import. Data flows one way."""

ROOMS = {
    "plan": {
        "budget": set(),
        "time_shares": set(),
        "program": set(),
        "check": {"program"},
        "address": {"program"},
        "request": {"budget", "program"},
        "problem": {"program"},
        "bounds": {"program", "problem"},
        "recompute": {"time_shares", "program", "request", "problem", "bounds"},
        "offload": {"time_shares", "program", "request", "problem", "bounds", "recompute"},
        "result": {"time_shares", "program", "request", "check", "problem", "recompute"},
        "make": {
            *{"budget", "time_shares", "program", "request", "check", "problem", "bounds"},
            *{"recompute", "offload", "result"},
        },
        "baselines": {"program", "bounds"},
    },
    "trace": {
        "refusal": set(),
        "branches": set(),
        "distributed": set(),
        "eager": {"branches", "distributed"},
        "step": {"refusal", "distributed", "eager"},
        "shapes": {"eager", "step"},
        "operators": {"step"},
        "groups": {"step"},
        "tiles": {"refusal", "distributed", "eager", "step", "operators", "groups"},
        "shards": {"distributed", "eager", "step", "operators", "tiles"},
    },
    "execute": {
        "memory": set(),
        "calls": set(),
        "runtime": {"memory", "calls"},
        "planning": {"memory", "runtime"},
        "graphs": {"memory", "calls", "runtime"},
        "kernels": set(),
        "tiling": {"memory", "runtime", "planning", "kernels"},
        "compile": {"memory", "runtime", "graphs", "planning", "tiling", "kernels"},
        "breaks": {"memory", "runtime", "planning", "tiling", "compile"},
        "backend": {"memory", "runtime", "planning", "tiling", "compile", "breaks"},
        "shards": {"planning", "compile"},
        "fit": {"memory", "runtime", "planning", "compile", "breaks", "backend", "shards"},
        "compare": {"memory", "runtime", "compile", "backend", "fit", "shards"},
    },
}
"""The rooms of the larger parts, in order, and which rooms of the same part each may import."""

ENTRIES = 14
"""So many entries a folder of these parts has at most."""

TORCH_IN = (
    "trace",
    "execute",
    "integrations",
    "zoo",
    "torch_internals.py",
    "inductor_internals.py",
    "dynamo_internals.py",
    "device_internals.py",
    "distributed_internals.py",
    "cost/clock.py",
    "cost/measure.py",
    "cost/probe.py",
    "cost/record.py",
    "cost/normalize.py",
    "cost/short.py",
    "cost/split.py",
    "cost/kernel_trial.py",
    "cost/modes.py",
    "cost/slices.py",
    "cost/watch.py",
)


def part_of(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@functools.cache
def imports(path):
    """The names that a module imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


@functools.cache
def modules():
    return sorted(SOURCE.rglob("*.py"))


def test_every_part_has_its_place_in_the_layers():
    assert {part_of(path) for path in modules()} == set(MAY_IMPORT)


def test_imports_go_one_way():
    for path in modules():
        part = part_of(path)
        for name in imports(path):
            if not name.startswith("lowtide"):
                continue
            pieces = name.split(".")
            target = pieces[1] if len(pieces) > 1 and (SOURCE / pieces[1]).exists() else None
            target = target or (
                pieces[1] if len(pieces) > 1 and (SOURCE / f"{pieces[1]}.py").exists() else "__init__"
            )
            assert target == part or target in MAY_IMPORT[part], f"{path} imports {name}"


def test_layers_have_no_cycle():
    done = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part in set(MAY_IMPORT) - done if MAY_IMPORT[part] <= done}
        assert ready, f"a cycle among {set(MAY_IMPORT) - done}"
        done |= ready


def test_torch_is_imported_only_where_it_belongs():
    for path in modules():
        if not str(path.relative_to(SOURCE)).startswith(TORCH_IN):
            for name in imports(path):
                assert name.split(".")[0] != "torch", path
                assert not name.startswith("lowtide.") or not name.endswith("_internals"), path


def is_private(path):
    """Whether a dotted path in torch has a private name; what is below ``torch.ops.aten`` are operators."""
    names = path.split(".")[: 3 if path.startswith("torch.ops.") else None]
    return any(name.startswith("_") and not name.endswith("__") for name in names)


def imported_from_torch(nodes):
    """Names that are imported from torch, by the names that they get."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return {name: path for name, path in found.items() if path.split(".")[0] == "torch"}


def in_torch(node, stands_for):
    """Where in torch an expression leads, as a dotted path; None where it leads elsewhere."""
    if isinstance(node, ast.Attribute):
        base = in_torch(node.value, stands_for)
        return base and f"{base}.{node.attr}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
        base, name = in_torch(node.args[0], stands_for), node.args[1]
        return base and isinstance(name, ast.Constant) and f"{base}.{name.value}"
    return stands_for.get(node.id) if isinstance(node, ast.Name) else None


def private_names_of_torch(source):
    """The private names of torch that a module imports, or reaches by attributes."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = imported_from_torch(nodes)
    stands_for = {"torch": "torch"} | imported
    for node in nodes:  # other names for parts of torch
        if isinstance(node, ast.Assign | ast.AnnAssign) and in_torch(node.value, stands_for):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            path = in_torch(node.value, stands_for)
            stands_for |= {one.id: path for one in targets if isinstance(one, ast.Name)}
    used = [*imported.values(), *(in_torch(node, stands_for) for node in nodes)]
    return [path for path in used if path and is_private(path)]


def test_private_names_of_torch_stand_in_modules_of_their_own():
    inside = [SOURCE / f"{name}_internals.py" for name in ("torch", "dynamo", "device", "distributed")]
    assert all(private_names_of_torch(path.read_text()) for path in inside)
    for path in modules():
        if path not in inside:
            found = private_names_of_torch(path.read_text())
            assert not found, f"{path} uses {found}; give them a public name in torch_internals.py"


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo.config",
        "import torch._dynamo.config as config",
        "from torch._dynamo import convert_frame",
        "from torch import _dynamo",
        "from torch.utils import _pytree as pytree",
        "from torch.fx._lazy_graph_module import GraphModule",
        "def f():\n    from torch._guards import tracing",
        "import torch\ntorch._C._autograd",
        "import torch\ntorch.autograd._get_sequence_nr()",
        "import torch as t\nt.cuda._sleep(1)",
        "from torch import autograd as a\na._enable_profiler_legacy()",
        "import torch\nautograd: Any = torch.autograd\nautograd._disable_profiler_legacy()",
        "import torch\ngetattr(torch.cuda, '_sleep', None)",
        "import torch\ntorch.ops._x",
    ],
)
def test_a_private_name_of_torch_is_found(source):
    assert private_names_of_torch(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._to_copy.default",
        "import torch\naten = torch.ops.aten\naten._to_copy.default",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torchvision._internally_replaced_utils",
        "import torch\nself._torch = torch.nn\nself._torch",
    ],
)
def test_a_public_name_of_torch_is_left_alone(source):
    assert not private_names_of_torch(source)


def room_of(path, part):
    """The room of a module, which may be a module itself."""
    return path.relative_to(SOURCE / part).parts[0].removesuffix(".py")


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_import_one_way(part):
    rooms = ROOMS[part]
    before = set()
    for room, may in rooms.items():
        assert may <= before, f"{room} may import a room that comes later"
        before.add(room)
    for path in (SOURCE / part).rglob("*.py"):
        room = room_of(path, part)
        if room == "__init__":
            assert not list(imports(path)), f"the face of {part} imports nothing"
            continue
        assert room in rooms, f"{path} has no place"
        for name in imports(path):
            pieces = name.split(".")
            if pieces[:2] == ["lowtide", part] and len(pieces) > 2:
                assert pieces[2] == room or pieces[2] in rooms[room], f"{path} imports {name}"


def folders():
    found = [path for part in ROOMS for path in (SOURCE / part).rglob("*") if (path / "__init__.py").exists()]
    return [*(SOURCE / part for part in ROOMS), *found]


@pytest.mark.parametrize("folder", folders(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_face_says_what_may_be_imported_from_outside(folder):
    """The last line of its docstring names exactly the modules that are."""
    entries = [path for path in folder.iterdir() if path.name != "__pycache__" and path.suffix != ".so"]
    assert len(entries) <= ENTRIES, f"{len(entries)} entries in {folder}"
    own = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    dotted = ".".join(("lowtide", *folder.relative_to(SOURCE).parts)) + "."
    names = {name for path in modules() if folder not in path.parents for name in imports(path)}
    used = {name.removeprefix(dotted).split(".")[0] for name in names if name.startswith(dotted)} & own
    face = ast.parse((folder / "__init__.py").read_text())
    if face.body[1:]:  # a face that gives names of its own
        given = next(ast.literal_eval(one.value) for one in face.body if isinstance(one, ast.Assign))
        assert used <= set(given), f"{used} of {folder} are imported from outside"
        return
    said = ast.get_docstring(face).split("From outside: ")
    assert set(re.findall(r"``(\w+)``", said[-1])) == used
    assert len(said) == 2, f"{folder} does not say what may be imported"


def test_the_checker_shares_no_code_with_planners():
    for path in (SOURCE / "plan" / "check").glob("*.py"):
        for used in imports(path):
            pieces = used.split(".")
            if pieces[0] == "lowtide":
                assert pieces[1] in ("errors", "units", "graph", "plan"), f"{path} imports {used}"
                program = pieces[1:4] == ["plan", "program", "instructions"]
                assert pieces[1] != "plan" or pieces[2] == "check" or program, f"{path} imports {used}"


def test_nothing_unpickles_or_evaluates():
    for path in modules():
        names = {name.split(".")[0] for name in imports(path)}
        assert not names & {"pickle", "marshal", "shelve", "dill", "urllib", "http", "socket", "requests"}, (
            path
        )
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "print", "__import__"), path


def test_text_for_people_goes_through_one_function():
    """``say`` escapes what commands a terminal; progress is a line of numbers that is written over."""
    for path in (SOURCE / "commands").glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        echoes = [node for node in calls if ast.unparse(node.func) in ("click.echo", "click.secho")]
        allowed = {"common.py": 2, "plan.py": 2, "address.py": 1}.get(path.name, 0)
        assert len(echoes) == allowed, path


def test_the_public_names_are_these():
    assert sorted(lowtide.__all__) == [
        "Cost", "Graph", "LowtideError", "Rect", "Step", "Timeline", "capture", "fit", "read", "watch", "write",
    ]  # fmt: skip
    assert len(lowtide.__all__) <= 11
    for name in lowtide.__all__:
        assert getattr(lowtide, name) is not None


def test_a_document_is_shown_where_torch_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    document = SOURCE.parent.parent / "examples" / "documents" / "000_1953327273121cc3.txt"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "lowtide", "show", str(document)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "7,329,956,112 bytes" in result.stdout


def test_modules_stay_readable():
    for path in modules():
        assert len(path.read_text().splitlines()) <= 400, f"{path} is probably two modules"


def test_one_word_stands_for_one_thing():
    """No two public classes share a name."""
    names = Counter(
        node.name
        for path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_take_few_parameters():
    """Requests are objects. What users call takes its options one by one, and so do commands."""
    doors = {"fit", "compare", "_kernel", "emit"}
    for path in modules():
        if part_of(path) in ("commands", "formats"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name not in doors:
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(one.arg not in ("self", "cls") for one in given)
                most = 7 if path.is_relative_to(SOURCE / "plan") else 8
                assert count <= most, f"{path}: {node.name} takes {count} parameters"
