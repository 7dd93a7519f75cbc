"""What the networks that put a label on a colour image have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lowtide.zoo.base import Input, Key, Settings

__all__ = ["classification_loss", "image_keys", "images", "images_and_labels"]


def image_keys(batch: int) -> dict[str, Key]:
    """The keys, with the customary 224 pixels and 1000 classes."""
    return {"batch": Key(batch), "size": Key(224), "classes": Key(1000)}


def images(settings: Settings) -> tuple[Input, ...]:
    """A batch of colour images."""
    return (Input((settings["batch"], 3, settings["size"], settings["size"])),)


def images_and_labels(settings: Settings) -> tuple[Input, ...]:
    """A batch of colour images and a label for each."""
    labels = Input((settings["batch"],), classes=settings["classes"], dtype=torch.int64)
    return (*images(settings), labels)


def classification_loss(model: nn.Module, image: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the scores that the model gives."""
    return cross_entropy(model(image), labels)
