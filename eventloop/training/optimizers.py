"""Optimizers: find the one inside a wrapper, set the learning rate, report options that a checkpoint overrides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from trainbus.eventloop.errors import ConfigurationError
from trainbus.eventloop.log import get_logger

log = get_logger()

# Options at the time a run first saw the optimizer: schedules and checkpoints overwrite its groups later.
_seen: WeakKeyDictionary[torch.optim.Optimizer, dict[str, Any]] = WeakKeyDictionary()


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that calls torch's step hooks: the inner one of a wrapper that skips ``Optimizer.__init__``.

    Libraries that prepare optimizers wrap them so.
    """
    inner: torch.optim.Optimizer | None = optimizer
    while inner is not None and not _has_step_hooks(inner):
        inner = next((value for value in vars(inner).values() if isinstance(value, torch.optim.Optimizer)), None)
    if inner is None:
        raise ConfigurationError(
            f"the run cannot count the steps of {type(optimizer).__name__}: neither it nor its inner optimizer called "
            "torch.optim.Optimizer.__init__; give the optimizer that it wraps"
        )
    return inner


def optimizers_in(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those in its attributes, but for wrappers that skip ``Optimizer.__init__``."""
    found: dict[int, torch.optim.Optimizer] = {}
    looked_at: dict[int, Any] = {}
    waiting: list[Any] = [optimizer]
    while waiting:
        one = waiting.pop()
        if id(one) in looked_at:
            continue
        looked_at[id(one)] = one
        if isinstance(one, torch.optim.Optimizer):
            found[id(one)] = one
            waiting += [part for name, part in vars(one).items() if name not in ("state", "param_groups")]
        elif isinstance(one, dict | list | tuple):
            waiting += one.values() if isinstance(one, dict) else one
    return [one for one in found.values() if _has_step_hooks(one)]


def in_training_mode(optimizer: Any) -> bool:
    """Return whether the optimizer has swapped in the weights to train, and has others to evaluate: schedule-free ones.

    They switch by ``train()`` and ``eval()``; source: https://github.com/facebookresearch/schedule_free
    """
    modes = callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))
    trains = [bool(group["train_mode"]) for group in optimizer.param_groups if "train_mode" in group]
    return modes and (any(trains) if trains else bool(getattr(optimizer, "train_mode", True)))


def enter_training_mode(optimizer: Any) -> None:
    """Swap in the weights to train, where the optimizer has others to evaluate."""
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        optimizer.train()


def check_step(optimizer: torch.optim.Optimizer, error: Exception | None = None) -> None:
    """Raise ConfigurationError if a step, or the ``error`` of one, asks for a closure, which an update has not."""
    required = [
        name
        for name, one in inspect.signature(optimizer.step).parameters.items()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    if "closure" in required if error is None else "closure" in f"{type(error).__name__}: {error}".lower():
        kind = type(optimizer).__name__
        raise ConfigurationError(
            f"{kind}.step() needs a closure that computes the loss again, and the update of TrainLoop calls it without: write "
            "your own loop around Run, with `for batch in run.train(loader): optimizer.step(closure)`"
        ) from error


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return _takes(optimizer.register_step_pre_hook)


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return False for an optimizer that skips ``Optimizer.__init__``, so that torch's method cannot load its state."""
    return _takes(optimizer.register_load_state_dict_pre_hook)


def _takes(register: Callable[[Any], Any]) -> bool:
    try:
        register(lambda *_: None).remove()
    except AttributeError:  # Optimizer.__init__ was skipped
        return False
    return True


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizers_of(model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that hold parameters of a model; all of them, if none does."""
    own = set(map(id, model.parameters()))
    found = [optimizer for optimizer in optimizers.values() if not own.isdisjoint(map(id, parameters_of(optimizer)))]
    return found or [*optimizers.values()]


def selected(optimizers: Mapping[str, torch.optim.Optimizer], wanted: str | int | None) -> tuple[str, ...]:
    """Return the names of all optimizers, or of the one with this name or index; raise ConfigurationError for another."""
    if not optimizers:
        raise ConfigurationError("run.set_lr() needs an optimizer: give it to Run(optimizer=...)")
    chosen = tuple(name for index, name in enumerate(optimizers) if wanted in (None, name, index))
    if not chosen:
        names = ", ".join(map(repr, optimizers))
        raise ConfigurationError(f"optimizer={wanted!r}: the run has {names}; give one of these names, or an index")
    return chosen


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups, and scale the base rates of schedules by the same factor.

    torch's schedulers keep their base rates in the groups, as ``initial_lr``, ``max_lr`` and ``min_lr``.
    """
    for group in optimizer.param_groups:
        before = float(group["lr"])
        if "initial_lr" in group and before == 0:
            log.warning(
                "the schedule's learning rate is 0 now and cannot be scaled; the schedule is unchanged",
                id="rate-not-scaled",
                wanted=rate,
            )
        for key in ("initial_lr", "max_lr", "min_lr"):
            if key in group and before > 0:
                group[key] = group[key] * (rate / before)  # a new object, by which a schedule notices it
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def options_path(name: str) -> str:
    """Return the path of an optimizer's options."""
    return "optimizer" if name == "optimizer" else f"optimizer.{name}"


def options_given(optimizers: Mapping[str, torch.optim.Optimizer], seed: int | None) -> dict[str, Any]:
    """Return the seed and the optimizer options that the program set, by path (``"optimizer.lr"``)."""
    given: dict[str, Any] = {} if seed is None else {"seed": seed}
    for name, optimizer in optimizers.items():
        given |= by_path(_seen.setdefault(optimizer, _options(optimizer)), options_path(name))
    return given


def by_path(options: Any, path: str) -> dict[str, Any]:
    """Flatten a tree of options into plain values by path (``"optimizer.lr"``); tensors become numbers."""
    if isinstance(options, Mapping):
        inner = [(f"{path}.{name}" if path else str(name), each) for name, each in options.items()]
    elif isinstance(options, list | tuple):
        inner = [(f"{path}[{index}]", each) for index, each in enumerate(options)]
    elif isinstance(options, torch.Tensor) and options.numel() == 1:
        return {path: options.item()}
    else:
        return {path: options} if options is None or isinstance(options, bool | int | float | str) else {}
    return {leaf: value for where, each in inner for leaf, value in by_path(each, where).items()}


def forget_options(options: dict[str, Any], owner: str) -> None:
    """Remove the options of ``owner``, whose state was not saved or not loaded."""
    for name in [name for name in options if name.startswith(f"{owner}.")]:
        del options[name]


def warn_of_overridden(saved: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Warn about options that the program changed but the checkpoint overrides."""
    changed = [
        f"{path} is {saved[path]!r}, not {value!r}"
        for path, value in given.items()
        if path in saved and not _same(saved[path], value)
    ]
    if changed:
        log.warning(
            "your options differ from the checkpoint, and a resumed run uses the checkpoint's; "
            "start a new run, or set them in a handler of before_train",
            id="options-differ",
            options="; ".join(changed),
        )


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    for group in groups:  # a scheduler sets "lr" for its first step and keeps the user's in "initial_lr"
        if "initial_lr" in group:
            group["lr"] = group.pop("initial_lr")
    options = groups[0] if len(groups) == 1 else {"groups": groups}
    return by_path({"type": type(optimizer).__name__, **options}, "")


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))
