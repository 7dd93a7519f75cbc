"""The U-Net against the training graph that it is written after."""

import pytest
import torch

from lowtide import zoo
from lowtide.formats import chainer
from lowtide.graph import Phase, Role
from tests.zoo.record import Recorder


@pytest.fixture(scope="module")
def seed(documents):
    return chainer.read(documents["000"]).graph


@pytest.fixture(scope="module")
def built():
    return zoo.build("unet", device="meta")


@pytest.fixture(scope="module")
def recorded(built):
    with Recorder() as recorder:
        built.step()
    return recorder


def outputs(seed, kind):
    """Bytes of what the forward functions of this kind write, by rising rank."""
    ops = [op for op in seed.ops if op.kind == kind and op.phase is Phase.FORWARD]
    return [seed.tensors[op.outputs[0]].bytes for op in ops]


def test_parameters_have_the_names_and_bytes_of_the_seed(seed, built):
    ours = {name: p.numel() * p.element_size() for name, p in built.model.named_parameters()}
    theirs = {
        t.name.strip("/").replace("/W", ".weight").replace("/b", ".bias"): t.bytes
        for t in seed.tensors
        if t.role is Role.PARAMETER
    }
    assert ours == theirs
    assert len(ours) == 46
    assert sum(ours.values()) == 124_401_416


def test_the_batch_has_the_bytes_of_the_seed(seed, built):
    ours = sorted(t.numel() * t.element_size() for t in built.batch)
    assert ours == sorted(t.bytes for t in seed.tensors if t.role is Role.INPUT) == [4_817_408, 10_469_888]


def test_every_convolution_has_the_bytes_of_the_seed(seed, recorded):
    calls = recorded.named("convolution")
    plain = [call.bytes for call in calls if not call.arguments[6]]
    transposed = [call.bytes for call in calls if call.arguments[6]]
    assert plain == outputs(seed, "Convolution2DFunction")
    assert transposed == outputs(seed, "Deconvolution2DFunction")
    assert (len(plain), len(transposed)) == (19, 4)


@pytest.mark.parametrize(
    ("ours", "theirs", "count"),
    [("relu", "ReLU", 22), ("max_pool2d_with_indices", "MaxPooling2D", 4), ("cat", "Concat", 4)],
)
def test_every_other_layer_has_the_bytes_of_the_seed(seed, recorded, ours, theirs, count):
    sizes = [call.bytes for call in recorded.named(ours)]
    assert sizes == outputs(seed, theirs)
    assert len(sizes) == count


def test_every_crop_has_the_place_and_bytes_of_the_seed(seed, recorded):
    crops = [call for call in recorded.named("slice") if call.arguments[1] == 3]
    assert [call.bytes for call in crops] == outputs(seed, "GetItem")
    theirs = [
        op.attributes["slices"] for op in seed.ops if op.kind == "GetItem" and op.phase is Phase.FORWARD
    ]
    for call, text in zip(crops, theirs, strict=True):
        start = call.arguments[2]
        assert text.endswith(f"slice({start}, -{start}, None), slice({start}, -{start}, None))")


def test_the_skip_comes_first_in_a_concatenation(seed, recorded):
    calls = recorded.named("cat")
    ops = [op for op in seed.ops if op.kind == "Concat" and op.phase is Phase.FORWARD]
    for call, op in zip(calls, ops, strict=True):
        assert [part.numel() * 4 for part in call.arguments[0]] == [seed.tensors[t].bytes for t in op.inputs]
    assert [part.shape[1] for part in calls[-1].arguments[0]] == [64, 128]


def test_dropout_is_where_the_seed_has_it(seed, recorded):
    masks = [call.bytes for call in recorded.calls if call.kind in ("native_dropout", "bernoulli_")]
    assert masks == outputs(seed, "Dropout") == [67_108_864, 25_690_112]


def test_ignored_pixels_do_not_count():
    built = zoo.build("unet:base=2,batch=1,size=188")
    built.model.eval()
    image, labels = built.batch
    with torch.no_grad():
        scores = built.model(image)
        chosen = scores.log_softmax(1).gather(1, labels.long().clamp(min=0)[:, None])[:, 0]
        expected = -chosen[labels >= 0].mean()
        torch.testing.assert_close(built.step(), expected)
    labels.fill_(-1)
    assert built.step().isnan()
