"""Hooks that average the weights: ``EMAHook`` for any model, others for a model that averages its own weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import chain
from types import NoneType
from typing import Annotated, Any, ClassVar

import torch
from torch.nn.parameter import is_lazy

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, events, get_logger, mount
from trainbus.eventloop.annotations import OptionsOf
from trainbus.eventloop.checkpoint import unwrapped
from trainbus.eventloop.errors import UnknownNameError
from trainbus.eventloop.events import Progress
from trainbus.eventloop.privates import metadata_of, with_metadata
from trainbus.eventloop.registry import find, register
from trainbus.eventloop.training import checkpoint_names, load_weights
from trainbus.hooks.averages import (
    ExponentialMovingAverage,
    ModelUpdates,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
    WarmupEMA,
    WeightAverage,
)
from trainbus.hooks.copies import CopiedAnew
from trainbus.hooks.options import Name, NonNegativeInt, added_late, check_averages_alone, check_epochs, model_name

log = get_logger()

RAW_WEIGHTS = "ema_state_dict"
"""Key of the raw weights in a checkpoint; its ``state_dict`` holds the averaged ones."""


@register
class EMAHook(CopiedAnew, Hook):
    """Average the weights after each optimizer update, and validate, test and save with the average.

    Of several optimizers, only the steps of those that hold the model's parameters count. A body that makes several steps has
    as many updates, each averaged. Optimizers of one model that step in turn make one update together.

    During a validation or test the model has the averaged weights, also in handlers of ``after_val_epoch``. The hook exchanges
    storage and copies nothing. The raw weights come back when the validation ends, also by an exception.

    In checkpoints ``state_dict`` holds the averaged weights, so the file is usable for inference. ``ema_state_dict`` holds the
    raw weights, and resuming swaps them back. A checkpoint that was saved without this hook gives a warning, and the average
    begins with its weights.

    Until ``begin`` the average equals the weights. From there on the default average warms up, so that
    it follows a short training, too. ``ema_type="ExponentialMovingAverage"``, MMEngine's default, has no warm-up.

    Args:
        ema_type: a class derived from :class:`WeightAverage`, or the registered name of one.
        strict_load: an average in a checkpoint that does not fit is an error; False loads the tensors that fit, and logs.
        begin: first iteration, or epoch, whose updates are averaged, 1-based.
        by_epoch: True counts epochs for ``begin``, False iterations.
        model: name of the model, needed if the run has several.
        name: key of this hook in checkpoints, needed if there are several of its kind.
        **options: options of ``ema_type``: ``momentum``, ``interval``, ``update_buffers``, ``gamma``, or those of your class.

    Raises:
        ConfigurationError: later: training ends before ``begin``.
    """

    priority = Priority.NORMAL
    observes = True
    of_run: ClassVar = {
        "_model": torch.nn.Module,
        "_model_name": str,
        "_updates": NoneType,
        "average": NoneType,
        "_in_checkpoint": bool,
    }

    @check_options
    def __init__(
        self,
        ema_type: type[WeightAverage] | str = WarmupEMA,
        *,
        strict_load: bool = False,
        begin: NonNegativeInt = 0,
        by_epoch: bool = False,
        model: str | None = None,
        name: str = "",
        **options: Annotated[Any, OptionsOf("ema_type")],
    ) -> None:
        self.name = name
        self.strict_load = strict_load
        self.begin = begin
        self.by_epoch = by_epoch
        self._type = _average_type(ema_type, options)
        self._options = options
        self._model_option = model
        self._model_name = ""
        self._alone = True  # a checkpoint of a single model holds its weights without a name
        self._model = torch.nn.Module()  # until before_run
        self._updates: ModelUpdates | None = None  # until before_train
        self.average: WeightAverage | None = None
        """The average, or None before its first update."""
        self._horizon_checked = False
        self._in_checkpoint = False
        self._lacking_logged = False

    def before_run(self, event: events.BeforeRun) -> None:
        """Find the model. The average of an earlier run of the same model is kept."""
        models = event.run.models
        self._model_name = model_name(self.label, models, self._model_option)
        self._alone = set(models) == {"model"}
        if models[self._model_name] is not self._model:
            self._model, self.average = models[self._model_name], None
        self._horizon_checked = False

    def before_train(self, event: events.BeforeTrain) -> None:
        self._updates = ModelUpdates(event.run, self._model, self._average)
        event.run.defer(self._end_updates)

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        """Check options against the length of the training, which is known from here on."""
        check_averages_alone(self.label, event.run)
        last = (event.progress.max_epochs or 1) if self.by_epoch else event.run.data.total_iters
        if last is not None and self.begin > last:
            hint = "; iteration-based training is one epoch: count iterations, by_epoch=False"
            end = f"this training ends with {'epoch' if self.by_epoch else 'iteration'} {last}; give {last} at most"
            end += hint if self.by_epoch and event.progress.max_epochs is None else ""
            raise ConfigurationError(f"{self.label}(begin={self.begin}): nothing would be averaged, as {end}")
        if not self._horizon_checked:
            self._horizon_checked = True
            self._check_horizon(event)

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        if self._updates is None:
            raise added_late(self.label)
        if self._updates.end(event.progress):
            self._average(event.progress)

    def _end_updates(self) -> None:
        self._updates = None

    def _average(self, progress: Progress) -> None:
        if (progress.epoch if self.by_epoch else progress.iter) + 1 >= self.begin:
            average = self.average or self._make_average()
            average.update_parameters(self._model)

    @mount("before_val_epoch", "before_test_epoch")
    def lend(self, event: events.BeforeValEpoch | events.BeforeTestEpoch) -> None:
        """Give the model the averaged weights until the validation or test ends, also by an exception."""
        average = self.average
        if average is not None and average.steps:  # else the average equals the weights
            event.run.defer(lambda: average.restore(self._model))  # first, because Ctrl-C may interrupt the swap
            average.swap(self._model)

    def before_save_checkpoint(self, event: events.BeforeSaveCheckpoint) -> None:
        average, weights = self.average, self._weights_in(event.checkpoint["state_dict"])
        # Tensors that are not averaged (buffers) are the same in both, so the file stores them once.
        averaged = raw = weights
        if average is not None and average.steps:
            swapped_in = {key: tensor for key, tensor in average.tensors.items() if key in weights}
            if lacking := set(average.tensors) - weights.keys():
                made = self._made(average, weights)
                swapped_in |= made
                self._warn_of_lacking(set() if made else lacking)
            other = with_metadata({**weights, **swapped_in}, metadata_of(weights))
            averaged, raw = (weights, other) if average.swapped else (other, weights)
        self._put(event.checkpoint, "state_dict", averaged)
        self._put(event.checkpoint, RAW_WEIGHTS, raw)

    def _made(self, average: WeightAverage, weights: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the averages of what ``model.state_dict()`` makes of its weights, such as three matrices of a fused one."""
        model, names = self._model, checkpoint_names(self._model)
        own = {names.without(name) for name, _ in chain(model.named_parameters(), model.named_buffers())}
        if not any(isinstance(weights[key], torch.Tensor) for key in weights.keys() - own):
            return {}
        swapped = average.swapped
        try:
            average.swap(model)
            state = {names.short[name]: value for name, value in model.state_dict().items()}
            found = {key: state[key] for key in weights.keys() & state.keys() - own}
            return {key: value.clone() for key, value in found.items() if isinstance(value, torch.Tensor)}
        finally:
            if average.swapped is not swapped:
                average.swap(model)

    def _warn_of_lacking(self, lacking: set[str]) -> None:
        """Warn once of trained weights that another trainer's checkpoint leaves out, or has other values for."""
        if not lacking or self._lacking_logged:
            return
        names = checkpoint_names(self._model)
        trained = {names.without(name) for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        if others := sorted(lacking & trained):
            self._lacking_logged = True
            log.warning(
                "code of the trainer leaves these weights out of its checkpoint or changes them, so their average is not in it",
                id="average-not-in-checkpoint",
                weights=others,
            )

    def after_load_checkpoint(self, event: events.AfterLoadCheckpoint) -> None:
        """Load the averaged weights from ``state_dict``, and put the raw ones there for the model."""
        self._load(event.checkpoint)

    def take_weights(self, checkpoint: dict[str, Any]) -> None:
        self._load(checkpoint)
        self.load_state_dict(checkpoint["bus"]["hooks"].get(self.label, {"steps": 0}))

    def _load(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(RAW_WEIGHTS, {})
        self._in_checkpoint = bool(saved) and (self._alone or self._model_name in saved)
        if self.average is not None:  # else it begins with its first update
            self.average.steps = 0
        if not self._in_checkpoint:
            log.warning(
                f"the checkpoint has no averaged weights ({RAW_WEIGHTS}); the average begins with the loaded weights",
                id="no-averaged-weights",
            )
            return
        self._load_average(self._weights_in(checkpoint["state_dict"]))
        self._put(checkpoint, "state_dict", self._weights_in(saved))

    def _load_average(self, averaged: Mapping[str, Any]) -> None:
        """Load the average by the model, which may rename or convert what was saved; the model's own weights stay."""
        model = self._model
        if any(is_lazy(one) for one in chain(model.parameters(), model.buffers())):
            load_weights(model, averaged, strict=self.strict_load)  # makes the tensors to average
        average = self.average or self._make_average()
        average.swap(model)
        try:
            load_weights(model, averaged, strict=self.strict_load)
        finally:
            average.restore(model)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 0 if self.average is None else self.average.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.average is not None and self._in_checkpoint:
            self.average.steps = int(state["steps"])
            if not self.average.steps:
                self.average = None  # as in the saved run

    def _make_average(self) -> WeightAverage:
        if not self._model_name:
            raise added_late(self.label)
        self.average = self._type(self._model, **self._options)
        return self.average

    def _check_horizon(self, event: events.BeforeTrainEpoch) -> None:
        """Log if the average would look back beyond the first update, as far as the number of updates is known."""
        run, options = event.run, inspect.signature(self._type).bind(self._model, **self._options)
        options.apply_defaults()
        given = options.arguments
        bounded = issubclass(self._type, ExponentialMovingAverage) and {"momentum", "interval"} <= given.keys()
        if run.data.total_iters is None or not bounded:
            return
        momentum, interval = given["momentum"], given["interval"]
        before = max(self.begin - 1, 0) * ((run.data.epoch_length or 0) if self.by_epoch else 1)
        updates = math.ceil((run.data.total_iters - before) / (run.steps.accumulation or 1))
        horizon = round(interval / momentum)
        if horizon > updates:
            advice = f"set momentum={min(10 * interval / updates, 0.5):.2g} to average its last tenth"
            long = f"momentum={momentum} averages {horizon} updates, more than the {updates} of this training"
            log.warning(f"{self.label}: {long}; {advice}", id="momentum-too-small")

    def _weights_in(self, entry: Any) -> Mapping[str, Any]:
        """Return the model's part of ``state_dict`` or ``ema_state_dict``."""
        weights: Mapping[str, Any] = entry if self._alone else entry[self._model_name]
        return weights

    def _put(self, checkpoint: dict[str, Any], key: str, weights: Mapping[str, Any]) -> None:
        checkpoint[key] = weights if self._alone else {**checkpoint.get(key, {}), self._model_name: weights}


def _average_type(ema_type: type[WeightAverage] | str, options: dict[str, Any]) -> type[WeightAverage]:
    """Return the average's class after checking that it takes ``options``."""
    try:
        kind = find("average", ema_type) if isinstance(ema_type, str) else ema_type
    except UnknownNameError as error:
        raise ConfigurationError(f"ema_type={ema_type!r}: {error}") from None
    if not issubclass(kind, WeightAverage):
        advice = "give a class derived from hooks.WeightAverage, or the registered name of one"
        raise ConfigurationError(f"ema_type={ema_type!r}: {advice}")
    probe, parameters = torch.nn.Module(), inspect.signature(kind).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        known = [*list(inspect.signature(EMAHook).parameters)[:-1], *list(parameters)[1:]]  # neither **options nor the model
        for option in options.keys() - parameters.keys():
            raise ConfigurationError.unknown_option(f"EMAHook with {kind.__name__}", option, known)
    try:
        inspect.signature(kind).bind(probe, **options)
    except TypeError as error:
        raise ConfigurationError(f"EMAHook with {kind.__name__}: {error}") from None
    if kind in (WarmupEMA, ExponentialMovingAverage, StochasticWeightAverage, MomentumAnnealingEMA):
        kind(probe, **options)  # raises now if a value is out of range
    return kind


@register
class EMAIterHook(Hook):
    """Call the model's ``init_ema()`` when its first run begins, and its ``update_ema()`` after each update, as ``EMAHook``.

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
        self._updates: ModelUpdates | None = None  # until before_train

    def before_run(self, event: events.BeforeRun) -> None:
        """Begin the average before a checkpoint is loaded, so that the checkpoint fills its buffers."""
        models = event.run.models
        model = unwrapped(models[model_name(self.label, models, self._name)])
        if lacking := [method for method in ("init_ema", "update_ema") if not callable(getattr(model, method, None))]:
            advice = "EMAHook averages the weights of any model, use it instead"
            raise ConfigurationError(f"{self.label}: {type(model).__name__} has no {' and no '.join(lacking)}; {advice}")
        if model is not self._model:
            self._model = model
            model.init_ema()

    def before_train(self, event: events.BeforeTrain) -> None:
        if self._model is not None:
            self._updates = ModelUpdates(event.run, self._model, self._update)
            event.run.defer(self._end_updates)

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        if self._updates is None:
            raise added_late(self.label)
        if self._updates.end(event.progress):
            self._update()

    def _end_updates(self) -> None:
        self._updates = None

    def _update(self, progress: Progress | None = None) -> None:
        if self._model is None:
            raise added_late(self.label)
        self._model.update_ema()


@register
class EMAEpochHook(EMAIterHook):
    """Call the model's ``init_ema()`` when its first run begins, and its ``update_ema()`` after each training epoch.

    Raises:
        ConfigurationError: later: as for ``EMAIterHook``, or the training is iteration-based.
    """

    def unused(self) -> tuple[str, ...]:
        return ("before_train", "after_train_iter")

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        check_epochs(event, self.label, "use EMAIterHook")

    def after_train_epoch(self, event: events.AfterTrainEpoch) -> None:
        self._update()
