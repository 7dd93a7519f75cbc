"""Groups in the joint graph of a step: what is in them, what is kept for backward, and what they compute."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import lowtide
from lowtide.documents import read_document, write_document
from lowtide.execute.kernels import compile_groups
from lowtide.graph import GROUP, Phase
from lowtide.plan.result.plan import Plan
from lowtide.trace.groups.decompose import decompose


@pytest.fixture(scope="module", autouse=True)
def one_by_one():
    """Groups run operator by operator: nothing is compiled."""

    def refused(*_):
        raise NotImplementedError("not here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_groups, "compile_kernels", refused)
        patch.setattr(compile_groups, "_warn", lambda label, why: None)
        torch._dynamo.reset()
        yield


def fitted(loss, model, *batch, **options):
    options = {"budget": "100%", "cost": "estimated", "time_limit": 0.2, "cache": False, **options}
    return lowtide.fit(loss, model, *batch, kernels="fused", **options)


def left(step, model, *batch):
    model.zero_grad()
    torch.manual_seed(3)
    loss = step(model, *batch)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)
        self.gate, self.drop = nn.Linear(width, 64), nn.Dropout(0.2)

    def forward(self, x):
        y = self.norm(x)
        return x + self.drop(self.down(F.silu(self.gate(y)) * self.up(y)))


class Model(nn.Module):
    def __init__(self, tokens=300, width=16, layers=3):
        super().__init__()
        self.table = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, tokens)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), ignore_index=0)


@pytest.fixture(scope="module")
def language():
    torch.manual_seed(0)
    return Model(), torch.randint(0, 300, (4, 12))


@pytest.fixture(scope="module")
def step(language):
    return fitted(loss_of, *language)


@pytest.fixture(scope="module")
def graph(step):
    return step.plan.graph


@pytest.mark.parametrize("planned", ["100%", "70%"])
def test_loss_and_gradients_are_those_of_eager_up_to_rounding(language, step, planned):
    step = step if planned == "100%" else fitted(loss_of, *language, budget=planned)
    for one, other in zip(left(loss_of, *language), left(step, *language), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_no_log_softmax_is_kept_and_no_copy_of_the_logits(graph):
    logits = 4 * 12 * 300 * 4
    kept = [t for t in graph.saved_for_backward() if graph.tensors[t].bytes >= logits]
    assert len(kept) == 1
    maker = next(
        op for op in graph.ops if kept[0] in op.outputs or graph.tensors[kept[0]].alias in op.outputs
    )
    assert maker.kind == "aten.addmm"


def test_products_of_activations_are_computed_again_inside_groups_of_backward(graph):
    """``silu(gate) * up`` is kept for a matrix product; ``silu(gate)`` is not kept for anybody."""
    wide = [t for t in graph.saved_for_backward() if graph.tensors[t].bytes == 4 * 12 * 64 * 4]
    assert len(wide) == 3 * 3  # gate, up and their product, of three layers
    silu = [op for op in graph.ops if op.body and any(one.kind == "aten.silu" for one in op.body.ops)]
    assert {op.phase for op in silu} == {Phase.FORWARD, Phase.BACKWARD}


def test_sums_over_layers_are_not_computed_from_all_of_them():
    """In half precision each layer adds a small tensor to a large one: the smallest cut would keep those."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(8))
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

        def forward(self, x):
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = x + layer(norm(x))
            return x

    def squared(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).square().mean()

    graph = fitted(squared, Deep(), torch.randn(128, 16)).plan.graph
    groups = [op for op in graph.ops if op.kind == GROUP and op.phase is Phase.BACKWARD]
    full = [[graph.tensors[t] for t in op.inputs if graph.tensors[t].shape == (128, 16)] for op in groups]
    assert max(map(len, full)) <= 5, "a gradient, its sum, and what is computed again from three"


def test_pieces_lie_in_memory_as_the_operator_does():
    """A logarithm of softmax is contiguous, whatever it reads."""

    def turned(model, x):
        scores = F.log_softmax(model(x).transpose(1, 2), -1)
        return scores.view(4, 6, 2, 8).square().mean()

    torch.manual_seed(0)
    model, x = nn.Conv1d(3, 16, 1), torch.randn(4, 3, 6)
    expected = left(turned, model, x)
    for one, other in zip(expected, left(fitted(turned, model, x), model, x), strict=True):
        torch.testing.assert_close(one, other)


