"""On a CUDA device: bits, peaks and predictions. Run these where there is one: ``pytest -m gpu``."""

import gc

import pytest
import torch

from lowtide import zoo
from lowtide.errors import RunError
from lowtide.execute.backend import PROGRAMS
from lowtide.execute.compare.compare import compare
from lowtide.execute.fit import fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TARGETS = [
    "unet:base=16,batch=2,size=284",
    "resnet50:batch=8,size=64",
    "gpt2:batch=2,layers=2,width=128,heads=2,length=64,vocab=1000",
    "vgg19:batch=2,size=64",
    "alexnet:batch=4",
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = before


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_step_is_bitwise_equal_and_never_takes_more_than_predicted(target, program):
    built = zoo.build(target, device="cuda")
    found = compare(built.model, built.batch, built.loss, PROGRAMS[program], repeats=1)
    assert found.bitwise
    assert found.measured.peak_bytes <= found.predicted_peak_bytes <= found.measured.peak_bytes * 1.02


def test_memory_that_somebody_else_holds_is_said_and_the_next_step_works():
    torch._dynamo.reset()  # what other tests compiled holds memory
    built = zoo.build("unet:base=16,batch=8,size=284", device="cuda")
    step = fit(built.loss, built.model, *built.batch, budget="90%", time_limit=2)

    def left():
        built.model.zero_grad()
        torch.manual_seed(0)
        loss = step(built.model, *built.batch)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in built.model.parameters())]

    expected = left()
    built.model.zero_grad()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
        with pytest.raises(
            RunError, match="Somebody else holds memory.* of the device other programs"
        ) as caught:
            left()
        assert isinstance(caught.value, torch.OutOfMemoryError)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(left(), expected)  # the loss of this network is summed in no fixed order


def test_a_step_that_was_let_go_does_not_count():
    built = zoo.build("unet:base=16,batch=8,size=284", device="cuda")
    taken = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            torch._dynamo.reset()
            step = fit(built.loss, built.model, *built.batch, budget="60%", time_limit=1, graphs="auto")
            for _ in range(3):  # the third one replays graphs, which keep copies of their own
                built.model.zero_grad()
                step(built.model, *built.batch).backward()
            built.model.zero_grad()
            taken.append(step.plan.beside_bytes)
            del step
    finally:
        gc.enable()
    assert taken[1] <= taken[0]


@pytest.mark.parametrize("shape", [(4, 8, 64, 64), (3, 5, 7, 9), (16, 12)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_half_of_a_batch_norm_with_what_follows_it_is_one_kernel(shape, dtype):
    from lowtide.cost.normalize import normalized

    torch.manual_seed(0)
    x, z = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    weight, bias, mean = (torch.randn(shape[1], device="cuda") for _ in range(3))
    inverse = torch.rand(shape[1], device="cuda") + 0.5
    plain = torch.batch_norm_elemt(x, weight, bias, mean, inverse, 1e-5)
    for other in (None, z):
        for relu in (False, True):
            wanted = plain if other is None else plain + other
            wanted = wanted.relu() if relu else wanted
            assert torch.equal(normalized(x, weight, bias, mean, inverse, other, relu), wanted)
