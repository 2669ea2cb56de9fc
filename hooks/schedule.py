"""Learning-rate schedules: when torch's schedulers step, and their place in checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, get_args, runtime_checkable

import torch
from msgspec import Meta

from eventloop import ConfigurationError, Hook, Priority, TrainingError, check_options, get_logger, register
from eventloop.events import (
    AfterLoadCheckpoint,
    AfterRun,
    AfterTrainEpoch,
    AfterTrainIter,
    AfterValEpoch,
    BeforeRun,
    BeforeSaveCheckpoint,
    BeforeTrain,
    RunView,
    Slot,
)
from hooks.rules import check_validated, warn_unvalidated

By = Literal["iter", "epoch", "metric"]


@runtime_checkable
class Scheduler(Protocol):
    """What torch's schedulers have, and others need: a ``step`` (with the metric, where they follow one), and their state."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take its state back."""


Like = Annotated[Scheduler, Meta(description="an object like torch's schedulers, with step, state_dict and load_state_dict")]

log = get_logger()

_ALWAYS = ("before_run", "before_train", "before_save_checkpoint", "after_load_checkpoint")
_METHODS: dict[By, str] = {"iter": "after_train_iter", "epoch": "after_train_epoch", "metric": "after_val_epoch"}

STEPPED = Slot("schedulers that hooks step", dict)
"""The hook of each, by the scheduler's id."""

KEY = "param_schedulers"
"""Where checkpoints hold the states of schedulers, by name."""


