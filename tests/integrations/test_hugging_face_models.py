"""Models of Hugging Face look at the values of masks, and leave masks out: a fitted step does what eager does."""

import copy

import pytest
import torch

import lowtide

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MODELS = {
    "Llama": ("LlamaForCausalLM", {"use_cache": False}),
    "Bert": ("BertForMaskedLM", {}),
    "Mixtral": ("MixtralForCausalLM", {"use_cache": False, "num_local_experts": 2}),
}


def loss_of(model, **batch):
    return model(**batch).loss


def left_behind(step, model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    loss = step(model, **batch)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None), torch.rand(2)]


@pytest.mark.parametrize("name", MODELS)
def test_with_masks_and_without_a_step_is_one_graph_with_the_bits_of_eager(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="the models are those of transformers")
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, sizes = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**SMALL, **sizes)).train()
    twin = copy.deepcopy(model)
    tokens = torch.randint(1, 64, (4, 16))
    whole = torch.ones_like(tokens)
    padded = whole.clone()
    padded[1:, 10:] = 0
    batch = {"input_ids": tokens, "labels": tokens}
    step = lowtide.fit(loss_of, model, budget="100%", time_limit=0.3, fullgraph=True, **batch)
    for mask in (None, whole, padded, whole):
        given = batch if mask is None else {**batch, "attention_mask": mask}
        ours, right = left_behind(step, model, given), left_behind(loss_of, twin, given)
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
