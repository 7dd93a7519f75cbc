import torch
from torch import nn

from lowtide.plan.program.instructions import Run
from lowtide.plan.program.simple import recompute_all
from lowtide.trace.step.capture import capture


class Twice(nn.Module):
    """One BatchNorm that runs twice in a step: its buffers cannot be updated by either run alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(self.norm(x).relu()).square().mean()


def norms(graph):
    return [op for op in graph.ops if "batch_norm" in op.kind and op.phase == "forward"]


def test_batch_norm_updates_its_buffers_itself():
    graph = capture(lambda m, x: m(x).sum(), nn.BatchNorm1d(3), torch.randn(4, 3)).step.graph
    assert not [op for op in graph.ops if op.kind == "aten.copy_"]
    (norm,) = norms(graph)
    assert norm.kind == "aten._native_batch_norm_legit"
    updated = [graph.tensors[norm.inputs[k]].name for k in norm.updates]
    assert updated == ["running_mean", "running_var"]
    names = {graph.tensors[t].name for t in graph.updated_early}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}


def test_a_later_run_reads_no_buffer():
    graph = capture(lambda m, x: m(x).sum(), nn.BatchNorm1d(3), torch.randn(4, 3)).step.graph
    (norm,) = norms(graph)
    assert len(norm.reads) == 5
    assert len(norm.reads_again) == 3
    assert not {"running_mean", "running_var"} & {graph.tensors[t].name for t in norm.reads_again}


def test_backward_in_training_reads_no_running_statistics():
    graph = capture(lambda m, x: m(x).sum(), nn.BatchNorm1d(3), torch.randn(4, 3)).step.graph
    backward = next(op for op in graph.ops if "batch_norm_backward" in op.kind)
    assert not {"running_mean", "running_var"} & {graph.tensors[t].name for t in backward.inputs}


def test_buffers_that_another_operator_reads_are_copied_at_the_end_of_forward():
    graph = capture(Twice(), torch.randn(4, 3)).step.graph
    forward = [op for op in graph.ops if op.phase == "forward"]
    copies = [op for op in forward if op.kind == "aten.copy_"]
    assert {graph.tensors[op.outputs[0]].name for op in copies} >= {"norm.running_mean", "norm.running_var"}
    assert forward[-len(copies) :] == copies
    assert all(op.inputs[0] == op.outputs[0] for op in copies)


def test_a_copy_into_a_buffer_is_never_run_again():
    graph = capture(Twice(), torch.randn(4, 3)).step.graph
    runs = [line.op for line in recompute_all(graph, each_use=True).instructions if isinstance(line, Run)]
    assert len(runs) > len(graph.ops)
    for k, op in enumerate(graph.ops):
        if op.kind == "aten.copy_":
            assert runs.count(k) == 1
