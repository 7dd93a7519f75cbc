import subprocess
import sys

import pytest
import torch

from lowtide import torch_internals
from lowtide.execute.backend import backend
from lowtide.torch_internals import trust_no_dict_versions


@pytest.mark.parametrize("name", torch_internals.__all__)
def test_this_version_of_torch_has_every_name(name):
    assert getattr(torch_internals, name) is not None


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="no attribute 'compile_everything'"):
        torch_internals.compile_everything  # noqa: B018


def test_dynamo_is_imported_when_it_is_asked_for():
    """It takes seconds, and measuring an operator does not need it."""
    lines = (
        "import sys",
        "import lowtide.cost.measure",
        "assert 'lowtide.torch_internals' in sys.modules",
        "assert 'torch._dynamo' not in sys.modules",
        "from lowtide.torch_internals import dynamo_config",
        "assert dynamo_config is sys.modules['torch._dynamo.config']",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_dynamo_itself_is_changed():
    from torch._dynamo import convert_frame

    assert torch_internals.part_of_compiler("frame") is convert_frame._compile
    before = convert_frame._compile
    try:
        torch_internals.set_part_of_compiler("frame", len)
        assert convert_frame._compile is len
    finally:
        torch_internals.set_part_of_compiler("frame", before)


@pytest.mark.parametrize(
    ("python", "trusted"), [((3, 12, 1), True), ((3, 13, 0), False), ((3, 13, 1), True), ((3, 14, 0), True)]
)
def test_versions_of_dictionaries_are_trusted_unless_python_forgets_them(python, trusted):
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        trust_no_dict_versions(python)
        assert torch._dynamo.config.use_recursive_dict_tags_for_guards is trusted


def test_evaluation_is_noticed_after_training():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5))
    step = torch.compile(lambda m, x: m(x), backend=backend, fullgraph=True)
    x = torch.randn(5, 4)
    for _ in range(3):
        step(model.train(), x).sum().backward()
        with torch.no_grad():
            assert torch.equal(step(model.eval(), x), model(x))
        assert torch.equal(step(model, x), model(x))
