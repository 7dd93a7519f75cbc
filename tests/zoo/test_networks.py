"""Every network: it builds from its small address, trains, and repeats itself."""

import math

import pytest
import torch

from lowtide import zoo

NAMES = zoo.names()
SLOW = ("vgg19",)
"""Made of the same layers and filled by the same function as those that are quicker to try twice."""

PUBLISHED = {
    "unet": 31_100_354,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "vgg19": 143_667_240,
    "vgg16body": 14_714_688 + 512 * 10 + 10,
    "densenet161": 28_681_000,
    "gpt2": 354_823_168,
}


def run(built, seed=1):
    """Loss and gradients with the random state of this seed, which is forgotten afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        out = built.step()
        if built.trains:
            out.backward()
    return out.detach(), [parameter.grad for parameter in built.model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_the_small_step_has_a_loss_and_gradients(name):
    state = torch.get_rng_state()
    built = zoo.build(zoo.small(name))
    assert torch.equal(torch.get_rng_state(), state)
    out, gradients = run(built)
    assert out.isfinite().all()
    assert built.model.training == built.trains
    if built.trains:
        assert out.shape == ()
        for (key, _), gradient in zip(built.model.named_parameters(), gradients, strict=True):
            assert gradient is not None, key
            assert gradient.isfinite().all(), key
            assert gradient.any(), key


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SLOW])
def test_the_same_seed_gives_the_same_step(name):
    one, other = (zoo.build(zoo.small(name)) for _ in range(2))
    results = [run(built) for built in (one, other)]
    assert torch.equal(results[0][0], results[1][0])
    if one.trains:
        assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    # After the step, so that buffers have been updated.
    states = one.model.state_dict(), other.model.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_default_step_runs_on_the_meta_device(name):
    state = torch.get_rng_state()
    built = zoo.build(name, device="meta")
    out = built.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert out.is_meta
    assert built.name == name
    assert all(part.is_meta for part in (*built.batch, *built.model.parameters(), *built.model.buffers()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_default_network_has_the_published_number_of_parameters(name):
    model = zoo.build(name, device="meta").model
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["unet", "convpool", "gpt2", "locallyconnected"])
def test_another_seed_gives_other_parameters_and_another_batch(name):
    one, other = (zoo.build(zoo.small(name), seed=seed) for seed in (0, 1))
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    assert not torch.equal(one.batch[0], other.batch[0])


@pytest.mark.parametrize("name", ["unet", "alexnet", "locallyconnected", "convpool", "gpt2"])
def test_meta_and_real_steps_have_the_same_shapes(name):
    real = zoo.build(zoo.small(name))
    meta = zoo.build(zoo.small(name), device="meta")
    assert [(p.shape, p.dtype) for p in real.batch] == [(p.shape, p.dtype) for p in meta.batch]
    states = real.model.state_dict(), meta.model.state_dict()
    assert [(k, v.shape) for k, v in states[0].items()] == [(k, v.shape) for k, v in states[1].items()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["unet", "locallyconnected", "gpt2"])
def test_values_do_not_depend_on_the_device(name):
    here, there = (zoo.build(zoo.small(name), device=device) for device in ("cpu", "cuda"))
    pairs = [*zip(here.batch, there.batch, strict=True)]
    pairs += zip(here.model.state_dict().values(), there.model.state_dict().values(), strict=True)
    for one, other in pairs:
        assert other.is_cuda
        assert torch.equal(one, other.cpu())


def test_labels_are_in_range():
    _, labels = zoo.build("unet:base=1,batch=2,size=284").batch
    assert labels.dtype == torch.int32
    assert set(labels.unique().tolist()) == {-1, 0, 1}
    _, labels = zoo.build("locallyconnected:batch=500,size=15,channels=1,classes=7").batch
    assert set(labels.flatten().tolist()) == set(range(7))


def test_a_fresh_classifier_knows_nothing():
    """Its loss is that of guessing, which badly scaled first values would miss by far."""
    built = zoo.build("gpt2:batch=2,layers=2,width=32,heads=4,length=16,vocab=64")
    assert float(run(built)[0]) == pytest.approx(math.log(64), rel=0.05)


def test_every_network_describes_itself():
    assert NAMES == (
        "unet", "resnet50", "resnet152", "resnet50-inference", "alexnet", "locallyconnected", "convpool",
        "vgg19", "vgg16body", "densenet161", "gpt2",
    )  # fmt: skip
    for name in NAMES:
        network = zoo.network(name)
        assert network.summary
        assert "\n" not in network.summary
        assert "batch" in network.keys
        assert zoo.parse(zoo.small(name)).network is network


def test_sgd_takes_a_step_down():
    built = zoo.build(zoo.small("locallyconnected"))
    before = built.step()
    before.backward()
    old = {name: parameter.detach().clone() for name, parameter in built.model.named_parameters()}
    built.update(built.model, 0.01)
    for name, parameter in built.model.named_parameters():
        torch.testing.assert_close(parameter.detach(), old[name] - 0.01 * parameter.grad)
    assert built.step() < before
