"""On a CUDA device: bits, peaks and predictions. Run these where there is one: ``pytest -m gpu``."""

import pytest
import torch

from lowtide import zoo
from lowtide.execute.backend import PROGRAMS
from lowtide.execute.compare import compare

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
