"""``transformers.Trainer`` inside a budget: a mixin fits the loss of the first batch and runs it after that.

.. code-block:: python

    class BudgetTrainer(TrainerMixin, transformers.Trainer):
        budget = "8GiB"
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lowtide.errors import RunError
from lowtide.execute.fit import Fitted, fit

__all__ = ["TrainerMixin"]

_FITS = ("auto", "loss", "model")


class TrainerMixin:
    """Stands before ``transformers.Trainer``, or a class made from it, among the bases of a class."""

    budget: str | int = "auto"
    """As ``lowtide.fit`` takes it: bytes, a share of the plain peak, or ``auto``."""
    fit_options: Mapping[str, Any] = {}
    """Other arguments of ``lowtide.fit``."""
    fits: str = "auto"
    """What is fitted: ``loss``, the whole of ``compute_loss``, or ``model``, the model's forward alone.

    ``auto`` takes the model's forward where ``compute_loss`` keeps a record of its own, as in TRL's trainers:
    such code runs once a step, and not while a plan is made.
    """
    fitted: Fitted | None = None
    """The step, once there was a batch: ``trainer.fitted.plan.explain()`` says what it does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        """The loss of a batch; in evaluation, and with the model's outputs, as the trainer computes it."""
        plain: Any = super().compute_loss  # type: ignore[misc]
        if return_outputs or not model.training:
            return plain(model, inputs, return_outputs=return_outputs, **keywords)
        if self._fits_model():
            with self._planned(model):
                return plain(model, inputs, **keywords)
        batch = dict(inputs)
        if self.fitted is None:

            def loss_of(model: Any, inputs: Any, **keywords: Any) -> Any:
                return plain(model, inputs, **keywords)

            options: dict[str, Any] = {"budget": self.budget, **self.fit_options, **keywords}
            self.fitted = fit(loss_of, model, batch, **options)
        return self.fitted(model, batch, **keywords)

    def _fits_model(self) -> bool:
        if self.fits not in _FITS:
            raise RunError(
                f"fits={self.fits!r} of {type(self).__name__} is not possible; "
                f"set it to one of {', '.join(_FITS)}"
            )
        return self.fits == "model" or (self.fits == "auto" and hasattr(self, "_metrics"))

    @contextlib.contextmanager
    def _planned(self, model: Any) -> Iterator[None]:
        """Inside, the model's forward runs by the plan where it is trained."""
        plain = model.forward
        own = {"forward": model.__dict__["forward"]} if "forward" in model.__dict__ else {}

        def output_of(model: Any, args: Any, keywords: Any) -> Any:  # noqa: ARG001
            return plain(*args, **keywords)

        def forward(*args: Any, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **keywords)
            if self.fitted is None:
                self.fitted = fit(output_of, model, args, keywords, budget=self.budget, **self.fit_options)
            return self.fitted(model, args, keywords)

        model.__dict__["forward"] = forward
        try:
            yield
        finally:
            del model.__dict__["forward"]
            model.__dict__.update(own)
