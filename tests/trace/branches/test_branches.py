"""A branch on a value that the step is given goes the way of eager: one graph for each way, and the bits of eager."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.cost.watch import watch_cpu
from lowtide.errors import GraphBreakError
from lowtide.execute import fit as fitting
from lowtide.trace.branches.branches import WAYS

WIDTH = 16
ZEROS, ONES = torch.zeros(32, WIDTH), torch.ones(32, WIDTH)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _fresh(cache, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(cache))
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.fixture
def compiled(monkeypatch):
    """The graphs that are compiled."""
    graphs = []
    original = fitting.compile_planned

    def counted(module, *args, **kwargs):
        graphs.append(module)
        return original(module, *args, **kwargs)

    monkeypatch.setattr(fitting, "compile_planned", counted)
    return graphs


class Branching(nn.Module):
    """One layer where ``asks`` is true, another where it is not."""

    def __init__(self, asks):
        super().__init__()
        self.first, self.second, self.asks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), asks
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, mask):
        y = self.first(x)
        return y.tanh() if self.asks(self, y, mask) else self.second(y) * mask


def loss_of(model, x, mask):
    return model(x, mask).square().mean()


def fitted(model, *example, **options):
    options = {"budget": "100%", "time_limit": 0.2, **options}
    return lowtide.fit(loss_of, model, *example, **options)


def left_behind(step, model, *batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = step(model, *batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers(), torch.rand(2)]


def same(step, model, *batch):
    """Whether a step leaves behind what eager does, for a model in the same state."""
    twin = copy.deepcopy(model)
    pairs = zip(left_behind(step, model, *batch), left_behind(loss_of, twin, *batch), strict=True)
    return all((a is None and b is None) or (a is not None and torch.equal(a, b)) for a, b in pairs)


def _plainly(model, y, mask):
    return (mask == 0).all()


def _in_all_words(model, y, mask):
    """Python may ask in many ways."""
    found = [1 if (mask == 0).all() else 0]
    found += [not (mask != 0).any(), bool((mask == 0).all()), not bool(mask.sum()), (mask == 0).all().item()]
    either = (mask == 0).all() or (mask == 2).all()  # a tensor, as in eager
    found += [1 if either.logical_and(either) else 0, all((row == 0).all() for row in mask[:3])]
    rows = torch.arange(mask.shape[0]).unsqueeze(1)
    if torch.where(rows < 4, mask, 0).amax() < 0.5 and (mask == 0).sum():
        found.append(1)
    return sum(found) == 8


@pytest.mark.parametrize("asks", [_plainly, _in_all_words])
def test_each_way_is_captured_once_and_gives_the_bits_of_eager(asks, compiled):
    model, x = Branching(asks), torch.randn(32, WIDTH)
    step = fitted(model, x, ZEROS, fullgraph=True)
    assert len(step.plans) == 1
    for mask in (ZEROS, ONES, ONES, ZEROS):
        assert same(step, model, x, mask)
    assert len(compiled) == 2
    assert ("second" in str(compiled[0].graph), "second" in str(compiled[1].graph)) == (False, True)


def test_what_is_planned_is_told():
    model, x = Branching(_plainly), torch.randn(32, WIDTH)
    step = fitted(model, x, ONES)
    asked = f"branch     {__file__}:{Branching.forward.__code__.co_firstlineno + 2}: planned where it is"
    assert step.explain().endswith(f"{asked} False")
    step(model, x, ZEROS)
    assert step.explain().endswith(f"{asked} False and True")


def test_without_gradients_the_ways_are_those_of_eager():
    model, x = Branching(_plainly).eval(), torch.randn(32, WIDTH)
    step = fitted(model, x, ZEROS)
    with torch.no_grad():
        for mask in (ZEROS, ONES, ZEROS):
            assert torch.equal(step(model, x, mask), loss_of(model, x, mask))
    assert same(step, model, x, ONES)


def test_a_constant_is_asked_once():
    """Positions that are counted up are one sequence, whatever the tokens are."""

    def asks(model, y, mask):
        positions = torch.arange(mask.shape[1]).expand(mask.shape[0], -1)
        return ((torch.diff(positions, dim=-1) != 1).cumsum(-1)[:, -1] == 0).all()

    model, x = Branching(asks), torch.randn(32, WIDTH)
    step = fitted(model, x, ZEROS, fullgraph=True)
    assert "branch " not in step.explain()
    assert same(step, model, x, ONES)


def test_what_follows_from_sizes_goes_its_way_for_each_size(compiled):
    def asks(model, y, mask):
        return torch.arange(y.shape[0] * 2).sum() > 1500

    model = Branching(asks)
    step = fitted(model, torch.randn(32, WIDTH), ONES, fullgraph=True)
    for rows in (20, 24, 40, 28, 32, 64, 20):
        assert same(step, model, torch.randn(rows, WIDTH), torch.ones(rows, WIDTH))
    assert len(compiled) == 4  # with numbers for 32 and 20, with symbols for the others, each way once


def test_a_value_and_sizes_together():
    def asks(model, y, mask):
        return mask.sum() > y.shape[0] * (y.shape[1] - 1)

    model = Branching(asks)
    step = fitted(model, torch.randn(32, WIDTH), ONES, fullgraph=True)
    for rows in (20, 24, 28):
        for value in (1, 0):
            assert same(step, model, torch.randn(rows, WIDTH), torch.full((rows, WIDTH), float(value)))


def test_a_buffer_that_the_step_updates_behind_the_branch():
    class Beginning(Branching):
        def forward(self, x, mask):
            y = super().forward(x, mask)
            self.seen += 1
            return y

    model, x = Beginning(lambda model, y, mask: model.seen < 2), torch.randn(32, WIDTH)
    step = fitted(model, x, ONES, fullgraph=True)
    assert all(same(step, model, x, ONES) for _ in range(4))
    assert model.seen == 4


def _of_a_parameter(model, y, mask):
    return model.first.bias.sum() > 0


def _of_a_frozen_one(model, y, mask):
    return model.second.weight.detach().sum() > 0


def _computed(model, y, mask):
    return y.sum() > 0


def _random(model, y, mask):
    return torch.rand(()) < 0.5


def _changed(model, y, mask):
    model.seen += 1
    return model.seen < 2


def _a_view_of_what_is_changed(model, y, mask):
    view = mask[0]
    mask.data[:, 0] += 1
    return (view == 0).all()


def _seen_by_a_function(model, y, mask):
    checkpoint(lambda x: x.sin(), mask, use_reentrant=False)
    return (mask == 0).all()


ENDING = {
    _of_a_parameter: "it depends on a parameter",
    _of_a_frozen_one: "it depends on a parameter",
    _computed: "it depends on a parameter",
    _random: "it depends on aten.rand",
    _changed: "it is changed in place before the branch",
    _a_view_of_what_is_changed: "it is changed in place before the branch",
    _seen_by_a_function: "it is changed in place before the branch",
}


@pytest.mark.parametrize("asks", ENDING)
def test_a_graph_ends_where_the_value_is_not_known_before(asks):
    model, x = Branching(asks), torch.randn(32, WIDTH)
    with pytest.raises(GraphBreakError, match=ENDING[asks]):
        fitted(model, x, ONES, fullgraph=True)


def test_there_python_asks_between_graphs_as_always():
    model, x = Branching(_changed), torch.randn(32, WIDTH)
    step = fitted(model, x, ONES)
    assert "break " in step.explain()
    assert all(same(step, model, x, ONES) for _ in range(3))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_layer_that_is_never_dropped_ends_no_graph(share):
    model, x = Branching(lambda model, y, mask: torch.rand([]) < share), torch.randn(32, WIDTH)
    step = fitted(model, x, ONES, fullgraph=True)
    assert all(same(step, model, x, ONES) for _ in range(2))


class Bits(nn.Module):
    """Has as many ways as numbers of so many bits."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask):
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh() if mask[k, 0] > 0 else layer(x)
        return x


