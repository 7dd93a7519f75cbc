"""The chain of the tile log gives the gradients that the log prints."""

import numpy as np
import torch

from lowtide import zoo
from lowtide.formats import tilelog
from lowtide.formats.tilelog.recover import recover
from lowtide.formats.tilelog.script import REFERENCE_RESULT, RESULT


def test_the_log_is_reproduced(documents):
    step = tilelog.read(documents["004"])
    found = recover(step)
    built = zoo.build("convpool")
    (image,) = built.batch
    with torch.no_grad():
        image[0, 0] = torch.tensor(found.input)
        for conv, kernel in zip((built.model.conv1, built.model.conv2), found.kernels.values(), strict=True):
            conv.weight[0, 0] = torch.tensor(kernel)
    image.requires_grad_()
    built.step().backward()
    log = tilelog.log_of(step)
    printed = [*log.printed(RESULT), *log.printed(REFERENCE_RESULT)]
    assert [len(one.values) for one in printed] == [256, 256]
    for one in printed:
        np.testing.assert_allclose(image.grad.flatten().numpy(), one.values, rtol=0, atol=1e-4)


def test_channels_and_size_can_be_set():
    built = zoo.build("convpool:batch=2,size=9,channels=3")
    assert built.model(*built.batch).shape == (2, 3, 2, 2)
    torch.testing.assert_close(built.step(), built.model(*built.batch).sum())
