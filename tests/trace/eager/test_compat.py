import pytest
import torch

from lowtide.execute.backend import backend
from lowtide.trace.eager.compat import trust_no_dict_versions


@pytest.mark.parametrize(
    ("python", "trusted"), [((3, 12, 1), True), ((3, 13, 0), False), ((3, 13, 1), True), ((3, 14, 0), True)]
)
def test_versions_of_dictionaries_are_trusted_unless_python_forgets_them(python, trusted):
    with torch._dynamo.config.patch(use_recursive_dict_tags_for_guards=True):
        trust_no_dict_versions(python)
        assert torch._dynamo.config.use_recursive_dict_tags_for_guards is trusted


def test_evaluation_is_noticed_after_training():
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5))
    step = torch.compile(lambda m, x: m(x), backend=backend, fullgraph=True)
    x = torch.randn(5, 4)
    for _ in range(3):
        step(model.train(), x).sum().backward()
        with torch.no_grad():
            assert torch.equal(step(model.eval(), x), model(x))
        assert torch.equal(step(model, x), model(x))