def bits(number):
    return torch.tensor([[float(number >> k & 1)] for k in range(4)])


def test_beyond_so_many_ways_a_graph_ends(monkeypatch):
    monkeypatch.setattr("lowtide.trace.branches.branches.WAYS", 3)
    model, x = Bits(), torch.randn(32, WIDTH)
    step = fitted(model, x, bits(0))
    for number in (1, 2, 0, 1):
        assert same(step, model, x, bits(number))
    assert "break " not in step.explain()
    for number in (4, 0, 9):
        assert same(step, model, x, bits(number))
    assert "break " in step.explain()


def test_beyond_so_many_ways_one_graph_is_refused(monkeypatch):
    assert WAYS == 8
    monkeypatch.setattr("lowtide.trace.branches.branches.WAYS", 2)
    model, x = Bits(), torch.randn(32, WIDTH)
    step = fitted(model, x, bits(0), fullgraph=True)
    assert same(step, model, x, bits(1))
    with pytest.raises(GraphBreakError, match="2 ways through branches are planned"):
        step(model, x, bits(2))
    assert same(step, model, x, bits(0))


def test_a_value_that_is_refused_is_refused_by_the_users_code():
    lines = (  # not here, where pytest makes something else of an assert
        "def asks(model, y, mask):",
        "    if mask.max() > 2:",
        "        raise ValueError('masks are 0 or 1')",
        "    assert mask.min() > -1",
        "    assert mask.min() > -1, 'masks are not negative'",
        "    assert mask.max() < 2, f'in {len(mask)} rows'",
    )
    code = {}
    exec("\n".join(lines), code)
    model, x = Branching(code["asks"]), torch.randn(32, WIDTH)
    step = fitted(model, x, ONES, fullgraph=True)
    with pytest.raises(ValueError, match="masks are 0 or 1"):
        step(model, x, ONES + 2)
    with pytest.raises(AssertionError, match="in 32 rows"):
        step(model, x, ONES + 1)
    assert same(step, model, x, ONES)


