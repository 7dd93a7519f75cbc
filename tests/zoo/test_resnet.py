"""Residual networks: folding keeps the function, and the folded one is that of the profile."""

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.formats import megengine
from lowtide.graph import Role
from lowtide.zoo.initial import he
from lowtide.zoo.resnet import ResNet, fold
from tests.zoo.record import Recorder


@pytest.fixture(scope="module")
def seed(documents):
    return megengine.read(documents["001"]).graph


@pytest.fixture(scope="module")
def inference():
    return zoo.build("resnet50-inference", device="meta")


def random_statistics(model, generator):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.weight.uniform_(0.5, 1.5, generator=generator)
            module.bias.normal_(0, 0.5, generator=generator)
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)


@pytest.mark.parametrize("blocks", [(1, 1, 1, 1), (2, 1, 2, 1)])
def test_folding_keeps_the_function(blocks):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model = ResNet(blocks, 10).eval()
        he(model, generator)
        random_statistics(model, generator)
        model.double()
        state = torch.get_rng_state()
        folded = fold(model)
        assert torch.equal(torch.get_rng_state(), state)
        image = torch.randn(2, 3, 48, 48, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(folded(image), model(image), rtol=1e-10, atol=1e-10)
    assert not folded.training
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert not any(parameter.requires_grad for parameter in folded.parameters())


def test_a_folded_network_cannot_be_folded():
    with torch.device("meta"):
        model = ResNet((1, 1, 1, 1), 10, folded=True)
    with pytest.raises(TypeError, match="only a network with BatchNorm"):
        fold(model)


def test_the_folded_network_has_the_weights_of_the_seed(seed, inference):
    def shapes(tensors):
        return sorted(tuple(n for n in tensor.shape if n != 1) for tensor in tensors)

    constants = [t for t in seed.tensors if t.role is Role.PARAMETER and t.bytes]
    ours = list(inference.model.parameters())
    assert shapes(ours) == shapes(constants)
    assert sum(p.numel() * p.element_size() for p in ours) == 102_106_528


def test_its_convolutions_have_the_shapes_of_the_seed(seed, inference):
    with Recorder() as recorder:
        out = inference.step()
    ours = sorted(tuple(call.output.shape) for call in recorder.named("convolution"))
    theirs = sorted(seed.tensors[op.outputs[0]].shape for op in seed.ops if op.kind == "ConvolutionForward")
    assert ours == theirs
    assert len(ours) == 53
    assert out.shape == (10, 1000)


def test_inference_gives_probabilities():
    built = zoo.build(zoo.small("resnet50-inference"))
    out = built.step()
    assert not built.trains
    assert not out.requires_grad
    torch.testing.assert_close(out.sum(1), torch.ones(2))
    assert out.max() < 0.999


def test_the_stride_is_on_the_middle_convolution():
    model = zoo.build("resnet50", device="meta").model
    assert model.layer2[0].conv1.stride == (1, 1)
    assert model.layer2[0].conv2.stride == (2, 2)


def test_training_updates_the_statistics_once():
    built = zoo.build("resnet50:batch=2,size=33,classes=3")
    built.step()
    assert built.model.bn1.num_batches_tracked == 1
    assert built.model.layer4[2].bn3.running_mean.any()
