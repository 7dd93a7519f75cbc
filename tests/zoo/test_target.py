"""Addresses: what they name, and what is said about those that name nothing."""

import sys
import textwrap

import pytest
import torch

from lowtide import zoo
from lowtide.errors import LowtideError
from lowtide.nested import leaves


def problem(text, **options):
    with pytest.raises(zoo.TargetError) as caught:
        zoo.build(text, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("unet", "unet"),
        ("unet:base=64,batch=8,size=572", "unet"),
        ("unet:size=188,base=4", "unet:base=4,size=188"),
        ("unet:base=16,batch=2,size=284", "unet:base=16,batch=2,size=284"),
        ("unet:batch=02", "unet:batch=2"),
        ("gpt2:dropout=0", "gpt2"),
        ("gpt2:dropout=10,width=64", "gpt2:width=64,dropout=10"),
        ("resnet50-inference:batch=1,size=32", "resnet50-inference:batch=1,size=32"),
        ("some/where.py:make", "some/where.py:make"),
    ],
)
def test_one_step_has_one_name(text, name):
    assert zoo.parse(text).name == name
    assert zoo.parse(name).name == name


def test_settings_reach_the_network():
    built = zoo.build("unet:base=16,batch=2,size=284", device="meta")
    assert [tuple(part.shape) for part in built.batch] == [(2, 1, 284, 284), (2, 100, 100)]
    assert built.model.conv_d0a_b.out_channels == 16
    assert built.name == "unet:base=16,batch=2,size=284"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("unett", ["no network 'unett'", "Did you mean 'unet'", "resnet50-inference", "file.py:function"]),
        ("", ["no network ''"]),
        ("unet:bse=4", ["no key 'bse'", "Did you mean 'base'", "base=64, batch=8, size=572"]),
        ("unet:", ["'' is not key=value", "base=64"]),
        ("unet:base", ["'base' is not key=value"]),
        ("unet:base=4,", ["'' is not key=value"]),
        ("unet:base=4,base=8", ["base is set twice"]),
        ("unet:base=0", ["base=0 is not possible", "from 1 to"]),
        ("unet:base=-4", ["base=-4 is not possible"]),
        ("unet:base=4.5", ["base=4.5 is not possible", "whole number"]),
        ("unet:base=", ["base= is not possible"]),
        ("unet:base=٣", ["is not possible"]),
        ("unet:batch=" + "9" * 5000, ["is not possible"]),
        ("gpt2:dropout=100", ["dropout is a whole number from 0 to 99"]),
        ("unet:size=570", ["size=570 is impossible", "size=556 or size=572"]),
        ("unet:size=100", ["size=100 is impossible", "nearest that works: size=188"]),
        ("alexnet:size=30", ["nearest that works: size=59"]),
        ("locallyconnected:size=3", ["nearest that works: size=15"]),
        ("convpool:size=2", ["nearest that works: size=4"]),
        ("vgg19:size=31", ["nearest that works: size=32"]),
        ("vgg16body:size=31", ["vgg16body: size=31", "nearest that works: size=32"]),
        ("densenet161:size=28", ["nearest that works: size=29"]),
        ("densenet161:batch=1,size=60", ["no variance", "batch=2 or size=61"]),
        ("resnet50:batch=1,size=32", ["resnet50: batch=1 with size=32", "no variance", "batch=2 or size=33"]),
        ("gpt2:width=1000", ["width=1000 is impossible", "16 heads", "width=992 or width=1008"]),
        ("unet:batch=16777216,size=16777212", ["cannot be built on meta"]),
    ],
)
def test_a_bad_address_is_explained(text, parts):
    said = problem(text, device="meta")
    for part in parts:
        assert part in said, said
    assert "\n" not in said


@pytest.mark.parametrize(
    "text",
    [
        "unet:base=1,batch=1,size=188",
        "alexnet:batch=1,size=59",
        "locallyconnected:batch=1,size=15,channels=1,classes=1",
        "convpool:size=4",
        "vgg19:batch=1,size=32",
        "vgg16body:width=1,size=32,classes=1",
        "densenet161:batch=1,size=61",
        "densenet161:batch=2,size=29",
        "resnet50:batch=1,size=33",
        "resnet50:batch=2,size=1",
        "resnet50-inference:batch=1,size=1",
        "gpt2:batch=1,layers=1,width=1,heads=1,length=1,vocab=1",
    ],
)
def test_the_smallest_sizes_work(text):
    assert zoo.build(text, device="meta").step().is_meta


def test_a_device_that_is_not_there_is_an_error():
    assert "'nowhere' cannot be used" in problem("convpool", device="nowhere")


def test_it_is_an_error_of_lowtide():
    assert issubclass(zoo.TargetError, LowtideError)


