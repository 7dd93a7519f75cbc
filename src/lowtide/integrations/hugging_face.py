"""``transformers.Trainer`` inside a budget: a mixin fits the loss of the first batch and runs it after that.

.. code-block:: python

    class BudgetTrainer(TrainerMixin, transformers.Trainer):
        budget = "8GiB"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowtide.execute.fit import Fitted, fit

__all__ = ["TrainerMixin"]


class TrainerMixin:
    """Stands before ``transformers.Trainer``, or a class made from it, among the bases of a class."""

    budget: str | int = "auto"
    """As ``lowtide.fit`` takes it: bytes, a share of the plain peak, or ``auto``."""
    fit_options: Mapping[str, Any] = {}
    """Other arguments of ``lowtide.fit``."""
    fitted: Fitted | None = None
    """The step, once there was a batch: ``trainer.fitted.plan.explain()`` says what it does."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any) -> Any:
        """The loss of a batch; in evaluation, and with the model's outputs, as the trainer computes it."""
        plain: Any = super().compute_loss  # type: ignore[misc]
        if return_outputs or not model.training:
            return plain(model, inputs, return_outputs=return_outputs, **keywords)
        batch = dict(inputs)
        if self.fitted is None:

            def loss_of(model: Any, inputs: Any, **keywords: Any) -> Any:
                return plain(model, inputs, **keywords)

            options: dict[str, Any] = {"budget": self.budget, **self.fit_options, **keywords}
            self.fitted = fit(loss_of, model, batch, **options)
        return self.fitted(model, batch, **keywords)
