"""Architectures of `timm`: random weights, small images, ten classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import timm
import torch
from torch.nn import functional

__all__ = ["CASES"]

Case = tuple[Any, dict[str, Any], Callable[..., Any]]


def classified(model: Any, batch: dict[str, Any]) -> Any:
    """Cross entropy of the classes."""
    return functional.cross_entropy(model(batch["images"]), batch["labels"])


def network(name: str, size: int = 64, batch: int = 8, **options: Any) -> Callable[[int], Case]:
    def build(times: int) -> Case:
        model = timm.create_model(name, pretrained=False, num_classes=10, **options)
        images = {"images": torch.randn(batch * times, 3, size, size)}
        images["labels"] = torch.arange(batch * times) % 10
        return model, images, classified

    return build


CONVOLUTIONS = (
    "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "efficientnet_b0", "mobilenetv2_100",
    "mobilenetv3_small_100", "regnetx_002", "regnety_002", "convnext_atto", "convnextv2_atto", "vgg11",
    "dla34", "hrnet_w18_small", "ghostnet_100", "mnasnet_100", "rexnet_100", "repvgg_a0", "poolformer_s12",
    "edgenext_xx_small", "tinynet_a",
)  # fmt: skip
WITH_SIZES = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "resmlp_12_224", "gmlp_ti16_224",
    "cait_xxs24_224", "visformer_tiny",
)  # fmt: skip

CASES: dict[str, Callable[[int], Case]] = {
    **{name: network(name) for name in CONVOLUTIONS},
    **{name: network(name, img_size=64) for name in WITH_SIZES},
    "swin_tiny_patch4_window7_224": network(
        "swin_tiny_patch4_window7_224", 56, batch=4, img_size=56, depths=(2, 2, 2, 2)
    ),
    "mobilevit_xxs": network("mobilevit_xxs", 64),
    "pit_ti_224": network("pit_ti_224", 224, batch=2),
    "inception_v3": network("inception_v3", 128, batch=4),
}