GOOD = """
    import torch
    from dataclasses import dataclass
    from torch import nn
    from beside import WIDTH

    @dataclass
    class Options:
        width: "int" = WIDTH

    def make():
        model = nn.Sequential(nn.Linear(Options().width, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        batch = (torch.randn(2, 3), {"target": torch.rand(2, 1), "scale": 2.0})
        return model, batch, loss

    def loss(model, x, more):
        return ((model(x) - more["target"]) ** 2).mean() * more["scale"]

    def frozen():
        model, batch, loss = make()
        return model.requires_grad_(False), list(batch), loss

    def pair():
        return make()[:2]

    def nothing():
        return None

    def no_module():
        return (loss, (), loss)

    def single():
        return [make()[0]]

    def loss_is_no_function():
        return torch.ones(3), make()[0], torch.ones(3)

    def no_loss():
        return (make()[0], (), 3)

    def fails():
        x = 1
        raise KeyError("inside")

    number = 3
"""


@pytest.fixture
def code(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(GOOD))
    yield path
    sys.modules.pop("beside", None)


def test_a_function_of_my_own_file(code):
    state, paths = torch.get_rng_state(), list(sys.path)
    built, again, other = (zoo.build(f"{code}:make", seed=seed) for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert sys.path == paths
    assert built.name == f"{code}:make"
    assert built.trains
    assert built.update is None
    assert torch.equal(built.batch[0], again.batch[0])
    assert torch.equal(built.model[0].weight, again.model[0].weight)
    assert not torch.equal(built.batch[0], other.batch[0])
    with torch.random.fork_rng(devices=[]):
        built.step().backward()
    assert all(parameter.grad is not None for parameter in built.model.parameters())


def test_it_is_moved_to_the_device(code):
    built = zoo.build(f"{code}:make", device="meta")
    assert built.batch[0].is_meta
    assert built.batch[1]["target"].is_meta
    assert built.batch[1]["scale"] == 2.0
    assert built.step().is_meta


BATCHES = """
    import torch
    from collections import OrderedDict, namedtuple
    from torch import nn

    Pair = namedtuple("Pair", "x y")

    def x():
        return torch.ones(2, 3)

    def step(batch, loss_of):
        return loss_of, nn.Linear(3, 3), batch

    def error(model, x, y):
        return (model(x) - y).square().mean()

    def tensor(): return step(x(), lambda model, batch: error(model, batch, 1.0))
    def pair(): return step((x(), x()), lambda model, batch: error(model, *batch))
    def many(): return step([x(), x()], lambda model, batch: error(model, *batch))
    def named(): return step(Pair(x(), x()), lambda model, batch: error(model, batch.x, batch.y))
    def by_name(): return step({"x": x(), "y": x()}, lambda model, batch: error(model, batch["x"], batch["y"]))
    def ordered(): return step(OrderedDict(x=x(), y=x()), lambda model, b: error(model, b["x"], b["y"]))
    def deep():
        def loss_of(model, batch):
            return error(model, batch["views"][0][1], batch["y"]["low"]) * batch["scale"]
        return step({"views": [(x(), x())], "y": {"low": x()}, "scale": 2.0, "name": "b"}, loss_of)
    def spread():
        loss_of, model, batch = pair()
        return lambda model, x, y: loss_of(model, (x, y)), model, *batch
    def alone():
        return lambda model: model(x()).sum(), nn.Linear(3, 3)
    def a_tensor_in_the_middle(): return nn.Linear(3, 3), x(), lambda model, x: error(model, x, 1.0)
    def a_dict_in_the_middle():
        loss_of, model, batch = deep()
        return model, batch, loss_of
    def a_module_as_loss():
        class Loss(nn.Module):
            def forward(self, model, batch):
                return error(model, *batch)
        return Loss(), nn.Linear(3, 3), (x(), x())
"""


def form(value):
    """What a batch is made of."""
    if isinstance(value, dict):
        return type(value), {key: form(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value).__name__, [form(one) for one in value]
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "function",
    [
        "tensor", "pair", "many", "named", "by_name", "ordered", "deep", "spread", "alone", "a_module_as_loss",
        "a_tensor_in_the_middle", "a_dict_in_the_middle",
    ],
)  # fmt: skip
def test_a_batch_is_whatever_the_loss_takes(function, tmp_path):
    path = tmp_path / "batches.py"
    path.write_text(textwrap.dedent(BATCHES))
    built = zoo.build(f"{path}:{function}")
    assert built.step().shape == ()
    built.step().backward()
    assert all(parameter.grad is not None for parameter in built.model.parameters())
    away = zoo.build(f"{path}:{function}", device="meta")
    assert form(away.batch) == form(built.batch)
    assert all(leaf.is_meta for leaf in leaves(away.batch) if isinstance(leaf, torch.Tensor))
    if function != "alone":
        assert away.step().is_meta


def test_nothing_to_train(code):
    built = zoo.build(f"{code}:frozen")
    assert not built.trains
    assert isinstance(built.batch, tuple)


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("mak", ["'mak' does not exist there", "Did you mean 'make'"]),
        ("number", ["'number' is not a function there"]),
        ("pair", ["mine.py:23: pair() returned (Sequential, tuple); wanted (loss_of, model, batch)"]),
        ("nothing", ["mine.py:26: nothing() returned a NoneType; wanted (loss_of, model, batch)"]),
        ("single", ["single() returned a list of 1; wanted"]),
        ("no_module", ["returned (function, tuple, function); wanted"]),
        ("no_loss", ["the function of the loss is a int; wanted"]),
        ("loss_is_no_function", ["the function of the loss is a Tensor; wanted"]),
        ("fails", ["mine.py:43: fails() failed: KeyError: 'inside'"]),
        ("not a name", ["is no name of a function"]),
        ("", ["is no name of a function"]),
    ],
)
def test_a_bad_function_is_explained(code, function, parts):
    said = problem(f"{code}:{function}")
    for part in parts:
        assert part in said, said