@register
class ParamSchedulerHook(Hook):
    """Steps schedulers after the optimizer, as often as ``by`` says.

    ``"iter"``: after each iteration in which the scheduler's optimizer has stepped (so not within an accumulation window,
    and not when the gradient scaler skipped the step). ``"epoch"``: after each training epoch. ``"metric"``: after each
    validation during training, with the metric named ``monitor``, as ``ReduceLROnPlateau`` needs it.

    ``run.set_lr()`` scales a schedule: each later rate is the schedule's, times the rate that was set over the one before it.

    Args:
        scheduler: a scheduler, a list of them, or a mapping of names to them. Names are keys in checkpoints; without one
            it is the name of the class, so two of a class need a mapping. None for no schedules: the hook does nothing.
        by: torch's schedulers do not say what they count, so this must.
        monitor: name of the metric, for ``by="metric"``.

    Raises:
        ConfigurationError: an option that cannot work; or when training begins: a scheduler of an optimizer that is not the
            run's, one that another hook steps, or ``by="metric"`` without validations.
    """

    priority = Priority.LOW

    @check_options
    def __init__(
        self,
        scheduler: Like | Sequence[Scheduler] | Mapping[str, Scheduler] | None = None,
        *,
        by: By | None = None,
        monitor: str | None = None,
    ) -> None:
        if scheduler is None and (by is not None or monitor is not None):
            raise ConfigurationError(f"by={by!r}, monitor={monitor!r}: give the scheduler that this is about, too")
        if scheduler is not None and by not in get_args(By):
            raise ConfigurationError(
                f'by={by!r}: say when to step: after each "iter" or "epoch", or after validations with a "metric"'
            )
        if (by == "metric") != isinstance(monitor, str):
            raise ConfigurationError(
                f"by={by!r}, monitor={monitor!r}: "
                + ("name the metric to step with" if by == "metric" else 'monitor= is for by="metric"')
            )
        self.schedulers = {} if scheduler is None else _named(scheduler)
        for name, one in self.schedulers.items():
            _check_scheduler(name, one, by)
        self._given = {name: _options(one) for name, one in self.schedulers.items()}
        self.by = by
        self.monitor = monitor
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        """Of the run, by the name of the scheduler that follows it."""
        self._starts: dict[str, list[float]] = {}
        """The ``initial_lr`` of each parameter group, by the name of the scheduler that starts from it."""

    def unused(self) -> Collection[str]:
        """The moments of the other values of ``by``; without schedulers, all."""
        if not self.schedulers:
            return [*_ALWAYS, *_METHODS.values(), "after_run"]
        others = [method for by, method in _METHODS.items() if by != self.by]
        return others if self.by == "metric" else [*others, "after_run"]

    def before_train(self, event: BeforeTrain) -> None:
        """Check that each scheduler has something to follow, and that no other hook steps it."""
        run = event.run
        if self.by == "metric":
            check_validated(event, f'{self.label}(by="metric")')
        run.shared[STEPPED] = hooks = run.shared.get(STEPPED, {})
        for name, scheduler in self.schedulers.items():
            if hooks.setdefault(id(scheduler), self) is not self:
                raise ConfigurationError(f"scheduler {name!r} is in two hooks, and both would step it; leave it in one of them")
        self._optimizers = {
            name: _optimizer_of(name, scheduler, run.optimizers)
            for name, scheduler in self.schedulers.items()
            if run.optimizers and isinstance(getattr(scheduler, "optimizer", None), torch.optim.Optimizer)
        }
        self._starts = {name: _starts(optimizer) for name, optimizer in self._optimizers.items()}

    def before_run(self, event: BeforeRun) -> None:
        """Have a resume tell which options of the schedules have changed: those in its checkpoint override them."""
        event.run.note_options(KEY, self._given)

    def after_train_iter(self, event: AfterTrainIter) -> None:
        """Step the schedulers that count iterations."""
        for name, scheduler in self.schedulers.items():
            if self._due(name, event.run):
                self._rescale(name, scheduler)
                scheduler.step()

    def after_train_epoch(self, event: AfterTrainEpoch) -> None:
        """Step the schedulers that count epochs."""
        for name, scheduler in self.schedulers.items():
            self._rescale(name, scheduler)
            scheduler.step()

    def after_val_epoch(self, event: AfterValEpoch) -> None:
        """Step the schedulers that follow a metric."""
        assert self.monitor is not None  # noqa: S101 - by="metric"
        if not event.run.training:
            return
        value = event.metrics.get(self.monitor)
        if value is None:
            raise TrainingError(
                f"{self.label} steps by the metric {self.monitor!r}, which this validation has not; it has "
                f"{', '.join(map(repr, event.metrics)) or 'none'}"
            )
        for scheduler in self.schedulers.values():
            scheduler.step(float(value))

    def before_save_checkpoint(self, event: BeforeSaveCheckpoint) -> None:
        """Put the schedulers' states into the checkpoint; a save that leaves this key out drops them again."""
        saved = event.checkpoint.setdefault(KEY, {})
        taken = saved.keys() & self.schedulers.keys()
        if taken:
            raise ConfigurationError(
                f"two hooks have a scheduler named {', '.join(map(repr, sorted(taken)))}, and a checkpoint keeps them by name; "
                'give them names: ParamSchedulerHook({"warmup": scheduler}, ...)'
            )
        for name, scheduler in self.schedulers.items():
            self._rescale(name, scheduler)
        saved |= {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def after_load_checkpoint(self, event: AfterLoadCheckpoint) -> None:
        """Give the schedulers their states back."""
        saved = event.checkpoint.get(KEY, {})
        for name, scheduler in self.schedulers.items():
            if name in saved:
                scheduler.load_state_dict(saved[name])
            else:
                log.warning("the checkpoint has no state for this scheduler; it starts afresh", scheduler=name)

    def after_run(self, event: AfterRun) -> None:
        """Warn if there was no metric to step by."""
        warn_unvalidated(event, f'{self.label}(by="metric")')

    def _rescale(self, name: str, scheduler: Any) -> None:
        """Scale what a schedule starts from as ``run.set_lr()`` has scaled ``initial_lr``, of which it has a copy."""
        if name not in self._optimizers or self._starts[name] == (now := _starts(self._optimizers[name])):
            return
        before, self._starts[name] = self._starts[name], now
        factors = [new / old if old else 1.0 for old, new in zip(before, now, strict=True)]
        for one in (scheduler, *getattr(scheduler, "_schedulers", ())):
            for attribute in ("base_lrs", "max_lrs"):  # max_lrs are CyclicLR's
                if rates := getattr(one, attribute, None):
                    setattr(one, attribute, [rate * factor for rate, factor in zip(rates, factors, strict=True)])

    def _due(self, name: str, run: RunView) -> bool:
        """True if the scheduler's own optimizer has stepped; any of them, where the scheduler does not tell."""
        optimizer = self._optimizers.get(name)
        return run.updated or not run.optimizers if optimizer is None else run.stepped(optimizer)


def _starts(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups]


def _optimizer_of(name: str, scheduler: Any, optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the run's optimizer that a scheduler changes; what wraps an optimizer has the same parameter groups."""
    groups = scheduler.optimizer.param_groups
    for optimizer in optimizers.values():
        if optimizer.param_groups is groups:
            return optimizer
    raise ConfigurationError(
        f"scheduler {name!r} ({type(scheduler).__name__}) changes an optimizer ({type(scheduler.optimizer).__name__}) that is "
        f"not one of the run's ({', '.join(map(repr, optimizers))}); make it with one of them, or give the run that one"
    )


def _named(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, Mapping):
        named = {str(name): one for name, one in scheduler.items()}
    else:
        listed = list(scheduler) if isinstance(scheduler, Iterable) else [scheduler]
        named = {type(one).__name__: one for one in listed}
        if len(named) < len(listed):
            raise ConfigurationError(
                f"several schedulers are a {' or a '.join(sorted(named))}, and checkpoints keep them by name; give a mapping, "
                'such as {"warmup": one, "decay": other}'
            )
    if len({id(one) for one in named.values()}) < len(named):
        raise ConfigurationError(f"scheduler={scheduler!r}: a scheduler is there twice, and would be stepped twice")
    if not named:
        raise ConfigurationError(f"scheduler={scheduler!r}: give at least one scheduler")
    return named


def _options(scheduler: Scheduler) -> Any:
    """Return what of a new schedule's state are its options."""
    try:
        return _without_rates(scheduler.state_dict())
    except AttributeError:  # torch's LambdaLR of a builtin function; the first save says that it cannot be saved
        return {}


def _without_rates(state: Any) -> Any:
    """Return a copy without the learning rates, which are the optimizer's."""
    if isinstance(state, Mapping):
        return {name: _without_rates(value) for name, value in state.items() if name not in ("_last_lr", "base_lrs")}
    return [_without_rates(value) for value in state] if isinstance(state, list) else state


def _check_scheduler(name: str, scheduler: Any, by: By | None) -> None:
    lacking = [method for method in ("step", "state_dict", "load_state_dict") if not callable(getattr(scheduler, method, None))]
    if lacking or isinstance(scheduler, type | torch.optim.Optimizer):  # an optimizer has these methods, too
        shown = "an optimizer" if isinstance(scheduler, torch.optim.Optimizer) else repr(scheduler)  # whose repr has many lines
        raise ConfigurationError(
            f"scheduler {name!r} is {shown}; give an object like torch's schedulers, with step, state_dict and load_state_dict"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) and by != "metric":
        raise ConfigurationError(f'scheduler {name!r} needs a metric to step: by="metric", monitor="loss", say, not by={by!r}')
    if by == "metric" and not _takes_metric(scheduler):
        raise ConfigurationError(
            f'scheduler {name!r} ({type(scheduler).__name__}) steps without a metric: by="iter" or "epoch"'
        )


def _takes_metric(scheduler: Any) -> bool:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        return True
    # torch's others take an epoch, which is deprecated and no metric.
    return "epoch" not in (names := inspect.signature(scheduler.step).parameters) and bool(names)
