"""Predicted against actual memory while training runs."""

import json
import warnings

import pytest
import torch
from torch.profiler import profile

import lowtide
from lowtide.errors import MemoryWarning, PlanError, RunError
from lowtide.execute.compare import watch as module
from lowtide.execute.compare.watch import Watch


def loss_of(model, x):
    return model(x).square().mean()


@pytest.fixture(scope="module")
def small():
    """A fitted step with its model and batch."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(6))
    )
    x = torch.randn(512, 64)
    step = lowtide.fit(loss_of, model, x, budget="60%", cost="estimated", time_limit=1.0, verify=False)
    return step, model, x


def train(step, model, x, watched, *, steps=3, momentum=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, foreach=False)
    for _ in range(steps):
        step(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        watched.step()


def test_a_planned_step_takes_what_was_predicted(small):
    step, model, x = small
    with warnings.catch_warnings(), lowtide.watch(step) as watched:
        warnings.simplefilter("error", MemoryWarning)  # it is close to its budget, as planned
        train(step, model, x, watched)
    assert len(watched.steps) == 3
    for one in watched.steps:
        assert one.predicted_bytes == step.plan.predicted.peak_bytes
        assert one.peak_bytes == pytest.approx(one.predicted_bytes, rel=0.01)
        assert one.peak_bytes <= one.limit_bytes == step.plan.budget_bytes
    assert watched.report().startswith("watched    3 steps on cpu\nbudget ")
    assert watched.report().endswith("% of the budget, as predicted")


def test_a_plan_is_watched_as_its_step_is(small):
    step, model, x = small
    with lowtide.watch(step.plan) as watched:
        train(step, model, x, watched, steps=1)
    assert watched.steps[0].predicted_bytes == step.plan.predicted.peak_bytes


def test_what_comes_beside_the_step_is_warned_of(small):
    step, model, x = small
    with pytest.warns(MemoryWarning) as caught, lowtide.watch(step) as watched:
        train(step, model, x, watched, momentum=0.9)
    assert "% over what was predicted" in watched.report()
    first, later = watched.steps[0].peak_bytes, watched.steps[1].peak_bytes
    state = sum(p.nbytes for p in model.parameters())
    assert later - first == state
    text = str(caught[-1].message)
    assert text.startswith("step 2 took ")
    assert f"of its budget of {module.format_bytes(step.plan.budget_bytes)}; " in text
    assert (
        "gradients of the step before or the state of an optimizer: free it, name it to lowtide.fit" in text
    )
    assert caught[-1].filename == __file__


def test_a_budget_alone_is_watched_from_where_it_began(small):
    _, model, x = small
    with lowtide.watch("1GiB", device="cpu") as watched:
        train(loss_of, model, x, watched, steps=2)
    kept = 6 * x.nbytes  # what Tanh saves for backward; parameters were there before
    assert kept < watched.peak_bytes < 3 * kept
    assert watched.predicted_bytes is None
    assert "predicted" not in watched.report()


def test_a_warning_comes_once_before_the_limit_and_once_at_it(small):
    _, model, x = small
    with lowtide.watch("1GiB", device="cpu") as free:
        train(loss_of, model, x, free, steps=1)
    took = free.peak_bytes
    with pytest.warns(MemoryWarning) as caught, lowtide.watch(int(took * 1.05), device="cpu") as watched:
        train(loss_of, model, x, watched, steps=3)
    assert len(caught) == 1
    assert "What comes on top, as larger shapes or more state, may not fit" in str(caught[0].message)
    with pytest.warns(MemoryWarning) as caught, lowtide.watch(took // 2, device="cpu") as watched:
        train(loss_of, model, x, watched, steps=3)
    assert len(caught) == 1
    with warnings.catch_warnings(), lowtide.watch(int(took * 1.05), device="cpu", warn_at=1.0) as watched:
        warnings.simplefilter("error", MemoryWarning)
        train(loss_of, model, x, watched, steps=1)


def test_steps_that_nobody_marks_count_as_one(small):
    _, model, x = small
    with lowtide.watch("1GiB", device="cpu") as watched:
        loss_of(model, x).backward()
    assert len(watched.steps) == 1
    assert watched.peak_bytes > 0
    with pytest.raises(ZeroDivisionError), lowtide.watch("1GiB", device="cpu") as watched:  # noqa: PT012
        loss_of(model, x).backward()
        watched.step()
        1 / 0  # noqa: B018
    assert len(watched.steps) == 1
    with lowtide.watch("1GiB", device="cpu"):  # the one before has stopped recording
        pass


def test_results_do_not_change(small):
    _, model, x = small
    plain = loss_of(model, x)
    with lowtide.watch("1GiB", device="cpu"):
        assert torch.equal(loss_of(model, x), plain)


def test_figures_are_given_as_json_and_to_notebooks(small):
    step, model, x = small
    with lowtide.watch(step) as watched:
        train(step, model, x, watched, steps=2)
    assert json.loads(json.dumps(watched.as_json()))["steps"][1]["number"] == 2
    html = watched._repr_html_()
    assert "Watched steps" in html
    assert html.count("<polygon") == html.count("<polyline") == 1
    assert "no step yet" in Watch("1GiB", warn_at=0.9, device=torch.device("cpu"))._repr_html_()


def test_what_cannot_be_watched_is_refused(small):
    step, *_ = small
    for what, problem in (
        (3.5, "this is a float"),
        (True, "this is a bool"),
        ("40%", "'40%' is a share of what a step takes: give watch the fitted step, or a budget in bytes"),
        ("4 parsecs", "there is no unit"),
    ):
        with pytest.raises((RunError, PlanError), match=problem):
            lowtide.watch(what, device="cpu")
    with pytest.raises(
        PlanError, match="give warn_at as a share of the budget, more than 0 and at most 1, not 90"
    ):
        lowtide.watch(step, warn_at=90)
    waiting = lowtide.execute.fit.Fitted(loss_of, step._request)
    with pytest.raises(RunError, match="not been planned yet: call it once, then watch it"):
        lowtide.watch(waiting)


def test_a_profiler_in_the_same_thread_is_named():
    with (
        profile(),
        pytest.raises(RunError, match="leave it before lowtide.watch"),
        lowtide.watch("1GiB", device="cpu"),
    ):
        pass


def test_auto_is_what_the_device_has():
    with lowtide.watch("auto", device="cpu") as watched:
        pass
    assert watched.limit_bytes > 1 << 20


class Counters:
    """Stands for the allocator of a CUDA device."""

    def __init__(self):
        self.peaks, self.resets = iter([700, 950, 1200, 100]), 0

    def reset_peak_memory_stats(self, device):
        self.resets += 1

    def max_memory_allocated(self, device):
        return next(self.peaks)

    def is_available(self):
        return True


def test_on_cuda_the_counters_are_read_once_a_step(monkeypatch):
    counters = Counters()
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "is_available"):
        monkeypatch.setattr(torch.cuda, name, getattr(counters, name))
    with pytest.warns(MemoryWarning) as caught, lowtide.watch(1000) as watched:  # noqa: PT031
        for _ in range(3):
            watched.step()
    assert str(watched.device) == "cuda"
    assert [one.peak_bytes for one in watched.steps] == [700, 950, 1200]
    assert counters.resets == 4
    assert [str(one.message)[:6] for one in caught] == ["step 2", "step 3"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_planned_step_takes_what_was_predicted():
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).cuda()
    x = torch.randn(4096, 1024, device="cuda")
    step = lowtide.fit(loss_of, model, x, budget="80%")
    with lowtide.watch(step) as watched:
        train(step, model, x, watched)
    assert watched.peak_bytes <= step.plan.budget_bytes
