"""Architectures of Hugging Face's `transformers` and `diffusers`: small, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

__all__ = ["CASES"]

Case = tuple[Any, dict[str, Any], Callable[..., Any]]

VOCABULARY = 512
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
FEW_HEADS = {"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
TWO_STACKS = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def own_loss(model: Any, batch: dict[str, Any]) -> Any:
    """The loss that the model computes."""
    return model(**batch).loss


def squares(model: Any, batch: dict[str, Any]) -> Any:
    """A loss of the first result, for a model that has none."""
    return model(**batch)[0].square().mean()


def ids(times: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (8 * times, 64))


def text(model: str, config: str, **sizes: Any) -> Callable[[int], Case]:
    """A model of language whose labels are its tokens."""

    def build(times: int) -> Case:
        tokens = ids(times)
        batch = {"input_ids": tokens, "labels": tokens}
        return getattr(hf, model)(getattr(hf, config)(**(SMALL | sizes))), batch, own_loss

    return build


def image(model: str, config: str, size: int = 64, **sizes: Any) -> Callable[[int], Case]:
    """A classifier of images."""

    def build(times: int) -> Case:
        values = {
            "pixel_values": torch.randn(8 * times, 3, size, size),
            "labels": torch.arange(8 * times) % 10,
        }
        return getattr(hf, model)(getattr(hf, config)(num_labels=10, **sizes)), values, own_loss

    return build


def sequence_to_sequence(model: str, config: str, **sizes: Any) -> Callable[[int], Case]:
    """A model that reads one text and writes another."""

    def build(times: int) -> Case:
        batch = {"input_ids": ids(times), "labels": ids(times)}
        return getattr(hf, model)(getattr(hf, config)(vocab_size=VOCABULARY, **sizes)), batch, own_loss

    return build


def wav2vec2(times: int) -> Case:
    config = hf.Wav2Vec2Config(
        **(SMALL | {"vocab_size": 32}),
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    batch = {"input_values": torch.randn(4 * times, 4000), "labels": torch.randint(1, 32, (4 * times, 8))}
    return hf.Wav2Vec2ForCTC(config), batch, own_loss


def whisper(times: int) -> Case:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        **TWO_STACKS,
        max_source_positions=100,
        max_target_positions=64,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    batch = {
        "input_features": torch.randn(4 * times, 16, 200),
        "labels": torch.randint(1, VOCABULARY, (4 * times, 24)),
    }
    return hf.WhisperForConditionalGeneration(config), batch, own_loss


def clip(times: int) -> Case:
    text_config = SMALL | {"projection_dim": 32, "eos_token_id": 2, "bos_token_id": 1}
    vision_config = VISION | {"image_size": 64, "patch_size": 8, "projection_dim": 32}
    config = hf.CLIPConfig(text_config=text_config, vision_config=vision_config, projection_dim=32)
    batch = {"input_ids": ids(times), "pixel_values": torch.randn(8 * times, 3, 64, 64), "return_loss": True}
    return hf.CLIPModel(config), batch, own_loss


def segformer(times: int) -> Case:
    config = hf.SegformerConfig(
        num_labels=5, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], decoder_hidden_size=32
    )
    batch = {
        "pixel_values": torch.randn(4 * times, 3, 64, 64),
        "labels": torch.randint(0, 5, (4 * times, 64, 64)),
    }
    return hf.SegformerForSemanticSegmentation(config), batch, own_loss


def diffusion_unet(times: int) -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    batch = {
        "sample": torch.randn(4 * times, 4, 32, 32),
        "timestep": torch.arange(4 * times),
        "encoder_hidden_states": torch.randn(4 * times, 16, 32),
    }
    return model, batch, squares


CASES: dict[str, Callable[[int], Case]] = {
    "gpt2": text("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=3, n_head=4, n_positions=128),
    "bert": text("BertForMaskedLM", "BertConfig"),
    "roberta": text("RobertaForMaskedLM", "RobertaConfig"),
    "distilbert": text(
        "DistilBertForMaskedLM", "DistilBertConfig", dim=64, hidden_dim=128, n_layers=3, n_heads=4
    ),
    "albert": text("AlbertForMaskedLM", "AlbertConfig", embedding_size=32),
    "electra": text("ElectraForMaskedLM", "ElectraConfig", embedding_size=32),
    "llama": text("LlamaForCausalLM", "LlamaConfig", **FEW_HEADS),
    "qwen2": text("Qwen2ForCausalLM", "Qwen2Config", **FEW_HEADS),
    "qwen3": text("Qwen3ForCausalLM", "Qwen3Config", **FEW_HEADS),
    "mistral": text("MistralForCausalLM", "MistralConfig", **FEW_HEADS),
    "gemma2": text("Gemma2ForCausalLM", "Gemma2Config", **FEW_HEADS),
    "phi3": text("Phi3ForCausalLM", "Phi3Config", num_key_value_heads=2, use_cache=False),
    "opt": text("OPTForCausalLM", "OPTConfig", ffn_dim=128, word_embed_proj_dim=64, use_cache=False),
    "gpt-neox": text("GPTNeoXForCausalLM", "GPTNeoXConfig", use_cache=False),
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", **FEW_HEADS, **EXPERTS),
    "qwen3-moe": text(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **FEW_HEADS, **EXPERTS, moe_intermediate_size=64
    ),
    "t5": sequence_to_sequence(
        "T5ForConditionalGeneration",
        "T5Config",
        decoder_start_token_id=0,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_layers=2,
        num_heads=4,
    ),
    "bart": sequence_to_sequence(
        "BartForConditionalGeneration",
        "BartConfig",
        **TWO_STACKS,
        max_position_embeddings=128,
    ),
    "vit": image("ViTForImageClassification", "ViTConfig", image_size=64, patch_size=8, **VISION),
    "swin": image(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": image(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]
    ),
    "segformer": segformer,
    "wav2vec2": wav2vec2,
    "whisper": whisper,
    "clip": clip,
    "diffusion-unet": diffusion_unet,
}
