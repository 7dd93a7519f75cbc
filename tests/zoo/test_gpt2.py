"""The decoder: it does not look ahead, shares its embedding, starts as GPT-2 does."""

import pytest
import torch

from lowtide import zoo

SMALL = zoo.small("gpt2")


def test_a_token_does_not_see_those_after_it():
    built = zoo.build(SMALL)
    tokens = built.batch[0][:, :-1]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    with torch.no_grad():
        before, after = built.model(tokens), built.model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_every_token_but_the_first_is_predicted():
    built = zoo.build(SMALL)
    (tokens,) = built.batch
    assert tokens.shape == (2, 17)
    with torch.no_grad():
        chances = built.model(tokens[:, :16]).log_softmax(-1)
        expected = -sum(chances[n, k, tokens[n, k + 1]] for n in range(2) for k in range(16)) / 32
        torch.testing.assert_close(built.step(), expected)


def test_the_output_layer_has_no_weight_of_its_own():
    names = [name for name, p in zoo.build(SMALL).model.named_parameters() if 64 in p.shape]
    assert names == ["tokens.weight"]


def test_first_values_are_those_of_gpt2():
    model = zoo.build("gpt2:batch=1,layers=8,width=128,heads=2,length=64,vocab=500").model
    block = model.blocks[3]
    for weight, deviation in [
        (model.tokens.weight, 0.02),
        (model.positions.weight, 0.01),
        (block.attention.split.weight, 0.02),
        (block.perceptron.widen.weight, 0.02),
        (block.attention.project.weight, 0.005),
        (block.perceptron.project.weight, 0.005),
    ]:
        assert weight.std().item() == pytest.approx(deviation, rel=0.03)
    assert (block.norm1.weight == 1).all()
    assert not block.attention.split.bias.any()


def test_dropout_is_a_percentage():
    with torch.random.fork_rng(devices=[]):
        plain, dropped = zoo.build(SMALL), zoo.build(f"{SMALL},dropout=10")
        assert torch.equal(plain.step(), plain.step())
        assert not torch.equal(dropped.step(), dropped.step())
        dropped.model.eval()
        assert torch.equal(dropped.step(), plain.step())
