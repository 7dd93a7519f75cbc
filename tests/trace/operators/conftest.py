import random

import pytest
import torch


@pytest.fixture(params=range(3))
def rng(request):
    torch.manual_seed(request.param)
    return random.Random(request.param)
