"""Hooks for a model that averages its own weights: they call its ``init_ema`` and ``update_ema``."""

from __future__ import annotations

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
        ConfigurationError: later: the model lacks these methods.
    """

    @check_options
    def __init__(self, model: Name | None = None) -> None:
        self._name = model
        self._model: Any = None

    def before_run(self, event: BeforeRun) -> None:
        """Begin the average before a checkpoint is loaded, so that the checkpoint fills its buffers."""
        models = event.run.models
        model = unwrapped(models[model_name(self.label, models, self._name)])
        if lacking := [method for method in ("init_ema", "update_ema") if not callable(getattr(model, method, None))]:
            advice = "EMAHook averages the weights of any model, use it instead"
            raise ConfigurationError(f"{self.label}: {type(model).__name__} has no {' and no '.join(lacking)}; {advice}")
        if model is not self._model:
            self._model = model
            model.init_ema()

    def after_train_iter(self, event: AfterTrainIter) -> None:
        if event.run.updated or not event.run.optimizers:
            self._model.update_ema()


@register
class EMAEpochHook(EMAIterHook):
    """Like :class:`EMAIterHook`, but call ``update_ema()`` after each training epoch.

    Args:
        model: name of the model, needed if the run has several.
    """

    def unused(self) -> tuple[str]:
        return ("after_train_iter",)

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        self._model.update_ema()
