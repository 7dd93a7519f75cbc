import torch

from lowtide.execute.runtime.snapshot import Snapshot


def test_values_come_back_in_every_type_and_shape():
    tensors = [torch.randn(3), torch.tensor(7), torch.randn(2, 2).t(), torch.tensor([1, 2]), torch.empty(0)]
    before = [t.clone() for t in tensors]
    snapshot = Snapshot()
    snapshot.take(tensors)
    for tensor in tensors:
        tensor.add_(1)
    snapshot.restore()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_nothing_taken_restores_nothing():
    Snapshot().restore()


def test_it_keeps_nothing_once_restored():
    tensor = torch.ones(4)
    snapshot = Snapshot()
    snapshot.take([tensor])
    snapshot.restore()
    tensor.zero_()
    snapshot.restore()
    assert not tensor.any()