BROKEN = """
    import torch
    from torch import nn
    from broken_beside import helper

    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Outside(BaseException):
        pass

    def many_lines(): raise ValueError("one\\ntwo")
    def odd(): raise Odd
    def outside(): raise Outside("here")
    def leaves(): raise SystemExit("bye")
    def takes(argument): return argument
    def again(): return again()
    def elsewhere(): return helper()
    async def later(): return 1
    def unfinished():
        class Model(nn.Module):
            def __init__(self): pass
        return lambda model, x: model(x).sum(), Model(), torch.ones(3)
    def on_meta():
        return lambda model, x: model(x).sum(), nn.Linear(3, 3, device="meta"), torch.ones(3)
    def spread(): return nn.Linear(3, 3), (torch.ones(3), torch.ones(3)), lambda model, batch: model(batch[0]).sum()
"""


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("many_lines", ":13: many_lines() failed: ValueError: one"),
        ("odd", ":14: odd() failed: Odd"),
        ("outside", ":15: outside() failed: Outside: here"),
        ("leaves", ":16: leaves() failed: SystemExit: bye"),
        ("takes", ":17: takes() failed: TypeError: takes() missing 1 required positional argument"),
        ("again", ":18: again() failed: RecursionError: maximum recursion depth"),
        ("elsewhere", ":19: elsewhere() failed: ZeroDivisionError: division by zero"),
        ("later", ":20: later() returned a coroutine; wanted (loss_of, model, batch)"),
        ("unfinished", ":21: unfinished(): the step cannot be moved to cpu: AttributeError: 'Model' object"),
        ("on_meta", ":25: on_meta(): the step cannot be moved to cpu: NotImplementedError: Cannot copy"),
        ("spread", ":27: spread(): the function of the loss takes (model, batch) and gets (model, Tensor, Tensor)"),
        ("many_line", ": 'many_line' does not exist there. Did you mean 'many_lines'? Functions there: many_lines, "),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_mistake_is_told_with_the_file_the_line_and_the_exception(function, part, tmp_path):
    (tmp_path / "broken_beside.py").write_text("def helper():\n    return 1 / 0\n")
    path = tmp_path / "broken.py"
    path.write_text(textwrap.dedent(BROKEN))
    try:
        said = problem(f"{path}:{function}")
    finally:
        sys.modules.pop("broken_beside", None)
    assert said.startswith(f"{path}{part}"), said
    assert "\n" not in said


def test_an_interrupt_is_no_mistake(tmp_path):
    path = tmp_path / "stopped.py"
    path.write_text("def step():\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        zoo.build(f"{path}:step")


def test_a_missing_file_is_explained(tmp_path):
    assert "there is no such file" in problem(f"{tmp_path / 'none.py'}:make")
    (tmp_path / "folder.py").mkdir()
    assert "there is no such file" in problem(f"{tmp_path / 'folder.py'}:make")
    assert "names no function; write mine.py:function" in problem("mine.py")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("x = 1\nx = = 2\n", ":2: the file cannot be run: SyntaxError"),
        ("import no_such_module\n", ":1: the file cannot be run: ModuleNotFoundError"),
        ("\n\nraise SystemExit(3)\n", ":3: the file cannot be run: SystemExit: 3"),
        ("def step(:\n    pass\n", ":1: the file cannot be run: SyntaxError: "),
        ("if True:\nx = 1\n", ":2: the file cannot be run: IndentationError: "),
        ("x = 1\0\n", ": the file cannot be run: "),
        ("import torch\ntorch.ones(2) @ torch.ones(3)\n", ":2: the file cannot be run: RuntimeError: "),
    ],
)
def test_a_broken_file_is_explained(tmp_path, text, part):
    path = tmp_path / "broken.py"
    path.write_text(text)
    before = set(sys.modules)
    assert f"{path}{part}" in problem(f"{path}:make")
    assert not {name for name in set(sys.modules) - before if name.startswith("lowtide_target")}
