"""Lightning's ``Trainer`` inside a budget: a callback fits ``training_step`` at the first batch.

.. code-block:: python

    class Budget(BudgetCallback, lightning.Callback):
        pass


    trainer = lightning.Trainer(callbacks=[Budget("8GiB")])
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lowtide.errors import RunError
from lowtide.execute.fit import Fitted, fit

__all__ = ["BudgetCallback"]


class BudgetCallback:
    """Stands before ``lightning.Callback``, or ``pytorch_lightning.Callback``, among the bases of a class.

    Takes the budget and the other arguments of ``lowtide.fit``. While the Trainer fits a module, its
    ``training_step`` runs by the plan; afterwards the module is what it was.
    """

    fitted: Fitted | None = None
    """The step, once there was a batch: ``callback.fitted.explain()`` says what it does."""

    def __init__(self, budget: str | int = "auto", **fit_options: Any) -> None:
        super().__init__()
        self._options: dict[str, Any] = {"budget": budget, **fit_options}
        self._ending = contextlib.ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have ``training_step`` run by a plan from now on."""
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        _check(trainer, pl_module)
        self.fitted = None
        self._ending.enter_context(_instead(pl_module, "training_step", self._planned(pl_module)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the module as it was."""
        super().on_train_end(trainer, pl_module)  # type: ignore[misc]
        self._ending.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same after an error."""
        super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
        self._ending.close()

    def _planned(self, module: Any) -> Callable[..., Any]:
        """``training_step`` of this module; what it logs is handed to Lightning when it has run."""
        plain: Callable[..., Any] = module.training_step
        logged: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def log(name: str, value: Any, *args: Any, **keywords: Any) -> None:
            kept = value if keywords.get("enable_graph") else _detached(value)
            logged.append(((name, kept, *args), keywords))

        def loss_of(module: Any, *args: Any) -> Any:  # noqa: ARG001
            results = plain(*args)
            if not isinstance(results, Mapping):
                return results
            return {key: value if key == "loss" else _detached(value) for key, value in results.items()}

        @functools.wraps(plain)
        def training_step(*args: Any) -> Any:
            with _instead(module, "log", log):
                if self.fitted is None:
                    self.fitted = fit(loss_of, module, *args, **self._options)
                    self.fitted.on_retry = logged.clear
                logged.clear()  # what was logged while the step was planned
                results = self.fitted(module, *args)
            for told, how in logged:
                module.log(*told, **how)
            return results

        return training_step


@contextlib.contextmanager
def _instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the module has this function in the place of its method."""
    own = {name: module.__dict__[name]} if name in module.__dict__ else {}
    module.__dict__[name] = function
    try:
        yield
    finally:
        del module.__dict__[name]
        module.__dict__.update(own)


def _check(trainer: Any, module: Any) -> None:
    """Refuse loops in which ``training_step`` is not the loss of one device."""
    if not module.automatic_optimization:
        raise RunError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False): its training_step "
            "calls backward itself, and a plan is for what comes before backward. Leave this callback out, "
            "and call lowtide.fit inside of training_step for the function that gives the loss"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise RunError(
            f"training_step of {type(module).__name__} takes dataloader_iter, and fetches its batches "
            "itself: a plan is for one batch. Have training_step take (batch, batch_idx)"
        )
    strategy = trainer.strategy
    if trainer.world_size > 1 or strategy.model is not module:
        raise RunError(
            f"this callback is for one device; the Trainer runs {type(strategy).__name__} on "
            f"{trainer.world_size}. Take Trainer(devices=1, strategy='auto'), or write the loop yourself: "
            "lowtide.fit takes a model inside of DistributedDataParallel (docs/integrations.md)"
        )


def _detached(value: Any) -> Any:
    """The value without its graph, as Lightning keeps what is logged, and results beside the loss."""
    if isinstance(value, Mapping):
        return {key: _detached(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_detached(one) for one in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_detached(one) for one in value)
    return value.detach() if isinstance(value, torch.Tensor) else value
