import pytest
import torch

from lowtide import zoo
from lowtide.execute.backend import PROGRAMS
from lowtide.execute.compare import compare

FAST = ["convpool", "alexnet", "gpt2", "unet", "locallyconnected", "resnet50-inference", "vgg19"]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", FAST)
def test_the_zoo_is_bitwise_equal_and_its_peak_is_predicted(name, program):
    built = zoo.build(zoo.small(name))
    found = compare(built.model, built.batch, built.loss, PROGRAMS[program], trains=built.trains, repeats=1)
    assert found.loss_equal
    assert found.bitwise
    assert found.max_rel_grad_diff == 0
    assert found.predicted_peak_bytes == pytest.approx(found.measured.peak_bytes, rel=0.005)
    if program == "plain":
        assert found.measured.peak_bytes <= found.eager.peak_bytes * 1.005


def test_the_model_is_left_as_it_was():
    built = zoo.build(zoo.small("locallyconnected"))
    before = {name: value.clone() for name, value in built.model.state_dict().items()}
    compare(built.model, built.batch, built.loss, PROGRAMS["plain"], repeats=1)
    assert all(torch.equal(before[name], value) for name, value in built.model.state_dict().items())
    assert all(p.grad is None for p in built.model.parameters())
