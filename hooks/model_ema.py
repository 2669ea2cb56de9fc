"""Hooks for a model that averages its own weights: they call its ``init_ema`` and ``update_ema``."""

from __future__ import annotations

import weakref
from typing import Any

from eventloop import ConfigurationError, Hook, check_options, register
from eventloop.checkpoint import unwrapped
from eventloop.events import AfterTrainEpoch, AfterTrainIter, BeforeRun
from hooks.options import Name, model_name


@register
class EMAIterHook(Hook):
    """Call the model's ``init_ema()`` when its first run begins, and its ``update_ema()`` after each optimizer step.

    The model keeps its average in buffers (``register_buffer`` in ``init_ema``), so checkpoints contain it. The hook also finds
    a model inside wrappers (``DistributedDataParallel``, ``torch.compile``).

    Args:
        model: name of the model, needed if the run has several.

    Raises:
        ConfigurationError: an option is invalid. Later: the model lacks these methods.
    """

    @check_options
    def __init__(self, model: Name | None = None) -> None:
        self._name = model
        self._initialised: weakref.ref[Any] | None = None

    def before_run(self, event: BeforeRun) -> None:
        """Begin the average before a checkpoint is loaded, so that the checkpoint fills its buffers."""
        models = event.run.models
        model = unwrapped(models[model_name(self.label, models, self._name)])
        lacking = [method for method in ("init_ema", "update_ema") if not callable(getattr(model, method, None))]
        if lacking:
            raise ConfigurationError(
                f"{self.label} calls the model's own init_ema() and update_ema(), but {type(model).__name__} has no "
                f"{' and no '.join(lacking)}; EMAHook averages the weights of any model, use it instead"
            )
        if self._initialised is None or self._initialised() is not model:
            model.init_ema()
            self._initialised = weakref.ref(model)

    def after_train_iter(self, event: AfterTrainIter) -> None:
        if event.run.updated or not event.run.optimizers:
            self._update()

    def _update(self) -> None:
        model = None if self._initialised is None else self._initialised()
        if model is not None:
            model.update_ema()


@register
class EMAEpochHook(EMAIterHook):
    """Call the model's ``init_ema()`` when its first run begins, and its ``update_ema()`` after each training epoch.

    Args:
        model: name of the model, needed if the run has several.

    Raises:
        ConfigurationError: an option is invalid. Later: the model lacks these methods.
    """

    def unused(self) -> tuple[str]:
        return ("after_train_iter",)

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        self._update()
