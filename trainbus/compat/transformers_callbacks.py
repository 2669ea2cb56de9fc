"""The objects that callbacks of Hugging Face's Trainer get: arguments, state and control, and the list that calls them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerState
from transformers.training_args import TrainingArguments

from trainbus.eventloop import ConfigurationError, TrainingError
from trainbus.eventloop.checkpoint import unwrapped
from trainbus.eventloop.events import Progress, RunView
from trainbus.eventloop.training import missing_metric
from trainbus.eventloop.user_errors import add_note
from trainbus.hooks.schedule import STEPPED

UNKNOWN: Final[Any] = object()  # the value of an unknown attribute of :class:`State`


class Guest(Protocol):
    """The hook of a callback."""

    guest: Any
    args: Any
    processing_class: Any

    @property
    def label(self) -> str: ...


class State(TrainerState):  # type: ignore[misc]  # transformers is not followed by mypy
    """The Trainer's state; an attribute that is unknown raises an error."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if value is UNKNOWN:
            advice = "give the run max_epochs and a loader with a length, or max_iters"
            raise AttributeError(f"the length of this training is unknown: {advice}", name=name, obj=self)
        return value

    def measure(self, run: RunView, progress: Progress, args: Any, *, resumed: bool) -> None:
        """Take the lengths of a training, as far as they are known."""
        length, window = run.data.epoch_length, run.steps.accumulation or args.gradient_accumulation_steps
        if progress.max_iters is not None:
            self.max_steps = math.ceil(progress.max_iters / window)
            self.num_train_epochs = math.ceil(progress.max_iters / length) if length else 1
        elif progress.max_epochs is not None:
            self.num_train_epochs = progress.max_epochs
            if length:
                self.max_steps = progress.max_epochs * math.ceil(length / window)
            elif not resumed:  # else the run validates first, and the checkpoint has the number
                self.max_steps = UNKNOWN
        else:
            self.max_steps = self.num_train_epochs = UNKNOWN
        steps = self.known().get("max_steps")
        if steps is not None or args.logging_steps >= 1:
            self.compute_steps(args, steps)
        self.train_batch_size = getattr(run.data.train, "batch_size", None)

    def take_best(self, metrics: Mapping[str, Any], args: Any, *, named: bool) -> None:
        """Take the metric of the best model. Its absence is an error if the user has ``named`` it."""
        name = args.metric_for_best_model
        value = None if name is None else metrics.get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:
            if named and name is not None:
                raise missing_metric("args.metric_for_best_model is", name, metrics)
            return
        best: Any = vars(self)["best_metric"]
        if best is None or (value > best if args.greater_is_better else value < best):
            self.best_metric, self.best_global_step = value, self.global_step

    def known(self) -> dict[str, Any]:
        """Return the attributes with their values, without unknown ones."""
        return {name: value for name, value in vars(self).items() if value is not UNKNOWN}