def test_inputs_on_one_memory_of_which_one_is_changed():
    def asks(model, y, mask):
        mask += 1
        return (model.other == 1).all()

    model, x, mask = Branching(asks), torch.randn(32, WIDTH), torch.zeros(32, WIDTH)
    model.register_buffer("other", mask.view(-1)[:4])
    with pytest.raises(GraphBreakError, match="changed in place"):
        fitted(model, x, mask, fullgraph=True)


class InSeveral(Branching):
    """A graph ends for another reason."""

    def forward(self, x, mask):
        y = self.first(x)
        y = y * y.detach().abs().max().item()
        return y.tanh() if self.asks(self, y, mask) else self.second(y) * mask


@pytest.mark.parametrize(
    ("asks", "followed"),
    [(_plainly, True), (lambda model, y, mask: y.detach().sum() > 0, False)],
    ids=["given", "computed"],
)
def test_in_several_graphs_branches_on_arguments_alone_are_followed(asks, followed):
    model, x = InSeveral(asks), torch.randn(32, WIDTH)
    step = fitted(model, x, ZEROS)
    assert ("branch " in step.explain()) == followed
    for mask in (ZEROS, ONES, ZEROS):
        assert same(step, model, x, mask)


def test_a_further_example_of_a_step_in_several_graphs_is_followed_too():
    model, x = InSeveral(_plainly), torch.randn(32, WIDTH)
    step = fitted(model, x, ZEROS, examples=[(model, x, ONES)])
    assert "planned where it is False and True" in step.explain()
    assert same(step, model, x, ONES)


def test_a_branch_inside_of_a_checkpoint():
    class Checkpointed(Branching):
        def forward(self, x, mask):
            return checkpoint(super().forward, x, mask, use_reentrant=False)

    model, x = Checkpointed(_plainly), torch.randn(32, WIDTH)
    with pytest.raises(GraphBreakError, match="checkpointed"):
        fitted(model, x, ZEROS, fullgraph=True)


def test_another_way_stays_inside_the_budget():
    class Deep(Branching):
        def __init__(self, asks):
            super().__init__(asks)
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6))
            )

        def forward(self, x, mask):
            return self.layers(super().forward(x, mask))

    model, x, ones = Deep(_plainly), torch.randn(512, WIDTH), torch.ones(512, WIDTH)
    # long enough to measure all operators: they are not measured again while the call is watched
    step = fitted(model, x, ones * 0, budget="70%", only="recompute", time_limit=4.0)

    def once(mask):
        model.zero_grad(set_to_none=True)
        step(model, x, mask).backward()

    _, seen = watch_cpu(lambda _: once(ones))  # planned meanwhile
    leaves = sum(t.nbytes for t in [*model.state_dict().values(), x, ones])
    assert step.plan.budget_bytes < step.plan.plain.peak_bytes
    assert seen.peak_bytes + leaves <= step.plan.budget_bytes


def test_other_compilers_end_their_graphs():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module

    model, x = Branching(_plainly), torch.randn(32, WIDTH)
    assert torch.equal(torch.compile(loss_of, backend=backend)(model, x, ONES), loss_of(model, x, ONES))
    assert len(graphs) > 1
    with pytest.raises(GraphBreakError):
        lowtide.capture(loss_of, model, x, ONES)
