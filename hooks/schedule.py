"""``ParamSchedulerHook``: step learning-rate schedulers, and keep their states in checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from operator import is_not, methodcaller
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
from msgspec import Meta

from trainbus.eventloop import ConfigurationError, Hook, Priority, check_options, events, get_logger
from trainbus.eventloop.events import Slot
from trainbus.eventloop.privates import schedulers_in
from trainbus.eventloop.registry import register
from trainbus.hooks.options import check_epochs
from trainbus.hooks.scores import check_validated, value_of, warn_unvalidated

log = get_logger()

_initial_lr = methodcaller("get", "initial_lr", 0.0)  # of a parameter group

By = Literal["iter", "epoch", "metric"]


@runtime_checkable
class Scheduler(Protocol):
    """The methods that a scheduler needs; ``step`` takes the metric if the scheduler follows one."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


_LIKE_TORCH = "an object like torch's schedulers, with step, state_dict and load_state_dict"
Like = Annotated[Scheduler, Meta(description=_LIKE_TORCH)]

STEPPED = Slot("schedulers that hooks step", dict)  # the hook that steps each scheduler, by the scheduler's id

KEY = "param_schedulers"  # key of the schedulers' states (by name) in a checkpoint


@register
class ParamSchedulerHook(Hook):
    """Step schedulers after each iteration, epoch or validation, and keep their states in checkpoints.

    ``run.set_lr()`` scales a schedule: each later rate is the schedule's rate, times the new rate over the old one.

    Args:
        scheduler: a scheduler, a list of schedulers, or a mapping of names to them. Checkpoints use these names, by default
            the name of the class; two schedulers of one class need a mapping. With None the hook does nothing.
        by: when to step. ``"iter"``: after each iteration in which the scheduler's optimizer has stepped (not within an
            accumulation window, nor when the gradient scaler skipped the step), once, also if it has made several steps there.
            ``"epoch"``: after each training epoch.
            ``"metric"``: after each validation during training, with the metric ``monitor``, as for ``ReduceLROnPlateau``.
        monitor: name of the metric, for ``by="metric"``.

    Raises:
        ConfigurationError: when training begins: the run does not have the scheduler's optimizer, another hook or the trainer
            of a bridge steps the scheduler, ``by="metric"`` without validations, or
            ``by="epoch"`` in an iteration-based training.
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
        if (scheduler is None) != (by is None):
            steps = 'give "iter", "epoch" or "metric" (after validations), when to step'
            raise ConfigurationError(f"by={by!r}: {'give a scheduler, too' if scheduler is None else steps}")
        if (by == "metric") != (monitor is not None):
            advice = "name the metric to step with" if by == "metric" else 'monitor= needs by="metric"'
            raise ConfigurationError(f"by={by!r}, monitor={monitor!r}: {advice}")
        self.schedulers = {} if scheduler is None else _named(scheduler)
        for name, one in self.schedulers.items():
            _check_scheduler(name, one, by)
        self._given = {name: _options(one) for name, one in self.schedulers.items()}
        self.by = by
        self.monitor = monitor
        # By the name of the scheduler: the run's optimizer, and the ``initial_lr`` of its parameter groups.
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._starts: dict[str, list[Any]] = {}

    def unused(self) -> Collection[str]:
        """Return the mount points of the other values of ``by``; without schedulers, all mount points."""
        steps = {
            "iter": ["after_train_iter"],
            "epoch": ["before_train_epoch", "after_train_epoch"],
            "metric": ["after_val_epoch", "after_run"],
        }
        unused = [method for by, methods in steps.items() for method in methods if by != self.by]
        always = ["before_run", "before_train", "before_save_checkpoint", "after_load_checkpoint"]
        return unused if self.schedulers else always + unused

    def needs_metrics(self) -> Collection[str]:
        return () if self.monitor is None or not self.schedulers else (self.monitor,)

    def before_run(self, event: events.BeforeRun) -> None:
        """Record the options of the schedules: a resume, whose checkpoint overrides them, warns about changed ones."""
        event.run.checkpoints.note_options(KEY, self._given)

    def before_train(self, event: events.BeforeTrain) -> None:
        run = event.run
        if self.by == "metric":
            check_validated(event, f'{self.label}(by="metric")')
        for one in map(_optimizer_in, run.foreign.schedulers if self.schedulers else ()):
            if one is None or any(one is other for other in map(_optimizer_in, self.schedulers.values())):
                advice = "whose schedule the trainer steps already: remove one of the two"
                raise ConfigurationError(f"{self.label} would step a schedule of an optimizer {advice}")
        run.shared[STEPPED] = hooks = run.shared.get(STEPPED, {})
        self._optimizers = {}
        for name, scheduler in self.schedulers.items():
            if hooks.setdefault(id(scheduler), self) is not self:
                raise ConfigurationError(f"scheduler {name!r} is in two hooks, which would both step it; remove it from one")
            if run.optimizers and isinstance(getattr(scheduler, "optimizer", None), torch.optim.Optimizer):
                self._optimizers[name] = _optimizer_of(name, scheduler, run.optimizers)
        self._starts = {name: [*map(_initial_lr, one.param_groups)] for name, one in self._optimizers.items()}

    def before_train_epoch(self, event: events.BeforeTrainEpoch) -> None:
        check_epochs(event, f'{self.label}(by="epoch")', 'Give by="iter", and a schedule in iterations')

    def after_train_iter(self, event: events.AfterTrainIter) -> None:
        run = event.run
        for name, scheduler in self.schedulers.items():
            optimizer = self._optimizers.get(name)  # if it is unknown, any optimizer's step counts
            if run.updated or not run.optimizers if optimizer is None else run.steps.of(optimizer):
                self._rescale(name, scheduler)
                scheduler.step()

    def after_train_epoch(self, event: events.AfterTrainEpoch) -> None:
        for name, scheduler in self.schedulers.items():
            self._rescale(name, scheduler)
            scheduler.step()

    def after_val_epoch(self, event: events.AfterValEpoch) -> None:
        if not event.run.training:
            return
        value = value_of(f"{self.label} steps by", str(self.monitor), event.metrics)
        for scheduler in () if value is None else self.schedulers.values():
            scheduler.step(value)

    def before_save_checkpoint(self, event: events.BeforeSaveCheckpoint) -> None:
        """Put the schedulers' states into the checkpoint; ``CheckpointHook`` may leave them out."""
        saved = event.checkpoint.setdefault(KEY, {})
        if taken := saved.keys() & self.schedulers.keys():
            advice = 'give another name: ParamSchedulerHook({"warmup": scheduler}, ...)'
            raise ConfigurationError(f"two hooks have a scheduler named {', '.join(map(repr, sorted(taken)))}; {advice}")
        for name, scheduler in self.schedulers.items():
            self._rescale(name, scheduler)
        saved |= {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def after_load_checkpoint(self, event: events.AfterLoadCheckpoint) -> None:
        saved = event.checkpoint.get(KEY, {})
        for name, scheduler in self.schedulers.items():
            if name in saved:
                scheduler.load_state_dict(saved[name])
            else:
                log.warning(
                    "the checkpoint has no state for this scheduler; it starts anew",
                    id="no-state-for-scheduler",
                    scheduler=name,
                )

    def after_run(self, event: events.AfterRun) -> None:
        warn_unvalidated(event, f'{self.label}(by="metric")')

    def _rescale(self, name: str, scheduler: Any) -> None:
        """Scale a schedule's copies of ``initial_lr`` as ``run.set_lr()`` has scaled the optimizer's."""
        optimizer = self._optimizers.get(name)
        # run.set_lr() makes new objects; comparing the values of tensors would wait for a device.
        if optimizer is None or not any(map(is_not, map(_initial_lr, optimizer.param_groups), self._starts[name])):
            return
        before, now = self._starts[name], [*map(_initial_lr, optimizer.param_groups)]
        self._starts[name] = now
        factors = [float(new) / float(old) if old else 1.0 for old, new in zip(before, now, strict=True)]
        for one in (scheduler, *schedulers_in(scheduler)):
            for attribute in ("base_lrs", "max_lrs"):  # max_lrs are CyclicLR's
                if rates := getattr(one, attribute, None):
                    setattr(one, attribute, [rate * factor for rate, factor in zip(rates, factors, strict=True)])


def _optimizer_of(name: str, scheduler: Any, optimizers: Mapping[str, torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Return the run's optimizer with the parameter groups of a scheduler's optimizer, which may be a wrapper."""
    groups = scheduler.optimizer.param_groups
    for optimizer in optimizers.values():
        if optimizer.param_groups is groups:
            return optimizer
    ours, other = ", ".join(map(repr, optimizers)), type(scheduler.optimizer).__name__
    advice = "make it with one of these, or give the run its optimizer"
    raise ConfigurationError(f"scheduler {name!r} changes an optimizer ({other}) that the run does not have ({ours}); {advice}")


def _optimizer_in(scheduler: Any) -> Any:
    return getattr(scheduler, "optimizer", None)


def _named(scheduler: Any) -> dict[str, Any]:
    if isinstance(scheduler, Mapping):
        named = {str(name): one for name, one in scheduler.items()}
    else:
        listed = list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        for one in listed:
            if isinstance(one, type):
                raise ConfigurationError(f"scheduler={one.__name__} is a class: make it, {one.__name__}(optimizer, ...)")
        named = {type(one).__name__: one for one in listed}
        if len(named) < len(listed):
            advice = 'checkpoints need unique names: give a mapping, such as {"warmup": one, "decay": other}'
            raise ConfigurationError(f"several schedulers are a {' or a '.join(sorted(named))}; {advice}")
    if not named or len(set(map(id, named.values()))) < len(named):
        advice = "a scheduler is given twice; remove one of the two" if named else "give at least one scheduler"
        raise ConfigurationError(f"scheduler={scheduler!r}: {advice}")
    return named


def _options(scheduler: Scheduler) -> Any:
    """Return the state of a new schedule without its learning rates, which belong to the optimizer."""

    def without_rates(state: Any) -> Any:
        if isinstance(state, Mapping):
            return {name: without_rates(value) for name, value in state.items() if name not in ("_last_lr", "base_lrs")}
        return [without_rates(value) for value in state] if isinstance(state, list) else state

    try:
        return without_rates(scheduler.state_dict())
    except AttributeError:  # torch's LambdaLR of a builtin function; the first save raises the error
        return {}


def _check_scheduler(name: str, scheduler: Any, by: By | None) -> None:
    if not isinstance(scheduler, Scheduler) or isinstance(scheduler, type | torch.optim.Optimizer):
        shown = "an optimizer" if isinstance(scheduler, torch.optim.Optimizer) else repr(scheduler)
        raise ConfigurationError(f"scheduler {name!r} is {shown}; give {_LIKE_TORCH}")
    taken = [one for one in inspect.signature(scheduler.step).parameters.values() if one.kind is not one.KEYWORD_ONLY]
    needed = [
        one.name for one in taken if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if needed[:1] == ["epoch"]:
        raise ConfigurationError(f"scheduler {name!r} needs the epoch to step; give {_LIKE_TORCH}")
    if by != "metric" and needed:
        raise ConfigurationError(f'scheduler {name!r} with by={by!r} needs a metric to step: give by="metric", monitor="loss"')
    if by == "metric" and not [one for one in taken if one.name != "epoch"]:  # what the step() of torch's others takes
        raise ConfigurationError(f'scheduler {name!r} steps without a metric: give by="iter" or by="epoch"')