class Callbacks(CallbackHandler):  # type: ignore[misc]
    """The Trainer's list of callbacks. It notes which one sets a flag of ``control``, and names the one that fails."""

    def __init__(self, callbacks: Sequence[Any], run: RunView, processing_class: Any) -> None:
        # Not the inherited __init__: it warns of a missing DefaultFlowCallback, and of two callbacks of a class.
        self.callbacks = list(callbacks)
        self.model = unwrapped(run.model)
        self.optimizer = next(iter(run.optimizers.values()), None)
        self.processing_class = processing_class
        self.lr_scheduler: Any = None
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self.set_by: dict[str, str] = {}  # for each flag of `control`, the callback that set it last

    def call_event(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> Any:
        """Call a method of every callback; return the control, which a callback may replace."""
        for callback in self.callbacks:
            name, before = type(callback).__name__, dict(vars(control))
            given |= {
                "model": self.model,
                "processing_class": self.processing_class,
                "optimizer": self.optimizer,
                "lr_scheduler": self.lr_scheduler,
                "train_dataloader": self.train_dataloader,
                "eval_dataloader": self.eval_dataloader,
            }
            try:
                result = getattr(callback, event)(args, state, control, **given)
            except Exception as error:
                _name(error, f"{name}.{event}", {"args": args, "state": state, "control": control}, given)
                raise
            control = control if result is None else result
            self.set_by.update({flag: name for flag, on in vars(control).items() if on and not before.get(flag)})
        return control

    def exported(self) -> list[Any]:
        return [one for one in self.callbacks if isinstance(one, ExportableState)]

    def restore(self, states: Mapping[str, Any]) -> list[str]:
        """Set the attributes that callbacks had exported, by the name of their class; return the names without a callback.

        Arguments of their constructors keep the program's values.
        """
        for name, state in states.items():
            saved = state if isinstance(state, list) else [state]
            ours = [one for one in self.exported() if type(one).__name__ == name]
            for callback, one in zip(ours, saved, strict=False):
                for attribute, value in one.get("attributes", {}).items():
                    setattr(callback, attribute, value)
        return sorted(states.keys() - {type(one).__name__ for one in self.exported()})


def _name(error: Exception, where: str, objects: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Name the callback in an error, and the attribute if it is one that a run does not have."""
    if isinstance(error, AttributeError):
        for name, one in objects.items():
            if error.obj is one:
                raise TrainingError(f"{where} uses {name}.{error.name}, which does not exist on a bus: {error}") from error
    absent = [name for name, value in given.items() if value is None]
    without = f"; this run has no {', '.join(absent)}" if absent and getattr(error, "obj", error) is None else ""
    add_note(error, f"in {where}, a callback of Hugging Face's Trainer{without}")


def arguments_for(hooks: Sequence[Guest], run: RunView, progress: Progress) -> Any:
    """Return the TrainingArguments given to the hooks, or else those that follow from the run."""
    given: list[Any] = []
    for hook in hooks:
        if hook.args is not None and not any(hook.args is one or hook.args == one for one in given):
            given.append(hook.args)
    if len(given) > 1:
        labels = ", ".join(hook.label for hook in hooks if hook.args is not None)
        raise ConfigurationError(f"{labels} have different args, which all callbacks on a bus share: give them to one")
    if given and isinstance(given[0], TrainingArguments):
        return given[0]
    options = {} if not given else given[0]
    if not isinstance(options, Mapping):
        raise ConfigurationError(f"args={options!r}: give transformers.TrainingArguments, or a mapping of their options")
    return TrainingArguments(**(_of_the_run(run, progress, options) | dict(options)))


def _of_the_run(run: RunView, progress: Progress, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of TrainingArguments that follow from a run."""
    by_iter = progress.max_iters is not None
    facts: dict[str, Any] = {
        "output_dir": str(run.work_dir or "trainer_output"),
        "use_cpu": run.device.type == "cpu",
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no" if run.validates is False else "steps" if by_iter else "epoch",
        "gradient_accumulation_steps": run.steps.accumulation or 1,
        "metric_for_best_model": "loss",
    }
    metric = str(options.get("metric_for_best_model", "loss"))
    facts["greater_is_better"] = not metric.endswith("loss")  # the Trainer's rule, which needs load_best_model_at_end there
    if run.seed is not None:
        facts["seed"] = run.seed
    if progress.max_iters is not None:
        facts["max_steps"] = math.ceil(progress.max_iters / facts["gradient_accumulation_steps"])
    elif progress.max_epochs is not None:
        facts["num_train_epochs"] = progress.max_epochs
    return facts


def schedule_of(run: RunView) -> Any:
    """Return the first learning-rate scheduler that a hook steps; None without one."""
    hooks = run.shared.get(STEPPED, {}).values()
    return next((one for hook in hooks for one in hook.schedulers.values()), None)


def is_local_first(rank: int) -> bool:
    """Return True on the first process of a machine."""
    return int(os.environ.get("LOCAL_RANK", rank)) == 0
