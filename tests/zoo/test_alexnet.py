"""AlexNet's layers against the list of operators that it is written after."""

import pytest
import torch

from lowtide import zoo
from lowtide.formats import tensorflow
from lowtide.graph import Role


@pytest.fixture(scope="module")
def seed(documents):
    return tensorflow.read(documents["003"]).graph


@pytest.fixture(scope="module")
def built():
    return zoo.build("alexnet", device="meta")


def channels_first(shape, name):
    """The local response normalisations of the seed keep channels last."""
    return (shape[0], shape[3], shape[1], shape[2]) if name.endswith("LRN") else shape


def test_every_layer_has_the_shape_of_the_seed(seed, built):
    shapes = {}
    for name, module in built.model.named_children():
        module.register_forward_hook(lambda m, i, out, name=name: shapes.__setitem__(name, tuple(out.shape)))
    built.step()
    theirs = {t.id: t.shape for t in seed.tensors}
    spelt = {"lrn1": "lrn1/LRN", "lrn2": "lrn2/LRN"}
    assert shapes == {
        name: channels_first(theirs[spelt.get(name, name)], spelt.get(name, name)) for name in shapes
    }
    assert shapes["conv1"] == (128, 64, 56, 56)
    assert shapes["pool5"] == (128, 256, 6, 6)
    assert len(shapes) == 10


def test_parameters_have_the_shapes_of_the_seed(seed, built):
    theirs = {t.id: t.shape for t in seed.tensors if t.role is Role.PARAMETER and "/read" not in t.id}
    for name, parameter in built.model.named_parameters():
        layer, kind = name.split(".")
        if kind == "weight":
            height, width, inputs, outputs = theirs.pop(f"{layer}/weights")
            assert tuple(parameter.shape) == (outputs, inputs, height, width)
        else:
            assert (*parameter.shape, 1) == theirs.pop(f"{layer}/biases")
    assert not theirs


def test_the_gradient_of_the_last_pool_is_the_pool():
    built = zoo.build("alexnet:batch=1,size=59")
    kept = []

    def keep(module, inputs, out):
        out.retain_grad()
        kept.append(out)

    built.model.pool5.register_forward_hook(keep)
    built.step().backward()
    assert tuple(kept[0].shape) == (1, 256, 1, 1)
    torch.testing.assert_close(kept[0].grad, kept[0].detach())


def test_normalisation_counts_every_channel_as_tensorflow_does():
    built = zoo.build("alexnet:batch=1,size=59")
    x = torch.randn(1, 64, 3, 3, generator=torch.Generator().manual_seed(0)) * 50
    padded = torch.nn.functional.pad(x.square(), (0, 0, 0, 0, 2, 2))
    sums = sum(padded[:, k : k + 64] for k in range(5))
    torch.testing.assert_close(built.model.lrn1(x), x / (2 + 1e-4 * sums) ** 0.75)