def test_equal_layers_have_equal_groups(graph):
    gates = [op.body for op in graph.ops if op.body and any(one.kind == "aten.silu" for one in op.body.ops)]
    assert len(gates) == 6
    assert gates[0] == gates[1] == gates[2]
    assert gates[0] != gates[3]


def test_matrix_products_and_random_operators_stay_calls_of_their_own(graph):
    inside = {one.kind for op in graph.ops if op.kind == GROUP for one in op.body.ops}
    assert not inside & {"aten.mm", "aten.addmm", "aten.bmm", "lowtide.bernoulli", "aten.native_dropout"}
    assert {"aten.addmm", "aten.mm"} <= {op.kind for op in graph.ops}


def test_a_plan_with_groups_is_written_and_read(step, tmp_path):
    write_document(tmp_path / "plan.json", step.plan)
    assert read_document(tmp_path / "plan.json", Plan) == step.plan


def test_a_buffer_that_is_written_is_read_before():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(8))

        def forward(self, x):
            y = self.layer(x * torch.exp(self.seen))
            self.seen += y.detach().mean(0)
            return (y * self.seen).square().mean()

    torch.manual_seed(0)
    model, x = Counting(), torch.randn(4, 8)
    step = fitted(lambda model, x: model(x), model, x)
    model.seen.zero_()
    eager = left(lambda model, x: model(x), model, x), model.seen.clone()
    model.seen.zero_()
    ours = left(step, model, x), model.seen.clone()
    torch.testing.assert_close(eager, ours, rtol=1e-5, atol=1e-7)


def test_evaluation_runs_in_groups_too(language, step):
    model, ids = language
    model.eval()
    try:
        with torch.no_grad():
            torch.testing.assert_close(step(model, ids), loss_of(model, ids))
    finally:
        model.train()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3, 4), (5,)])
def test_pieces_of_a_loss_give_what_it_gives(reduction, weighted, shape):
    from torch.fx.experimental.proxy_tensor import make_fx

    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 5, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    target = torch.where(torch.rand(target.shape) < 0.3, -100, target)
    weight = torch.rand(5, dtype=torch.float64) if weighted else None

    def step(x):
        loss = F.cross_entropy(x, target, weight, reduction=reduction)
        return loss, *torch.autograd.grad(loss.sum(), x)

    module = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    names = {str(node.target) for node in module.graph.nodes}
    decompose(module)
    module.recompile()
    assert any("nll_loss" in name for name in names)
    assert not any("nll_loss" in str(node.target) for node in module.graph.nodes)
    for one, other in zip(step(x), module(x), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(x))).mean((2, 3))


def test_a_batch_norm_is_fused_apart_from_its_statistics():
    """What runs again where memory is short reads its input once, and no statistics are computed again."""
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(4, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(model, x):
        return model(x).square().mean()

    step = fitted(loss, model, x)
    eager = left(loss, model, x), [b.clone() for b in model.buffers()]
    model.load_state_dict(before)
    ours = left(step, model, x), [b.clone() for b in model.buffers()]
    torch.testing.assert_close(eager, ours, rtol=1e-5, atol=1e-6)
    forward = [op.body for op in step.plan.graph.ops if op.body and op.phase is Phase.FORWARD]
    bodies = [[one.kind for one in body.ops] for body in forward]
    wide = [kinds for kinds in bodies if "aten.relu" in kinds]
    assert len(wide) == 2
    assert not any("aten.var_mean" in kinds for kinds in wide)
    assert not any("batch_norm" in op.kind for op in step.plan.graph.ops)


def test_what_is_read_many_times_is_laid_out_once():
    """The gradient of a sum is one number, expanded; torch says another step of a dimension of one."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 3, 3), torch.randn(3, 1, 6, 6)

    def loss_of(model, x):
        return model(x)[..., :1].sum() / 100

    expected = left(loss_of, model, x)
    found = left(fitted(loss_of, model, x), model, x)
    assert all(map(torch.allclose, found, expected))
